"""A Hugging Face model whose head is its embedding, under what plugins do beside the plain layouts of each axis."""

from __future__ import annotations

import pytest
from support.huggingface import assert_equal_to_one_device, make, results_of
from support.selected_cases import selected

from composer3d.huggingface.folder import import_transformers

SHARDS = "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"
STAGES = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "{}"\n'
TRACED = STAGES + 'split = "tracer"\n'
TP = "[sharding.tensor_parallel]\n"


def more(text, axis):
    return text.replace("[mesh]\n", f"[mesh]\n{axis} = 2\n")


# By world size: layout and share of the weights' bytes that a rank may read. Both stages with the tied weight read it.
CASES = {
    2: {
        "zero1": (SHARDS + "zero = 1\n", 0.5),
        "zero2": (SHARDS + "zero = 2\n", 0.5),
        "bucketed": ('[mesh]\ndp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n', 1.0),
        "compile": (SHARDS + '[scheduling.compile]\nbackend = "aot_eager"\n', 0.5),
        "InterleavedZeroBubble": (STAGES.format("InterleavedZeroBubble"), 0.55),
        "ZBVZeroBubble": (STAGES.format("ZBVZeroBubble"), 0.6),
        "DualPipeV": (STAGES.format("DualPipeV"), 0.6),
        "tracer": (TRACED.format("1F1B"), 0.55),
        "tracer-ZBVZeroBubble": (TRACED.format("ZBVZeroBubble"), 0.6),
    },
    4: {
        "hybrid": (more(SHARDS, "dp_replicate"), 0.5),
        "pp-tp": (more(STAGES.format("1F1B"), "tp") + TP, 0.3),
        "pp-tp-sequence": (more(STAGES.format("1F1B"), "tp") + TP + "sequence_parallel = true\n", 0.3),
        "ZBVZeroBubble-fsdp": (more(STAGES.format("ZBVZeroBubble"), "dp_shard") + "[sharding.fsdp2]\n", 0.3),
    },
}
NAMES = [(world_size, name) for world_size, cases in CASES.items() for name in cases]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    import_transformers()
    return {"gpt2": make("gpt2", tmp_path_factory.mktemp("models") / "gpt2")}


@pytest.fixture(scope="module")
def results(folders, request):
    wanted = selected(request, "world_size", "name")
    return {
        world_size: results_of(
            {name: ("gpt2", text, False) for name, (text, _) in cases.items() if (world_size, name) in wanted},
            folders,
            world_size,
        )
        for world_size, cases in CASES.items()
        if any(world_size == size for size, _ in wanted)
    }


# Dynamo looks at the .grad of everything that it traces.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize(("world_size", "name"), NAMES)
def test_losses_and_gradients_equal_one_device(world_size, name, results):
    assert_equal_to_one_device(results[world_size][name], CASES[world_size][name][1])
