"""A traced manifest is found again without torch, and only where nothing has changed that its trace may depend on."""

from __future__ import annotations

import json
import subprocess
import sys

MANIFEST = """
composer3d = 1
[model]
use = "composer3d.models:llama"
[model.args]
dim = 32
num_layers = 2
[mesh]
dp_shard = 2
[data]
use = "synthetic"
vocab_size = 64
seq_len = 8
[train]
steps = 1
global_batch = 4
[sharding.fsdp2]
"""
# Runs in a process without modules of a user: those of tests would keep anything from being kept.
SCRIPT = """
import importlib, json, os, sys
from pathlib import Path
from composer3d.manifest import read
from composer3d.mesh import AXES, Layout
from composer3d.planning.formulas.layout_numbers import Setup
from composer3d.planning.traced_manifest import TracedManifest
from composer3d.planning.kept_manifest import kept_manifest
sys.path.insert(0, str(Path("site-packages").absolute()))
import package
traced = TracedManifest(
    layout=Layout(axes=AXES, degrees={axis.name: 1 for axis in AXES}), setup=Setup(seq_len=8, global_batch=4),
    schedule=None, orders=None, traces=(), stack="eager", device="cpu",
    num_microbatches=1, gpus_per_node=None, unit="tokens",
    num_units=32, num_parameters=1, parameters_bytes=4, num_blocks=None)
made = []
def ask(overrides=(), modules=("package.part",), **asked):
    before = len(made)
    def trace():
        made.append(None)
        return traced, frozenset(modules)
    assert kept_manifest(read("run.toml", overrides), asked, trace) == traced
    return len(made) - before
found = {"first": ask(), "again": ask(), "override": ask(["train.microbatch=2"]), "world": ask(world_size=4)}
Path("data.bin").write_bytes(b"longer"); found["data"] = ask()
Path("site-packages/package/part.py").write_text("changed = True"); found["code"] = ask()
Path("site-packages/other-1.0.dist-info").mkdir(); found["installed"] = ask()
os.environ["HF_HOME"] = "elsewhere"; found["environment"] = ask()
found["still"] = ask()
sys.path.insert(0, os.getcwd())
import own, beside.part
found["own"] = [ask(["train.seed=1"], ("own",)), ask(["train.seed=1"], ("own",))]
found["torch"] = "torch" in sys.modules
found["beside"] = [ask(["train.seed=2"], ("beside.part",)), ask(["train.seed=2"], ("beside.part",))]
print(json.dumps(found))
"""


def run(tmp_path, *arguments):
    environment = {"PATH": "", "HOME": str(tmp_path), "COMPOSER3D_TRACES": str(tmp_path / "kept")}
    return subprocess.run(
        [sys.executable, *arguments], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def test_a_trace_is_made_anew_where_anything_that_it_depends_on_has_changed(tmp_path):
    (tmp_path / "run.toml").write_text(MANIFEST.replace('"synthetic"', '"data.bin"'))
    (tmp_path / "data.bin").write_bytes(b"data")
    (tmp_path / "own.py").write_text("def __getattr__(name):\n    raise ValueError(name)\n")  # it may raise anything
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "part.py").touch()
    package = tmp_path / "site-packages" / "package"
    package.mkdir(parents=True)
    for name in ("__init__.py", "part.py"):
        (package / name).touch()
    found = json.loads(run(tmp_path, "-c", SCRIPT))
    assert found.pop("torch") is False
    assert found == {
        "first": 1,
        "again": 0,
        "override": 1,
        "world": 1,
        "data": 1,
        "code": 1,
        "installed": 1,
        "environment": 1,
        "still": 0,
        "own": [1, 1],
        "beside": [1, 1],
    }


def test_a_plan_by_kept_traces_is_the_same_and_imports_no_torch(tmp_path):
    (tmp_path / "run.toml").write_text(MANIFEST)
    question = ("plan", "run.toml", "--hardware", "h100", "--json")
    program = "import runpy, sys; {}runpy.run_module('composer3d', run_name='__main__')"
    first = run(tmp_path, "-c", program.format(""), *question)
    without_torch = program.format("sys.modules['torch'] = None; ")
    assert run(tmp_path, "-c", without_torch, *question) == first
    slower = json.loads(run(tmp_path, "-c", without_torch, *question, "--what-if", "launch=2x"))
    assert slower["time"]["step_s"]["value"] > json.loads(first)["time"]["step_s"]["value"]
