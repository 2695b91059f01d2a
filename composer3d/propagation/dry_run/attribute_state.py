"""State of modules beside parameters, put back after a forward that only looks, and for one that is done again.

What a forward on meta, or one that finds shapes, leaves in attributes (the memory of a recurrent block, a cache, a
counter), in buffers and in generators of random numbers is not the model's; and a recomputation begins with what the
forward found there.
"""

from __future__ import annotations

import contextlib
import ctypes
import operator
import random
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["KeptState", "attributes_of"]

_TORCHS = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CONTAINERS = (dict, list, tuple, set, deque)
_GENERATORS = (torch.Generator, random.Random, np.random.Generator)
_HOLDERS = frozenset((Tensor, *_CONTAINERS, *_GENERATORS))  # what changes in its place
_DEPTH = 3  # of containers in each other
_MT19937_BYTES = 2500  # 624 words and the place among them


class KeptState:
    """Attributes that are tensors, plain values or containers of them, generators that are attributes, and buffers.

    Generators of Python's `random` and of numpy's global functions are of it, those of torch are not.

    Memory: a copy of the tensors.

    Args:
        modules: Whose state it is, with all modules in them.
        buffers: Whether buffers are written to; where others stand in their places they are not.
        numpy: Whether the state of numpy's global generator is taken, which is 40 microseconds; else only whether it
            has moved is known.
    """

    def __init__(self, modules: Iterable[nn.Module], *, buffers: bool = True, numpy: bool = True) -> None:
        self._modules = list(modules)
        owners = [module for root in self._modules for module in root.modules()]
        self._owned = [vars(module) for module in owners]
        self._before = [dict(owned) for owned in self._owned]
        held = [
            value
            for owned in self._before
            for name, value in owned.items()
            if type(value) in _HOLDERS and name not in _TORCHS and not name.startswith("_composer3d")
        ]
        self._noted = [_noted(value) for value in held if isinstance(value, _CONTAINERS) and _is_state(value)]
        tensors = [leaf for value in held for leaf in _leaves(value) if not leaf.is_meta]
        self._values = [(tensor, tensor.detach().clone(), tensor._version) for tensor in tensors]
        self._buffers = [(each, each.clone()) for module in owners for each in module.buffers(False)] if buffers else []
        self._generators = [_Generator(value) for value in held if isinstance(value, _GENERATORS)]
        self._python, self._place = random.getstate(), _numpy_place()
        self._numpy = np.random.get_state() if numpy else None

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

    def has_changed(self) -> bool:
        """Return whether anything has, but buffers; copies of tensors that nothing has written to are let go of."""
        self._values = [held for held in self._values if held[0]._version != held[2]]
        return bool(
            self._values
            or not all(map(_is_same, self._owned, self._before))
            or any(map(_is_other, self._noted))
            or any(generator.has_moved() for generator in self._generators)
            or self.has_moved_numpy()
            or random.getstate() != self._python
        )

    def has_moved_numpy(self) -> bool:
        """Return whether numpy's global generator was drawn from."""
        # Of a pair of normal numbers the second one leaves the place as it is.
        return _numpy_place() != self._place or (
            self._numpy is not None and _left_over(np.random.get_state()) != _left_over(self._numpy)
        )

    @contextlib.contextmanager
    def again(self) -> Iterator[None]:
        """Put back what there was inside, on copies of tensors that were changed in place: graphs may hold these."""
        now = KeptState(self._modules, buffers=False)
        present = [_noted(value) for value, _ in self._noted]
        self._assign({id(tensor): value for tensor, value, version in self._values if tensor._version != version})
        try:
            yield
        finally:
            for noted in present:
                _put_back(noted, {})
            now.restore()

    def _assign(self, others: dict[int, Tensor]) -> None:
        for owned, before in zip(self._owned, self._before, strict=True):
            if not _is_same(owned, before):
                for name in [name for name in owned if name not in before and _is_state_of(name, owned[name])]:
                    del owned[name]
                owned.update({n: v for n, v in before.items() if owned.get(n) is not v and _is_state_of(n, v)})
            if others:
                owned.update({n: others[id(v)] for n, v in before.items() if isinstance(v, Tensor) and id(v) in others})
        for noted in self._noted:
            _put_back(noted, others)
        for generator in self._generators:
            generator.put()
        random.setstate(self._python)
        if self._numpy is not None:
            np.random.set_state(self._numpy)
        elif self.has_moved_numpy():
            words = np.frombuffer(self._place, dtype=np.uint32)
            np.random.set_state(("MT19937", words[:-1], int(words[-1]), 0, 0.0))


def _is_same(owned: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(owned) == len(before) and all(map(operator.is_, owned.values(), before.values()))


def _left_over(state: Any) -> tuple[int, float]:
    """Return whether a normal number is left over from a pair, and that number, of what `get_state` returned."""
    if isinstance(state, dict):  # of generators other than MT19937
        return state["has_gauss"], state["gauss"]
    has_one, number = state[3:]
    return has_one, number


def _numpy_place() -> bytes:
    """Return the state of numpy's global bit generator, but for a normal number that is left over from a pair."""
    generator: Any = vars(np.random)["get_bit_generator"]()  # which numpy's own types leave out
    if not isinstance(generator, np.random.MT19937):
        return repr(generator.state).encode()
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES)


def attributes_of(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield a module's own attributes that can be state, by name; torch's and composer3d's own are none."""
    for name, value in list(vars(module).items()):
        if _is_state_of(name, value):
            yield name, value


def _is_state_of(name: str, value: Any) -> bool:
    return name not in _TORCHS and not name.startswith("_composer3d") and _is_state(value)


def _is_state(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Tensor):
        return not getattr(value, "composer3d_absent", False)
    if type(value) is dict:
        return depth < _DEPTH and all(_is_state(item, depth + 1) for item in value.values())
    if type(value) in _CONTAINERS:
        return depth < _DEPTH and all(_is_state(item, depth + 1) for item in value)
    return isinstance(value, _PLAIN)


class _Generator:
    """A generator of random numbers, and the state that it had."""

    def __init__(self, generator: Any) -> None:
        self._generator, self._state = generator, _state_of(generator)

    def has_moved(self) -> bool:
        """Return whether it was drawn from."""
        state = _state_of(self._generator)
        if isinstance(state, Tensor):
            return not torch.equal(state, self._state)
        return str(state) != str(self._state)  # some hold arrays

    def put(self) -> None:
        """Give it back the state."""
        if isinstance(self._generator, torch.Generator):
            self._generator.set_state(self._state)
        elif isinstance(self._generator, random.Random):
            self._generator.setstate(self._state)
        else:
            self._generator.bit_generator.state = self._state


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _is_other(noted: tuple[Any, Any]) -> bool:
    """Return whether a container, or one in it, holds other values."""
    value, held = noted
    if held is None:
        return False
    notes = list(held.values()) if type(value) is dict else held
    now = list(value.values()) if type(value) is dict else list(value)
    if type(value) is dict and list(value) != list(held):
        return True
    return (
        len(now) != len(notes)
        or not all(map(operator.is_, now, (one for one, _ in notes)))
        or any(map(_is_other, notes))
    )


def _noted(value: Any) -> tuple[Any, Any]:
    """Return a value with notes of what a container holds, None for one that is none."""
    if type(value) is dict:
        return value, {key: _noted(item) for key, item in value.items()}
    return value, [_noted(item) for item in value] if type(value) in _CONTAINERS else None


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
