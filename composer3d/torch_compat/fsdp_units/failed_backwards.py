"""Units of FSDP2 after a backward that raised, which leaves them between states (their records: torch 2.11-2.15)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from composer3d.torch_compat.fsdp_units.units import Units

__all__ = ["reset_units"]


def reset_units(units: Units) -> None:
    """Let the next forward of a part begin anew; gradients of the failed backward that are not reduced are dropped.

    torch queues the end of a backward once, and autograd drops what is queued with the error: without this the next
    backward would end nothing, and leave gradients of units unreduced. torch 2.13 has `reset_iter_state` for it.

    Args:
        units: Of the part. Collectives: none.
    """
    for group in units.groups:
        group.is_held = group.is_final = group.is_ready = False
        group.num_hooks, group.reduce_grads = 0, True
        group.earlier.clear()
        for parameter in group.fsdp_params:
            parameter.unsharded_accumulated_grad = None
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
        # What was prefetched is not waited for: a peer that caused the error may never send it.
        group._all_gather_result = group._partial_reduce_output = group.comm_ctx.all_gather_state = None
        getattr(group.comm_ctx, "reduce_scatter_states", []).clear()  # torch 2.11 has one, waited for later
        group._training_state = type(group._training_state).IDLE
        if not hasattr(group.comm_ctx, "reduce_scatter_stream"):
            continue  # no forward has begun
        group.finalize_backward()
        group.reshard()
    for state in units.states:
        context = state._state_ctx
        context.iter_forward_root, context.post_backward_final_callback_queued = None, False
        state._training_state = type(state._training_state).IDLE
        if hasattr(state, "_modules_to_run_forward"):
            state._modules_to_run_forward.clear()
    units.builds_graph = False
    units.begin()
