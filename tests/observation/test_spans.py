"""The spans that the core opens for others, and that nothing is prepared where nobody records."""

from __future__ import annotations

from collections import Counter

import torch
from support.models import composed, mine, padded

from composer3d import torch_compat
from composer3d.testing import run_ranks

WATCHED = '[profiling.names]\nuse = "support.recording_plugin:Names"\n'


def step(text):
    run = composed(text)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = padded()
    for x, y in run.steps([(mine(run, tokens), mine(run, targets))]):
        run.forward_backward(x, target=y)
        run.clip_grad_norm_(1.0)
        optimizer.step()
    names = [value.seen for value in run.context.state.values() if hasattr(value, "seen")]
    comms = [
        type(comm).__call__.__qualname__
        for module in run.parts[0].module.modules()
        for _, *both in torch_compat.fsdp_groups(module)
        for comm in both
    ]
    run.close()
    return Counter(map(tuple, names[0])) if names else None, comms


def test_nothing_is_wrapped_without_a_recorder():
    names, comms = run_ranks(step, 2, "[sharding.fsdp2]\n")[0]
    assert names is None and len(comms) == 2 * 4
    assert not any("_spanned" in name for name in comms)


def test_every_collective_of_a_unit_and_of_the_core_is_in_a_span():
    for names, comms in run_ranks(step, 2, "[sharding.fsdp2]\n" + WATCHED):
        assert all("_spanned" in name for name in comms)
        units = ["layers.0", "layers.1", "layers.2", "(root)"]
        assert [names["reduce_scatter", "dp_shard", unit] for unit in units] == [1] * 4
        # The root stays gathered from its forward to its backward.
        assert [names["all_gather", "dp_shard", unit] for unit in units] == [2, 2, 2, 1]
        assert [names["all_reduce", "world", group] for group in ("counts", "loss", "norm")] == [1] * 3
        assert names["data_wait", None, None] == 2 and names["optimizer", None, None] == 1


def test_the_all_reduces_of_copies():
    for names, _ in run_ranks(step, 2, "[sharding.ddp]\n" + WATCHED):
        found = {key[2]: count for key, count in names.items() if key[:2] == ("all_reduce", "dp_replicate")}
        assert found == {"layers.0": 1, "layers.1": 1, "layers.2": 1, "(root)": 1}
