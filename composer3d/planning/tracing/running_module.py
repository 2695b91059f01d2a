"""Name of the running module: forwards as they nest, backwards as they begin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Place", "watch_modules"]


@dataclass(kw_only=True, eq=False)
class Place:
    """The module that the step is in.

    Attributes:
        module: The FQN of the module that runs; empty outside of modules and in the root itself.
    """

    module: str = ""


@contextlib.contextmanager
def watch_modules(modules: Sequence[nn.Module], place: Place) -> Iterator[None]:
    """Update a place while the step runs.

    In a forward it is set by module hooks. In a backward it is the module whose output's gradient was computed last, by
    a hook on the output's autograd node: the graph is not changed, and no tensor is kept alive.

    Args:
        modules: This rank's parts.
        place: Updated in place.
    """
    handles: list[Any] = []
    outer: list[str] = []

    def enter(fqn: str, *_: Any) -> None:
        outer.append(place.module)
        place.module = fqn

    def leave(fqn: str, _: Any, __: Any, output: Any) -> None:
        place.module = outer.pop() if outer else ""
        for tensor in torch_compat.tree_leaves(output):
            node = getattr(tensor, "grad_fn", None)
            if node is not None:
                node.register_prehook(_setting(place, fqn))

    for module in modules:
        for fqn, inner in module.named_modules():
            handles.append(inner.register_forward_pre_hook(partial(enter, fqn)))
            handles.append(inner.register_forward_hook(partial(leave, fqn), always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _setting(place: Place, fqn: str) -> Callable[..., None]:
    """Return a hook of this module's own, which composition does not take for one of the model's, as a partial's is."""

    def set_module(*_: Any) -> None:
        place.module = fqn

    return set_module
