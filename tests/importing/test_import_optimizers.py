"""Optimizers of every source: what is written passes the manifest's own check of `[optimizer]`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from pydantic import TypeAdapter
from support.imported import manifest_of, translated
from support.imported_optimizers import SOURCES

from composer3d.runner import optimizer_class, refused_arguments
from composer3d.runner.runner_tables import OptimizerTable

pytest.importorskip("yaml")


@pytest.mark.parametrize("source", SOURCES)
def test_an_imported_optimizer_is_one_that_the_manifest_takes(tmp_path: Path, source: str) -> None:
    name, text = SOURCES[source]
    translation = translated(tmp_path, name, text, system=source.partition("-")[0], target="run")
    assert not [problem for problem in translation.problems if problem.severity == "error"]
    written = manifest_of(translation)["optimizer"]
    table = TypeAdapter(OptimizerTable).validate_json(json.dumps(written))
    cls, arguments = optimizer_class(table, tmp_path)
    assert list(refused_arguments(table, cls, arguments)) == []


def test_no_number_of_an_optimizer_is_lost(tmp_path: Path) -> None:
    name, text = SOURCES["deepspeed-l2"]
    written = manifest_of(translated(tmp_path, name, text, target="run"))["optimizer"]
    assert written["use"] == "torch.optim:Adam" and written["args"] == {"betas": [0.9, 0.95], "eps": 1e-6}
    name, text = SOURCES["deepspeed-l2-default"]
    written = manifest_of(translated(tmp_path, name, text, target="run"))["optimizer"]
    assert written["args"] == {"amsgrad": True, "betas": [0.9, 0.999], "eps": 1e-8}
