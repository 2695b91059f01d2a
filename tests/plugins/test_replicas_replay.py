"""`replay_every` of `[communication.replicas]`: a machine that computes wrong is found, and named."""

from __future__ import annotations

import pytest
from support.replica_groups import STEPS, difference, run_alone, run_groups

import composer3d

TEXT = "dp_shard = {}\n[train]\nmicrobatch = 1\n[sharding.fsdp2]"
EVERY = "replay_every = {}\n"
TOLERANCE = 1e-12  # of float64 sums in another order


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_alone(tmp_path_factory.mktemp("alone") / "run")


def test_a_step_that_is_replayed_is_the_step(alone, tmp_path):
    result, found = run_groups(tmp_path / "groups", TEXT.format(1), table=EVERY.format(1))
    assert result["outcome"] == "finished"
    for group in found:
        assert [(row["step"], row["repeated"]) for row in group] == [(step, 0) for step in range(STEPS)]
        assert difference(group, alone) < TOLERANCE


def test_a_backward_that_errs_once_is_done_again(alone, tmp_path):
    faults = [(1, 0, 0, 2, "wrong", "once")]
    result, found = run_groups(tmp_path / "groups", TEXT.format(1), ends=faults, table=EVERY.format(2))
    assert result["outcome"] == "finished"
    for group in found:
        assert [row["repeated"] for row in group] == [0, 0, 1, 1, 1, 1]
        assert difference(group, alone) < TOLERANCE


def test_of_two_groups_that_differ_both_are_named(tmp_path):
    faults = [(1, 0, 0, 2, "wrong", "always")]
    result, found = run_groups(tmp_path / "groups", TEXT.format(1), ends=faults, table=EVERY.format(2))
    assert result["outcome"] == "failed"
    assert (
        "step 2, done twice: on rank 0 groups have other gradients of the same samples, so that the machine of that "
        "rank in group 0 or group 1 computes wrong; composer3d selftest on it, and drain what fails"
    ) in result["failed"]
    assert [[row["step"] for row in group] for group in found] == [[0, 1], [0, 1]]


@pytest.mark.slow
def test_of_three_groups_the_one_that_errs_ends_and_the_others_go_on(alone, tmp_path):
    faults = [(1, 0, 0, 2, "wrong", "always")]
    result, found = run_groups(
        tmp_path / "groups", TEXT.format(1), groups=3, ends=faults, table=EVERY.format(2), restarts=0
    )
    assert result["outcome"] == "finished"
    assert [row["step"] for row in found[1]] == [0, 1]
    for group in (found[0], found[2]):
        assert [row["step"] for row in group] == list(range(STEPS))
        assert difference(group, alone) < TOLERANCE


@pytest.mark.slow
def test_a_rank_of_a_group_with_shards_that_errs_is_named(tmp_path):
    faults = [(0, 0, 1, 2, "wrong", "always")]
    result, _ = run_groups(tmp_path / "groups", TEXT.format(2), ranks=2, ends=faults, table=EVERY.format(2))
    assert result["outcome"] == "failed"
    assert "computes wrong; composer3d selftest on it" in result["failed"]


def test_a_plan_says_what_a_replay_takes(tmp_path):
    path = tmp_path / "run.toml"
    head = 'composer3d = 1\nextends = "quickstart"\n[mesh]\nreplica = 2\n[train]\nmicrobatch = 2\n'
    path.write_text(f"{head}[communication.replicas]\n{EVERY.format(4)}")
    notes = composer3d.plan(path, world_size=4).to_json()["notes"]
    assert [note for note in notes if "replay" in note] == [
        "replay_every = 4: in a step of 4 a group computes the piece of another one too, which takes twice as long"
    ]
