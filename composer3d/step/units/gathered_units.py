"""Units of data parallelism: modules whose parameters are gathered and reduced as one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.communication import ReplicaReduction, ReplicaReductions
from composer3d.context import RunContext
from composer3d.interfaces import Unit, Units

if TYPE_CHECKING:
    from torch import nn

__all__ = ["make_unit"]


def make_unit(make: Callable[..., Any], fqn: str, model: nn.Module, context: RunContext, **options: Any) -> None:
    """Make a module a unit, in the dtypes that plugins answer, and add it to `context.stash(Units)`.

    Its all-reduce over replicas, where it has one, is added to `context.stash(ReplicaReductions)`.
    Inner units are made first: a unit takes the parameters that none inside of it has taken.

    Args:
        make: `torch.distributed.fsdp.fully_shard`, or a function that takes its arguments.
        fqn: Of the module, in `model`.
        model: Of the part.
        context: Of the run.
        options: Of `make`, but for its module and its `mp_policy`.

    Memory and collectives: those of `make`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import DTensor

    dtypes = context.dtypes(fqn)
    module: Any = model.get_submodule(fqn)
    written = type(module)
    torch_compat.shard_integers()
    torch_compat.keep_output_hooks(module)
    for parameter in module.parameters():
        # torch shards rows of contiguous memory alone; strides are nothing of a model's result.
        if not (isinstance(parameter, DTensor) or parameter.is_contiguous()):
            parameter.data = parameter.detach().contiguous()
    policy = MixedPrecisionPolicy(param_dtype=dtypes.param, reduce_dtype=dtypes.reduce, output_dtype=dtypes.output)
    make(module, mp_policy=policy, **options)
    context.stash(Units).by_module[module] = Unit(
        written_class=written,
        gather=module.unshard,
        set_all_gather=module.set_custom_all_gather,
        set_reduce_scatter=module.set_custom_reduce_scatter,
        register_buffers=partial(_register_buffers, module),
    )
    for group in torch_compat.replica_groups(module):
        context.stash(ReplicaReductions).made.append(
            ReplicaReduction(
                parameters=partial(torch_compat.unit_parameters, module),
                group=group,
                replace=partial(torch_compat.replace_all_reduce, module),
            )
        )


def _register_buffers(module: Any) -> None:
    module.set_force_sum_reduction_for_comms(True)  # NCCL sums registered buffers without a copy, and nothing else
    module.set_allocate_memory_from_process_group_for_comm(True)
