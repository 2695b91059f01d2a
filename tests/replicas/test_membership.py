"""Who takes part in a step, and whether it counts: decisions without sockets and without a clock."""

from __future__ import annotations

import pytest

from composer3d.replicas import NOTHING, Membership, Place, ReplicaPolicy


def membership(groups=2, ranks=1, **policy):
    found = Membership(ReplicaPolicy(**policy), num_groups=groups, num_ranks=ranks)
    for group in range(groups):
        come(found, group, ranks=ranks)
    return found


def come(found, group, attempt=0, ranks=1):
    for rank in range(ranks):
        assert found.come(Place(group, rank), attempt=attempt, setup="a") is None


def ask(found, *groups, step=0, ranks=1, stop=False, **options):
    return [
        each
        for group in groups
        for rank in range(ranks)
        for each in found.ask(Place(group, rank), step=step, stop=stop, **options)
    ]


def vote(found, *groups, ok=True, ranks=1):
    return [each for group in groups for rank in range(ranks) for each in found.vote(Place(group, rank), ok=ok)]


def told(messages, group, rank=0):
    return [message for place, message in messages if place == (group, rank)]


def test_a_step_begins_when_all_have_come_to_it():
    found = membership(ranks=2)
    assert ask(found, 0, ranks=2) == []
    assert found.ask(Place(1, 0), step=0, stop=False) == []
    messages = found.ask(Place(1, 1), step=0, stop=True)
    expected = {"epoch": 1, "round": 1, "members": [0, 1], "step": 0, "source": 0, "behind": [], "stop": True}
    assert messages == [(Place(group, rank), expected) for group in (0, 1) for rank in (0, 1)]


def test_an_epoch_lasts_while_nobody_comes_or_goes():
    found = membership()
    for step in range(3):
        assert told(ask(found, 0, 1, step=step), 0)[0]["epoch"] == 1
        assert told(vote(found, 0, 1), 1) == [{"commit": True}]
    assert found.num_committed == 3


def test_a_step_does_not_count_where_one_rank_lacks_a_part():
    found = membership(groups=3)
    ask(found, 0, 1, 2)
    assert vote(found, 0, 1) == []
    assert vote(found, 2, ok=False) == [(Place(group, 0), {"commit": False}) for group in range(3)]
    # The connections of that epoch are of no use any more.
    assert told(ask(found, 0, 1, 2), 0)[0]["epoch"] == 2


def test_those_that_are_left_hear_of_a_lost_group_at_once_and_decide_without_it():
    found = membership(groups=3)
    ask(found, 0, 1, 2)
    vote(found, 0)
    messages = found.lose(1, "killed")
    assert told(messages, 1) == [{"out": "killed"}]
    assert told(messages, 0) == told(messages, 2) == [{"broken": 1}]
    assert told(vote(found, 2, ok=False), 0) == [{"commit": False}]
    assert told(ask(found, 0, 2), 2)[0]["members"] == [0, 2]


def test_a_group_that_comes_back_is_given_the_state_of_one_that_has_it():
    found = membership()
    ask(found, 0, 1)
    vote(found, 0, 1)
    found.lose(0, "killed")
    assert told(ask(found, 1, step=1), 1)[0]["members"] == [1]
    found.expect(0, 1)
    come(found, 0, attempt=1)
    assert ask(found, 0, step=NOTHING) == []  # not in the middle of a step
    vote(found, 1)
    answer = told(ask(found, 1, step=2), 0)[0]
    assert (answer["members"], answer["step"], answer["source"], answer["behind"]) == ([0, 1], 2, 1, [0])


def test_nobody_comes_between_the_batches_of_a_step():
    found = membership()
    ask(found, 0, 1)
    found.lose(1, "killed")
    vote(found, 0)
    found.expect(1, 1)
    come(found, 1, attempt=1)
    ask(found, 1, step=NOTHING)
    assert told(ask(found, 0, step=0, admits=False), 0)[0]["members"] == [0]


def test_an_old_process_that_wakes_up_is_not_let_in():
    found = membership()
    ask(found, 0, 1)
    found.lose(1, "silent")
    found.expect(1, 1)
    refused = found.come(Place(1, 0), attempt=0, setup="a")
    assert refused == "group 1 was started again since, and this process is of start 1, not 2"


def test_others_are_not_let_in():
    found = membership()
    assert found.come(Place(2, 0), attempt=0, setup="a") == "the run has 2 groups of 1 ranks, and none is (2, 0)"
    assert found.come(Place(1, 0), attempt=0, setup="a") == (
        "rank 0 of group 1 is there already: do two jobs have one name?"
    )
    found.lose(1, "killed")
    assert found.come(Place(1, 0), attempt=0, setup="b") == (
        "group 1 runs another manifest, other plugins or versions than the groups that are there: start all of them "
        "alike"
    )


def test_fewer_than_the_minimum_make_no_step():
    found = membership(minimum=2)
    ask(found, 0, 1)
    vote(found, 0, 1)
    found.lose(1, "killed")
    assert ask(found, 0, step=1) == [] and found.is_short()
    found.expect(1, 1)
    come(found, 1, attempt=1)
    assert told(ask(found, 1, step=NOTHING), 0)[0]["members"] == [0, 1]


def test_spares_wait_until_one_is_lost():
    found = membership(groups=3, spares=1)
    messages = ask(found, 0, 1, 2)
    assert told(messages, 0)[0]["members"] == [0, 1] and told(messages, 2) == [{"spare": True}]
    assert ask(found, 2, step=NOTHING) == []
    vote(found, 0, 1)
    assert told(ask(found, 0, 1, step=1), 2) == []
    found.lose(0, "killed")
    vote(found, 1)
    answer = told(ask(found, 1, step=1), 2)[0]
    assert (answer["members"], answer["source"], answer["behind"]) == ([1, 2], 1, [2])


@pytest.mark.parametrize("lost", [(0, 1), (1, 0)])
def test_the_state_is_lost_with_the_last_group_that_has_it(lost):
    found = membership(groups=3, spares=1)
    ask(found, 0, 1, 2)
    for group in lost:
        assert not found.is_lost
        found.lose(group, "killed")
    assert found.is_lost
    found.begin_again()
    assert not found.has_begun and not found.is_lost


def test_a_run_has_ended_when_those_who_train_have_left():
    found = membership(groups=3, spares=1)
    ask(found, 0, 1, 2)
    vote(found, 0, 1)
    assert found.leave(Place(0, 0)) == [] and not found.is_finished
    found.leave(Place(1, 0))
    assert found.is_finished and not found.is_lost
