"""The verbs as calls: typed results, which are what the commands print."""

from __future__ import annotations

import json

import pytest

import composer3d
from composer3d.cli import main
from composer3d.processes.forking import limit_ranks

SMALL = (
    "composer3d = 1\n[model]\n"
    'use = "composer3d.models:llama"\nargs = { dim = 64, num_layers = 2, num_heads = 4, vocab_size = 256 }\n'
    '[data]\nuse = "synthetic"\nseq_len = 32\n[train]\nsteps = 2\nglobal_batch = 4\n[sharding.fsdp2]\n'
)


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def printed(capsys, *arguments):
    main([*map(str, arguments), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report.pop("composer3d") == 1
    return report


def test_check(manifest, capsys):
    found = composer3d.check(manifest, world_size=2)
    assert found.ok and found.problems == ()
    assert found.to_json() == printed(capsys, "check", manifest, "--world-size", 2)
    assert str(found).startswith("pp=1 x dp_replicate=1 x dp_shard=2 x cp=1 x tp=1 = 2 ranks on cpu\n")


def test_check_says_what_is_wrong(manifest, capsys):
    found = composer3d.check(manifest, overrides=["train.lr=1"])
    assert not found.ok
    assert [problem.key for problem in found.problems] == ["lr"]
    assert found.to_json() == printed(capsys, "check", manifest, "--set", "train.lr=1")
    assert "optimizer.lr" in str(found)


def test_plan(manifest, capsys):
    found = composer3d.plan(manifest, world_size=2, memory_bytes=2**34)
    assert found.ok
    assert found.plan.layout.world_size == 2
    report = printed(capsys, "plan", manifest, "--world-size", 2, "--memory", "16GiB")
    assert json.loads(json.dumps(found.to_json())) == report
    assert "dp_shard=2" in str(found)


def test_a_wrong_manifest_is_not_planned(manifest):
    with pytest.raises(composer3d.ManifestError, match="unknown key"):
        composer3d.plan(manifest, overrides=["sharding.fsdp2.zeero=1"])


def test_suggest(manifest, capsys, tmp_path):
    found = composer3d.suggest(manifest, world_size=2, keep=["tp=1", "pp=1"])
    assert found.ok
    report = printed(capsys, "suggest", manifest, "--world-size", 2, "--keep", "tp=1", "--keep", "pp=1")
    assert json.loads(json.dumps(found.to_json())) == report
    found.write(tmp_path / "found")
    files = sorted((tmp_path / "found").iterdir())
    assert len(files) == len(found.suggestions)
    assert all(composer3d.check(file, world_size=2).ok for file in files)


RUNS = """
import json, pathlib, sys
import composer3d
result = composer3d.run("small.toml", nproc_per_node=2, overrides=["run.output=out"])
print(json.dumps(result.to_json()))
again = composer3d.run("small.toml", nproc_per_node=2, overrides=["run.output=out"])
print(json.dumps([again.status, again.ok]))
try:
    composer3d.run("small.toml", overrides=["train.steps=0"])
except composer3d.ManifestError as error:
    print(json.dumps([problem.key for problem in error.problems]))
"""


def test_run(manifest, tmp_path):
    # In a process of its own: ranks are forked from one that has only imported.
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-c", RUNS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, again, wrong = (json.loads(line) for line in done.stdout.splitlines() if line.startswith(("{", "[")))
    assert (first["status"], first["outcome"]["step"], first["failure"]) == ("finished", 2, None)
    assert again == ["already finished", True]
    assert wrong == ["steps"]


def test_verify(manifest):
    with limit_ranks(2):
        found = composer3d.verify(manifest, world_size=2, steps=1)
    assert found.ok, found.to_json()
    assert found.to_json()["world_size"] == 2
    assert "dp_shard=2" in str(found)
