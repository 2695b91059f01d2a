from __future__ import annotations

import logging
import threading
from importlib.metadata import version

import pytest
import torch
import torch.distributed as dist
from support.models import Even, composed, mean_loss, mine, padded, seeded, unpadded

from composer3d import StepError
from composer3d.composition import agreeing
from composer3d.mesh import AXES, resolve
from composer3d.step.guard import Guard, Totals
from composer3d.testing import run_ranks

LOCKSTEP = '[sharding.lockstep]\nuse = "support.plugins:Lockstep"\n'
BROKEN = "; a rank skipped or repeated a batch"


def guard_of(*, plan=0, compares=True, whole_sequences=True, **degrees):
    layout = resolve(degrees, axes=AXES, world_size=dist.get_world_size(), default="dp_shard")
    return Guard(
        layout=layout,
        rank=dist.get_rank(),
        group=None,
        device=torch.device("cpu"),
        plan=plan,
        compares=compares,
        whole_sequences=whole_sequences,
    )


def totals(degrees, counts):
    return guard_of(**degrees).agree(step=3, call=0, counts=counts[dist.get_rank()], digest=0)


@pytest.mark.parametrize(
    ("degrees", "counts", "expected"),
    [
        pytest.param({}, [[3], [4]], Totals(count=7, num_microbatches=2, equal=False), id="dp"),
        pytest.param({}, [[4, 4], [4, 4]], Totals(count=16, num_microbatches=4, equal=True), id="equal"),
        pytest.param({}, [[4, 4], [3, 5]], Totals(count=16, num_microbatches=4, equal=False), id="same sums"),
        pytest.param({}, [[0], [0]], Totals(count=0, num_microbatches=2, equal=True), id="empty"),
        # Ranks along tp and pp hold the same samples, which count once.
        pytest.param({"tp": 2}, [[5, 3], [5, 3]], Totals(count=8, num_microbatches=2, equal=False), id="tp"),
        pytest.param({"pp": 2}, [[5, 5], [5, 5]], Totals(count=10, num_microbatches=2, equal=True), id="pp"),
        pytest.param({"cp": 2}, [[5], [3]], Totals(count=8, num_microbatches=2, equal=False), id="cp"),
        pytest.param({"tp": 2}, [[3], [3], [4], [4]], Totals(count=7, num_microbatches=2, equal=False), id="dp-tp"),
    ],
)
def test_counts_are_added_up_over_ranks_that_hold_other_tokens(degrees, counts, expected):
    assert run_ranks(totals, len(counts), degrees, counts) == [expected] * len(counts)


def refused(given, degrees=None, plans=None):
    """Return what each rank is told, given its own arguments of `agree`."""
    rank = dist.get_rank()
    own = guard_of(plan=plans[rank] if plans else 0, **(degrees or {}))
    with pytest.raises(StepError) as caught:
        own.agree(**{"step": 2, "call": 0, "counts": [1], "digest": 0} | given[rank])
    return str(caught.value)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        pytest.param(
            [(2, 0), (3, 0), (2, 0)],
            "rank 1 (dp_shard 1) is at step 3, while 2 of 3 ranks are at step 2",
            id="skips a step",
        ),
        pytest.param(
            [(2, 0), (2, 0), (1, 0)],
            "rank 2 (dp_shard 2) is at step 1, while 2 of 3 ranks are at step 2",
            id="repeats a step",
        ),
        pytest.param(
            [(2, 1), (2, 0), (2, 1)],
            "rank 1 (dp_shard 1) is at step 2, while 2 of 3 ranks are at step 2, batch 2",
            id="fewer batches",
        ),
        pytest.param(
            [(2, 0), (5, 0), (7, 2)],
            "rank 1 (dp_shard 1) is at step 5, rank 2 (dp_shard 2) is at step 7, batch 3, "
            "while 1 of 3 ranks are at step 2",
            id="all elsewhere",
        ),
        pytest.param(
            [(2, 0), (2, None), (2, 0)],
            "rank 1 (dp_shard 1) is at evaluation 2, while 2 of 3 ranks are at step 2",
            id="evaluates",
        ),
    ],
)
def test_ranks_elsewhere_are_named_on_all_ranks(places, message):
    # Everything else differs too, as it does where ranks are at different steps: the place comes first.
    given = [
        {"step": step, "call": call, "counts": [1] * (rank + 1), "digest": rank}
        for rank, (step, call) in enumerate(places)
    ]
    assert run_ranks(refused, 3, given, None, [1, 2, 3]) == [f"ranks do not run the same step: {message}{BROKEN}"] * 3


def test_another_number_of_microbatches_is_named():
    message = (
        "ranks split step 2 into different numbers of micro-batches: rank 1 (dp_shard 0, tp 1) has 2, while 3 of 4 "
        "ranks have 1; collectives of micro-batches need all ranks, so hand every rank a batch of the same size"
    )
    given = [{}, {"counts": [1, 1]}, {}, {}]
    assert run_ranks(refused, 4, given, {"dp_shard": 2, "tp": 2}) == [message] * 4


def test_another_plan_is_named():
    message = (
        "ranks do not run the same plan at step 2: rank 2 (dp_shard 2) has plan 0000000009, while 2 of 3 ranks have "
        "plan 0000000007; start all ranks with the same manifest, overrides and plugins"
    )
    assert run_ranks(refused, 3, [{}] * 3, None, [7, 7, 9]) == [message] * 3


@pytest.mark.parametrize(
    ("degrees", "digests", "who", "axes"),
    [
        pytest.param({"tp": 2}, [7, 6], ("rank 1 (tp 1)", 0), "tp", id="tp"),
        pytest.param({"pp": 2}, [7, 6], ("rank 1 (pp 1)", 0), "pp", id="pp"),
        pytest.param({"cp": 2}, [7, 6], ("rank 1 (cp 1)", 0), "cp", id="cp"),
        pytest.param({"dp_shard": 2, "tp": 2}, [7, 7, 5, 6], ("rank 3 (dp_shard 1, tp 1)", 2), "tp", id="dp-tp"),
        pytest.param(
            {"pp": 2, "dp_shard": 2, "tp": 2},
            [1, 1, 2, 2, 1, 1, 3, 2],
            ("rank 6 (pp 1, dp_shard 1, tp 0)", 2),
            "pp",
            id="pp-dp-tp",
        ),
    ],
)
def test_peers_must_be_handed_the_same_batch(degrees, digests, who, axes):
    odd, other = who
    message = (
        f"{odd} was given another batch than rank {other}, its peer along {axes}, at step 2; "
        f"ranks that differ only in {axes} must be handed the same samples"
    )
    given = [{"digest": digest} for digest in digests]
    assert run_ranks(refused, len(digests), given, degrees) == [message] * len(digests)


def shares(degrees, digests, options):
    guard = guard_of(**degrees, **options)
    return guard.agree(step=2, call=0, counts=[1], digest=digests[dist.get_rank()]).count


@pytest.mark.parametrize(
    ("degrees", "digests", "options"),
    [
        pytest.param({"pp": 2, "dp_shard": 2, "tp": 2}, [1, 1, 2, 2, 1, 1, 2, 2], {}, id="other samples along dp"),
        pytest.param({"cp": 2}, [1, 2], {"whole_sequences": False}, id="a loop that shards sequences itself"),
        pytest.param({"tp": 2}, [1, 2], {"compares": False}, id="switched off"),
    ],
)
def test_ranks_that_may_differ_are_not_named(degrees, digests, options):
    expected = 2 if degrees != {"tp": 2} else 1
    assert run_ranks(shares, len(digests), degrees, digests, options) == [expected] * len(digests)


def votes(table):
    return guard_of().any(table[dist.get_rank()])


def test_one_vote_counts_for_all():
    assert run_ranks(votes, 2, [[False, True, False], [False, False, True]]) == [[False, True, True]] * 2


def loop(text, odd_steps):
    """Run a loop whose rank 1 runs other steps than rank 0; return each rank's error."""
    run = composed(text)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with pytest.raises(StepError) as caught:
        for number in odd_steps if dist.get_rank() == 1 else (0, 1, 2):
            with run.step(number):
                run.forward_backward(tokens, target=targets)
    return str(caught.value)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ((0, 2), "rank 1 (dp_shard 1) is at step 2, while 1 of 2 ranks are at step 1"),
        ((0, 0, 1), "rank 1 (dp_shard 1) is at step 0, while 1 of 2 ranks are at step 1"),
    ],
    ids=["skips", "repeats"],
)
def test_a_loop_that_loses_step_ends_on_all_ranks(steps, message):
    whole = f"ranks do not run the same step: {message}{BROKEN}"
    assert run_ranks(loop, 2, "[sharding.fsdp2]", steps) == [whole] * 2


def evaluates_instead():
    run = composed("[sharding.fsdp2]")
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with pytest.raises(StepError) as caught, run.step(1):
        (run.forward_backward if dist.get_rank() == 0 else run.evaluate)(tokens, target=targets)
    return str(caught.value)


def test_an_evaluation_is_not_taken_for_the_step_of_its_number():
    message = (
        "ranks do not run the same step: rank 1 (dp_shard 1) is at evaluation 1, while 1 of 2 ranks are at step 1"
        + BROKEN
    )
    assert run_ranks(evaluates_instead, 2) == [message] * 2


def lockstep(axis, shift):
    """Run two ranks along an axis, the second on a batch that differs in one token."""
    run = composed(f"[mesh]\n{axis} = 2\n" + LOCKSTEP)
    tokens, targets = unpadded()
    tokens[3, 2] = (tokens[3, 2] + shift * run.coordinates[axis]) % 11
    try:
        with run.step(0):
            return float(run.forward_backward(tokens, target=targets))
    except StepError as error:
        return str(error)


OTHER_BATCH = (
    "rank 1 (tp 1) was given another batch than rank 0, its peer along tp, at step 0; "
    "ranks that differ only in tp must be handed the same samples"
)


def test_composed_ranks_along_tp():
    assert len(set(run_ranks(lockstep, 2, "tp", 0))) == 1
    assert run_ranks(lockstep, 2, "tp", 1) == [OTHER_BATCH] * 2


def own_forward():
    """Run a loop with a forward of its own on two ranks along tp, which see different tokens."""
    run = composed("[mesh]\ntp = 2\n" + LOCKSTEP)
    tokens, targets = unpadded()
    with pytest.raises(StepError) as caught, run.step(0):
        run.backward(mean_loss(run.model((tokens + run.coordinates["tp"]) % 11), targets))
    return str(caught.value)


def test_a_loop_with_its_own_forward_is_guarded_too():
    assert run_ranks(own_forward, 2) == [OTHER_BATCH] * 2


def other_mode():
    """Evaluate on the second rank alone, so that its dropout, and what the loop computes of it, is another."""
    run = composed("[mesh]\ntp = 2\n" + LOCKSTEP, seeded(dropout=0.5))
    tokens, targets = unpadded()
    run.model.train(run.coordinates["tp"] == 0)
    with pytest.raises(StepError) as caught, run.step(0):
        run.backward(mean_loss(run.model(tokens), targets))
    return str(caught.value)


def test_a_mode_that_differs_along_tp_is_named_and_no_batch():
    for text in run_ranks(other_mode, 2):
        assert text.startswith(
            'the loop of rank 1 (tp 1) decided something else than that of rank 0 before step 0: "".training: False, '
        )


def unguarded():
    """Skip a step on one rank, where the guard is switched off; return the loss of the last."""
    run = composed("[sharding.fsdp2]", guard=False)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    for number in (0, 2) if dist.get_rank() else (0, 1):
        with run.step(number):
            loss = float(run.forward_backward(tokens, target=targets))
    return loss, [thread.name for thread in threading.enumerate() if thread.name == "composer3d-flight"]


def test_the_guard_can_be_switched_off():
    first, second = run_ranks(unguarded, 2)
    assert first == second and first[1] == []


def other_manifest(texts):
    with pytest.raises(StepError) as caught:
        composed(texts[dist.get_rank()])
    return str(caught.value)


@pytest.mark.parametrize(
    ("texts", "difference"),
    [
        pytest.param(
            ["[train]\nmicrobatch = 2\n[sharding.fsdp2]", "[train]\nmicrobatch = 1\n[sharding.fsdp2]"],
            "train.microbatch is 1 on rank 1 and 2 on rank 0",
            id="a key",
        ),
        pytest.param(
            ["[sharding.fsdp2]\nzero = 2", "[sharding.fsdp2]"],
            "sharding.fsdp2.zero is 3 on rank 1 and 2 on rank 0",
            id="a default",
        ),
    ],
)
def test_a_rank_with_another_manifest_is_named_before_the_first_step(texts, difference):
    message = (
        f"rank 1 (dp_shard 1) runs another manifest than rank 0: {difference}; "
        "start all ranks with the same manifest, overrides, plugins, versions and code"
    )
    assert run_ranks(other_manifest, 2, texts) == [message] * 2


def test_a_default_that_is_written_out_is_the_default():
    assert run_ranks(same_manifest, 2, ["[sharding.fsdp2]\nzero = 3", "[sharding.fsdp2]"]) == [2, 2]


def same_manifest(texts):
    return composed(texts[dist.get_rank()]).context.world_size


def other_version():
    if dist.get_rank():
        mended = agreeing.installed_version
        agreeing.installed_version = lambda name: "2.99.0" if name == "torch" else mended(name)
    with pytest.raises(StepError) as caught:
        composed("[sharding.fsdp2]")
    return str(caught.value)


def test_a_rank_with_another_version_is_named():
    here = version("torch")
    message = (
        f"rank 1 (dp_shard 1) runs another manifest than rank 0: version.torch is 2.99.0 on rank 1 and {here} on rank "
        "0; start all ranks with the same manifest, overrides, plugins, versions and code"
    )
    assert run_ranks(other_version, 2) == [message] * 2


def alike(text, given):
    """Return what a rank logs in five steps of its own loop, given the seed of each of its batches."""
    messages = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("composer3d").addHandler(handler)
    run = composed(text, seeded(Even), loss_fn=mean_loss)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    for seed in given[dist.get_rank()]:
        tokens, targets = unpadded(num_sequences=2, seed=seed)
        run.forward_backward(tokens, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return messages


@pytest.mark.parametrize(
    ("text", "given", "is_warned"),
    [
        pytest.param("[sharding.fsdp2]\n", [(1, 2, 3, 4, 5)] * 2, True, id="same seed"),
        pytest.param("[sharding.fsdp2]\n", [(1, 1, 1, 1, 1)] * 2, True, id="one batch"),
        pytest.param("[sharding.fsdp2]\n", [(1, 2, 3, 3, 3), (1, 2, 4, 3, 3)], False, id="begins alike"),
        pytest.param(
            "[mesh]\ndp_shard = 1\npp = 1\ntp = 2\n[sharding.tensor_parallel]\n", [(1,) * 5] * 2, False, id="tp"
        ),
    ],
)
def test_data_parallel_ranks_that_read_the_same_batches_are_warned_once(text, given, is_warned):
    first, second = run_ranks(alike, 2, text, given)
    expected = (
        "the 2 data-parallel ranks were given the same batch in each of the first 3 steps, so that every sample counts "
        "2 times and the global batch is no larger than one rank's; where that is not meant, iterate over "
        "run.loader(DataLoader(...)), which reads every rank's own part of each batch, or slice with "
        "run.context.data_parallel_rank"
    )
    assert (first, second) == ([expected] if is_warned else [], [])
