"""Lists of modules whose entries a forward calls, or leaves out, by the values of tensors: experts, early exits."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

__all__ = ["RoutedList", "caller_of", "chosen_by_values", "routed_list", "routed_lists"]

_Loop = ast.For | ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp
_LOOPS = (ast.For, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)
_COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)
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


@dataclass(frozen=True, kw_only=True)
class RoutedList:
    """A list whose entries are called by values.

    Args:
        fqn: Of the list.
        place: File and line of the test, or of the loop.
    """

    fqn: str
    place: str


class _Kind(IntEnum):
    """How much of an expression is known to depend on the values of tensors; the larger one prevails."""

    NONE = 0
    OPEN = 1  # an argument, or made of arguments: a tensor, or a flag of the caller's
    TENSOR = 2
    MASK = 3
    VALUE = 4  # a Python value read from a tensor, or a tensor of a size that depends on values


def routed_list(model: nn.Module, fqn: str) -> RoutedList | None:
    """Return a list whose entries the module around it calls only where the values of a tensor say so; else None.

    The code of the class is read: a loop over the list, or over indexes read from a tensor, in which a test of values
    decides whether an entry is called: `if mask.any(): y[mask] = expert(h[mask])`. Tests of shapes, indexes,
    configuration, modes, `None` and random draws are none.

    Args:
        model: That holds the list.
        fqn: Of the list.
    """
    for reader, file, first in _readers(model, fqn):
        found = reader.find()
        if found is not None:
            return RoutedList(fqn=fqn, place=f"{file}:{first + found.lineno - 1}")
    return None


def chosen_by_values(model: nn.Module, fqn: str) -> bool:
    """Return whether the module around a list chooses its entries, or the rows that it gives them, by values: experts.

    Beside what `routed_list` finds, a loop may call every entry, with rows that a mask or `torch.where` has chosen.

    Args:
        model: That holds the list.
        fqn: Of the list.
    """
    return any(reader.find() is not None or reader.gives_chosen_rows() for reader, _, _ in _readers(model, fqn))


def routed_lists(model: nn.Module) -> dict[str, int]:
    """Return the FQNs of lists of `chosen_by_values`, each with the number of its entries."""
    from torch import nn

    lists = (nn.ModuleList, nn.ModuleDict)
    return {
        fqn: len(module)
        for fqn, module in model.named_modules()
        if fqn and isinstance(module, lists) and len(module) > 1 and chosen_by_values(model, fqn)
    }


def caller_of(model: nn.Module, fqn: str) -> str:
    """Return the FQN of the module around a list that has a forward: not of a ModuleDict that holds the list."""
    from torch import nn

    owner = fqn.rpartition(".")[0]
    while owner and isinstance(model.get_submodule(owner), nn.ModuleDict | nn.ModuleList):
        owner = owner.rpartition(".")[0]
    return owner


def _readers(model: nn.Module, fqn: str) -> Iterator[tuple[_Reader, str, int]]:
    """Yield a reader, the file and the first line of every method around a list that has source."""
    name = fqn.rpartition(".")[2]
    around = model.get_submodule(caller_of(model, fqn))
    for function in _functions(type(around)):
        try:
            lines, first = inspect.getsourcelines(function)
            (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
        except (OSError, TypeError, SyntaxError, ValueError):  # no source: made at run time, or built in
            continue
        if isinstance(tree, ast.FunctionDef):
            yield _Reader(tree, name=name, modules=dict(around.named_children())), _file(function), first


def _file(function: Callable[..., Any]) -> str:
    return Path(inspect.getfile(function)).name


def _functions(cls: type) -> Iterator[Callable[..., Any]]:
    """Yield the methods of a class and of its bases up to torch's, overridden ones where `super` calls them."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] == "torch" or base is object:
            continue
        for name, value in vars(base).items():
            if inspect.isfunction(value) and name not in seen and name != "__init__":
                function = inspect.unwrap(value)
                if "super" not in function.__code__.co_names:
                    seen.add(name)
                yield function


class _Reader:
    """Kinds of a function's names, found by going over its assignments until none changes."""

    def __init__(self, tree: ast.FunctionDef, *, name: str, modules: dict[str, Any]) -> None:
        self._tree, self._name, self._modules = tree, name, modules
        given = tree.args
        self._kinds: dict[str, _Kind] = {}
        for argument in (*given.posonlyargs[1:], *given.args, *given.kwonlyargs):
            is_plain = isinstance(argument.annotation, ast.Name) and argument.annotation.id in _NOT_A_TENSOR
            self._kinds[argument.arg] = _Kind.NONE if is_plain else _Kind.OPEN
        first = [*given.posonlyargs, *given.args][:1]
        self._self = first[0].arg if first else "self"
        self._kinds.pop(self._self, None)
        before: dict[str, _Kind] = {}
        while before != self._kinds:
            before = dict(self._kinds)
            for node in ast.walk(tree):
                self._assign(node)

    def find(self) -> ast.expr | ast.stmt | None:
        """Return the first test, loop, or index, that decides by values which entries are called."""
        for loop in ast.walk(self._tree):
            if isinstance(loop, _LOOPS) and self._mentions(loop, set()):
                found = self._decider(loop)
                if found is not None:
                    return found
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Subscript) and self._is_list(node.value) and self.kind(node.slice) >= _Kind.MASK:
                return node
        return None

    def _is_list(self, node: ast.expr) -> bool:
        """Return whether code names the list itself."""
        key = node.slice if isinstance(node, ast.Subscript) else None
        is_entry = isinstance(key, ast.Constant) and key.value == self._name
        return is_entry or (isinstance(node, ast.Attribute) and node.attr == self._name)

    def gives_chosen_rows(self) -> bool:
        """Return whether a loop calls entries with tensors whose size depends on values."""
        for loop in ast.walk(self._tree):
            if not isinstance(loop, _LOOPS) or not self._mentions(loop, set()):
                continue
            entries = self._entries(loop)
            for node in ast.walk(loop):
                called = node.func if isinstance(node, ast.Call) else None
                is_entry = isinstance(called, ast.Name) and called.id in entries
                is_entry = is_entry or (isinstance(called, ast.Subscript) and self._mentions(called.value, set()))
                if is_entry and any(self.kind(each) is _Kind.VALUE for each in node.args):  # type: ignore[attr-defined]
                    return True
        return False

    def _decider(self, loop: _Loop) -> ast.expr | ast.stmt | None:
        generators = loop.generators if isinstance(loop, _COMPREHENSIONS) else [loop]
        for generator in generators:
            if self.kind(generator.iter) is _Kind.VALUE and not self._mentions(generator.iter, set()):
                return generator.iter
            for test in getattr(generator, "ifs", ()):
                if self.kind(test) >= _Kind.TENSOR:
                    return test
        entries = self._entries(loop)
        for node in ast.walk(loop):
            if not isinstance(node, ast.If | ast.IfExp) or self.kind(node.test) < _Kind.TENSOR:
                continue
            body = node.body if isinstance(node, ast.If) else [node.body]
            other = node.orelse if isinstance(node, ast.If) else [node.orelse]
            leaves = any(
                isinstance(each, ast.Break | ast.Continue | ast.Return) for part in body for each in ast.walk(part)
            )
            if leaves or self._mentions_any(body, entries) != self._mentions_any(other, entries):
                return node.test
        return None

    def _entries(self, loop: _Loop) -> set[str]:
        """Return the names that stand for entries of the list inside a loop."""
        found: set[str] = set()
        for generator in loop.generators if isinstance(loop, _COMPREHENSIONS) else [loop]:
            if self._mentions(generator.iter, set()):
                found |= {node.id for node in ast.walk(generator.target) if isinstance(node, ast.Name)}
        for node in ast.walk(loop):
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.value, ast.Subscript)
                and self._mentions(node.value, set())
            ):
                found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        return found

    def _mentions(self, node: ast.AST, entries: set[str]) -> bool:
        """Return whether code names the list, or one of its entries."""
        return any(
            (isinstance(each, ast.Attribute) and each.attr == self._name)
            or (isinstance(each, ast.Subscript) and getattr(each.slice, "value", None) == self._name)
            or (isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in entries)
            for each in ast.walk(node)
        )

    def _mentions_any(self, nodes: list[Any], entries: set[str]) -> bool:
        return any(self._mentions(node, entries) for node in nodes)

    # ---- kinds of names ----------------------------------------------------------------------------------------------

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

    def _raise(self, target: ast.expr, kind: _Kind) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._kinds[node.id] = max(kind, self._kinds.get(node.id, _Kind.NONE))

    # ---- kinds of expressions ----------------------------------------------------------------------------------------

    def kind(self, node: ast.AST) -> _Kind:
        """Return what an expression depends on."""
        if isinstance(node, ast.Name):
            return self._kinds.get(node.id, _Kind.NONE)
        if isinstance(node, ast.Attribute):
            return self._of_attribute(node.attr, self.kind(node.value))
        if isinstance(node, ast.Call):
            return self._of_call(node)
        if isinstance(node, ast.Compare):
            return self._of_comparison(node)
        if isinstance(node, ast.Subscript):
            return self._of_item(node)
        if isinstance(node, ast.Lambda | ast.FunctionDef):
            return _Kind.NONE
        return self._largest(ast.iter_child_nodes(node))

    def _largest(self, nodes: Any) -> _Kind:
        return max((self.kind(node) for node in nodes), default=_Kind.NONE)

    def _of_attribute(self, name: str, base: _Kind) -> _Kind:
        if name in _SIZES:
            return _Kind.VALUE if base is _Kind.VALUE else _Kind.NONE
        return _Kind.NONE if name in _KNOWN else base

    def _of_comparison(self, node: ast.Compare) -> _Kind:
        kind = self._largest([node.left, *node.comparators])
        if all(isinstance(op, ast.Is | ast.IsNot) for op in node.ops):
            return _Kind.NONE
        return _Kind.MASK if kind is _Kind.TENSOR else kind

    def _of_item(self, node: ast.Subscript) -> _Kind:
        base, index = self.kind(node.value), self.kind(node.slice)
        if base >= _Kind.OPEN and index is _Kind.MASK:
            return _Kind.VALUE
        several = isinstance(node.slice, ast.Tuple | ast.Slice)  # of tuples and lists nobody asks for several dims
        if base is _Kind.OPEN and isinstance(node.slice, ast.Tuple) and several:
            return _Kind.TENSOR
        return max(base, index) if base >= _Kind.OPEN else base

    def _of_call(self, node: ast.Call) -> _Kind:
        given = self._largest([*node.args, *(keyword.value for keyword in node.keywords)])
        if isinstance(node.func, ast.Name):
            return self._of_function(node.func.id, given)
        if not isinstance(node.func, ast.Attribute):
            return min(given, _Kind.OPEN)
        name, base = node.func.attr, node.func.value
        root = base
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in _LIBRARIES:
            return self._of_library(name, given, num_given=len(node.args))
        if isinstance(root, ast.Name) and root.id == self._self:
            is_module = base is root and name in self._modules
            return max(given, _Kind.TENSOR) if is_module and given else min(given, _Kind.OPEN)
        return self._of_method(name, self.kind(base), given)

    def _of_function(self, name: str, given: _Kind) -> _Kind:
        if name == "len":
            return _Kind.VALUE if given is _Kind.VALUE else _Kind.NONE
        if name in _NUMBERS:
            return _Kind.VALUE if given >= _Kind.TENSOR else given
        if name in ("enumerate", "range", "zip"):
            return given if given is _Kind.VALUE else min(given, _Kind.OPEN)
        return given if name in _PASSING else min(given, _Kind.OPEN)

    def _of_library(self, name: str, given: _Kind, *, num_given: int) -> _Kind:
        if name in _DRAWS or name.startswith("is_") or not given:
            return _Kind.NONE
        if name in _TO_VALUES or (name == "where" and num_given == 1):
            return _Kind.VALUE
        return max(given, _Kind.TENSOR)

    def _of_method(self, name: str, base: _Kind, given: _Kind) -> _Kind:
        import torch

        if not base or name in _KNOWN or name in _DRAWS:
            return _Kind.NONE
        if name in _SIZES:
            return _Kind.VALUE if base is _Kind.VALUE else _Kind.NONE
        if name in _TO_VALUES:
            return _Kind.VALUE
        if base is _Kind.OPEN:
            of_tensors = hasattr(torch.Tensor, name) and not any(hasattr(cls, name) for cls in (dict, list, str))
            return max(given, _Kind.TENSOR) if of_tensors else base
        return max(base, given)
