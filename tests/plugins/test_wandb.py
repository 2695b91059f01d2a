from __future__ import annotations

import importlib.util

import pytest
from support.models import assert_unchanged, composed
from support.profiled_steps import train

from composer3d import ManifestError
from composer3d.testing import run_ranks

FSDP, TABLE = "[sharding.fsdp2]\n", '[profiling.wandb]\nmode = "offline"\nproject = "test"\n'
needs_wandb = pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the package wandb")


@needs_wandb
def test_gradients_equal_one_device_and_collectives_stay():
    assert_unchanged(2, FSDP, TABLE)


@needs_wandb
def test_every_metric_is_logged(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")

    def logged():
        return train(TABLE, inside=lambda run: dict(next(iter(run.context.state.values())).summary))

    rows, summary = run_ranks(logged, 1)[0]
    # The library takes the last step as done when it is finished.
    assert summary.items() >= rows[-2].items()
    assert len(list(tmp_path.glob("runs/run/wandb/offline-run-*/*.wandb"))) == 1


@needs_wandb
def test_the_run_is_its_teams_with_its_group_and_tags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")

    def known():
        def made(run):
            ours = next(iter(run.context.state.values()))
            return ours.entity, ours.group, ours.tags

        text = TABLE + 'entity = "team"\ngroup = "ablations"\ntags = ["first", "short"]\n'
        return train(text, inside=made)[1]

    assert run_ranks(known, 1) == [("team", "ablations", ("first", "short"))]


def test_an_empty_tag_is_refused():
    def refused():
        with pytest.raises(ManifestError) as caught:
            composed(TABLE + 'tags = [""]\n')
        return str(caught.value)

    assert "tags" in run_ranks(refused, 1)[0]


@needs_wandb
def test_its_key_is_in_none_of_its_files(tmp_path, monkeypatch):
    key = "c0ffee" * 6 + "abcd"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("COMPOSER3D_TEST_KEY", key)

    def known():
        text = TABLE + 'api_key = { env = "COMPOSER3D_TEST_KEY" }\n'
        return train(text, inside=lambda run: next(iter(run.context.state.values())).settings.api_key)[1]

    assert run_ranks(known, 1) == [key]
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and not [path for path in files if key.encode() in path.read_bytes()]


def test_refuses_to_run_without_the_library(monkeypatch):
    def refused():
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ManifestError) as caught:
            composed(TABLE)
        return str(caught.value)

    assert run_ranks(refused, 1)[0].endswith('wandb is not installed; pip install "composer3d[wandb]"')
