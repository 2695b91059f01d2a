"""Parameters that a loss depends on and that are not of the composed model: a criterion's weights, log-variances."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.mesh import Role
from composer3d.step import gradients

if TYPE_CHECKING:
    from torch import nn

    from composer3d.context import RunContext

__all__ = ["OutsideParameters"]

log = logging.getLogger(__name__)
_RUNS: weakref.WeakSet[RunContext] = weakref.WeakSet()


class OutsideParameters:
    """Parameters that a loop adds to the composition's optimizer; replicated, their gradients averaged once a step.

    Args:
        context: Of the run.

    Attributes:
        parameters: Those added so far.

    Collectives: one all-reduce a group that is added, and for each of its parameters one broadcast; in a step with some
        of them one all-reduce an axis.
    """

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self.parameters: list[nn.Parameter] = []
        self._has_looked = False
        _RUNS.add(context)

    def add(self, parameters: Iterable[nn.Parameter], *, refused: str, meet: Callable[[], None]) -> None:
        """Take parameters of a group that was added to the optimizer, with the first rank's values.

        Args:
            parameters: The model's own are left out.
            refused: Why no gradient of theirs can be averaged; empty where it can.
            meet: Verifies that all ranks add some.

        Raises:
            StepError: It cannot, or some ranks add none.
        """
        import torch
        import torch.distributed as dist

        own = _parameters_of(self._context)
        added = [parameter for parameter in parameters if id(parameter) not in own]
        if added and refused:
            raise StepError(f"optimizer.add_param_group(...) was given parameters of no composed model: {refused}")
        if added and self._context.world_size > 1:
            meet()
        for parameter in added if self._context.world_size > 1 else ():
            with torch.no_grad():
                dist.broadcast(parameter, src=0)
        self.parameters += added

    def average(self) -> None:
        """Average gradients over the ranks that have other samples or positions."""
        if any(parameter.requires_grad for parameter in self.parameters):
            names = self._context.layout.names(Role.BATCH, Role.SEQUENCE)
            axes = [axis for axis in names if self._context.degrees[axis] > 1]
            gradients.average_whole(self.parameters, axes=axes, context=self._context)

    def look(self, loss: Any) -> None:
        """Log a warning at the first backward of a loss that depends on parameters of no composition.

        Memory: none. Collectives: none.
        """
        total = getattr(loss, "sum", loss[0] if isinstance(loss, tuple | list) and loss else None)
        root = getattr(loss, "grad_fn", getattr(total, "grad_fn", None))
        if self._has_looked or root is None or self._context.layout.degree(Role.BATCH, Role.SEQUENCE) == 1:
            return
        self._has_looked = True
        shapes = [list(parameter.shape) for parameter in _leaves(root, self._known())]
        if shapes:
            log.warning(
                "the loss depends on %d parameters of no composed model (the first of shape %s): their gradients are "
                "this rank's alone, and ranks would train different ones. Put them into the model before compose, or "
                'write optimizer.add_param_group({"params": list(criterion.parameters())}) on the optimizer that '
                "run.optimizer(...) returned, which averages them",
                len(shapes),
                shapes[0],
            )

    def _known(self) -> set[int]:
        added = {id(parameter) for parameter in self.parameters}
        return added.union(*(_parameters_of(context) for context in tuple(_RUNS)))


def _parameters_of(context: RunContext) -> set[int]:
    """Return the `id` of a run's parameters, sharded and gathered ones."""
    found: set[int] = set()
    for part in context.parts:
        found |= {id(parameter) for parameter in part.module.parameters()}
        for module in part.module.modules():
            for group, _, _ in torch_compat.fsdp_groups(module):
                found |= {id(held.sharded_param) for held in group.fsdp_params}
            found |= {id(tensor) for tensor in torch_compat.fsdp_buffers(module)}
    return found


def _leaves(root: Any, known: set[int]) -> list[nn.Parameter]:
    """Return the parameters in a graph that are not the run's, each once."""
    from torch import nn

    todo, seen, found = [root], {root}, []
    while todo:
        node = todo.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and leaf.requires_grad and id(leaf) not in known:
            found.append(leaf)
        new = {following for following, _ in node.next_functions if following is not None} - seen
        seen |= new
        todo += new
    return found
