"""The matrix of all installed plugins: a part of its cells that changes by the day, and every one that once failed.

A part holds cells of which it is on record that they are proven: no day brings one that nobody has seen. The fast tests
take what took few seconds when it was recorded, the slow ones take any. `COMPOSER3D_MATRIX_PART=7 pytest
tests/test_plugin_matrix.py` runs the part of another day.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from plugin_matrix import FAILED, RESULT, known_refusals, neutral_left_out, rows_of, whole
from plugin_matrix_cells import EXCLUDED, PERMITTED, check, judge, options, say_row
from support.rotation import PART

# Cells have what torch warns of: models that return views, options of DistributedDataParallel that exclude each other.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

NUM_QUICK, QUICK_S = 3, 10.0  # of a fast part: cells, and seconds that one took
NUM_CELLS = 6  # of a slow part; each takes up to 30 s on 2 cores
ONCE_FAILED_S = 15.0  # what once failed and is run by the fast tests took no more, all together
README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


VALUES = options()
CELLS = json.loads(RESULT.read_text())["cells"]
RECORDED = [cell["row"] for cell in CELLS if cell["outcome"] in ("proven", "refused")]
# A compiler takes much longer where its cache is cold.
QUICK = [
    cell["row"]
    for cell in CELLS
    if cell["outcome"] == "proven" and cell["wall_s"] <= QUICK_S and "scheduling.compile" not in cell["row"]
]
# What failed at its last run is told in README with its cause, and is a test once it does not. What failed for a value
# that an option no longer has is told by the schema.
MENDED = [
    row
    for row in (json.loads(FAILED.read_text()) if FAILED.exists() else [])
    if row not in [cell["row"] for cell in CELLS if cell["outcome"] == "failed"]
    and all(value in VALUES.get(key, ()) for key, value in row.items())
]


def once_failed() -> list[object]:
    """Return what once failed, marked as slow but for the cheapest that take few seconds together."""
    settled = [cell for cell in CELLS if cell["outcome"] in ("proven", "refused")]
    seconds = {json.dumps(cell["row"], sort_keys=True): cell["wall_s"] for cell in settled}

    def cost(row: Mapping[str, str]) -> float:
        known = seconds.get(json.dumps(row, sort_keys=True))
        return float("inf") if known is None or "scheduling.compile" in row else known

    spent, found = 0.0, []
    for row in sorted(MENDED, key=cost):
        spent += cost(row)
        found.append(pytest.param(row, id=say_row(row), marks=[] if spent <= ONCE_FAILED_S else [pytest.mark.slow]))
    return found


@pytest.mark.parametrize("number", range(NUM_QUICK))
def test_this_days_quick_part(number):
    row = whole(QUICK[(PART * NUM_QUICK + number) % len(QUICK)])
    verdict = judge(row)
    assert verdict.outcome == "proven", f"COMPOSER3D_MATRIX_PART={PART}, {say_row(row)}\n{verdict.detail}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_CELLS))
def test_this_days_part(number):
    row = whole(RECORDED[(PART * NUM_CELLS + number) % len(RECORDED)])
    verdict = judge(row)
    assert verdict.outcome in ("proven", "refused"), f"COMPOSER3D_MATRIX_PART={PART}, {say_row(row)}\n{verdict.detail}"


@pytest.mark.parametrize("row", once_failed())
def test_a_cell_that_once_failed(row):
    verdict = judge(whole(row))
    assert verdict.outcome in ("proven", "refused"), verdict.detail


def test_what_is_permitted_stands_in_readme():
    refused = [line for line in README.splitlines() if line.startswith("| ")]
    for permitted in PERMITTED:
        assert any(line.startswith(f"| {permitted.row}") for line in refused), permitted.row
    assert len(EXCLUDED) == 1 and "`preserve_rng_state = false` with dropout" in README


@pytest.mark.parametrize("part", [PART % 4, *(pytest.param(part, marks=pytest.mark.slow) for part in range(4))])
def test_known_refusals_are_permitted_ones_and_still_hold(part):
    reasons = {permitted.row for permitted in PERMITTED} | {"excluded"}
    refusals = known_refusals()
    assert {refusal.reason for refusal in refusals} <= reasons
    for refusal in refusals[part::4]:
        choices = dict(refusal.choices)
        plugins = {key: "on" for key in choices if key.count(".") == 1 and choices[key] == "on"}
        owners = {"mesh.pp": "scheduling.pipeline", "mesh.tp": "sharding.tensor_parallel"}
        plugins |= {owner: "on" for axis, owner in owners.items() if choices.get(axis, "1") != "1"}
        plugins |= {key.rpartition(".")[0]: "on" for key in choices if key.count(".") == 2}
        row = whole({**plugins, **choices})
        assert refusal.reason in check(row), refusal


def test_the_record_is_the_matrix_of_what_is_installed():
    """Every two options stand together in a recorded row, or in a refusal; an option more asks for another run."""
    assert [neutral_left_out(row) for row in rows_of(learn=False)] == [cell["row"] for cell in CELLS]


def test_rows_can_be_written_short():
    assert len(QUICK) >= NUM_QUICK and all(neutral_left_out(whole(row)) == row for row in RECORDED)
