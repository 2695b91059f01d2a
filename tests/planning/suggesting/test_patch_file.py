"""Manifests that extend a given one from another folder."""

from __future__ import annotations

import pytest

from composer3d.manifest import read
from composer3d.planning.suggesting.patch_file import extended_by, patch_text


@pytest.mark.parametrize(("folder", "moved"), [(".", False), ("proposed", True)])
def test_data_beside_the_given_manifest_stay_the_same(tmp_path, folder, moved):
    (tmp_path / "corpus").mkdir()
    (tmp_path / "run.toml").write_text('composer3d = 1\ndata.use = "corpus"\nmodel.hf = "not/there"\n')
    known, changes = extended_by(read(tmp_path / "run.toml"), tmp_path / folder)
    assert known == str(tmp_path / "run.toml")
    assert changes == ([f'data.use = "{tmp_path / "corpus"}"'] if moved else [])
    new = tmp_path / folder / "new.toml"
    new.parent.mkdir(exist_ok=True)
    new.write_text(patch_text(known, [*changes, "mesh.tp = 2"]))
    tables = read(new).tables
    assert (tables["data"]["use"], tables["mesh"]["tp"]) == (str(tmp_path / "corpus") if moved else "corpus", 2)


def test_a_shipped_manifest_is_extended_by_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus").mkdir()
    assert extended_by(read("quickstart"), tmp_path / "proposed") == ("quickstart", [])
    given = read("quickstart", ["data.use=corpus"])
    assert extended_by(given, tmp_path / "proposed") == ("quickstart", [f'data.use = "{tmp_path / "corpus"}"'])


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.global_batch=4", "model.args.dim=32", "data.seq_len=32"],
        ["model=composer3d.models:moe", 'data.use="corpus"', "sharding.fsdp2=false"],
        ["train.accumulate=2", "train.global_batch=8", "precision.mixed={}", "mesh.tp=4"],
    ],
)
def test_what_overrides_the_given_manifest_is_written_too(tmp_path, overrides):
    given = tmp_path / "run.toml"
    given.write_text(
        'composer3d = 1\ndata.use = "other"\n[model]\nuse = "composer3d.models:llama"\n'
        "args = { dim = 8, num_layers = 2 }\n"
        "[sharding.fsdp2]\nzero = 3\n[train]\nglobal_batch = 16\n"
    )
    known, moved = extended_by(read(given, overrides), tmp_path)
    changes = ["mesh.tp=2", "train.microbatch=1"]
    (tmp_path / "new.toml").write_text(patch_text(known, [*moved, *changes], overrides=overrides))
    assert read(tmp_path / "new.toml").tables == read(given, [*overrides, *changes]).tables


def test_a_secret_that_overrides_is_not_written():
    text = patch_text("run.toml", ["mesh.tp=2"], overrides=["profiling.wandb.api_key=hush", "mesh.pp=2"])
    assert "hush" not in text
    assert text.startswith("# profiling.wandb.api_key was given by --set and is a secret: give it again\n")
    assert "tp = 2\npp = 2" in text or "pp = 2\ntp = 2" in text
