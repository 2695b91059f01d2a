"""A plan against real ranks: the same bytes, the same collectives, on every kind of rank."""

from __future__ import annotations

import pytest
from support.planned_runs import Case, figures, measured, tracer_of
from support.selected_cases import selected

from composer3d.testing import run_ranks

# Those of two ranks that take least time, of different kinds.
FAST = (
    "zero3",
    "mixed",
    "cp_ring",
    "averages",
    "cpu_offload",
    "1f1b",
    "stranger",
    "unused",
    "unused_1f1b",
    "tied_1f1b",
    "kept_interleaved",
    "frozen_1f1b",
)
CP = "mesh.cp = 2\n[sharding.context_parallel]\n"
CASES = {
    "zero3": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n"),
    "zero2": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\nzero = 2\n"),
    "zero1": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\nzero = 1\n"),
    # What the last rank's forwards leave differs between a run's first step, which is traced, and its second.
    "zero3_uneven": Case("mesh.dp_shard = 3\n[sharding.fsdp2]\n", world_size=3, uncompared=("activations",)),
    "reshard_root": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\nreshard_root = true\n"),
    "prefetch": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\nforward_prefetch = 2\nbackward_prefetch = 1\n"),
    "gathered_early": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\ngather_early = 2\n"),
    "overlapped_optimizer": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\noverlap_optimizer = 2\n"),
    "hsdp": Case("[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n", world_size=4),
    "hsdp_delayed": Case(
        "[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\ndelay_all_reduce = true\n", world_size=4
    ),
    "ddp": Case("mesh.dp_replicate = 2\n[sharding.ddp]\n"),
    "mixed": Case('mesh.dp_shard = 2\n[sharding.fsdp2]\n[precision.mixed]\nparam_dtype = "bfloat16"\n'),
    "float16": Case('mesh.dp_shard = 2\n[sharding.fsdp2]\n[precision.mixed]\nparam_dtype = "float16"\n'),
    "recompute": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n"),
    "selective": Case(
        'mesh.dp_shard = 2\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\nmode = "selective"\n'
        'save = ["aten.mm"]\n'
    ),
    "tp": Case('mesh.tp = 2\n[sharding.tensor_parallel]\nplan = "auto"\n'),
    "sp": Case('mesh.tp = 2\n[sharding.tensor_parallel]\nplan = "auto"\nsequence_parallel = true\n'),
    "fsdp_sp": Case(
        '[mesh]\ndp_shard = 2\ntp = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\nplan = "auto"\n'
        "sequence_parallel = true\n",
        world_size=4,
    ),
    "exchanged_sums": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n[communication.process_groups]\n"),
    "exchanged_operators": Case(
        '[mesh]\ndp_shard = 2\ntp = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\nplan = "auto"\n'
        "sequence_parallel = true\n[communication.process_groups]\n",
        world_size=4,
    ),
    # A first forward, which is traced, makes the positions of a rank's tokens: 64 bytes that later ones find.
    "cp_gather": Case(f'{CP}method = "gather"\n[sharding.fsdp2]\n', uncompared=("activations",)),
    "cp_ring": Case(f'{CP}method = "ring"\n[sharding.fsdp2]\n', uncompared=("activations",)),
    "cp_ulysses": Case(f'{CP}method = "ulysses"\n[sharding.ddp]\n', uncompared=("activations",)),
    "cp_universal": Case(f'{CP}method = "universal"\n', uncompared=("activations",)),
    "cp_recomputed": Case(
        f'{CP}method = "ring"\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\nmode = "selective"\n'
        'policy = "attention"\n',
        uncompared=("activations",),
    ),
    "cp_1f1b": Case(
        f'mesh.pp = 2\n{CP}method = "ring"\n[sharding.fsdp2]\n[scheduling.pipeline]\n',
        world_size=4,
        num_microbatches=4,
        uncompared=("activations",),
    ),
    "averages": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n", decay=0.9),
    "averages_1f1b": Case("mesh.pp = 2\n[scheduling.pipeline]\n", num_microbatches=4, decay=0.9),
    "cpu_offload": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n[sharding.cpu_offload]\npiece_mib = 0.01\n"),
    "nvme_offload": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n[sharding.nvme_offload]\nchunk_mib = 0.01\n"),
    # Which results are kept hangs on the time that operators take, and how many of the same size.
    "budget": Case(
        "mesh.dp_shard = 2\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n"
        'mode = "budget"\nbudget_fraction = 1.0\n'
    ),
    "gpipe": Case('mesh.pp = 2\n[scheduling.pipeline]\nschedule = "GPipe"\n', num_microbatches=4),
    "1f1b": Case('mesh.pp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n', num_microbatches=5),
    "interleaved": Case('mesh.pp = 2\n[scheduling.pipeline]\nschedule = "Interleaved1F1B"\n', num_microbatches=4),
    "zero_bubble": Case('mesh.pp = 2\n[scheduling.pipeline]\nschedule = "ZBVZeroBubble"\n', num_microbatches=4),
    "zero_bubble_long": Case('mesh.pp = 2\n[scheduling.pipeline]\nschedule = "ZBVZeroBubble"\n', num_microbatches=8),
    "pp_fsdp": Case(
        "[mesh]\npp = 2\ndp_shard = 2\n[sharding.fsdp2]\n[scheduling.pipeline]\n", world_size=4, num_microbatches=4
    ),
    "three_dimensions": Case(
        '[mesh]\npp = 2\ntp = 2\n[sharding.tensor_parallel]\nplan = "auto"\n[scheduling.pipeline]\n'
        "[scheduling.activation_checkpoint]\n",
        world_size=4,
        num_microbatches=4,
    ),
    "ddp_bucketed": Case('mesh.dp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n', num_firsts=2),
    # The ranks that it is compared with run on CPUs, where a plan of another device does not emulate.
    "float8": Case('mesh.dp_shard = 2\n[sharding.fsdp2]\n[precision.float8]\nemulate = true\nexclude = ["output"]\n'),
    "mxfp8": Case('mesh.dp_shard = 2\n[sharding.fsdp2]\n[precision.mxfp8]\nemulate = true\nexclude = ["output"]\n'),
    "int8": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n[precision.int8]\n"),
    "low_bit": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n[precision.low_bit_optimizer]\nmin_numel = 256\n"),
    "activation_offload": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n[scheduling.activation_offload]\nmin_mib = 0\n"),
    "huggingface": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n", source="llama"),
    "huggingface_tp": Case('mesh.tp = 2\n[sharding.tensor_parallel]\nplan = "auto"\n', source="llama"),
    # Experts are multiplied in groups, in float32.
    "huggingface_experts": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n", source="mixtral"),
    # Its router divides in place what the checkpoint keeps.
    "huggingface_experts_selective": Case(
        'mesh.dp_shard = 2\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\nmode = "selective"\n',
        source="mixtral",
    ),
    "unused": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n", source="unused"),
    "unused_ddp": Case("mesh.dp_replicate = 2\n[sharding.ddp]\n", source="unused"),
    "unused_1f1b": Case("mesh.pp = 2\n[scheduling.pipeline]\n", source="unused", num_microbatches=4),
    "tied_1f1b": Case("mesh.pp = 2\n[scheduling.pipeline]\n", source="tied", num_microbatches=4),
    # Stages that send different values: several of them, and of other shapes and dtypes.
    "kept_interleaved": Case(
        'mesh.pp = 2\n[scheduling.pipeline]\nschedule = "Interleaved1F1B"\n', source="kept", num_microbatches=4
    ),
    "kept_1f1b": Case("mesh.pp = 3\n[scheduling.pipeline]\n", 3, source="kept", num_microbatches=4),
    "shrinking_1f1b": Case("mesh.pp = 4\n[scheduling.pipeline]\n", 4, source="shrinking", num_microbatches=5),
    "frozen_1f1b": Case("mesh.pp = 2\n[scheduling.pipeline]\n", source="frozen", num_microbatches=4),
    "stranger": Case(
        'mesh.dp_shard = 2\n[sharding.fsdp2]\n[communication.stranger]\nuse = "support.planned_runs:Stranger"\n'
    ),
}


def group(name):
    """Return what cases have in common that run in one world."""
    return name in FAST, CASES[name].world_size


@pytest.fixture(scope="module")
def happened(tmp_path_factory, request):
    """Run a case on real ranks when it is asked for, and with it all of its group that are selected."""
    folder, found = tmp_path_factory.mktemp("real"), {}
    wanted = selected(request, "name")

    def of(name):
        if name not in found:
            names = [other for other in CASES if other in wanted and group(other) == group(name)]
            ranks = run_ranks(
                lambda: [measured(CASES[other], folder) for other in names], CASES[name].world_size, timeout_s=240.0
            )
            found.update({other: [rank[index] for rank in ranks] for index, other in enumerate(names)})
        return found[name]

    return of


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in CASES])
def test_a_plan_is_what_real_ranks_do(name, happened, tmp_path):
    case = CASES[name]
    tracer = tracer_of(case, tmp_path, extrapolate=False)
    for rank in (0, case.world_size - 1):
        one, other = figures(tracer.trace(rank)), happened(name)[rank]
        for figure in case.uncompared:
            del one["memory"][figure], other["memory"][figure]
        assert one == other
