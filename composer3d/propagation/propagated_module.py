"""Modules whose code is propagated in every forward, and again where a part of them is recomputed."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.context import RunContext
from composer3d.propagation.captured_forward import CAPTURED, Graphs, captured_forward, repeatable
from composer3d.propagation.decision_cache import Memory
from composer3d.propagation.function_mode import Propagation
from composer3d.propagation.functions.random_functions import Drawing, eagerly
from composer3d.propagation.functions.view_shapes import Placed
from composer3d.propagation.module_calls import activation_of, replaced
from composer3d.propagation.shards import SEQUENCE, TENSOR_AXIS, Marks, copy_mark, restated, spec_of, specs_in, unmark
from composer3d.torch_compat.compilers.compiling import leave_uncompiled

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PropagatedModule"]

log = logging.getLogger(__name__)


@dataclass
class _SharedGraphs:
    """Graphs of a run, in which equal modules share theirs."""

    graphs: Graphs | None = None


class PropagatedModule:
    """A module whose code is propagated.

    The code may have a part of it recomputed in the backward, by torch.utils.checkpoint, when nothing around it is at
    work any more. Each module inside is therefore propagated by itself where it is called with tensors that are
    sharded, and numbers what it draws by itself, so that it draws the same then.

    Args:
        module: Its forwards are replaced, keeping their names.
        mesh: Of one dim, tp.
        shard_dim: The dim along which the activation that it takes is sharded, None if it is replicated.
    """

    def __init__(
        self, module: nn.Module, fqn: str, *, mesh: DeviceMesh, shard_dim: int | None, context: RunContext
    ) -> None:
        self._fqn, self._mesh, self._shard_dim, self._context = fqn, mesh, shard_dim, context
        self._memory, self._marks = Memory(), Marks(mesh.size(), frozenset({SEQUENCE}))
        self._at_work: Propagation | None = None
        if leave_uncompiled(module):
            log.warning('"%s" was compiled in place, and runs as it is: its code is propagated over tp', fqn)
        for name, inner in module.named_modules():
            inner.forward = self._inside(inner.forward, f"{fqn}.{name}") if name else self._around(inner, inner.forward)

    def _around(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(forward)
        def following(*args: Any, **kwargs: Any) -> Any:
            key = None if self._shard_dim is None else activation_of(args, kwargs)
            if key is not None:
                args, kwargs = replaced(args, kwargs, key, self._marked)
            output = self._follow(forward, self._fqn, args, kwargs)
            for leaf in torch_compat.tree_leaves(output):
                if (spec := spec_of(leaf)) is not None and spec.is_sequence:
                    unmark(leaf)
                    restated(leaf)
            return output

        setattr(following, CAPTURED, functools.partial(self._captured, module, following))
        return eagerly(repeatable(following))

    def _captured(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        compiled: Callable[[Any], Callable[..., Any]],
        *,
        recomputes: bool,
    ) -> Callable[..., Any]:
        """Return a forward that runs compiled graphs of what the propagation does."""
        shared = self._context.stash(_SharedGraphs)
        if shared.graphs is None:
            shared.graphs = Graphs(compiled, recomputes=recomputes, axis=TENSOR_AXIS, around=lambda: None)
        return captured_forward(module, forward, shared.graphs, fqn=self._fqn, alone=contextlib.nullcontext)

    def _inside(self, forward: Callable[..., Any], fqn: str) -> Callable[..., Any]:
        @functools.wraps(forward)
        def entered(*args: Any, **kwargs: Any) -> Any:
            following = self._at_work
            if following is None:
                # Only sharded tensors tell that the module around it was at work in the forward.
                return self._follow(forward, fqn, args, kwargs) if specs_in(args, kwargs) else forward(*args, **kwargs)
            before, following.drawing = following.drawing, Drawing(self._context, fqn)
            try:
                return forward(*args, **kwargs)
            finally:
                following.drawing = before

        return entered

    def _follow(self, forward: Callable[..., Any], fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before, drawing = self._at_work, Drawing(self._context, fqn)
        memory = None if torch_compat.capture_is_on() else self._memory  # decisions hold their tensors
        following = Propagation(self._mesh.size(), self._fqn, mesh=self._mesh, drawing=drawing, memory=memory)
        self._at_work = following
        try:
            with following:
                return forward(*args, **kwargs)
        finally:
            self._at_work = before

    def _marked(self, value: Tensor) -> Tensor:
        assert self._shard_dim is not None, "asked only then"
        if spec_of(value) is not None:
            return value
        # An outer axis may shard it too.
        with torch_compat.without_torch_functions():
            size = value.shape[self._shard_dim] * self._mesh.size()
            view = copy_mark(value, value.view_as(value))
            return restated(self._marks.mark(view, Placed(dim=self._shard_dim, parts=(size,))))
