from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from composer3d.runner.reporting.display import Display
from composer3d.runner.reporting.metrics import MetricsFile, read_metrics
from composer3d.runner.reporting.shared_writing import SharedWriting


def test_floats_are_written_exactly_and_what_is_not_finite_is_null(tmp_path):
    file = MetricsFile(tmp_path / "new" / "metrics.jsonl")
    file.write({"step": 1, "loss": 0.1 + 0.2, "grad_norm": math.nan, "lr": math.inf})
    file.close()
    text = (tmp_path / "new" / "metrics.jsonl").read_text()
    assert json.loads(text) == {"step": 1, "loss": 0.30000000000000004, "grad_norm": None, "lr": None}
    assert text.endswith("}\n")


def test_rows_of_later_steps_and_half_a_row_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    file = MetricsFile(path)
    file.keep(2)
    file.write({"step": 3, "again": True})
    file.close()
    assert list(read_metrics(path)) == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    assert [found.name for found in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_there_may_be_no_file_yet(tmp_path):
    MetricsFile(tmp_path / "metrics.jsonl").keep(5)
    assert list(tmp_path.iterdir()) == []


FIGURES = {"loss": 1.0, "grad_norm": 1.0, "lr": 0.1, "step_time_s": 1.0, "tokens_per_s": 1.0, "samples_per_s": 1.0}


@pytest.fixture
def files(tmp_path):
    """Files of one path, closed behind the test."""
    made = [MetricsFile(tmp_path / "metrics.jsonl") for _ in range(3)]
    yield made
    for file in made:
        file.close()


def group(file):
    """A rank that writes for its group, and what says whether that leads."""
    leading = SimpleNamespace(leads=False)
    run = SimpleNamespace(replicas=leading, context=SimpleNamespace(rank=0))
    return SharedWriting(run, file, Display(8, silent=True)), leading


def test_a_group_that_has_led_may_lead_again_where_another_one_led_meanwhile(tmp_path, files):
    (first, first_leads), (second, second_leads) = map(group, files[:2])
    first_leads.leads = True
    first.begin(0)
    for step in range(1, 9):
        if step in (3, 7):  # the first one is lost
            first_leads.leads, second_leads.leads = False, True
        if step == 5:  # it has come back as a process that knows nothing of the file
            first, first_leads = group(files[2])
            first_leads.leads, second_leads.leads = True, False
            first.begin(4)
        first.row({"step": step, **FIGURES})
        second.row({"step": step, **FIGURES})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == list(range(1, 9))


def test_a_file_that_was_moved_is_named(tmp_path, files):
    file = files[0]
    file.write({"step": 1})
    (tmp_path / "metrics.jsonl").rename(tmp_path / "moved.jsonl")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(FileNotFoundError, match="Another file has taken its place"):
        file.write({"step": 2})
