"""Spans of what operators and pipelines send: collectives of tensor parallelism, messages between stages."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest
from support.models import Even, composed, padded, seeded
from support.telemetry import table, train
from support.trace_files import read, tree

from composer3d.testing import count_collectives, run_ranks

TENSOR = '[mesh]\ntp = 2\n[sharding.tensor_parallel.plan]\n"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'
PIPELINE = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "{}"\n'
ACTIVATION = 3 * 5 * 7 * 4  # bytes: sequences of a micro-batch, positions, dim, float32


def traced_blocks(text):
    """Train on a rank; return the collectives that were really issued in a step."""
    run = composed(f"{text}\n[train]\nmicrobatch = 3\n", partial(seeded, Even))
    tokens, targets = padded()
    with run.step(0), count_collectives(run.mesh) as collectives:
        run.forward_backward(tokens, target=targets)
    run.close()
    return {key: count for key, (count, _) in collectives.summary().items()}


@pytest.mark.parametrize("detail", ["phase", "microbatch"])
def test_collectives_inside_operators(tmp_path, detail):
    def both():
        return traced_blocks(TENSOR), traced_blocks(TENSOR + table(tmp_path, detail=detail))

    for plain, counted in run_ranks(both, 2):
        assert counted == plain and plain["all_reduce", "tp"] >= 2 * 4 * 4
    _, spans = read(tmp_path / "rank-0.jsonl")
    (step,) = [span for span in spans if span.name == "step"]
    by_id = {span.id: span for span in spans}
    found = Counter()
    for span in spans:
        if span.attributes.get("axis") == "tp":
            found[by_id[span.parent].name, span.name] += span.attributes.get("count", 1)
            size = span.attributes.get("bytes", ACTIVATION * span.attributes.get("count", 1))
            assert size == ACTIVATION * span.attributes.get("count", 1)
    # One in the forward and one in the backward of every block and micro-batch, and each is waited for.
    assert found == {(phase, name): 4 * 4 for phase in ("forward", "backward") for name in ("all_reduce", "wait")}
    if detail == "phase":
        inside = [("all_reduce", []), ("wait", [])]
        (main,) = [children for name, children in tree(spans, step)[1] if name == "forward_backward"]
        assert main == [("forward", inside), ("backward", inside)]


def test_torch_is_as_it_was_once_the_run_is_closed(tmp_path):
    def functions():
        from torch.distributed import _functional_collectives as functional
        from torch.distributed.pipelining import schedules

        names = ("all_reduce", "all_gather_single", "reduce_scatter_single", "wait_tensor")
        return [getattr(functional, name, None) for name in names] + [schedules._batch_p2p, schedules._wait_batch_p2p]

    def rank():
        before = functions()
        run = composed(TENSOR + table(tmp_path), partial(seeded, Even))
        during = functions()
        run.close()
        return [one is two for one, two in zip(before, functions(), strict=True)], before[0] is during[0]

    for same, unwatched in run_ranks(rank, 2):
        assert all(same) and not unwatched


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "ZBVZeroBubble"])
def test_messages_between_stages(tmp_path, schedule):
    text = PIPELINE.format(schedule) + table(tmp_path, detail="microbatch")
    run_ranks(partial(train, steps=2, options={"num_layers": 4}), 2, text)
    moved = Counter()
    for rank in (0, 1):
        _, spans = read(tmp_path / f"rank-{rank}.jsonl")
        (step,) = [span for span in spans if span.name == "step" and span.attributes["step"] == 1]
        inside = [child for span in spans if span.parent == step.id for child in spans if child.parent == span.id]
        for span in inside:
            if span.attributes.get("axis") == "pp":
                assert span.name in ("send", "receive", "exchange")
                # An exchange is a message each way.
                for way in ("send", "receive") if span.name == "exchange" else (span.name,):
                    moved[way] += span.attributes["bytes"] // (2 if span.name == "exchange" else 1)
    boundaries = 1 if schedule != "ZBVZeroBubble" else 2
    # A message for every micro-batch and boundary between ranks, forward and back; each has two ends.
    assert moved == {way: 2 * 4 * boundaries * ACTIVATION for way in ("send", "receive")}
