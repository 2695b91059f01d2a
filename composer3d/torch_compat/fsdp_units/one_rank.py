"""Units of FSDP2 of which a rank's shard is all there is: nothing is gathered, nothing is copied."""

from __future__ import annotations

import functools
from typing import Any

from composer3d.torch_compat.fsdp_units.unit_gradients import gradient_of

__all__ = ["OneRankGroup"]

_Group: Any = object  # FSDP2's, whose module is not imported here
_FRESH = 2  # references to the memory of a tensor that nothing else shares: its own, and that of the question


class OneRankGroup(_Group):
    """A group whose gathered parameters have the memory of their shards, where these are whole on the rank.

    So are the experts of a layer where their own mesh has one rank, everything where dp_shard is 1, and replicas. FSDP2
    copies such a shard before every forward and backward, and the gradients twice (torch 2.11-2.15; its records are
    private). It still does what has to be copied: another dtype, host memory, weights that gather themselves.
    """

    def wait_for_unshard(self) -> None:
        """Take what was gathered; of shards that are whole nothing was."""
        if not self.is_gathered and self._all_gather_result is not None:
            for record in self.fsdp_params:
                if record.sharded_state.name == "SHARDED" and _is_whole(record):
                    _share(record)
                elif isinstance(record, _SharedRecord):
                    _part(record)
        super().wait_for_unshard()

    def post_backward(self, *unused: Any) -> None:
        """Give sharded parameters their gradients without a reduction, where no other rank has any of them."""
        is_alone = not self.is_gathered and self.mesh_info.mesh.size() == 1
        if is_alone and self.reduce_grads and self.gradient_divide_factor is None and self._all_reduce_hook is None:
            _give_gradients(self)
        super().post_backward(*unused)


class _SharedRecord:
    """FSDP2's record of a parameter whose gathered memory is the shard's, which is not freed."""

    def free_unsharded_param(self) -> None:
        """Free nothing."""


def _is_whole(record: Any) -> bool:
    shard = record._sharded_param_data
    is_plain = not hasattr(record._sharded_local_tensor, "fsdp_pre_all_gather") and not record.offload_to_cpu
    is_all = shard.storage_offset() == 0 and shard.untyped_storage().nbytes() == shard.numel() * shard.itemsize
    return is_plain and is_all and record.param_dtype is None and shard.numel() == record._orig_size.numel()


def _share(record: Any) -> None:
    """Let FSDP2 find what it would copy where it would copy it to; a tensor copied to itself stays as it is."""
    import torch

    shard = record._sharded_param_data
    if not isinstance(record, _SharedRecord):
        record.free_unsharded_param()
        cls: Any = type(record)
        record.__class__ = _shared_class(cls)
    if record.all_gather_outputs and record.all_gather_outputs[0] is shard:
        return
    record.all_gather_outputs = [shard]
    full = getattr(record, "_unsharded_param", None)
    if full is not None:  # made of other memory
        _point(full, torch.as_strided(shard, record._orig_size, record._contiguous_orig_stride, 0))


def _part(record: Any) -> None:
    """Let FSDP2 copy again: the shard has been given memory that is not its alone, or is kept elsewhere."""
    import torch

    record.__class__ = record.copied_class
    shard = record._sharded_param_data
    own = torch.empty(shard.numel(), dtype=record.param_dtype or shard.dtype, device=record.device)
    record.all_gather_outputs = [own]
    if hasattr(record, "_unsharded_param"):
        _point(record._unsharded_param, torch.as_strided(own, record._orig_size, record._contiguous_orig_stride, 0))


def _point(full: Any, memory: Any) -> None:
    if hasattr(full, "_local_tensor"):
        full._local_tensor = memory
    else:
        full.data = memory


@functools.cache
def _shared_class(cls: Any) -> Any:
    return type(cls.__name__, (_SharedRecord, cls), {"copied_class": cls})


def _give_gradients(group: Any) -> None:
    import torch

    with torch.no_grad():
        for record in group.fsdp_params:
            if hasattr(record, "_unsharded_param") and not record.offload_to_cpu:
                record.accumulate_unsharded_grad_if_needed()
                if gradient_of(record) is not None:
                    _give(record, _taken(record))


def _taken(record: Any) -> Any:
    """Return a gradient's local tensor, which the gathered parameter no longer has."""
    if record.unsharded_accumulated_grad is not None:
        grad = record.unsharded_accumulated_grad_data
        record.unsharded_accumulated_grad = None
        return grad
    grad = record.unsharded_grad_data
    record._unsharded_param.grad = None
    return grad


def _give(record: Any, grad: Any) -> None:
    """Give a sharded parameter a gradient, rounded as a reduction would round it, and in memory of its own."""
    import torch

    grad = grad.to(record.reduce_dtype or grad.dtype).to(record.orig_dtype)
    parameter = record.sharded_param
    if parameter.grad is not None:
        parameter.grad._local_tensor += grad
    else:
        storage = grad.untyped_storage()
        is_own = torch._C._storage_Use_Count(storage._cdata) == _FRESH  # autograd may have given it to two
        if not (is_own and grad.is_contiguous() and storage.nbytes() == grad.numel() * grad.itemsize):
            grad = grad.clone(memory_format=torch.contiguous_format)
        parameter.grad = record.to_sharded_dtensor(grad)
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(parameter)
