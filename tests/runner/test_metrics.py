from __future__ import annotations

import json
import math

from composer3d.runner.reporting.metrics import MetricsFile, read_metrics


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
