"""Kinds of the names and expressions of a function: how far its code says that they depend on values of tensors."""

from __future__ import annotations

import ast
from enum import IntEnum
from typing import Any

__all__ = ["Kind", "Kinds"]

_LIBRARIES = frozenset({"torch", "F", "functional"})
# Of a tensor, and known before its values are, unless its own size depends on values.
_SIZES = frozenset({"dim", "element_size", "ndim", "nelement", "numel", "shape", "size", "stride"})
_KNOWN = frozenset({"device", "dtype", "get_device", "is_cuda", "is_floating_point", "layout", "requires_grad"})
# Results that are Python's values, or tensors whose size depends on values.
_TO_VALUES = frozenset(
    {"allclose", "argwhere", "equal", "item", "masked_select", "nonzero", "tolist", "unique", "unique_consecutive"}
)
_DRAWS = frozenset({"bernoulli", "normal", "rand", "randint", "randn", "randperm"})  # nothing of the batch
_PASSING = frozenset({"abs", "all", "any", "list", "max", "min", "reversed", "set", "sorted", "sum", "tuple"})
_NUMBERS = frozenset({"bool", "float", "int"})
_NOT_A_TENSOR = frozenset({"bool", "int", "float", "str"})


class Kind(IntEnum):
    """Known dependence of an expression on the values of tensors; the larger one prevails."""

    NONE = 0
    OPEN = 1  # an argument, or made of arguments: a tensor, or a flag of the caller's
    TENSOR = 2
    MASK = 3
    VALUE = 4  # a Python value read from a tensor, or a tensor of a size that depends on values


class Kinds:
    """Kinds of a function's names, found by going over its assignments until none changes.

    Args:
        tree: The function.
        modules: Children of the module whose method it is.
        argument: Of the function, which is a list of modules; empty where it is none, and the first one is the module.
    """

    def __init__(self, tree: ast.FunctionDef, *, modules: dict[str, Any], argument: str = "") -> None:
        self._modules = modules
        given = tree.args
        self._kinds: dict[str, Kind] = {}
        for each in (*given.posonlyargs[1:], *given.args, *given.kwonlyargs):
            is_plain = isinstance(each.annotation, ast.Name) and each.annotation.id in _NOT_A_TENSOR
            self._kinds[each.arg] = Kind.NONE if is_plain else Kind.OPEN
        first = [] if argument else [*given.posonlyargs, *given.args][:1]
        self._self = first[0].arg if first else "" if argument else "self"
        self._kinds.pop(self._self, None)
        self._kinds.pop(argument, None)
        before: dict[str, Kind] = {}
        while before != self._kinds:
            before = dict(self._kinds)
            for node in ast.walk(tree):
                self._assign(node)

    def _assign(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind(target, node.value)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            self._bind(node.target, node.value)
        elif isinstance(node, ast.For | ast.comprehension):
            self._bind_items(node.target, node.iter)

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for each, own in zip(target.elts, value.elts, strict=True):
                self._bind(each, own)
        else:
            self._raise(target, self.kind(value))

    def _bind_items(self, target: ast.expr, items: ast.expr) -> None:
        """Bind a loop's names: what goes along with a tensor in `zip` or `enumerate` is none for that."""
        name = items.func.id if isinstance(items, ast.Call) and isinstance(items.func, ast.Name) else ""
        if isinstance(items, ast.Call) and isinstance(target, ast.Tuple) and name in ("zip", "enumerate"):
            given = [ast.Constant(0), *items.args[:1]] if name == "enumerate" else items.args
            if len(given) == len(target.elts):
                for each, own in zip(target.elts, given, strict=True):
                    self._bind_items(each, own)
                return
        self._raise(target, self.kind(items))

    def _raise(self, target: ast.expr, kind: Kind) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._kinds[node.id] = max(kind, self._kinds.get(node.id, Kind.NONE))

    # ---- kinds of expressions ----------------------------------------------------------------------------------------

    def kind(self, node: ast.AST) -> Kind:
        """Return what an expression depends on."""
        if isinstance(node, ast.Name):
            return self._kinds.get(node.id, Kind.NONE)
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node.attr, self.kind(node.value))
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Compare):
            return self._of_comparison(node)
        if isinstance(node, ast.Subscript):
            return self._of_item(node)
        if isinstance(node, ast.Lambda | ast.FunctionDef):
            return Kind.NONE
        return self._largest(ast.iter_child_nodes(node))

    def _largest(self, nodes: Any) -> Kind:
        return max((self.kind(node) for node in nodes), default=Kind.NONE)

    def _of_attribute(self, name: str, base: Kind) -> Kind:
        if name in _SIZES:
            return Kind.VALUE if base is Kind.VALUE else Kind.NONE
        return Kind.NONE if name in _KNOWN else base

    def _of_comparison(self, node: ast.Compare) -> Kind:
        kind = self._largest([node.left, *node.comparators])
        if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            return Kind.NONE
        return Kind.MASK if kind is Kind.TENSOR else kind

    def _of_item(self, node: ast.Subscript) -> Kind:
        base, index = self.kind(node.value), self.kind(node.slice)
        if base >= Kind.OPEN and index is Kind.MASK:
            return Kind.VALUE
        several = isinstance(node.slice, ast.Tuple | ast.Slice)  # of tuples and lists nobody asks for several dims
        if base is Kind.OPEN and isinstance(node.slice, ast.Tuple) and several:
            return Kind.TENSOR
        return max(base, index) if base >= Kind.OPEN else base

    def _of_call(self, node: ast.Call) -> Kind:
        given = self._largest([*node.args, *(keyword.value for keyword in node.keywords)])
        if isinstance(node.func, ast.Name):
            return self._of_function(node.func.id, given)
        if not isinstance(node.func, ast.Attribute):
            return min(given, Kind.OPEN)
        name, base = node.func.attr, node.func.value
        root = base
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in _LIBRARIES:
            return self._of_library(name, given, num_given=len(node.args))
        if isinstance(root, ast.Name) and root.id == self._self:
            is_module = base is root and name in self._modules
            return max(given, Kind.TENSOR) if is_module and given else min(given, Kind.OPEN)
        return self._of_method(name, self.kind(base), given)

    def _of_function(self, name: str, given: Kind) -> Kind:
        if name == "len":
            return Kind.VALUE if given is Kind.VALUE else Kind.NONE
        if name in _NUMBERS:
            return Kind.VALUE if given >= Kind.TENSOR else given
        if name in ("enumerate", "range", "zip"):
            return given if given is Kind.VALUE else min(given, Kind.OPEN)
        return given if name in _PASSING else min(given, Kind.OPEN)

    def _of_library(self, name: str, given: Kind, *, num_given: int) -> Kind:
        if name in _DRAWS or name.startswith("is_") or not given:
            return Kind.NONE
        if name in _TO_VALUES or (name == "where" and num_given == 1):
            return Kind.VALUE
        return max(given, Kind.TENSOR)

    def _of_method(self, name: str, base: Kind, given: Kind) -> Kind:
        import torch

        if not base or name in _KNOWN or name in _DRAWS:
            return Kind.NONE
        if name in _SIZES:
            return Kind.VALUE if base is Kind.VALUE else Kind.NONE
        if name in _TO_VALUES:
            return Kind.VALUE
        if base is Kind.OPEN:
            of_tensors = hasattr(torch.Tensor, name) and not any(hasattr(cls, name) for cls in (dict, list, str))
            return max(given, Kind.TENSOR) if of_tensors else base
        return max(base, given)
