from __future__ import annotations

import json
from dataclasses import replace

from composer3d.mesh import AXES, resolve
from composer3d.observation.hang_report import Account, RecordedCollective, diagnose


def row(number, op="all_reduce", size=(4,), axis="dp_shard", ranks=(0, 1)):
    return RecordedCollective(axis=axis, ranks=ranks, number=number, op=op, sizes=(size,), time_ns=number)


def account(rank, *rows, spans=("forward (microbatch 0)",)):
    return Account(rank=rank, step=3, inside=True, spans=spans, place="loop.py:7 in train", own=False, collectives=rows)


def told(accounts, **degrees):
    layout = resolve(degrees, axes=AXES, world_size=None, default=None)
    owners = {"dp_shard": "fsdp2", "tp": "tensor_parallel"}
    return diagnose(accounts, layout=layout, owners=owners, reason="Timed out").splitlines()


HERE = "in step 3, in forward (microbatch 0), at loop.py:7 in train, last collective "


def test_a_mismatch_names_both_collectives():
    accounts = [account(0, row(1), row(2)), account(1, row(1), row(2, "all_gather", (8,)))]
    assert told(accounts, dp_shard=2) == [
        "a collective failed in step 3: Timed out",
        "collective 2 over dp_shard (ranks 0 and 1; fsdp2): rank 1 (dp_shard 1) ran all_gather of [8], "
        "while rank 0 ran all_reduce of [4]",
        f"rank 1 (dp_shard 1): {HERE}all_gather of [8] over dp_shard (fsdp2)",
        f"rank 0 (dp_shard 0): {HERE}all_reduce of [4] over dp_shard (fsdp2)",
    ]


def test_inputs_of_an_exchange_may_have_any_sizes():
    accounts = [account(0, row(1, "all_to_all", (4,)), row(2)), account(1, row(1, "all_to_all", (8,)))]
    assert told(accounts, dp_shard=2)[1] == (
        "collective 2 over dp_shard (ranks 0 and 1; fsdp2): "
        "rank 1 (dp_shard 1) did not run all_reduce of [4], in which rank 0 waited"
    )


def test_the_rank_that_all_wait_for_is_found_through_the_rank_that_waits_for_it():
    # Rank 0 waits along tp for rank 1, which waits along dp_shard for rank 3, which waits for nobody.
    tp, other_tp = {"axis": "tp", "ranks": (0, 1)}, {"axis": "tp", "ranks": (2, 3)}
    accounts = [
        account(0, row(5, **tp)),
        account(1, row(4, **tp), row(9, ranks=(1, 3))),
        account(2, row(5, **other_tp)),
        account(3, row(8, ranks=(1, 3)), row(4, **other_tp)),
    ]
    assert told(accounts, dp_shard=2, tp=2)[1] == (
        "collective 9 over dp_shard (ranks 1 and 3; fsdp2): "
        "rank 3 (dp_shard 1, tp 1) did not run all_reduce of [4], in which rank 1 waited"
    )


def test_a_rank_that_does_not_answer_is_named():
    assert told([account(0, row(2))], dp_shard=2)[1:3] == [
        "collective 2 over dp_shard (ranks 0 and 1; fsdp2): "
        "rank 1 (dp_shard 1) did not come through all_reduce of [4], in which rank 0 waited",
        "rank 1 (dp_shard 1): gave no answer: it ended, or hangs",
    ]


def test_backends_of_one_group_count_their_own():
    # Both run the seventh of their group; one rank has since gone on with the other backend.
    nccl = {"backend": "nccl", "pending": True}
    accounts = [
        account(0, replace(row(7), backend="gloo"), replace(row(7, "all_gather", (8,)), time_ns=9, **nccl)),
        account(1, replace(row(6, "all_gather", (8,)), backend="nccl"), replace(row(7), backend="gloo")),
    ]
    assert told(accounts, dp_shard=2)[1] == (
        "collective 7 over dp_shard (ranks 0 and 1; fsdp2): "
        "rank 1 (dp_shard 1) did not run all_gather of [8], in which rank 0 waited"
    )


def test_calls_that_run_ahead_of_nccl_do_not_hide_what_it_waits_in():
    nccl = {"backend": "nccl", "pending": True}
    done = replace(row(1), backend="nccl")
    accounts = [account(0, done, *(replace(row(n), **nccl) for n in (2, 3, 4))), account(1, done)]
    assert told(accounts, dp_shard=2)[1] == (
        "collective 2 over dp_shard (ranks 0 and 1; fsdp2 or composer3d): "
        "rank 1 (dp_shard 1) did not run all_reduce of [4], in which rank 0 waited"
    )


def test_issuers_are_named_with_each_rank_where_ranks_ran_those_of_several():
    vote = replace(row(2, size=(5,)), issuer="voting", caller="voting.py:30 in _vote")
    accounts = [account(0, replace(row(2), issuer="")), account(1, vote)]
    assert told(accounts, dp_shard=2)[1:] == [
        "collective 2 over dp_shard (ranks 0 and 1; fsdp2 and voting): rank 1 (dp_shard 1) ran all_reduce of [5] "
        "(voting, voting.py:30 in _vote), while rank 0 ran all_reduce of [4] (fsdp2)",
        f"rank 1 (dp_shard 1): {HERE}all_reduce of [5] over dp_shard (voting, voting.py:30 in _vote)",
        f"rank 0 (dp_shard 0): {HERE}all_reduce of [4] over dp_shard (fsdp2)",
    ]


def test_another_dtype_is_a_mismatch():
    accounts = [
        account(0, replace(row(2), dtypes=("Float",))),
        account(1, replace(row(2), dtypes=("Double",))),
    ]
    assert told(accounts, dp_shard=2)[1] == (
        "collective 2 over dp_shard (ranks 0 and 1; fsdp2): rank 1 (dp_shard 1) ran all_reduce of [4] in Double, "
        "while rank 0 ran all_reduce of [4] in Float"
    )


def test_accounts_survive_json():
    one = account(0, row(1), row(2, "all_gather", (8, 2)))
    assert Account.from_json(json.loads(json.dumps(one.to_json()))) == one


def accounts_of_stages():
    # Rank 0 waits for the stage of rank 2, which waits in a collective for rank 3.
    dp, other_dp = {"axis": "dp_shard", "ranks": (0, 1)}, {"axis": "dp_shard", "ranks": (2, 3)}
    return [
        replace(account(0, row(4, **dp)), own=None, exchanges=True),
        replace(account(1, row(4, **dp)), own=None, exchanges=True),
        account(2, row(7, **other_dp)),
        replace(account(3, row(6, **other_dp)), own=None),
    ]


def test_whom_a_stage_waits_for_may_itself_wait_in_a_collective():
    assert told(accounts_of_stages(), pp=2, dp_shard=2)[1:4] == [
        "a send or receive between stages along pp (rank 0 and rank 2; pp): rank 2 (pp 1, dp_shard 0) did not come to "
        "it, and rank 0 waited",
        "collective 7 over dp_shard (ranks 2 and 3; fsdp2): rank 3 (pp 1, dp_shard 1) did not run all_reduce of [4], "
        "in which rank 2 waited",
        f"rank 3 (pp 1, dp_shard 1): {HERE}all_reduce of [4] over dp_shard (fsdp2)",
    ]
