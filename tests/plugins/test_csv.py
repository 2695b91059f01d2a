from __future__ import annotations

import csv

import pytest
from support.models import assert_unchanged, composed
from support.profiled_steps import train

from composer3d import ManifestError
from composer3d.testing import run_ranks

FSDP = "[sharding.fsdp2]\n"


def table(path):
    return f'[profiling.csv]\nfile = "{path}"\n'


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def report(path, rows):
    """Report rows of a run that has no other use for them."""

    def reported():
        run = composed(table(path))
        for step, row in rows:
            run.report(step, row)
        run.close()

    run_ranks(reported, 1)
    return read(path)


def test_gradients_equal_one_device_and_collectives_stay(tmp_path):
    assert_unchanged(2, FSDP, table(tmp_path / "m.csv"))


def test_every_metric_is_a_column_with_the_same_floats(tmp_path):
    rows, _ = run_ranks(train, 2, FSDP + table(tmp_path / "m.csv"))[0]
    found = read(tmp_path / "m.csv")
    assert [int(row.pop("step")) for row in found] == [0, 1, 2]
    assert [{name: float(value) for name, value in row.items()} for row in found] == rows


def test_a_metric_that_appears_later_is_a_further_column(tmp_path):
    found = report(tmp_path / "m.csv", [(1, {"loss": 3.0}), (2, {"loss": 2.0, "evaluation_loss": 2.5})])
    assert found == [
        {"step": "1", "loss": "3.0", "evaluation_loss": ""},
        {"step": "2", "loss": "2.0", "evaluation_loss": "2.5"},
    ]


def test_rows_of_a_resumed_run_replace_those_of_the_same_steps(tmp_path):
    path = tmp_path / "m.csv"
    report(path, [(1, {"loss": 3.0}), (2, {"loss": 2.0}), (3, {"loss": 1.0})])
    with path.open("a") as file:
        file.write("4,0.")  # a kill left it
    assert [(row["step"], row["loss"]) for row in report(path, [(2, {"loss": 2.25})])] == [("1", "3.0"), ("2", "2.25")]


def test_it_stands_in_the_runs_folder_and_nothing_is_written_outside_a_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def written(purpose):
        run = composed("[profiling.csv]\n", purpose=purpose)
        run.report(0, {"loss": 1.0})
        run.close()
        return (run.context.output / "metrics.csv").exists()

    assert run_ranks(written, 1, "verify") == [False]
    assert run_ranks(written, 1, "run") == [True]


def test_refusals():
    def refused():
        with pytest.raises(ManifestError) as caught:
            composed('[profiling.csv]\nfile = ""\n')
        return str(caught.value)

    assert run_ranks(refused, 1)[0].endswith("profiling.csv.file must have at least 1 character, not 0")
