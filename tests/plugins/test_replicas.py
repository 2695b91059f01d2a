"""`[communication.replicas]`: whoever takes part, the run is that of one device."""

from __future__ import annotations

import pytest
from support.group_runs import assert_one_run
from support.replica_groups import STEPS, run_alone, run_groups

import composer3d

DATA = "dp_shard = {}\n[train]\nmicrobatch = 1\n[sharding.fsdp2]"
TENSOR = "tp = 2\n[train]\nmicrobatch = 1\n[sharding.tensor_parallel]\n"
TENSOR += 'plan = {"layers.*.up" = "colwise", "layers.*.down" = "rowwise"}'
PIPELINE = 'pp = 2\n[train]\nmicrobatch = 1\n[model]\nblocks = "layers.*"\n[scheduling.pipeline]\nschedule = "1F1B"'


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_alone(tmp_path_factory.mktemp("alone") / "run")


# ---- numerics --------------------------------------------------------------------------------------------------------


def test_a_group_that_is_killed_comes_back_and_the_run_is_one_devices(alone, tmp_path):
    # The others wait for it, so that it certainly comes back before the end.
    ends = [(1, 0, 0, 2, "before", "kill"), (0, 0, 0, 4, "after", "kill")]
    result, found = run_groups(tmp_path / "groups", DATA.format(1), ends=ends, minimum=2)
    assert result == {"outcome": "finished", "failed": None, "restarts": 2}
    assert_one_run(found, alone)
    assert [row["attempt"] for row in found[1]] == [0, 0, 1, 1, 1, 1]
    assert all(row["members"] == [0, 1] for group in found for row in group)
    # One that ends after the vote has made the step with the others, and takes it from them.
    assert [(row["step"], row["attempt"]) for row in found[0]] == [(0, 0), (1, 0), (2, 0), (3, 0), (5, 1)]


def test_those_that_are_left_compute_the_samples_of_the_lost(alone, tmp_path):
    ends = [(1, 0, 0, 2, "before", "kill")]
    result, found = run_groups(tmp_path / "groups", DATA.format(1), ends=ends, restarts=0)
    assert result["outcome"] == "finished"
    assert_one_run(found, alone)
    assert [row["members"] for row in found[0]] == [[0, 1]] * 2 + [[0]] * 4


@pytest.mark.slow
@pytest.mark.parametrize("text", [DATA.format(2), TENSOR, PIPELINE], ids=["fsdp2", "tp", "pp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_any_rank_of_a_group_with_a_mesh_may_be_killed(text, rank, alone, tmp_path):
    ends = [(1, 0, rank, 2, "before", "kill"), (0, 0, rank, 4, "after", "kill")]
    result, found = run_groups(tmp_path / "groups", text, ranks=2, ends=ends, minimum=2)
    assert (result["outcome"], result["failed"]) == ("finished", None)
    assert_one_run(found, alone)


@pytest.mark.slow
def test_a_kill_while_the_state_is_received_costs_another_start(alone, tmp_path):
    ends = [(1, 0, 0, 2, "before", "kill"), (1, 1, 0, 0, "recovery", "kill")]
    result, found = run_groups(tmp_path / "groups", DATA.format(1), ends=ends, minimum=2)
    assert result == {"outcome": "finished", "failed": None, "restarts": 2}
    assert_one_run(found, alone)
    assert [row["attempt"] for row in found[1]] == [0, 0, 2, 2, 2, 2]


@pytest.mark.slow
def test_the_one_who_gives_its_state_may_be_killed_when_a_third_has_it(alone, tmp_path):
    ends = [(2, 0, 0, 1, "before", "kill"), (0, 0, 0, 2, "after", "kill")]
    result, found = run_groups(tmp_path / "groups", DATA.format(1), groups=3, ends=ends, minimum=3)
    assert (result["outcome"], result["failed"]) == ("finished", None)
    assert_one_run(found, alone)


@pytest.mark.slow
def test_a_group_that_was_stopped_is_found_by_its_silence(alone, tmp_path):
    ends = [(1, 0, 0, 2, "before", "stop")]
    result, found = run_groups(tmp_path / "groups", DATA.format(1), ends=ends, minimum=2, silent_s=8.0)
    assert result == {"outcome": "finished", "failed": None, "restarts": 1}
    assert_one_run(found, alone)


@pytest.mark.slow
def test_a_spare_group_takes_the_place_of_a_lost_one(alone, tmp_path):
    ends = [(0, 0, 0, 2, "before", "kill")]
    result, found = run_groups(
        tmp_path / "groups", DATA.format(1), groups=3, ends=ends, spares=1, minimum=2, restarts=0
    )
    assert result["outcome"] == "finished"
    assert_one_run(found, alone)
    assert [row["members"] for row in found[1]] == [[0, 1]] * 2 + [[1, 2]] * 4
    assert [row["step"] for row in found[2]] == [2, 3, 4, 5]


@pytest.mark.slow
def test_where_every_group_is_lost_the_run_ends_and_says_so(tmp_path):
    ends = [(group, 0, 0, 2, "before", "kill") for group in range(2)]
    result, _ = run_groups(tmp_path / "groups", DATA.format(1), ends=ends)
    assert result["outcome"] == "failed"
    assert "no group is left that has the state" in result["failed"]


# Group 1 is replaced; then all are lost, and the process of group 0, which looks first, ends first: both its ranks do.
REPLACED_AND_LOST = [(1, 0, 0, 1, "before", "kill"), (0, 0, 0, 3, "before", "kill"), (0, 0, 1, 3, "before", "kill")]
REPLACED_AND_LOST += [(1, 1, 1, 3, "before", "kill")]


@pytest.mark.slow
def test_where_every_group_is_lost_after_one_was_replaced_all_start_again(alone, tmp_path):
    options = {"ranks": 2, "ends": REPLACED_AND_LOST, "minimum": 2, "max_restarts": 1}
    result, found = run_groups(tmp_path / "groups", DATA.format(2), **options)
    assert (result["outcome"], result["failed"]) == ("finished", None)
    assert_one_run(found, alone)
    assert [row["step"] for row in found[0]] == [0, 1, 2, *range(STEPS)]


@pytest.mark.slow
def test_the_loss_that_ends_a_run_is_named_and_not_one_that_it_survived(tmp_path):
    ends = [(1, 0, 0, 1, "before", "kill"), (0, 0, 1, 3, "before", "kill"), (1, 1, 1, 3, "before", "kill")]
    result, _ = run_groups(tmp_path / "groups", DATA.format(2), ranks=2, ends=ends, minimum=2)
    assert result["failed"].startswith("run failed: rank 1 of 2 ")
    assert "was killed by SIGKILL; no group is left that has the state" in result["failed"]


# ---- collectives -----------------------------------------------------------------------------------------------------


def test_collectives_between_groups_are_stated_by_the_plan(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'composer3d = 1\nextends = "quickstart"\n[mesh]\nreplica = 4\ndp_shard = 2\n[train]\nmicrobatch = 2\n'
        "[model.args]\nnum_layers = 6\n[communication.replicas]\n"  # more blocks than a plan traces
    )
    checked = composer3d.check(path, world_size=8)
    assert checked.ok and checked.lines[0].endswith(" = 8 ranks on cpu")
    planned = composer3d.plan(path, world_size=8).to_json()
    (note,) = [note for note in planned["notes"] if note.startswith("over replica")]
    held = planned["ranks"][0]["memory"]["gradients"]
    assert f"averages {held:,} bytes of gradients with those of 3 other groups" in note
    assert f"sends {held * 6 // 4:,} of them" in note


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "table", "message"),
    [
        ("replica = 1", "", "replica = 1: there is one group of ranks, and none that could go on without it"),
        (
            "replica = 2",
            "minimum = 2\nspares = 1",
            "minimum = 2 and spares = 1 are more than the 2 groups there are: no step could be made",
        ),
        (
            "replica = -1",
            "",
            "replica cannot be -1: a group of ranks does not know how many others there are; state it",
        ),
        (
            "replica = 2",
            '[sharding.cpu_offload]\nmode = "gradients"',
            "gradients are moved elsewhere by [sharding.cpu_offload] ({path}:7) before they are averaged over groups",
        ),
    ],
)
def test_refusals(mesh, table, message, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        f'composer3d = 1\nextends = "quickstart"\n[mesh]\ndp_shard = 1\n{mesh}\n[communication.replicas]\n{table}\n'
    )
    result = composer3d.check(path)
    assert message.format(path=path) in [problem.message for problem in result.problems]


def test_counts_that_groups_would_not_exchange_are_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        'composer3d = 1\nextends = "quickstart-moe"\n[mesh]\nreplica = 2\ndp_shard = 1\nep = 1\n[model.args]\n'
        "bias_rate = 1e-3\n[sharding]\nexpert_parallel = false\n[communication.replicas]\n"
    )
    messages = [problem.message for problem in composer3d.check(path, world_size=2).problems]
    assert any("keeps counts over a step" in message and "exchange gradients alone" in message for message in messages)


@pytest.mark.slow
def test_a_backward_of_the_loops_own_is_refused(tmp_path):
    ends = [(0, 0, 0, 0, "own", "")]
    result, _ = run_groups(tmp_path / "groups", DATA.format(1), ends=ends)
    assert result["outcome"] == "failed"
    assert (
        "run.backward was called in one of several groups of ranks that come and go: which samples are this group's "
        "is known only when a step begins, and it may have to be done again; use run.forward_backward(...), which is "
        "given the whole batch"
    ) in result["failed"]
