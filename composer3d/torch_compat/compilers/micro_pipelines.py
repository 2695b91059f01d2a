"""Micro-pipelined matrix products over symmetric memory: torch's graph pass, and what it has fused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["FusedPairs", "lacking_symmetric_memory", "micro_pipeline"]

# Of each kind the operators that the pass puts in the place of an exchange and the products beside it.
_FUSED = {
    "gathered": ("fused_all_gather_matmul", "fused_all_gather_scaled_matmul"),
    "summed": ("fused_matmul_reduce_scatter", "fused_scaled_matmul_reduce_scatter"),
}


@dataclass(kw_only=True, eq=False)
class FusedPairs:
    """Exchanges that stand in compiled graphs, and those of them that are one operator with their products.

    Attributes:
        gathered: All-gathers that were fused.
        summed: Reduce-scatters that were fused.
        found: All-gathers and reduce-scatters of tensor parallelism that the pass has seen.
    """

    gathered: int = 0
    summed: int = 0
    found: int = 0


def lacking_symmetric_memory(device: Any, num_ranks: int) -> str | None:
    """Return what symmetric memory among the ranks of a group lacks here; None where it is to be had.

    Args:
        device: Of the run.
        num_ranks: Of the group, neighbours on one machine.
    """
    import torch
    import torch.distributed as dist

    if device.type != "cuda":
        return f"symmetric memory is of GPUs, and this run is on {device.type}"
    if not dist.is_nccl_available():
        return "this build of torch has no NCCL, without which its pass returns at once"
    count = torch.cuda.device_count()
    if count < num_ranks:
        return f"symmetric memory is among the GPUs of one machine, which has {count}, and the group has {num_ranks}"
    here = torch.cuda.current_device()
    first = here - here % num_ranks
    peers = [other for other in range(first, first + num_ranks) if other != here]
    apart = [other for other in peers if other >= count or not torch.cuda.can_device_access_peer(here, other)]
    return f"GPU {here} cannot access the memory of GPU {apart[0]}" if apart else None


def micro_pipeline(groups: Sequence[str]) -> tuple[FusedPairs, Callable[[], None]]:
    """Let the compiler fuse exchanges over some groups with their products; return what it has fused, and what ends it.

    All private (torch 2.11-2.15): the setting, the pass, and the function that enables symmetric memory for a group,
    which is deprecated as needless while the pass still does nothing without it. The pass does nothing, and says
    nothing, where its pattern does not match: it is replaced by one that counts. Caches of compiled graphs, which would
    leave it out, are off meanwhile.

    Args:
        groups: Names of process groups.
    """
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what torch imports itself
        warnings.simplefilter("ignore", FutureWarning)
        import torch._inductor.config
        from torch._inductor.fx_passes import micro_pipeline_tp, post_grad
        from torch.distributed import _symmetric_memory

        module: Any = post_grad
        passes: Any = micro_pipeline_tp
        enable: Any = _symmetric_memory.enable_symm_mem_for_group
        for name in groups:
            enable(name)
    fused, plain = FusedPairs(), module.micro_pipeline_tp_pass

    @functools.wraps(plain)
    def counting(graph: Any) -> None:
        fused.found += len(passes.find_all_gather_patterns(graph)) + len(passes.find_reduce_scatter_patterns(graph))
        before = _count(graph)
        plain(graph)
        after = _count(graph)
        fused.gathered += after["gathered"] - before["gathered"]
        fused.summed += after["summed"] - before["summed"]

    module.micro_pipeline_tp_pass = counting
    config: Any = torch._inductor.config
    settings = {"_micro_pipeline_tp": True, "force_disable_caches": True}
    held = {name: getattr(config, name) for name in settings}
    for name, value in settings.items():
        setattr(config, name, value)

    def end() -> None:
        if module.micro_pipeline_tp_pass is counting:
            module.micro_pipeline_tp_pass = plain
        for name, value in held.items():
            setattr(config, name, value)

    return fused, end


def _count(graph: Any) -> dict[str, int]:
    """Return how many fused operators of each kind stand in a graph."""
    targets = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return {kind: sum(any(f".{n}." in t for n in names) for t in targets) for kind, names in _FUSED.items()}
