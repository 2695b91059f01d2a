from __future__ import annotations

import doctest
from itertools import combinations, product

import pytest

from composer3d.testing import covering, pairwise

OPTIONS = {
    "data": ["ddp", "zero1", "zero2", "zero3", "hsdp"],
    "tp": ["1", "2", "2 sp"],
    "schedule": ["", "GPipe", "1F1B", "ZBV"],
    "many": [False, True],
}


def pairs_of(row):
    return set(combinations(row.items(), 2))


def possible_pairs(options, excluded):
    rows = (dict(zip(options, values, strict=True)) for values in product(*options.values()))
    return set().union(*(pairs_of(row) for row in rows if not excluded(row)))


def never(row):
    return False


def two_excluded(row):
    return (row.get("tp") == "2 sp" and row.get("schedule") == "ZBV") or (
        row.get("data") == "hsdp" and row.get("tp", "1") != "1" and row.get("schedule", "") != ""
    )


def chained(row):
    """Every schedule is excluded with ddp, but one by one: only a whole row shows it."""
    return row.get("data") == "ddp" and row.get("many") is True and row.get("schedule") in OPTIONS["schedule"]


@pytest.mark.parametrize("excluded", [never, two_excluded, chained])
def test_every_pair_that_can_be_is_there_and_no_row_that_cannot(excluded):
    rows = pairwise(OPTIONS, excluded=excluded)
    assert all(list(row) == list(OPTIONS) and not excluded(row) for row in rows)
    wanted = possible_pairs(OPTIONS, excluded)
    assert set().union(*map(pairs_of, rows)) == wanted
    assert (len(wanted) < len(possible_pairs(OPTIONS, never))) == (excluded is not never)


def test_rows_are_few():
    # 5 x 4 is the least that any set of rows can be.
    assert len(pairwise(OPTIONS)) == 20
    # 10 options of two values: 45 x 4 pairs in at most twice log2's rows, of 1024.
    assert len(pairwise({str(number): [0, 1] for number in range(10)})) <= 12


def test_no_row_is_there_for_nothing():
    seen = set()
    for row in pairwise(OPTIONS, excluded=two_excluded):
        assert not pairs_of(row) <= seen
        seen |= pairs_of(row)


def test_the_same_options_give_the_same_rows():
    assert pairwise(OPTIONS) == pairwise(OPTIONS)
    # Values that are not hashable are fine: only their places count.
    lists = {name: [[value] for value in values] for name, values in OPTIONS.items()}
    assert [[value for (value,) in row.values()] for row in pairwise(lists)] == [
        list(row.values()) for row in pairwise(OPTIONS)
    ]


def test_nothing_to_pair_gives_nothing():
    assert pairwise({}) == [] and pairwise({"tp": [1, 2]}) == [] and pairwise({"tp": [1], "pp": []}) == []
    assert pairwise(OPTIONS, excluded=lambda row: True) == []


def test_the_example():
    assert doctest.testmod(covering).failed == 0
