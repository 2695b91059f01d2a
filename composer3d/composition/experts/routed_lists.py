"""Lists of modules whose entries a forward calls, or leaves out, by the values of tensors: experts, early exits."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any

from composer3d.composition.experts.value_kinds import Kind, Kinds

if TYPE_CHECKING:
    from torch import nn

__all__ = ["RoutedList", "caller_of", "chosen_by_values", "listed_experts", "routed_list", "routed_lists"]

_Loop = ast.For | ast.ListComp | ast.GeneratorExp | ast.DictComp | ast.SetComp
_LOOPS = (ast.For, ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)
_COMPREHENSIONS = (ast.ListComp, ast.GeneratorExp, ast.DictComp, ast.SetComp)
_ENTRIES = frozenset({"children", "items", "values"})
_PRODUCTS = frozenset({"addmm", "baddbmm", "bmm", "einsum", "linear", "matmul", "mm"})


@dataclass(frozen=True, kw_only=True)
class RoutedList:
    """A list whose entries are called by values.

    Args:
        fqn: Of the list.
        place: File and line of the test, or of the loop.
    """

    fqn: str
    place: str


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

    Beside what `routed_list` finds, a loop may call every entry, with rows that a mask or `torch.where` has chosen, or
    multiply it, of a list of parameters.

    Args:
        model: That holds the list.
        fqn: Of the list.
    """
    from torch import nn

    are_matrices = isinstance(model.get_submodule(fqn), nn.ParameterList | nn.ParameterDict)
    for reader, _, _ in _readers(model, fqn):
        if reader.find() is not None or reader.gives_chosen_rows():
            return True
        if are_matrices and reader.multiplies_chosen_rows():
            return True
    return False


def routed_lists(model: nn.Module) -> dict[str, int]:
    """Return the FQNs of lists of `chosen_by_values`, each with the number of its entries."""
    from torch import nn

    lists = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    return {
        fqn: len(listed_experts(module)) or len(module)
        for fqn, module in model.named_modules()
        if fqn and isinstance(module, lists) and len(module) > 1 and chosen_by_values(model, fqn)
    }


def listed_experts(module: nn.Module) -> dict[str, nn.Module]:
    """Return the entries of a list of experts, by name: of a dict those that hold parameters.

    A dropout or an activation in a dict is one that all experts have. Of lists in a list, such as groups of experts, it
    is the entries of these, by names with dots.
    """
    from torch import nn

    entries = {name: entry for name, entry in module._modules.items() if entry is not None}
    if entries and all(_is_plain(entry) and len(entry._modules) > 0 for entry in entries.values()):
        return {
            f"{name}.{inner}": held for name, entry in entries.items() for inner, held in listed_experts(entry).items()
        }
    if isinstance(module, nn.ModuleList):
        return entries
    return {name: entry for name, entry in entries.items() if any(True for _ in entry.parameters())} or entries


def caller_of(model: nn.Module, fqn: str) -> str:
    """Return the FQN of the module whose forward calls a list's entries.

    It is the list itself where its class has a forward, and never a module without one that holds the list. Where the
    code of the module next around the list does not name it, and that of one farther out does, inside of the same
    block, it is that one.
    """
    owner = fqn
    while owner and not _has_forward(model.get_submodule(owner)):
        owner = owner.rpartition(".")[0]
    if owner == fqn or _names_it(model.get_submodule(owner), fqn):
        return owner
    outer = owner
    while outer and not _is_plain(model.get_submodule(outer)):
        if _has_forward(model.get_submodule(outer)) and _names_it(model.get_submodule(outer), fqn):
            return outer
        outer = outer.rpartition(".")[0]
    return owner


def _has_forward(module: nn.Module) -> bool:
    from torch import nn

    return type(module).forward is not nn.Module.forward


def _names_it(module: nn.Module, fqn: str) -> bool:
    """Return whether code of a module's class names the attribute, or the key, that a list is."""
    name = fqn.rpartition(".")[2]

    def is_in(code: CodeType) -> bool:
        inner = [each for each in code.co_consts if isinstance(each, CodeType)]
        return name in code.co_names or name in code.co_consts or any(map(is_in, inner))

    return any(is_in(function.__code__) for function in _functions(type(module)))


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is a list or dict of modules, and nothing that is called."""
    from torch import nn

    return isinstance(module, nn.ModuleDict | nn.ModuleList) and not _has_forward(module)


def _readers(model: nn.Module, fqn: str) -> Iterator[tuple[_Reader, str, int]]:
    """Yield a reader, the file and the first line of every method around a list that has source.

    Functions that a method calls with the list are among them.
    """
    caller = caller_of(model, fqn)
    name, around = fqn.rpartition(".")[2], model.get_submodule(caller)
    modules = dict(around.named_children())
    for function in _functions(type(around)):
        read = _source(function)
        if read is None:
            continue
        tree, first = read
        own = _Reader(tree, name=name, modules=modules, is_own=caller == fqn)
        yield own, _file(function), first
        for helper, argument in own.given_to(function.__globals__):
            if (read := _source(helper)) is not None:
                yield _Reader(read[0], name=name, modules=modules, argument=argument), _file(helper), read[1]


def _source(function: Callable[..., Any]) -> tuple[ast.FunctionDef, int] | None:
    try:
        lines, first = inspect.getsourcelines(function)
        (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):  # no source: made at run time, or built in
        return None
    return (tree, first) if isinstance(tree, ast.FunctionDef) else None


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


def _multiplied(node: ast.AST) -> list[ast.expr]:
    """Return the operands of a product; none of other code."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return [node.left, node.right]
    if not isinstance(node, ast.Call):
        return []
    function = node.func
    name = getattr(function, "attr", getattr(function, "id", ""))
    of = [function.value] if isinstance(function, ast.Attribute) else []
    return [*of, *node.args] if name in _PRODUCTS else []


class _Reader(Kinds):
    """A function that has the list, and what it does with its entries.

    Args:
        tree: The function.
        name: Of the list, as an attribute.
        modules: Children of the module whose method the function is.
        is_own: Whether the function is a method of the list itself.
        argument: Of the function, which is the list; empty where it is none.
    """

    def __init__(
        self,
        tree: ast.FunctionDef,
        *,
        name: str,
        modules: dict[str, Any],
        is_own: bool = False,
        argument: str = "",
    ) -> None:
        super().__init__(tree, modules=modules, argument=argument)
        self._tree, self._name = tree, name
        # Names that are the list.
        self._lists = {argument, self._self if is_own else ""} - {""}

    def find(self) -> ast.expr | ast.stmt | None:
        """Return the first test, loop, or index, that decides by values which entries are called."""
        for loop in ast.walk(self._tree):
            if isinstance(loop, _LOOPS) and self._mentions(loop, set()):
                found = self._decider(loop)
                if found is not None:
                    return found
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Subscript) and self._is_list(node.value) and self.kind(node.slice) >= Kind.MASK:
                return node
        return None

    def given_to(self, known: Mapping[str, Any]) -> Iterator[tuple[Callable[..., Any], str]]:
        """Yield the functions that are called with the list, and the argument that it is to them.

        Args:
            known: Functions by name.
        """
        for node in ast.walk(self._tree):
            function = (
                known.get(node.func.id) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else None
            )
            if not isinstance(node, ast.Call) or not inspect.isfunction(function):
                continue
            names = list(inspect.signature(function).parameters)
            given = [*zip(names, node.args, strict=False), *((each.arg, each.value) for each in node.keywords)]
            yield from ((function, name) for name, value in given if name and self._is_list(value))

    def _is_list(self, node: ast.expr) -> bool:
        """Return whether code names the list itself."""
        if isinstance(node, ast.Name) and node.id in self._lists:
            return True
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
                if is_entry and any(self.kind(each) is Kind.VALUE for each in node.args):  # type: ignore[attr-defined]
                    return True
                # A generator hands both to its caller.
                if isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
                    parts = node.value.elts
                    is_entry = any(isinstance(each, ast.Name) and each.id in entries for each in parts)
                    if is_entry and any(self.kind(each) is Kind.VALUE for each in parts):
                        return True
        return False

    def multiplies_chosen_rows(self) -> bool:
        """Return whether a loop multiplies entries with tensors whose size depends on values."""
        for loop in ast.walk(self._tree):
            if not isinstance(loop, _LOOPS) or not self._mentions(loop, set()):
                continue
            entries = self._entries(loop)
            for node in ast.walk(loop):
                operands = _multiplied(node)
                matrices = [each for each in operands if self._mentions(each, entries)]
                if any(self.kind(each) is Kind.VALUE and matrices != [each] for each in operands) and matrices:
                    return True
        return False

    def _decider(self, loop: _Loop) -> ast.expr | ast.stmt | None:
        generators = loop.generators if isinstance(loop, _COMPREHENSIONS) else [loop]
        for generator in generators:
            if self.kind(generator.iter) is Kind.VALUE and not self._mentions(generator.iter, set()):
                return generator.iter
            for test in getattr(generator, "ifs", ()):
                if self.kind(test) >= Kind.TENSOR:
                    return test
        entries = self._entries(loop)
        for node in ast.walk(loop):
            if not isinstance(node, ast.If | ast.IfExp) or self.kind(node.test) < Kind.TENSOR:
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
        if isinstance(node, ast.Name):
            return node.id in self._lists or (node.id in entries and isinstance(node.ctx, ast.Load))
        if isinstance(node, ast.Attribute):
            if node.attr == self._name:
                return True
            # Of a list of an own class, its attributes are others than its entries.
            is_own = isinstance(node.value, ast.Name) and node.value.id in self._lists
            return node.attr in _ENTRIES if is_own else self._mentions(node.value, entries)
        if isinstance(node, ast.Subscript) and getattr(node.slice, "value", None) == self._name:
            return True
        return any(self._mentions(each, entries) for each in ast.iter_child_nodes(node))

    def _mentions_any(self, nodes: list[Any], entries: set[str]) -> bool:
        return any(self._mentions(node, entries) for node in nodes)
