"""Forwards of a block as they found it: its buffers, what its attributes keep, and the versions of its arguments."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d import PluginError, torch_compat
from composer3d.propagation import KeptState, OutsideState, copy_mark
from composer3d.torch_compat import forward_hooks

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Found", "versions"]

# Whether a forward of a block has drawn from numpy's global generator.
_DRAWS_OF_NUMPY: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
# Lists and objects outside of a block that its code writes to.
_OUTSIDE: weakref.WeakKeyDictionary[nn.Module, tuple[tuple[int, ...], OutsideState]] = weakref.WeakKeyDictionary()
# Where hooks of all modules, and of those in a block, are registered.
_TABLES: weakref.WeakKeyDictionary[nn.Module, forward_hooks.ForwardTables] = weakref.WeakKeyDictionary()

Place = tuple[dict[str, Any], str]  # the buffers of a module, and the name of one


@dataclass(kw_only=True, eq=False)
class Found:
    """Buffers, attributes, hooks and arguments of a block as one forward of it found them, for its recomputations.

    torch's checkpoints leave state to the caller: a recomputation would read what the forward made of it (vectors of a
    spectral norm, a codebook by moving average, a cache that is filled once, a memory or a generator that is an
    attribute), and change it a second time. And it would call the hooks that are there in the backward: others, where a
    forward removes its own at its end.

    Args:
        fqn: Of the block.
        block: Keeps its buffers and attributes, whatever is recomputed.
        arguments: Of the forward; recomputations refuse tensors among them that were changed in place since.

    Arguments may come back as other tensors, as from host memory, that a propagation knows nothing of: recomputations
    mark them as the forward's were, or a shard would be computed with as if it were whole.

    Memory: until the backward a copy of the tensors that the forward changes; during the forward, of all.
    """

    fqn: str
    block: nn.Module
    arguments: InitVar[Any] = ()
    _versions: list[tuple[Callable[[], Tensor | None], int]] = field(default_factory=list)
    _before: dict[tuple[int, str], Tensor | None] = field(default_factory=dict)
    _kept: KeptState | None = None
    _marks: list[Tensor] = field(default_factory=list)
    _hooks: forward_hooks.HeldHooks | None = None

    def __post_init__(self, arguments: Any) -> None:
        """Remember the versions of the arguments, and their marks."""
        import torch

        self._marks = [copy_mark(each, torch.empty(0, device="meta")) for each in tensors_in(arguments)]
        # Whoever recomputes keeps them, or has them elsewhere, such as in host memory.
        self._versions = [(weakref.ref(tensor), version) for tensor, version in versions(arguments)]

    def contexts(self, others: Callable[[], Any] | None) -> Callable[[], tuple[Any, Any]]:
        """Return torch's form of a pair of contexts, for a forward and its recomputations.

        Args:
            others: Another pair, which is entered inside: its modes do not see the copies.
        """

        def both() -> tuple[Any, Any]:
            inner = (contextlib.nullcontext(), contextlib.nullcontext()) if others is None else others()
            return _Inside(self.recording, inner[0]), _Inside(self.restored, inner[1])

        return both

    def marking(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return a forward whose arguments are marked as those of this one, where it is called again."""

        @functools.wraps(forward)
        def marked(*args: Any, **kwargs: Any) -> Any:
            if torch_compat.in_backward():
                for tensor, mark in zip(tensors_in((args, kwargs)), self._marks, strict=True):
                    copy_mark(mark, tensor)
            return forward(*args, **kwargs)

        return marked

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Run the forward; keep what it changes as it was before."""
        if self.block not in _TABLES:
            inner = (module for module in self.block.modules() if module is not self.block)
            _TABLES[self.block] = forward_hooks.ForwardTables(inner)
        self._hooks = forward_hooks.HeldHooks(_TABLES[self.block])
        held = {_key(place): (place, _buffer(place)) for place in self._places()}
        copies: dict[int, tuple[Tensor, int]] = {}
        for _, buffer in held.values():
            if buffer is not None and id(buffer) not in copies:
                copies[id(buffer)] = buffer.detach().clone(), _version(buffer)
        draws = _DRAWS_OF_NUMPY.get(self.block)
        kept = KeptState([self.block], buffers=False, numpy=draws is not False)
        yield
        _DRAWS_OF_NUMPY[self.block] = bool(draws) or kept.has_moved_numpy()
        if kept.has_changed():
            self._kept = kept
        for key, (place, buffer) in held.items():
            if buffer is None:
                if _buffer(place) is not None:
                    self._before[key] = None
                continue
            copy, version = copies[id(buffer)]
            if _version(buffer) != version or _buffer(place) is not buffer:
                self._before[key] = copy

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run a recomputation, on copies of the buffers as the forward found them.

        Raises:
            PluginError: An argument was changed in place after the forward began.
        """
        self.refuse_changed()
        modules = list(self.block.modules())
        saved = {(id(m._buffers), name) for m in modules for name in m._buffers.keys() - m._non_persistent_buffers_set}
        found: dict[tuple[int, str], Tensor | None] = {}
        for place in self._places():
            # Kernels of batch norm update running statistics, and their version stays.
            if _key(place) in self._before or _key(place) in saved:
                found[_key(place)] = self._before.get(_key(place), _buffer(place))
        keys = () if self._hooks is None else self._hooks.keys
        if self.block not in _OUTSIDE or _OUTSIDE[self.block][0] != keys:
            _OUTSIDE[self.block] = keys, OutsideState(modules)
        with contextlib.ExitStack() as stack:
            gone = [] if self._hooks is None else stack.enter_context(self._hooks.again())
            put_back = [_OUTSIDE[self.block][1].now(), *([OutsideState((), hooks=gone).now()] if gone else [])]
            try:
                with self._copied(found), contextlib.nullcontext() if self._kept is None else self._kept.again():
                    yield
            finally:
                for each in put_back:
                    each()

    @contextlib.contextmanager
    def discarded(self) -> Iterator[None]:
        """Run a forward whose changes of buffers and attributes, and of what its hooks note, are discarded."""
        kept, put_back = KeptState([self.block], buffers=False), OutsideState(self.block.modules()).now()
        with self._copied({_key(place): _buffer(place) for place in self._places()}):
            try:
                yield
            finally:
                kept.restore()
                put_back()

    @contextlib.contextmanager
    def _copied(self, found: Mapping[tuple[int, str], Tensor | None]) -> Iterator[None]:
        held = [(place, _buffer(place)) for place in self._places()]
        copies: dict[int, Tensor] = {}
        for (owner, name), _ in held:
            if (id(owner), name) in found:
                buffer = found[id(owner), name]
                owner[name] = None if buffer is None else copies.setdefault(id(buffer), buffer.detach().clone())
        try:
            yield
        finally:
            # Also where a recomputation stops early, once it has the tensors that it is for.
            for (owner, name), buffer in held:
                owner[name] = buffer

    def refuse_changed(self) -> None:
        """Refuse arguments that were changed in place.

        Raises:
            PluginError: An argument was.
        """
        for reference, version in self._versions:
            tensor = reference()
            if tensor is not None and _version(tensor) != version:
                raise PluginError(
                    f"{self.fqn or 'the model'} is recomputed from its arguments, and one of them, of shape "
                    f"{tuple(tensor.shape)}, was changed in place after its forward began",
                    hint="change a copy (x = x + h for x += h), or leave this block out with units",
                )

    def _places(self) -> list[Place]:
        return [(module._buffers, name) for module in self.block.modules() for name in module._buffers]


class _Inside:
    """One context inside another, entered as often as a block is recomputed."""

    def __init__(self, outer: Callable[[], contextlib.AbstractContextManager[None]], inner: Any) -> None:
        self._outer, self._inner = outer, inner
        self._entered: list[contextlib.ExitStack] = []

    def __enter__(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._outer())
            stack.enter_context(self._inner)
            self._entered.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


def versions(*trees: Any) -> list[tuple[Tensor, int]]:
    """Return the tensors among values, each with the number of changes in place that it has seen."""
    return [(tensor, _version(tensor)) for tensor in tensors_in(trees)]


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors among values, in their order."""
    import torch

    return [leaf for leaf in torch_compat.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _key(place: Place) -> tuple[int, str]:
    return id(place[0]), place[1]


def _buffer(place: Place) -> Tensor | None:
    owner, name = place
    return owner.get(name)
