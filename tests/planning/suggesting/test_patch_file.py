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


def test_a_shipped_manifest_is_extended_by_its_name(tmp_path):
    assert extended_by(read("quickstart"), tmp_path) == ("quickstart", [])
