"""Recomputed tensors, of modules before every forward and of graphs before a backward; parts of forwards that are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["recomputed_tensors", "replaced_recomputations", "saved_tensor", "watched_checkpoints"]


def recomputed_tensors(model: nn.Module) -> dict[int, Tensor]:
    """Return what stands for the tensors that torch's older reparametrisations keep as attributes, by their `id`.

    `torch.nn.utils.weight_norm`, `spectral_norm` and pruning keep `weight` as a plain attribute, which a hook before
    every forward computes from parameters. As a result of that computation it is no leaf, and `copy.deepcopy` refuses
    it; as a `memo` of `copy.deepcopy` the answer gives copies a detached one, which their first forward replaces. Until
    the first forward `spectral_norm` keeps a view of the parameter there. The hooks name their tensor in an attribute
    that torch does not document (`name`, or `_tensor_name`).

    Args:
        model: Left as it is.

    Memory: none. Collectives: none.
    """
    import torch

    found: dict[int, Tensor] = {}
    for module in model.modules():
        hooks = module._forward_pre_hooks.values()
        if not hooks:
            continue
        names = {getattr(hook, key, None): hook for hook in hooks for key in ("name", "_tensor_name")}
        for name, value in vars(module).items():
            if name not in names or not isinstance(value, torch.Tensor):
                continue
            if not value.is_leaf or type(names[name]).__module__.startswith("torch.nn.utils."):
                found[id(value)] = value.detach()
    return found


def saved_tensor(node: Any, name: str) -> Any:
    """Return what a node of a graph has saved; None where it has nothing of that name, or hooks would have to make it.

    Reading a tensor that a checkpoint dropped runs the forward again, with its collectives and draws, and once more in
    the backward. Whether hooks hold it is known of the private saved tensor alone (torch 2.11-2.15).

    Args:
        node: A `grad_fn`.
        name: Such as `self` or `other`.
    """
    raw = getattr(node, f"_raw_saved_{name}", None)
    if raw is not None and getattr(raw, "unpack_hook", raw) is not None:
        return None
    return getattr(node, f"_saved_{name}", None)


@contextmanager
def watched_checkpoints(reentrant: Callable[[], None]) -> Iterator[Sequence[int]]:
    """Watch where a forward recomputes by `torch.utils.checkpoint.checkpoint`, whatever the grad mode.

    torch has no hook for it; `checkpoint` looks up what it needs in its own module (torch 2.11-2.15).

    Args:
        reentrant: Called where one has `use_reentrant=True`.

    Yields:
        Numbers of the others that are at work, the outermost first; kept up to date.
    """
    from torch.utils import checkpoint

    function: Any = checkpoint.CheckpointFunction
    generator: Any = checkpoint._checkpoint_without_reentrant_generator
    at_work: list[int] = []
    num = 0

    class Watched(function):
        @classmethod
        def apply(cls, *args: Any) -> Any:
            reentrant()
            return function.apply(*args)

    def watched(*args: Any, **kwargs: Any) -> Iterator[None]:
        nonlocal num
        num += 1
        at_work.append(num)
        try:
            yield from generator(*args, **kwargs)
        finally:
            at_work.pop()

    checkpoint.CheckpointFunction = Watched  # type: ignore[misc]
    checkpoint._checkpoint_without_reentrant_generator = watched
    try:
        yield at_work
    finally:
        checkpoint.CheckpointFunction = function  # type: ignore[misc]
        checkpoint._checkpoint_without_reentrant_generator = generator


@contextmanager
def replaced_recomputations(replaced: Callable[[Any, Sequence[Any]], Any]) -> Iterator[None]:
    """Have `torch.utils.checkpoint.checkpoint` recompute another function than the one that it is called with.

    Args:
        replaced: Called with the function, and its arguments where `use_reentrant=True`, whose forward it runs too;
            returns what runs in its place.
    """
    from torch.utils import checkpoint

    function: Any = checkpoint.CheckpointFunction
    names: Any = vars(checkpoint)
    generator: Any = names["_checkpoint_without_reentrant_generator"]

    class Replaced(function):
        @classmethod
        def apply(cls, run: Any, preserves: Any, *args: Any) -> Any:
            return function.apply(replaced(run, args), preserves, *args)

    def recomputing(run: Any, *args: Any, **kwargs: Any) -> Iterator[None]:
        yield from generator(replaced(run, ()), *args, **kwargs)

    names.update(CheckpointFunction=Replaced, _checkpoint_without_reentrant_generator=recomputing)
    try:
        yield
    finally:
        names.update(CheckpointFunction=function, _checkpoint_without_reentrant_generator=generator)
