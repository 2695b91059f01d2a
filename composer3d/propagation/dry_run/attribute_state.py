"""State of modules beside parameters, put back after a forward that only looks, and for one that is done again.

What a forward on meta, or one that finds shapes, leaves in attributes (the memory of a recurrent block, a cache, a
counter), in buffers and in generators of random numbers is not the model's; and a recomputation begins with what the
forward found there.
"""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["KeptState", "attributes_of"]

_TORCHS = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_DEPTH = 3  # of containers in each other


class KeptState:
    """Attributes that are tensors, plain values or containers of them, generators that are attributes, and buffers.

    Generators of Python's `random` and of numpy's global functions are of it, those of torch are not.

    Memory: a copy of the tensors.

    Args:
        modules: Whose state it is, with all modules in them.
        buffers: Whether buffers are written to; where others stand in their places they are not.
    """

    def __init__(self, modules: Iterable[nn.Module], *, buffers: bool = True) -> None:
        self._modules = list(modules)
        owners = [module for root in self._modules for module in root.modules()]
        self._attributes = [(each, {name: _noted(value) for name, value in attributes_of(each)}) for each in owners]
        held = [leaf for module in owners for _, value in attributes_of(module) for leaf in _leaves(value)]
        self._values = [(tensor, tensor.detach().clone(), tensor._version) for tensor in held if not tensor.is_meta]
        self._buffers = [(each, each.clone()) for module in owners for each in module.buffers(False)] if buffers else []
        self._generators = [put for module in owners for value in vars(module).values() if (put := _generator(value))]
        self._generators += [_later(random.setstate, random.getstate())]
        self._generators += [_later(np.random.set_state, np.random.get_state())]

    def restore(self) -> None:
        """Put back what has changed since."""
        self._assign({})
        with torch.no_grad():
            for tensor, value, version in self._values:
                if tensor._version != version:
                    tensor.copy_(value)
            for buffer, value in self._buffers:  # kernels of batch norm leave their versions
                if not torch.equal(buffer, value):
                    buffer.copy_(value)

    def forget_unchanged(self) -> None:
        """Let go of the copies of tensors that nothing has written to since."""
        self._values = [held for held in self._values if held[0]._version != held[2]]

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Put back what there was inside, on copies of tensors that were changed in place: graphs may hold these."""
        now = KeptState(self._modules, buffers=False)
        present = [_noted(value) for _, before in self._attributes for value, _ in before.values()]
        self._assign({id(tensor): value for tensor, value, version in self._values if tensor._version != version})
        try:
            yield
        finally:
            for noted in present:
                _put_back(noted, {})
            now.restore()

    def _assign(self, others: dict[int, Tensor]) -> None:
        for module, before in self._attributes:
            for name in [name for name, _ in attributes_of(module) if name not in before]:
                del vars(module)[name]
            for name, noted in before.items():
                vars(module)[name] = _put_back(noted, others)
        for put in self._generators:
            put()


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's own attributes that can be state, by name; torch's and composer3d's own are none."""
    for name, value in list(vars(module).items()):
        if name not in _TORCHS and not name.startswith("_composer3d") and _is_state(value):
            yield name, value


def _is_state(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Tensor):
        return not getattr(value, "composer3d_absent", False)
    if type(value) in (list, tuple, set, deque):
        return depth < _DEPTH and all(_is_state(item, depth + 1) for item in value)
    if type(value) is dict:
        return depth < _DEPTH and all(_is_state(item, depth + 1) for item in value.values())
    return isinstance(value, _PLAIN)


def _generator(value: Any) -> Callable[[], None] | None:
    """Return what gives a generator back the state that it has; None for other values."""
    if isinstance(value, torch.Generator):
        return _later(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return _later(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return _later(lambda state: setattr(value.bit_generator, "state", state), value.bit_generator.state)
    return None


def _later(function: Callable[[Any], Any], state: Any) -> Callable[[], None]:
    def put() -> None:
        function(state)

    return put


def _noted(value: Any) -> tuple[Any, Any]:
    """Return a value with notes of what a container holds, None for one that is none."""
    if type(value) is dict:
        return value, {key: _noted(item) for key, item in value.items()}
    return value, [_noted(item) for item in value] if type(value) in (list, tuple, set, deque) else None


def _put_back(noted: tuple[Any, Any], others: dict[int, Tensor]) -> Any:
    """Return the value; containers, which others may hold too, are given back what they held."""
    value, held = noted
    if type(value) is dict:
        entries = {key: _put_back(item, others) for key, item in held.items()}
        value.clear()
        value.update(entries)
    elif held is not None:
        items = [_put_back(item, others) for item in held]
        if type(value) is tuple:
            return tuple(items)
        if type(value) is list:
            value[:] = items
        else:
            value.clear()
            value.extend(items) if isinstance(value, deque) else value.update(items)
    return others.get(id(value), value)


def _leaves(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple | set | deque):
        for item in value:
            yield from _leaves(item)
