"""Layouts beside one device: a covering set of the matrix that `benchmarks/matrix.py layouts` runs whole.

Of its groups of eight ranks, those with a sharded sequence among them, the fast tests take another one each day, the
slow ones all: see support/daily_part.py.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, product

import pytest
from layout_matrix import groups, report, run
from layout_matrix_cells import OPTIONS, PERMITTED, Cell, Verdict, cells, covering, factory, judge, one_device
from layout_matrix_progress import Progress, row_of
from layout_matrix_record import Record
from support.daily_part import PART
from support.models import write_manifest

import composer3d
from composer3d.testing import fake_world


@pytest.fixture(scope="module")
def reference():
    return one_device()


def outcomes(verdicts):
    return {str(verdict.cell): f"{verdict.outcome} {verdict.detail}".strip() for verdict in verdicts}


def test_every_layout_is_a_cell():
    data = ("ddp", "ddp-bucketed", "zero1", "zero2", "zero3", "hsdp")
    schedules = ("no-pp", "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble")
    product_of = product(data, ("tp1", "tp2", "tp2-sp"), (*schedules, "DualPipeV"), ("P", "4P"))
    assert [str(cell) for cell in cells() if cell.context == "cp1"] == ["/".join(options) for options in product_of]


def test_every_layout_of_eight_ranks_with_a_sharded_sequence_is_a_cell():
    wanted = set()
    for data, tensor, schedule in product(
        ("ddp", "zero1", "zero2", "zero3", "hsdp"), OPTIONS["tensor"], OPTIONS["schedule"]
    ):
        for degree, method in product((2, 4), ("gather", "ring", "ulysses")):
            least = degree * (1 if tensor == "tp1" else 2) * (1 if schedule == "no-pp" else 2)
            if least <= 8:
                wanted.add(f"{data}/{tensor}/{schedule}/4P/cp{degree}-{method}")
    found = [cell for cell in cells() if cell.context != "cp1"]
    assert {str(cell) for cell in found} == wanted and len(found) == 510
    assert all(cell.world_size <= 8 and cell.degrees["cp"] == int(cell.context[2]) for cell in found)


def groups_of_the_day():
    """Return the groups of the covering set, those of eight ranks marked as slow but for one."""
    found = groups(covering())
    large = [group for group in found if group[0].world_size == 8]
    slow = [group for number, group in enumerate(large) if number != PART % len(large)]
    return [
        pytest.param(group, id=f"{group[0].world_size}-{group[0]}", marks=[pytest.mark.slow] * (group in slow))
        for group in found
    ]


@pytest.mark.parametrize("group", groups_of_the_day())
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
        (("tensor", "tp2"), ("context", "cp4-ulysses")),
        (("tensor", "tp2-sp"), ("context", "cp4-ulysses")),
        *((bucketed, ("tensor", name)) for name in ("tp2", "tp2-sp")),
        *((bucketed, ("schedule", name)) for name in OPTIONS["schedule"] if name != "no-pp"),
        (dual, ("microbatches", "P")),
    }


# ---- sixteen ranks ---------------------------------------------------------------------------------------------------


def laid_out(cell, rank):
    """Return what a rank holds, by FQN: elements, and axes of the mesh."""
    with fake_world(cell.world_size, rank=rank):
        run = composer3d.compose(
            factory, write_manifest(cell.manifest.removeprefix("composer3d = 1\n")), purpose="plan"
        )
        return {
            name: (parameter.to_local().numel(), parameter.device_mesh.mesh_dim_names)
            for name, parameter in run.named_parameters()
        }


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("ZBVZeroBubble", marks=pytest.mark.slow)])
def test_hybrid_tensor_and_pipeline_parallelism_hold_every_element_once_a_copy(schedule):
    # The tests above compare any two of the three with one device; all three take 16 ranks, laid out one by one here.
    cell = Cell(data="hsdp", tensor="tp2-sp", schedule=schedule, microbatches="4P")
    assert cell.world_size == 16
    total = Counter()
    for rank in range(16):
        for name, (number, axes) in laid_out(cell, rank).items():
            assert axes[:2] == ("dp_replicate", "dp_shard") and ("tp" in axes or "norm" in name)
            total[name] += number
    # Two copies along dp_replicate, and norms are whole on both ranks along tp.
    model = dict(factory().named_parameters())
    assert total == {name: (4 if "norm" in name else 2) * parameter.numel() for name, parameter in model.items()}


# ---- what the verdicts themselves can tell ---------------------------------------------------------------------------

CELL = Cell(data="zero3", tensor="tp1", schedule="no-pp", microbatches="P")


def test_a_wrong_gradient_a_missing_one_and_a_refusal_too_many_are_failures(reference, monkeypatch):
    wrong = {name: tensor.clone() for name, tensor in reference.items()}
    wrong["gradients 1 norm.weight"][3] *= 1 + 1e-9
    (verdict,) = judge([CELL], wrong)
    assert verdict.outcome == "failed" and verdict.detail.startswith("gradients 1 norm.weight differs by ")
    (verdict,) = judge([CELL], {**reference, "parameters of another": reference["loss 0"]})
    assert (verdict.outcome, verdict.detail) == ("failed", "no rank has parameters of another")
    monkeypatch.setattr("layout_matrix_cells.PERMITTED", ())
    (verdict,) = judge([Cell(data="ddp-bucketed", tensor="tp2", schedule="no-pp", microbatches="P")], reference)
    assert verdict.outcome == "failed"
    assert verdict.detail.startswith("refused on 4 of 4 ranks: ") and 'reducer = "bucketed"' in verdict.detail


def test_a_cell_that_is_permitted_a_refusal_it_does_not_need_is_a_failure(reference, monkeypatch):
    bucketed, *_ = PERMITTED
    stale = type(bucketed)(reason="stale", message=bucketed.message, applies=lambda cell: True)
    monkeypatch.setattr("layout_matrix_cells.PERMITTED", (stale,))
    (verdict,) = judge([CELL], reference)
    assert (verdict.outcome, verdict.detail) == ("failed", "not refused, although: stale")


def test_too_few_blocks_are_refused(reference, monkeypatch):
    monkeypatch.setattr("layout_matrix_cells.NUM_LAYERS", 2)
    cell = Cell(data="zero3", tensor="tp1", schedule="ZBVZeroBubble", microbatches="4P")
    assert outcomes(judge([cell], reference)) == {str(cell): "refused too few micro-batches or blocks for the schedule"}


def test_the_report_counts():
    made = [("proven", "", {"loss": 1e-16}), ("refused", "few", {}), ("failed", "wrong", {"loss": 1.0})]
    rows = [
        row_of(Verdict(cell=cell, outcome=outcome, detail=detail, largest=largest))
        for cell, (outcome, detail, largest) in zip(cells(), made, strict=False)
    ]
    found = report(rows, {}, 1.0)
    assert found["summary"] == {"proven": 1, "refused": 1, "failed": 1}
    assert found["refused"] == {"few": 1} and found["largest"] == {"loss": 1.0}
    assert [row["outcome"] for row in found["cells"]] == ["proven", "refused", "failed"]


# ---- a run that was cut off ------------------------------------------------------------------------------------------

STATED = {"code": "0", "machine": "m", "python": "3", "torch": "2"}


def test_a_run_that_was_cut_off_goes_on(tmp_path):
    path, other = tmp_path / "progress.jsonl", Cell(data="ddp", tensor="tp1", schedule="no-pp", microbatches="P")
    (row,) = run([CELL], Progress(path, stated=STATED, resume=False))
    assert row["outcome"] == "proven"
    # What is written down already is believed; the line that was being written when the run ended is not there.
    path.write_text(path.read_text().replace('"proven"', '"kept"') + '{"wall_s": 1.0, "rows": [{"cell": "')
    progress = Progress(path, stated=STATED, resume=True)
    assert [row["outcome"] for row in run([other, CELL], progress)] == ["proven", "kept"]
    assert progress.wall_s > 0
    again = Progress(path, stated=STATED, resume=True)
    assert again.rows == progress.rows and again.wall_s == progress.wall_s
    again.close()
    assert not path.exists()


def test_verdicts_of_other_code_are_not_gone_on_with(tmp_path, capsys):
    path = tmp_path / "progress.jsonl"
    Progress(path, stated=STATED, resume=False).add([{"cell": str(CELL)}], 1.0)
    with pytest.raises(SystemExit):
        Progress(path, stated=STATED | {"code": "1"}, resume=True)
    assert capsys.readouterr().err == (
        f"{path} is of other conditions: code was 0 and is 1; leave --resume out to begin anew\n"
    )
    assert Progress(path, stated=STATED | {"code": "1"}, resume=False).rows == {}


def test_a_record_holds_what_was_run_and_goes_on_with_the_rest(tmp_path):
    path, cell = tmp_path / "record.json", Record(tmp_path / "record.json", stated={}).left()[0]
    for day, outcome in (("1", "failed"), ("2", "proven")):
        record = Record(path, stated={"date": day})
        assert record.left()[0] == cell and not record.rows
        verdict = Verdict(cell=cell, outcome=outcome, detail="", largest={"loss": 2e-16})
        record.add([row_of(verdict)], 3.0)
    again = Record(path, stated={"date": "3"})
    assert cell not in again.left() and len(again.left()) == 509
    again.add([row_of(Verdict(cell=again.left()[0], outcome="refused", detail="few heads", largest={}))], 1.0)
    found = Record(path, stated={}).found()
    assert found["summary"] == {"proven": 1, "refused": 1, "failed": 0} and found["largest"] == {"loss": 2e-16}
    assert found["runs"] == [{"date": "2", "wall_s": 3.0}, {"date": "3", "wall_s": 1.0}]
    assert {row["cell"]: row["run"] for row in found["cells"]}[str(cell)] == 0
