"""Sequences sharded over cp beside other plugins: equal to one device, with the collectives that follow."""

from __future__ import annotations

import pytest
import torch
from layout_matrix_cells import batch, distance, factory, loss_fn, one_device, train
from support.models import mine, write_manifest

import composer3d
from composer3d.runner.weights.ema import EMA
from composer3d.testing import count_collectives, full, run_ranks

LAYERS = 4
FSDP = "[sharding.fsdp2]\n"
SP = "[sharding.tensor_parallel]\nsequence_parallel = true\n"
OFFLOAD = "[scheduling.activation_offload]\nmin_mib = 0.0\n"


def cp(method, tables, *, mesh="", train=""):
    return (
        f"composer3d = 1\n[mesh]\ncp = 2\n{mesh}\n[train]\nglobal_batch = 32\n{train}\n{tables}"
        f'[sharding.context_parallel]\nmethod = "{method}"\n'
    )


def recompute(mode, policy=None):
    text = f'[scheduling.activation_checkpoint]\nmode = "{mode}"\n'
    return text if policy is None else f'{text}policy = "{policy}"\n'


def pipeline(schedule):
    return f'[scheduling.pipeline]\nschedule = "{schedule}"\n'


def distances(cases, reference):
    """Return how far two optimizer steps of each case are from one device."""
    found = [train(text) for text in cases]
    return [max(distance(tensor, reference[name]) for name, tensor in each.items()) for each in found]


def assert_equal_to_one_device(world_size, cases):
    for ranks in zip(*run_ranks(distances, world_size, cases, one_device()), strict=True):
        assert max(ranks) <= 1e-12


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(cp("ring", "", train="microbatch = 16"), id="accumulation"),
        pytest.param(cp("ulysses", "[sharding.ddp]\n"), id="ddp"),
    ],
)
def test_accumulation_by_itself_and_beside_data_parallelism(text):
    assert_equal_to_one_device(2, [text])


@pytest.mark.slow
def test_sharded_data_parallelism_and_accumulation():
    assert_equal_to_one_device(2, [cp("gather", FSDP + "zero = 1\n", train="microbatch = 16")])


def test_recomputed_and_offloaded_activations():
    cases = [
        cp("ring", FSDP + recompute("selective", "attention")),
        cp("ulysses", FSDP + recompute("full")),
        cp("gather", FSDP + recompute("sqrt")),
        cp("universal", FSDP + recompute("selective")),
        cp("ring", FSDP + '[scheduling.activation_checkpoint]\nmode = "budget"\nbudget_fraction = 0.5\n'),
        cp("universal", FSDP + OFFLOAD),
        cp("ring", FSDP + recompute("full") + OFFLOAD),
    ]
    assert_equal_to_one_device(2, cases)


def test_what_is_offloaded_and_recomputed_in_part_has_lost_its_marks():
    """A block's inputs come back from the host as other tensors, which a recomputation marks again."""
    budget = '[scheduling.activation_checkpoint]\nmode = "budget"\nbudget_fraction = 0.5\n'
    inside = 'units = ["layers.*.attention"]\n'
    tables = [recompute("selective"), recompute("full") + inside, budget]
    assert_equal_to_one_device(2, [cp("gather", FSDP + table + OFFLOAD) for table in tables])


SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


@pytest.mark.parametrize(
    ("schedule", "method", "tables"),
    [
        pytest.param(*case, marks=[] if case[:2] == ("1F1B", "ring") else [pytest.mark.slow])
        for each in SCHEDULES
        for case in ((each, "ring", ""), (each, "gather", recompute("full")))
    ],
)
def test_schedules(schedule, method, tables):
    text = cp(method, FSDP + pipeline(schedule) + tables, mesh="pp = 2", train="microbatch = 8")
    assert_equal_to_one_device(4, [text])


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_with_sequences_that_tp_shards_again(schedule):
    tables = FSDP + SP + pipeline(schedule)
    assert_equal_to_one_device(8, [cp("ring", tables, mesh="pp = 2\ntp = 2", train="microbatch = 8")])


def counted(cases):
    """Return the collectives over cp of one step of each case."""
    found = []
    for text in cases:
        with composer3d.compose(
            factory, write_manifest(text.removeprefix("composer3d = 1\n")), loss_fn=loss_fn, device="cpu"
        ) as run:
            tokens, targets = (mine(run, tensor)[:2] for tensor in batch(0))
            with run.step(0), count_collectives(run.mesh) as collectives:
                run.forward_backward(tokens, target=targets)
            found.append({op: n for (op, axis), (n, _) in collectives.summary().items() if axis == "cp"})
    return found


# A ring of two has a message forward and three backward; ulysses four each way; gather one forward, one backward.
@pytest.mark.parametrize(
    ("method", "op", "plain", "again"),
    [
        ("ring", "send", 4, 5),
        pytest.param("ulysses", "all_to_all", 8, 12, marks=pytest.mark.slow),
        pytest.param("gather", "all_gather", 2, 3, marks=pytest.mark.slow),
    ],
)
def test_a_named_policy_keeps_what_attention_exchanged(method, op, plain, again):
    policies = ["", recompute("full"), recompute("selective", "attention")]
    counts = run_ranks(counted, 2, [cp(method, tables) for tables in policies])[0]
    assert [each[op] for each in counts] == [plain * LAYERS, again * LAYERS, plain * LAYERS]
    if method == "gather":
        assert {each["reduce_scatter"] for each in counts} == {LAYERS}


def averaged(text):
    """Train two steps; return the evaluated loss of the averaged weights, and the averages."""
    torch.set_default_dtype(torch.float64)
    with composer3d.compose(
        factory, write_manifest(text.removeprefix("composer3d = 1\n")), loss_fn=loss_fn, device="cpu"
    ) as run:
        optimizer, ema = run.optimizer(torch.optim.SGD, lr=0.5), EMA(run, decay=0.75)
        tokens, targets = (mine(run, tensor) for tensor in batch(0))
        for step in range(2):
            with run.step(step):
                run.forward_backward(tokens, target=targets)
                optimizer.step()
                ema.update(step)
                optimizer.zero_grad()
        with ema.applied():
            weights = {name: full(parameter.detach()).clone() for name, parameter in run.named_parameters()}
            evaluated = run.evaluate(tokens, target=targets)
    return float(evaluated.loss), evaluated.count, weights


def test_averages_of_weights_and_their_evaluation():
    ((loss_1, count_1, weights_1),) = run_ranks(averaged, 1, "composer3d = 1\n")
    for loss, count, weights in run_ranks(averaged, 2, cp("ring", FSDP)):
        assert abs(loss - loss_1) <= 1e-12 * loss_1 and count == count_1
        assert max(distance(weights[name], weights_1[name]) for name in weights_1) <= 1e-6  # averages are float32
