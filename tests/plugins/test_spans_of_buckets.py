"""Buckets of ddp in spans: what is issued, for how long it is waited, and that nothing of the step changes."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from support.models import composed, mine, padded, seeded

from composer3d.testing import count_collectives, run_ranks

WATCHED = '[profiling.names]\nuse = "support.recording_plugin:Names"\n'
MODES = {
    "one bucket": "",
    "many, as views": "gradient_as_bucket_view = true\nbucket_mib = 0.0002\n",
    "static": "static_graph = true\n",
    "unused": "find_unused_parameters = true\n",
}
# torch compares shapes and hands out weights when it makes its reducer, in the first forward: one span. So is what it
# hands out when it forms its buckets anew, once it knows the order of gradients.
MADE, FORMED = Counter({"all_gather": 1, "broadcast": 2}), Counter({"broadcast": 2})


def table(more):
    return f'[sharding.ddp]\nreducer = "bucketed"\n{more}[train]\nmicrobatch = 2\n'


def trained(text, steps=3):
    """Train on a rank; return its weights, and of every step what was issued and what spans tell."""
    run = composed(text, seeded())
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = padded()
    seen = next((value.seen for value in run.context.state.values() if hasattr(value, "seen")), [])
    found = []
    for number in range(steps):
        seen.clear()
        with run.step(number), count_collectives(run.mesh) as collectives:
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            optimizer.step()
            optimizer.zero_grad()
        issued = Counter({op: count for (op, _), (count, _) in collectives.summary().items()})
        found.append((issued, Counter((name, group) for name, axis, group in seen if axis is not None)))
    weights = [parameter.detach().clone() for _, parameter in run.named_parameters()]
    run.close()
    return weights, found


def compared(more):
    return trained(table(more)), trained(table(more) + WATCHED)


@pytest.mark.parametrize("mode", MODES)
def test_every_bucket_is_in_a_span_and_nothing_changes(mode):
    """Three ranks: what is divided by three shows whether it is done as the reducer does it."""
    for (expected, before), (weights, found) in run_ranks(compared, 3, MODES[mode]):
        assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))
        assert [issued for issued, _ in found] == [issued for issued, _ in before]
        formed = [number for number, (_, told) in enumerate(found) if told["broadcast", "buckets"]]
        assert formed == ([] if mode == "unused" else [1])
        for number, (issued, told) in enumerate(found):
            compare(mode, number, issued, told)
        assert found[-1][1]["all_reduce", "buckets"] > (5 if "many" in mode else 0)


def compare(mode, number, issued, told):
    """Look at one step's collectives beside its spans."""
    first = mode == "static" and number == 0  # both micro-batches are reduced, and what is unused is exchanged
    hidden = (MADE if number == 0 else Counter()) + (FORMED if told["broadcast", "buckets"] else Counter())
    assert told["broadcast", "weights"] == (number == 0)
    assert told["wait", "buckets"] == (2 if first else 1)
    assert told["all_reduce", "unused"] == (mode == "unused")
    num_reduces = sum(count for (name, _), count in told.items() if name == "all_reduce")
    assert Counter({"all_reduce": num_reduces + first}) + hidden == issued


def summed(_, bucket):
    """A hook of somebody else's, which sums."""
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


def with_a_hook(text):
    run = composed(text, seeded())
    run.parts[0].module.register_comm_hook(None, summed)
    tokens, targets = padded()
    with run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
    gradient = next(parameter.grad.clone() for _, parameter in run.named_parameters())
    seen = next((value.seen for value in run.context.state.values() if hasattr(value, "seen")), [])
    run.close()
    return gradient, seen


def test_a_hook_of_somebody_else_is_called():
    def both():
        return with_a_hook(table("")), with_a_hook(table("") + WATCHED)

    for (expected, _), (gradient, seen) in run_ranks(both, 2):
        assert torch.equal(gradient, expected)
        assert ("all_reduce", "dp_replicate", "buckets") in seen and ("wait", "dp_replicate", "buckets") in seen
