"""Whatever a plugin sends in a step is in a span: spans beside the collectives that a rank was seen to issue."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
import torch
from support.float8 import Wide
from support.float8 import table as float8
from support.models import composed, mine, padded, seeded

from composer3d import torch_compat
from composer3d.testing import count_collectives, run_ranks

# Before ranks are forked: each of them would import it anew.
torch_compat.import_torchao("torchao.float8")

WATCHED = '[profiling.names]\nuse = "support.recording_plugin:Names"\n'
OPS = ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter")
TENSOR = "[mesh]\ntp = 2\n{}[sharding.tensor_parallel]\n{}"
PLAN = """
[sharding.tensor_parallel.plan]
tok = "vocab"
"layers.*.up" = "colwise"
"layers.*.down" = "rowwise"
norm = "sequence"
out = "head"
"""
FSDP, SEQUENCE = "[sharding.fsdp2]\n", "sequence_parallel = true\nsequence_dim = 1\n"
WHOLE = PLAN.replace('norm = "sequence"\n', "")
GATHERED = FSDP + float8("tensorwise", "all_gather = true")
CASES = {
    "sequences": (2, TENSOR.format("", SEQUENCE) + PLAN + "[scheduling.activation_checkpoint]\n"),
    "loss": (2, TENSOR.format("", "loss_parallel = true\n") + WHOLE),
    "float8 over two axes": (4, TENSOR.format("dp_shard = 2\n", SEQUENCE) + PLAN + GATHERED),
    "a scale for every row": (2, TENSOR.format("", "") + WHOLE + float8("rowwise")),
    "units": (4, "[mesh]\ndp_shard = 2\ndp_replicate = 2\n" + FSDP),
    "exchanged": (
        4,
        TENSOR.format("dp_shard = 2\n", SEQUENCE) + PLAN + FSDP + "[communication.process_groups]\n",
    ),
    "compressed": (2, FSDP + '[communication.compression]\ngradients = "int8"\nweights = "int8"\n'),
    "copies": (2, '[sharding.ddp]\nreducer = "bucketed"\nbroadcast_buffers = true\n'),
}
# What torch's reducer compares and hands out when it is made, in the first forward, is in one span `broadcast`.
UNSEEN = {"copies": Counter({"all_gather": 1, "broadcast": 1})}


class Sized(Wide):
    """Of sizes that are even, with a buffer."""

    def __init__(self):
        super().__init__()
        self.tok, self.out = torch.nn.Embedding(12, 16), torch.nn.Linear(16, 12)
        self.register_buffer("scale", torch.ones(3))


def step(text, model):
    """Train a step on a rank; return the collectives that were issued in it, and those that spans tell of."""
    run = composed(text + WATCHED, model)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = padded(seq_len=6)
    (seen,) = [value.seen for value in run.context.state.values() if hasattr(value, "seen")]
    seen.clear()
    with run.step(0), count_collectives(run.mesh) as collectives:
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        run.clip_grad_norm_(1.0)
        optimizer.step()
    told = Counter((name, axis) for name, axis, _ in seen if name in OPS)
    issued = Counter({key: count for key, (count, _) in collectives.summary().items() if key[0] in OPS})
    run.close()
    return issued, told


@pytest.mark.parametrize("name", CASES)
def test_no_collective_is_without_a_span(name):
    degree, text = CASES[name]
    for issued, told in run_ranks(step, degree, text, partial(seeded, Sized)):
        # A group of all ranks has two names: the world, and the axes that it goes along.
        (whole,) = {axis for _, axis in issued} if degree == 2 else ("world",)
        named = Counter()
        for (op, axis), count in told.items():
            named[op, whole if axis in ("world", "dp_shard+tp") else axis] += count
        unseen = Counter({(op, whole): count for op, count in UNSEEN.get(name, {}).items()})
        assert named + unseen == issued and sum(named.values()) > 3


def compiled(text, model):
    """Train two steps on a rank; return what spans tell of the second, by name and axis."""
    run = composed(text + WATCHED, model)
    tokens, targets = padded(seq_len=6)
    (seen,) = [value.seen for value in run.context.state.values() if hasattr(value, "seen")]
    for number in range(2):
        seen.clear()
        with run.step(number):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
    run.close()
    return Counter((name, axis) for name, axis, _ in seen if name in (*OPS, "wait") and axis == "tp")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # inductor's own imports
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_collectives_inside_compiled_blocks_are_those_of_eager_ones(backend):
    text = TENSOR.format("", "") + WHOLE

    def both():
        model = partial(seeded, Sized)
        return compiled(text, model), compiled(text + f'[scheduling.compile]\nbackend = "{backend}"\n', model)

    for eager, found in run_ranks(both, 2):
        assert found == eager and eager["all_reduce", "tp"] == eager["wait", "tp"] > 4
