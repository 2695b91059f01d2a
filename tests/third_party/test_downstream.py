"""A plugin package is installed as a user would, and works without composer3d knowing of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent / "composer3d_nvtx"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Build the package's wheel and install it into a folder, offline; return the environment that sees it."""
    work = tmp_path_factory.mktemp("downstream")
    script = (
        "import shutil, sys, pathlib, zipfile; from hatchling import build\n"
        "source, work = map(pathlib.Path, sys.argv[1:])\n"
        "shutil.copytree(source, work / 'source', ignore=shutil.ignore_patterns('__pycache__'))\n"
        "import os; os.chdir(work / 'source')\n"
        "zipfile.ZipFile(work / build.build_wheel(str(work))).extractall(work / 'site')\n"
    )
    subprocess.run([sys.executable, "-c", script, PACKAGE, work], check=True, capture_output=True, text=True)
    path = os.pathsep.join([str(work / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), "OMP_NUM_THREADS": "1"}


def output(environment, *command, folder=None):
    done = subprocess.run(
        [sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_package_is_not_there_without_being_installed():
    # Asked of what is installed: its source folder lies beside this file, and may be imported from there by accident.
    with pytest.raises(PackageNotFoundError):
        distribution("composer3d-nvtx")


def test_its_own_tests_pass(environment, tmp_path):
    # Outside its source folder, so that what is tested is what is installed.
    tests = tmp_path / "test_composer3d_nvtx.py"
    tests.write_text((PACKAGE / tests.name).read_text())
    said = output(environment, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "error", tests, folder=tmp_path)
    assert "4 passed" in said


def test_it_is_listed_with_its_options(environment):
    found = json.loads(output(environment, "-m", "composer3d", "plugins", "nvtx", "--json"))["plugins"]
    (entry,) = found
    assert (entry["name"], entry["family"], entry["error"]) == ("nvtx", "profiling", None)
    assert entry["origin"] == "composer3d_nvtx:Nvtx (composer3d-nvtx 1.0)"
    assert [(option["key"], option["default"]) for option in entry["options"]] == [("every", 1)]
    assert entry["options"][0]["description"] == "Steps from one shown step to the next."


def test_a_manifest_that_names_it_is_checked(environment, tmp_path):
    (tmp_path / "my_model.py").write_text(
        "from torch import nn\n\n"
        "class Model(nn.Module):\n"
        "    def __init__(self, vocab=256):\n"
        "        super().__init__()\n"
        "        self.tok, self.out = nn.Embedding(vocab, 4), nn.Linear(4, vocab)\n"
        "    def forward(self, tokens):\n"
        "        return self.out(self.tok(tokens))\n"
    )
    (tmp_path / "text.txt").write_text("Many words for a model of bytes. " * 100)
    (tmp_path / "run.toml").write_text(
        'composer3d = 1\nmodel = "my_model:Model"\ndata = "text.txt"\ntrain.steps = 2\n'
        "sharding.fsdp2 = {}\n[profiling.nvtx]\nevery = 2\n"
    )
    command = ("-m", "composer3d", "check", "run.toml", "--world-size", "2", "--json")
    found = json.loads(output(environment, *command, folder=tmp_path))
    assert (found["ok"], found["problems"]) == (True, [])
    assert [row["name"] for row in found["plan"]] == ["fsdp2"]


def test_a_wrong_key_of_its_table_is_found(environment, tmp_path):
    manifest = tmp_path / "run.toml"
    manifest.write_text("composer3d = 1\nsharding.fsdp2 = {}\n[profiling.nvtx]\nevry = 2\n")
    script = (
        "import sys, composer3d\n"
        "try: composer3d.load_manifest(sys.argv[1])\nexcept composer3d.ManifestError as error: print(error)"
    )
    said = output(environment, "-c", script, "run.toml", folder=tmp_path)
    assert said == 'run.toml:4:1: [profiling.nvtx] unknown key "evry"; did you mean "every"?\n'


ISLAND = '''
from composer3d import Axis, Phase, Role, Transform, hookimpl, plugin


@plugin(family="sharding", owns=("island",), axes=(Axis(name="island", role=Role.BATCH, inside="dp_replicate"),))
class Islands:
    """Averages over an axis of its own. Memory: none. Collectives: none here."""

    backward: bool = False

    @hookimpl
    def composer3d_shard(self, context):
        return Transform(
            name="islands",
            phase=Phase.DATA,
            select=lambda model, context: [""],
            apply=lambda module, fqns, context: fqns,
            averages=("island",),
        )
'''


def test_an_axis_of_its_own_is_in_the_matrix(tmp_path):
    (tmp_path / "islands.py").write_text(ISLAND)
    described = tmp_path / "islands-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: islands\nVersion: 1.0\n")
    (described / "entry_points.txt").write_text("[composer3d]\nislands = islands:Islands\n")
    script = (
        "from plugin_matrix_cells import check, manifest_of, options, owners\n"
        "row = {'mesh.island': '4', 'mesh.tp': '1', 'sharding.islands': 'on', 'train.accumulation': '2'}\n"
        "print(options()['mesh.island'], options()['sharding.islands.backward'], owners()['mesh.island'])\n"
        "print('global_batch = 8' in manifest_of(row), check(row))\n"
    )
    benchmarks = Path(__file__).parents[2] / "benchmarks"
    path = os.pathsep.join([str(tmp_path), str(benchmarks), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    said = output({**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, "-c", script)
    assert said.splitlines() == [
        "('1', '2', '4') ('off', 'default', 'true') ('sharding.islands',)",
        "True ()",
    ]
