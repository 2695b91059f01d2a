"""The matrix of all installed plugins: a part of its cells that changes by the day, and every one that once failed.

A part holds cells of which it is on record that they are proven: no day brings one that nobody has seen. The fast tests
take what took few seconds when it was recorded, and of what once failed a few each day; the slow ones take any, and
all that once failed. `COMPOSER3D_MATRIX_PART=7 pytest tests/test_plugin_matrix.py` runs the part of another day.
"""

from __future__ import annotations

import json
from itertools import chain

import pytest
from plugin_matrix import RESULT, known_refusals, neutral_left_out, once_failed, rows_of, whole
from plugin_matrix_cells import check, judge, num_ranks, options, owners, say_row
from plugin_matrix_permitted import EXCLUDED, PERMITTED
from support.daily_part import NUM_PARTS, PART
from support.documents import read, tables

# Cells have what torch warns of: models that return views, options of DistributedDataParallel that exclude each other.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),  # inductor's own imports
]

NUM_QUICK, QUICK_S = 1, 5.0  # of a fast part: cells, and seconds that one took
SHORT_S = 8.0  # that a cell took which once failed and is in a day's fast tests
NUM_CELLS = 6  # of a slow part; each takes up to 30 s on 2 cores


CELLS = json.loads(RESULT.read_text())["cells"]
RECORDED = [cell["row"] for cell in CELLS if cell["outcome"] in ("proven", "refused")]
# A compiler takes much longer where its cache is cold.
QUICK = [
    cell["row"]
    for cell in CELLS
    if cell["outcome"] == "proven" and cell["wall_s"] <= QUICK_S and "scheduling.compile" not in cell["row"]
]
# What failed at its last run is told in benchmarks/README.md with its cause, and is a test once it does not.
MENDED = [
    entry
    for entry in once_failed()
    if entry["row"] not in [cell["row"] for cell in CELLS if cell["outcome"] == "failed"]
]
# Of what takes few seconds the fast tests run another part each day. What is compiled on one rank is run as the
# compiler traces it, without the kernels, whose cache is cold.
SHORT = [entry["row"] for entry in MENDED if "scheduling.compile" not in entry["row"] and entry["wall_s"] <= SHORT_S]
DAILY = SHORT[PART % NUM_PARTS :: NUM_PARTS]

TRACED = [
    {**entry["row"], "scheduling.compile.backend": '"aot_eager"'}
    for entry in MENDED
    if "scheduling.compile" in entry["row"] and num_ranks(entry["row"]) == 1
]


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


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(entry["row"], id=say_row(entry["row"]), marks=[] if entry["row"] in DAILY else [pytest.mark.slow])
        for entry in MENDED
    ],
)
def test_a_cell_that_once_failed(row):
    verdict = judge(whole(row))
    assert verdict.outcome in ("proven", "refused"), verdict.detail


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, id=say_row(row), marks=[] if number == PART % len(TRACED) else [pytest.mark.slow])
        for number, row in enumerate(TRACED)
    ],
)
def test_a_compiled_cell_that_once_failed_without_its_kernels(row):
    verdict = judge(whole(row))
    assert verdict.outcome in ("proven", "refused"), verdict.detail


def test_what_is_permitted_is_documented():
    refused = [f"| {row[0]}" for row in chain(*tables(read("plugins/README.md"), "refused", "reason", "test"))]
    for permitted in PERMITTED:
        assert any(line.startswith(f"| {permitted.row}") for line in refused), permitted.row
    assert len(EXCLUDED) == 1 and "`preserve_rng_state = false` with dropout" in read("benchmarks/README.md")


@pytest.mark.parametrize("part", [PART % 4, *(pytest.param(part, marks=pytest.mark.slow) for part in range(4))])
def test_known_refusals_are_permitted_ones_and_still_hold(part):
    reasons = {permitted.row for permitted in PERMITTED} | {"excluded"}
    refusals = known_refusals()
    assert {refusal.reason for refusal in refusals} <= reasons
    for refusal in refusals[part::4]:
        choices = dict(refusal.choices)
        plugins = {key: "on" for key in choices if key.count(".") == 1 and choices[key] == "on"}
        plugins |= {key.rpartition(".")[0]: "on" for key in choices if key.count(".") == 2}
        for axis, owning in owners().items():
            if choices.get(axis, "1") != "1" and not plugins.keys() & set(owning):
                plugins[owning[-1]] = "on"
        row = whole({**plugins, **choices})
        assert refusal.reason in check(row), refusal


def test_every_option_of_what_is_installed_is_in_the_record_or_refused_by_itself():
    stood = {choice for cell in CELLS for choice in whole(cell["row"]).items()}
    left = {(key, value) for key, values in options().items() for value in values} - stood
    # What a refusal has beside an option is that its plugin is on.
    refused = [{choice for choice in refusal.choices if choice[1] != "on"} for refusal in known_refusals()]
    assert [choice for choice in left if {choice} not in refused] == []


@pytest.mark.slow
def test_the_record_is_the_matrix_of_what_is_installed():
    """Every two options stand together in a recorded row, or in a refusal; an option more asks for another run."""
    assert [neutral_left_out(row) for row in rows_of(learn=False)] == [cell["row"] for cell in CELLS]


def test_rows_can_be_written_short():
    assert len(QUICK) >= NUM_QUICK and all(neutral_left_out(whole(row)) == row for row in RECORDED)
