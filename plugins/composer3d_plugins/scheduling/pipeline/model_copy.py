"""Deep copies of models whose functions hold modules: a lambda in a list calls the copy's modules, not the model's."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import nn

__all__ = ["copy_model"]

# Most of what modules hold; nothing is inside of these.
_PLAIN = frozenset({bool, float, int, str, type(None)})


def copy_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a deep copy of a model, in which functions that hold its modules hold the copy's.

    `copy.deepcopy` takes functions for constants: closures and default values would still be the model's own modules.

    Args:
        model: Not changed.
        memo: Of `copy.deepcopy`; what stands in it is not copied.

    Memory: of the structure.
    """
    walk = _Walk(model)
    functions = walk.copied(memo)
    twins = {function: _twin(function, walk) for function in functions}
    memo.update({id(function): twin for function, twin in twins.items()})
    made: nn.Module = torch_compat.copy_modules(model, memo)
    for function, twin in twins.items():
        twin.__defaults__ = copy.deepcopy(function.__defaults__, memo)
        twin.__kwdefaults__ = copy.deepcopy(function.__kwdefaults__, memo)
        vars(twin).update(copy.deepcopy(vars(function), memo))
        for cell, empty in zip(function.__closure__ or (), twin.__closure__ or (), strict=True):
            if cell is not empty:
                empty.cell_contents = copy.deepcopy(cell.cell_contents, memo)
    return made


def _twin(function: types.FunctionType, walk: _Walk) -> types.FunctionType:
    """Return a function of the same code, with an empty cell for each that leads to a module of the model."""
    closure = tuple(walk.empty_of(cell) for cell in function.__closure__ or ())
    twin = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, closure=closure if function.__closure__ else None
    )
    twin.__qualname__, twin.__module__, twin.__doc__ = function.__qualname__, function.__module__, function.__doc__
    twin.__annotations__ = dict(function.__annotations__)
    return twin


class _Walk:
    """Objects that the attributes, containers and hooks of a model's modules hold; each is entered once."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = {id(module) for module in model.modules()}
        self._leads: dict[int, bool] = {}
        self._cells: dict[int, Any] = {}

    def copied(self, memo: Mapping[int, Any]) -> list[types.FunctionType]:
        """Return the functions that lead to a module of the model and are reached.

        What stands in the memo is not entered: of a stage's model, most blocks.
        """
        seen: set[int] = set()
        functions: list[types.FunctionType] = []
        waiting: list[Any] = [self._model]
        while waiting:
            value = waiting.pop()
            if type(value) in _PLAIN or id(value) in seen or id(value) in memo:
                continue
            seen.add(id(value))
            if isinstance(value, types.FunctionType) and self.leads(value):
                functions.append(value)
            waiting += _inside(value)
        return functions

    def leads(self, value: Any) -> bool:
        """Return whether an object is, or holds, a module of the model."""
        if id(value) in self._modules:
            return True
        if id(value) not in self._leads:
            self._leads[id(value)] = False  # while its own contents are looked at
            self._leads[id(value)] = any([self.leads(inner) for inner in _inside(value)])
        return self._leads[id(value)]

    def empty_of(self, cell: types.CellType) -> types.CellType:
        """Return the cell that a copy has in place of one: an empty one, or the very same."""
        if not any(self.leads(content) for content in _content(cell)):
            return cell
        empty: types.CellType = self._cells.setdefault(id(cell), types.CellType())
        return empty


def _content(cell: types.CellType) -> Iterator[Any]:
    try:
        yield cell.cell_contents
    except ValueError:  # a name that is bound later
        return


def _inside(value: Any) -> list[Any]:
    """Return what a container, a function, a part of a call, or a module that is held elsewhere holds."""
    if type(value) in _PLAIN:
        return []
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.FunctionType):
        cells = [content for cell in value.__closure__ or () for content in _content(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    from torch import nn

    return list(vars(value).values()) if isinstance(value, nn.Module) else []
