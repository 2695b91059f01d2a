"""A server that is lost at any message: another one goes on, and all ranks make the same steps."""

from __future__ import annotations

import pytest
from support.membership_model import Model

from composer3d.replicas.resumption import Resolution, Standing, settle

SEEDS = 100
AFTER = Resolution(term=2, round=5, commit=False, groups=(1, 2))


@pytest.mark.parametrize(
    "options",
    [
        {"losses": 0, "crashes": 1},
        {"losses": 1, "crashes": 2},
        {"groups": 2, "ranks": 1, "crashes": 3, "losses": 0},
        {"groups": 4, "ranks": 1, "crashes": 3, "losses": 3},
        {"spares": 1, "losses": 2, "crashes": 2},
    ],
    ids=str,
)
def test_a_server_may_be_lost_at_any_message(options):
    # Asserted inside: nobody is a step ahead, no state that a group has is given up, and the run does not stand still.
    ends = [Model(seed, **options).run() for seed in range(SEEDS)]
    assert ends.count("finished") > 0.85 * SEEDS
    if options["crashes"] == 1:
        assert ends.count("finished") == SEEDS


def voted(round=5, ok=True, commit=None, **options):
    return Standing(round=round, epoch=round, voted=ok, commit=commit, **options)


def asked(round=4, **options):
    return voted(round, commit=True, **options)


NEW, INITIAL = Standing(has_state=False), Standing()


@pytest.mark.parametrize(
    ("standings", "commit", "holders", "out"),
    [
        # Nobody was told: the step is done again, by those that were not told that it has begun, too.
        ([[voted(), voted()], [voted(ok=None), asked()]], False, (1, 2), ()),
        ([[voted(ok=False)], [voted()]], False, (1, 2), ()),
        # One was told, in the group or in another: all have what they need.
        ([[voted(commit=True)], [voted()]], True, (1, 2), ()),
        ([[voted(commit=True), voted()], [voted(), voted()]], True, (1, 2), ()),
        # A group that was given up before has not made the step.
        ([[voted(commit=True)], [voted(ok=None)]], True, (1,), (2,)),
        ([[voted(commit=True)], [voted(ok=False)]], True, (1,), (2,)),
        ([[voted(commit=True)], [asked()]], True, (1,), (2,)),
        ([[voted()], [voted(4)]], False, (1,), (2,)),
        ([[voted()], [asked(3)]], False, (1,), (2,)),
        # Not all ranks of it have come; or it is being started.
        ([[voted(), voted()], [voted()]], False, (1,), (2,)),
        ([[voted(), voted()], [NEW]], False, (1,), ()),
        # The first step: those that were not told of it have the same state, unless it was made.
        ([[voted(1)], [INITIAL]], False, (1, 2), ()),
        ([[voted(1, commit=True)], [INITIAL]], True, (1,), ()),
        ([[voted(2)], [INITIAL]], False, (1,), ()),
        # Groups that receive the state: whole ones have none, and of one that was told in part nobody has it.
        ([[voted()], [NEW]], False, (1,), ()),
        ([[voted(), voted()], [voted(has_state=False, ok=None), NEW]], False, (1, 2), ()),
        ([[voted(commit=True), voted()], [voted(has_state=False, ok=None), NEW]], True, (1,), (2,)),
        # A server was lost just after it had decided, and not all have heard of it.
        ([[voted(commit=False, resolution=AFTER)], [voted()]], False, (1, 2), ()),
        ([[voted(6, resolution=AFTER)], [asked(4)]], False, (1, 2), ()),
        # The third one did not come in time, and the others have decided without it.
        ([[voted(commit=False, resolution=AFTER)], [voted()], [voted(commit=True)]], False, (1, 2), (3,)),
        ([[voted(6, resolution=AFTER)], [voted(6, resolution=AFTER)], [voted(commit=True)]], False, (1, 2), (3,)),
        # One that came new since knows the decision by its first answer.
        ([[voted(6, resolution=AFTER)], [voted(commit=False, resolution=AFTER)], [voted(6, resolution=AFTER)]],
         False, (1, 2, 3), ()),
    ],
)  # fmt: skip
def test_what_counts_is_what_a_rank_was_told(standings, commit, holders, out):
    stated = {group: dict(enumerate(ranks)) for group, ranks in enumerate(standings, start=1)}
    settled = settle(stated, term=3, num_ranks=max(map(len, standings)))
    assert (settled.resolution.commit, settled.resolution.groups, tuple(settled.out)) == (commit, holders, out)


def test_a_run_that_has_begun_does_not_begin_again_with_the_state_of_its_beginning():
    stated = {1: {0: INITIAL}, 2: {0: NEW}}
    assert settle(stated, term=1, num_ranks=1, has_begun=True).resolution.groups == ()
    begun = settle(stated, term=1, num_ranks=1)
    assert begun.resolution.groups == (1,) and not begun.has_begun
