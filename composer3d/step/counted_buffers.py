"""Counts that modules keep over a step, summed over the ranks of other samples before the modules use them.

A module takes part with `summed_buffers`, the names of its buffers that are sums over samples, and `after_step()`,
called once after the optimizer's step, as balancing of experts by their load needs. It is the module's own code, so a
loop on one device calls `after_step()` itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from composer3d.errors import PluginError
from composer3d.mesh import Role
from composer3d.transform import StepAction, StepPoint

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.context import RunContext
    from composer3d.step.step_state import StepState

__all__ = ["counting_actions"]


def counting_actions(modules: Iterable[nn.Module], context: RunContext) -> list[StepAction]:
    """Return the actions that sum the counts of modules and let these use them; none where no module counts.

    Steps that are vetoed change nothing, and their counts are dropped. Evaluations and forwards without gradients are
    the module's to leave out, recomputed forwards leave buffers as they are. Along the axes of sequences and of tensors
    the module's own sums are whole: it is computed as on one device there.

    Collectives: one all-reduce of all counts an axis of other samples, once a step.

    Args:
        modules: Of this rank's stages.
        context: Of the run.

    Raises:
        PluginError: A name of `summed_buffers` is no buffer of whole numbers; or groups of ranks come and go, which
            exchange gradients alone.
    """
    counting: dict[int, Any] = {
        id(module): module
        for module in modules
        if getattr(module, "summed_buffers", ()) and callable(getattr(module, "after_step", None))
    }
    if not counting:
        return []
    for module in counting.values():
        _buffers(module)
    if context.layout.num_groups > 1:
        first = next(iter(counting.values()))
        raise PluginError(
            f"{type(first).__name__} keeps counts over a step ({', '.join(first.summed_buffers)}), and groups of ranks "
            "that come and go exchange gradients alone: its buffers would be another model's in each group",
            hint="balance by a loss instead, or train on one group",
        )

    def use(state: StepState) -> None:
        _sum([buffer for module in counting.values() for buffer in _buffers(module)], context)
        for module in counting.values():
            module.after_step()

    def drop(state: StepState) -> None:
        for module in counting.values() if state.vetoes else ():
            for buffer in _buffers(module):
                buffer.zero_()

    return [
        StepAction(name="model.after_step", point=StepPoint.AFTER_OPTIMIZER, run=use, gradients=False),
        StepAction(name="model.dropped_counts", point=StepPoint.END, run=drop, gradients=False),
    ]


def _buffers(module: Any) -> list[Tensor]:
    found: list[Tensor] = []
    for name in module.summed_buffers:
        buffer = module._buffers.get(name)
        if buffer is None or buffer.is_floating_point() or buffer.is_complex():
            kind = "no buffer" if buffer is None else f"of {buffer.dtype}"
            raise PluginError(
                f'{type(module).__name__}.summed_buffers names "{name}", which is {kind}: sums of several ranks are '
                "those of one device for whole numbers alone",
                hint=f'self.register_buffer("{name}", torch.zeros(..., dtype=torch.int64), persistent=False)',
            )
        found.append(buffer)
    return found


def _sum(buffers: list[Tensor], context: RunContext) -> None:
    import torch
    import torch.distributed as dist

    axes = [name for name in context.layout.names(Role.BATCH) if context.degrees[name] > 1]
    if not axes:
        return
    flat = torch.cat([buffer.reshape(-1).to(torch.int64) for buffer in buffers])
    for axis in axes:
        with context.span("all_reduce", group="counts", axis=axis, bytes=flat.nbytes):
            dist.all_reduce(flat, group=context.mesh.get_group(axis))
    for buffer, total in zip(buffers, flat.split([buffer.numel() for buffer in buffers]), strict=True):
        buffer.copy_(total.view_as(buffer))
