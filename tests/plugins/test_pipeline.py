"""Schedules, shapes, ties."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.models import Net, composed, full, mine, padded, seeded, sum_loss
from support.pipeline_models import Spans, assert_equal_to_one_device, beside_one_device, pipelined_step

from composer3d.testing import count_collectives, run_ranks

TIGHT = 1e-12
ONE_STAGE, LOOPS, VS = (
    ("GPipe", "1F1B"),
    ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"),
    ("ZBVZeroBubble", "DualPipeV"),
)
ALL = (*ONE_STAGE, *LOOPS, *VS)


def manifest(schedule="1F1B", pp=2, more=""):
    return f'[mesh]\npp = {pp}\n[scheduling.pipeline]\nschedule = "{schedule}"\n{more}'


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "num_microbatches"),
    # DualPipeV needs as many micro-batches as stages.
    [*((schedule, 8) for schedule in ALL), *((schedule, 4 if schedule == "DualPipeV" else 2) for schedule in ALL)],
)
def test_gradients_equal_one_device(schedule, num_microbatches):
    step = partial(pipelined_step, microbatch=16 // num_microbatches, batch=partial(padded, 16))
    assert_equal_to_one_device(run_ranks(step, 2, manifest(schedule), Net, {"num_layers": 4}))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("tied", [False, True])
def test_four_ranks(schedule, tied):
    # Of the tied weight's copies rank 0 and rank 3 hold one each, or rank 0 both.
    step = partial(pipelined_step, microbatch=2, batch=partial(padded, 16))
    options = {"num_layers": 8, "tied": tied}
    assert_equal_to_one_device(run_ranks(step, 4, manifest(schedule, pp=4), Net, options))


@pytest.mark.parametrize("schedule", ALL)
def test_tied_weights_stay_equal_to_one_devices(schedule):
    (worst, copies, names), (other, more, others) = run_ranks(
        beside_one_device, 2, manifest(schedule), Net, {"num_layers": 4, "tied": True}
    )
    assert max(worst, other) < TIGHT
    # A copy has its own name in the stage, and the first name everywhere else.
    assert copies + more == ["out.weight"]
    assert "out.weight" not in names + others
    assert names.count("tok.weight") + others.count("tok.weight") == (1 if schedule in VS else 2)


class SharedBetweenBlocks(Net):
    """A block of the first stage and one of the last have a weight in common, and so have two that follow another."""

    def __init__(self, num_layers):
        super().__init__(num_layers=num_layers)
        for one, other in ((0, 7), (1, 2)):
            self.layers[other].up.weight = self.layers[one].up.weight


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize("more", ["", "[sharding.fsdp2]\n"], ids=["plain", "sharded"])
def test_weights_that_blocks_of_several_stages_share_stay_equal_to_one_devices(schedule, more):
    text, options = manifest(schedule) + more, {"num_layers": 8}
    ranks = run_ranks(beside_one_device, 4 if more else 2, text, SharedBetweenBlocks, options)
    assert max(worst for worst, *_ in ranks) < TIGHT
    copies = {name for _, names, _ in ranks for name in names}
    assert copies == {"layers.7.up.weight", *(() if schedule == "1F1B" else ("layers.2.up.weight",))}


def test_tied_weights_under_sharding():
    text = manifest("ZBVZeroBubble") + "[sharding.fsdp2]\n"
    assert (
        max(worst for worst, *_ in run_ranks(beside_one_device, 4, text, Net, {"num_layers": 4, "tied": True})) < TIGHT
    )


def several_shapes():
    """Two batches of other lengths in one step, an evaluation between steps, and other numbers of micro-batches."""
    torch.set_default_dtype(torch.float64)
    batches = [padded(12, 5), padded(12, 9), padded(8, 9), padded(8, 5)]
    model = seeded(num_layers=4)
    run = composed(manifest("Interleaved1F1B") + "[sharding.fsdp2]\n[train]\nmicrobatch = 2\n", seeded(num_layers=4))
    errors = []
    for number, calls in enumerate([(0, 1), (2,), (0, 0), (3, 1)]):
        counts = [int((batches[call][1] != -100).sum()) for call in calls]
        total = sum(sum_loss(model(batches[call][0]), batches[call][1])[0] for call in calls)
        (total / sum(counts)).backward()
        with run.step(number):
            for call in calls:
                tokens, targets = batches[call]
                run.forward_backward(mine(run, tokens), target=mine(run, targets))
            run.clip_grad_norm_(1e9)
            gradients = {name: p.grad for name, p in model.named_parameters()}
            for name, parameter in run.named_parameters():
                error = (full(parameter.grad) - gradients[name]).abs().max() / gradients[name].abs().max()
                errors.append(float(error))
                parameter.grad = None
        model.zero_grad()
        tokens, targets = padded(6, 4)
        evaluation = run.evaluate(mine(run, tokens)[:2], target=mine(run, targets)[:2])
        errors.append(float(abs(evaluation.loss - evaluation_of(model, run, tokens, targets))))
    run.close()
    return max(errors), len(errors)


def evaluation_of(model, run, tokens, targets):
    degree = run.context.data_parallel_degree
    chosen = [index * (6 // degree) + offset for index in range(degree) for offset in range(2)]
    with torch.no_grad():
        total, count = sum_loss(model(tokens[chosen]), targets[chosen])
    return total / count


@pytest.mark.parametrize("world_size", [2, 4])
def test_shapes_change_within_and_between_steps(world_size):
    for error, compared in run_ranks(several_shapes, world_size):
        assert compared > 4
        assert error < TIGHT


class HalfFrozen(Net):
    """The blocks of the chosen stages do not learn."""

    def __init__(self, frozen):
        super().__init__(num_layers=4)
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
@pytest.mark.parametrize(
    "frozen",
    [
        pytest.param(("tok", "layers.0", "layers.1"), id="first"),
        pytest.param(("layers.2", "layers.3", "norm", "out"), id="last"),
        pytest.param(("layers.1", "layers.2"), id="middle"),
    ],
)
def test_wholly_frozen_stages(schedule, frozen):
    results = run_ranks(partial(pipelined_step, microbatch=3), 2, manifest(schedule), HalfFrozen, {"frozen": frozen})
    for result in results:
        assert result["loss"] < TIGHT
        assert result["norm"] < TIGHT
        assert result["gradients"] < TIGHT
    assert set().union(*(result["names"] for result in results)) == results[0]["all_names"]


@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_recomputation(schedule):
    text = manifest(schedule) + "[scheduling.activation_checkpoint]\n"
    assert_equal_to_one_device(run_ranks(pipelined_step, 2, text, Net, {"num_layers": 4}))


# ---- collectives -----------------------------------------------------------------------------------------------------


def second_step(text, tied):
    run = composed(text + "\n[train]\nmicrobatch = 2\n", seeded(num_layers=4, tied=tied))
    tokens, targets = padded()
    for number in range(2):
        with count_collectives(run.mesh) as collectives, run.step(number):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            run.clip_grad_norm_(1.0)
    with count_collectives(run.mesh) as evaluation:
        run.evaluate(mine(run, tokens), target=mine(run, targets))
    run.close()
    return [{key: count for key, (count, _) in seen.summary().items()} for seen in (collectives, evaluation)]


@pytest.mark.parametrize(
    ("schedule", "tied", "boundaries"),
    [
        # Per rank: boundaries between stages at which it sends, and at which it receives, activations.
        ("1F1B", False, [(1, 0), (0, 1)]),
        ("1F1B", True, [(1, 0), (0, 1)]),
        ("Interleaved1F1B", False, [(2, 1), (1, 2)]),
        ("ZBVZeroBubble", True, [(1, 1), (1, 1)]),
    ],
)
def test_collectives(schedule, tied, boundaries):
    microbatches = 6
    for (sends, receives), (trained, evaluated) in zip(
        boundaries, run_ranks(second_step, 2, manifest(schedule), tied), strict=True
    ):
        # Each activation comes back as a gradient. Of tied copies on two ranks the gradients are summed.
        summed = int(tied and schedule not in VS)
        assert trained == {
            ("send", "pp"): (sends + receives) * microbatches,
            ("recv", "pp"): (sends + receives) * microbatches,
            ("all_reduce", "pp"): 3 + summed,
        }
        # Each activation follows a message of its shape.
        expected = {("send", "pp"): sends * microbatches * 2, ("recv", "pp"): receives * microbatches * 2}
        assert evaluated == {key: n for key, n in expected.items() if n} | {("all_reduce", "pp"): 2}


def executed(text, degree, num_microbatches):
    """Return what this rank's stages did in a step, and what the plugin lists for it."""
    tokens, targets = padded(num_microbatches)
    text += '[profiling.watching]\nuse = "support.pipeline_models:Watching"\n[train]\nmicrobatch = 1\n'
    run = composed(text, seeded(num_layers=2 * degree))
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    (spans,) = [value for value in run.context.state.values() if isinstance(value, Spans)]
    listed = run._assembled.hooks.actions(run.context, num_microbatches)
    run.close()
    return spans.actions, listed[run.context.rank]


@pytest.mark.parametrize("schedule", ALL)
def test_what_is_listed_is_what_runs(schedule):
    degree, num_microbatches = 3, 6
    for done, listed in run_ranks(executed, degree, manifest(schedule, degree), degree, num_microbatches):
        assert done == listed
