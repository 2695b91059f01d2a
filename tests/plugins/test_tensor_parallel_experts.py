"""Stacked weights of experts, for which the search for what tp may shard needs few runs, and none where ep has them."""

from __future__ import annotations

import pytest
from composer3d_plugins.sharding.tensor_parallel.multiplied_parameters import WeightSearch
from support.mixtures import MIXTURES, shipped, token_sum
from support.models import seeded, write_manifest

import composer3d
from composer3d.testing import fake_world

EP = "ep = 2\ndp_shard = 2\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"
WHOLE = "tensor_parallel.whole (it is sharded over experts)"


@pytest.fixture
def searches(monkeypatch):
    """Return the searches of compositions that follow."""
    made, rules = [], WeightSearch.rules
    monkeypatch.setattr(WeightSearch, "rules", lambda self: made.append(self) or rules(self))
    return made


def plan_of(factory, text, world_size):
    with fake_world(world_size), composer3d.compose(seeded(factory), write_manifest(text), loss_fn=token_sum) as run:
        return {row.name: row.fqns for row in run.plan}


@pytest.mark.parametrize("name", ["shipped", "dense"])
def test_experts_that_ep_shards_are_not_tried(searches, name):
    plan = plan_of(MIXTURES[name], f"[mesh]\ntp = 2\n{EP}[sharding.tensor_parallel]\n", 4)
    assert sum(search.num_runs for search in searches) <= 4  # the shipped router's weight, in four ways
    assert all("experts" in fqn for fqn in plan[WHOLE])
    assert "tensor_parallel.weights" not in plan


@pytest.mark.slow
def test_runs_that_fail_as_earlier_ones_are_left_out(searches):
    plan_of(shipped, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n", 2)
    assert [search.num_runs for search in searches] == [116]  # of 181 ways
