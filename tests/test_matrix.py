"""Layouts beside one device: a covering set of the matrix that benchmarks/matrix.py runs whole."""

from __future__ import annotations

from itertools import combinations

import pytest
from matrix import groups, report
from matrix_cells import OPTIONS, PERMITTED, Cell, Verdict, cells, covering, judge, one_device


@pytest.fixture(scope="module")
def reference():
    return one_device()


def outcomes(verdicts):
    return {str(verdict.cell): f"{verdict.outcome} {verdict.detail}".strip() for verdict in verdicts}


@pytest.mark.parametrize("group", groups(covering()), ids=lambda group: f"{group[0].world_size}-{group[0]}")
def test_every_two_options_together_give_one_device(group, reference):
    assert outcomes(judge(group, reference)) == {str(cell): "proven" for cell in group}


@pytest.mark.parametrize("refusal", PERMITTED, ids=lambda refusal: refusal.reason)
def test_cells_that_must_be_refused_are_refused_with_their_reason(refusal, reference):
    wanted = [cell for cell in cells() if refusal.applies(cell) and cell.world_size <= 8]
    # One that the other options cannot be the reason of, and the first with tensor parallelism beside it.
    some = [wanted[0], next(cell for cell in wanted if cell.tensor != "tp1")]
    for cell in some:
        assert outcomes(judge([cell], reference)) == {str(cell): f"refused {refusal.reason}"}


def test_two_options_that_stand_nowhere_together_are_those_of_permitted_refusals():
    def pairs(cell):
        return set(combinations([(name, getattr(cell, name)) for name in OPTIONS], 2))

    all_pairs = set().union(*map(pairs, cells()))
    left = all_pairs - set().union(*map(pairs, covering()))
    bucketed, dual = ("data", "ddp-bucketed"), ("schedule", "DualPipeV")
    assert left == {
        *((bucketed, ("tensor", name)) for name in ("tp2", "tp2-sp")),
        *((bucketed, ("schedule", name)) for name in OPTIONS["schedule"] if name != "no-pp"),
        (dual, ("microbatches", "P")),
    }


# ---- what the verdicts themselves can tell ---------------------------------------------------------------------------

CELL = Cell(data="zero3", tensor="tp1", schedule="no-pp", microbatches="P")


def test_a_wrong_gradient_a_missing_one_and_a_refusal_too_many_are_failures(reference, monkeypatch):
    wrong = {name: tensor.clone() for name, tensor in reference.items()}
    wrong["gradients 1 norm.weight"][3] *= 1 + 1e-9
    (verdict,) = judge([CELL], wrong)
    assert verdict.outcome == "failed" and verdict.detail.startswith("gradients 1 norm.weight differs by ")
    (verdict,) = judge([CELL], {**reference, "parameters of another": reference["loss 0"]})
    assert (verdict.outcome, verdict.detail) == ("failed", "no rank has parameters of another")
    monkeypatch.setattr("matrix_cells.PERMITTED", ())
    (verdict,) = judge([Cell(data="ddp-bucketed", tensor="tp2", schedule="no-pp", microbatches="P")], reference)
    assert verdict.outcome == "failed"
    assert verdict.detail.startswith("refused on 4 of 4 ranks: ") and 'reducer = "bucketed"' in verdict.detail


def test_a_cell_that_is_permitted_a_refusal_it_does_not_need_is_a_failure(reference, monkeypatch):
    (bucketed, _) = PERMITTED
    stale = type(bucketed)(reason="stale", message=bucketed.message, applies=lambda cell: True)
    monkeypatch.setattr("matrix_cells.PERMITTED", (stale,))
    (verdict,) = judge([CELL], reference)
    assert (verdict.outcome, verdict.detail) == ("failed", "not refused, although: stale")


def test_the_report_counts():
    made = [("proven", "", {"loss": 1e-16}), ("refused", "few", {}), ("failed", "wrong", {"loss": 1.0})]
    verdicts = [
        Verdict(cell=cell, outcome=outcome, detail=detail, largest=largest)
        for cell, (outcome, detail, largest) in zip(cells(), made, strict=False)
    ]
    found = report(verdicts, {}, 1.0)
    assert found["summary"] == {"proven": 1, "refused": 1, "failed": 1}
    assert found["refused"] == {"few": 1} and found["largest"] == {"loss": 1.0}
    assert [row["outcome"] for row in found["cells"]] == ["proven", "refused", "failed"]
