"""What is built is what is in the checkout: both packages, the shipped manifests, the entry points."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parent.parent
PACKAGES = {"composer3d": ROOT / "composer3d", "composer3d_plugins": ROOT / "plugins" / "composer3d_plugins"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    return Path(next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])))


def test_the_wheel_holds_both_packages_whole(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if not name.split("/")[0].endswith(".dist-info")}
    here = {
        f"{name}/{path.relative_to(folder).as_posix()}"
        for name, folder in PACKAGES.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == here
    assert {"composer3d/py.typed", "composer3d/manifests/quickstart.toml"} <= held


def test_an_installed_wheel_runs_outside_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    code = "import composer3d, composer3d_plugins; print(composer3d.__file__, composer3d_plugins.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert where.stdout.split() == [str(site / name / "__init__.py") for name in PACKAGES]
    checked = subprocess.run(
        [sys.executable, "-m", "composer3d", "check", "quickstart"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr
    assert "DATA         fsdp2                    layers.[0-3], (root)" in checked.stdout


def test_an_installed_wheel_runs_inside_a_checkout(wheel, tmp_path):
    """As after README's first command: the checkout's own folder stands beside the manifest, and is not what runs."""
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    (tmp_path / "composer3d").mkdir()
    (tmp_path / "composer3d" / "__init__.py").write_text("raise ImportError('the checkout')")
    script = "import sys; sys.path.remove(''); from composer3d.cli import main; sys.exit(main(['check', 'quickstart']))"
    checked = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stderr
