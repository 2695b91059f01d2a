"""What a run of groups is compared with."""

from __future__ import annotations

from support.replica_groups import STEPS, difference

TOLERANCE = 1e-12  # of float64 sums in another order


def assert_one_run(found, alone):
    """Every step was made, with the numbers of one device, and groups have the same parameters after each."""
    assert sorted({row["step"] for group in found for row in group}) == list(range(STEPS))
    digests = {}
    for group in found:
        assert not group or difference(group, alone) < TOLERANCE
        for row in group:
            assert digests.setdefault(row["step"], row["digest"]) == row["digest"], row["step"]
