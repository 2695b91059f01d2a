"""The verbs as calls: typed results, which are what the commands print."""

from __future__ import annotations

import inspect
import json
import math
import os
import random
import threading
from dataclasses import replace

import pytest
import torch

import composer3d
from composer3d.cli import main
from composer3d.errors import ArgumentError
from composer3d.processes.forking import limit_ranks
from composer3d.runner import Outcome

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


VERBS = ("check", "plan", "suggest", "verify", "run")
NUMBER, PATH = "must be a whole number of at least 1", "must be a path, or the name of a shipped manifest"
LISTED = 'must be a list of texts, such as ["train.steps=5"], or values by key, such as {"train.steps": 5}'


def refusal(verb, *args, **arguments):
    with pytest.raises(ArgumentError) as caught:
        getattr(composer3d, verb)(*args, **arguments)
    return str(caught.value)


@pytest.mark.parametrize("verb", VERBS)
def test_a_mistake_is_told_the_same_way_by_all_verbs(verb):
    world = {"world_size": 2} if verb == "suggest" else {}
    text = "composer3d = 1\nmodel = 'm:M'\n"
    for value, shown in ((None, "None"), ("", '""'), ({}, "{}"), (b"a", "b'a'"), (text, json.dumps(text)), (5, "5")):
        assert refusal(verb, value, **world) == f"{verb}(manifest={shown}): it {PATH}"
    for value in ("train.steps=5", [5], None, 5, {5: 1}, {"train.steps": None}):
        told = refusal(verb, "quickstart", overrides=value, **world)
        why = " (TOML has no NoneType)" if value == {"train.steps": None} else ""
        assert told == f"{verb}(overrides): it {LISTED}{why}, and is of type {type(value).__name__}"
    name = "nproc_per_node" if verb == "run" else "world_size"
    for value, shown in ((0, "0"), (-1, "-1"), (True, "True"), (1.5, "1.5"), ("2", '"2"'), (math.nan, "nan")):
        assert refusal(verb, "quickstart", **{name: value}) == f"{verb}({name}={shown}): it {NUMBER}"
    assert refusal(verb, "quickstart", **{f"{name}s": 2}) == (
        f'{verb}({name}s=2): there is no such argument; did you mean "{name}"?'
    )
    assert refusal(verb, "quickstart", 2, **world).startswith(
        f'{verb}(manifest="quickstart"): it alone is given without'
    )


@pytest.mark.parametrize(
    ("verb", "arguments", "told"),
    [
        ("check", {"rank": -1}, "check(rank=-1): it must be a whole number of at least 0"),
        ("check", {"strict": "no"}, 'check(strict="no"): it must be True or False'),
        ("plan", {"rank": "wurst"}, 'plan(rank="wurst"): it must be "worst", "all" or a whole number of at least 0'),
        ("plan", {"rank": None}, 'plan(rank=None): it must be "worst", "all" or a whole number of at least 0'),
        ("plan", {"memory_bytes": "80GiB"}, 'plan(memory_bytes="80GiB"): it must be a whole number of bytes'),
        ("plan", {"memory_bytes": 0}, "plan(memory_bytes=0): it must be a whole number of bytes of at least 1"),
        ("plan", {"tokens": math.nan}, "plan(tokens=nan): it must be a number above 0"),
        ("plan", {"samples": 0.0}, "plan(samples=0.0): it must be a number above 0"),
        ("plan", {"price": -1.0}, "plan(price=-1.0): it must be a number above 0"),
        ("plan", {"tokens": 1e12}, "plan(hardware): tokens, samples and price need it: without it there is no time"),
        ("plan", {"hardware": ""}, 'plan(hardware=""): it must be a shipped name, or the path of a file'),
        ("plan", {"what_if": "network=0.5"}, 'plan(what_if="network=0.5"): it must be numbers above 0 by part'),
        (
            "plan",
            {"what_if": {"network": "0.5"}},
            "plan(what_if={'network': '0.5'}): it must be numbers above 0",
        ),
        (
            "plan",
            {"what_if": {"netwrok": 2}, "hardware": "h100"},
            'plan(what_if): a cluster has no part "netwrok"',
        ),
        ("plan", {"failures": 3}, "plan(failures=3): it must be a composer3d.planning.Failures, of numbers above 0"),
        ("verify", {"steps": 0}, "verify(steps=0): it must be a whole number of at least 1"),
        ("verify", {"max_ranks": -1}, "verify(max_ranks=-1): it must be a whole number of at least 1"),
        ("verify", {"report": None}, "verify(report=None): it must be a function of one argument"),
        ("run", {"resume": None}, 'run(resume=None): it must be "auto", "never", or the path of a checkpoint'),
        ("run", {"nodes": 2}, "run(nodes=2): node_rank and endpoint are missing: groups of ranks"),
        ("suggest", {}, "suggest(world_size): it is missing, and must be a whole number of at least 1"),
        ("suggest", {"world_size": 2, "keep": "pp=1"}, 'suggest(keep="pp=1"): it must be a list of texts, such as'),
    ],
)
def test_arguments_that_are_none(verb, arguments, told):
    assert refusal(verb, "quickstart", **arguments).startswith(told)


def test_a_rank_outside_of_its_world(manifest):
    assert refusal("check", manifest, world_size=2, rank=5) == "check(rank=5): it is not in a world of 2 ranks"
    assert refusal("plan", manifest, world_size=1, rank=1) == "plan(rank=1): it is not in a world of 1 rank"


def test_a_pin_that_no_world_of_so_many_ranks_has(manifest, capsys):
    assert refusal("suggest", manifest, world_size=2, keep=["pp=7"]) == "suggest(keep): pp=7 does not divide 2 ranks"
    assert main(["suggest", str(manifest), "--world-size", "2", "--keep", "pp=7"]) == 2
    assert capsys.readouterr().err == "--keep: pp=7 does not divide 2 ranks\n"


def test_overrides_by_key(manifest):
    stated = {"train.lr": 1, "sharding.fsdp2": {"zero": 2}, "mesh.dp_shard": 2}
    listed = ["train.lr=1", "sharding.fsdp2={ zero = 2 }", "mesh.dp_shard=2"]
    assert composer3d.check(manifest, overrides=stated) == composer3d.check(manifest, overrides=listed)


def test_verbs_have_their_names_and_signatures():
    for name in VERBS:
        verb = getattr(composer3d, name)
        first, *others = inspect.signature(verb).parameters.values()
        assert (verb.__name__, first.name) == (name, "manifest")
        assert {each.kind for each in others} == {inspect.Parameter.KEYWORD_ONLY}


@pytest.mark.parametrize("verb", ["run", "verify"])
def test_ranks_are_not_started_from_another_thread(manifest, verb):
    told = []

    def call():
        with pytest.raises(composer3d.ForkError) as caught:
            getattr(composer3d, verb)(manifest)
        told.append(str(caught.value))

    thread = threading.Thread(target=call, name="mine")
    thread.start()
    thread.join()
    assert told and told[0].startswith('ranks cannot be started from the thread "mine": the signals that end them')


def test_what_the_caller_has_set_up_plays_no_part(manifest):
    alone = composer3d.check(manifest, world_size=2)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    drawn = random.getstate()
    try:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            found = composer3d.check(manifest, world_size=2)
            assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
        assert (torch.get_default_dtype(), torch.empty(1).device.type) == (torch.float64, "meta")
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert alone.ok and found == alone
    assert random.getstate() == drawn


def test_plan(manifest, capsys):
    found = composer3d.plan(manifest, world_size=2, memory_bytes=2**34)
    assert found.ok
    assert found.plan.layout.world_size == 2
    report = printed(capsys, "plan", manifest, "--world-size", 2, "--memory", "16GiB")
    assert json.loads(json.dumps(found.to_json())) == report
    assert "dp_shard=2" in str(found)


def test_a_manifest_is_loaded_with_the_tables_that_it_is_meant_for(manifest, tmp_path):
    assert composer3d.load_manifest(manifest).train.steps == 2
    loop = tmp_path / "loop.toml"
    loop.write_text("composer3d = 1\n[train]\nseed = 3\n[sharding.fsdp2]\n")
    assert composer3d.load_manifest(loop).train.seed == 3  # of a run it would lack its number of steps
    loop.write_text("composer3d = 1\n[data]\nsteps = 2\n")
    with pytest.raises(composer3d.ManifestError, match=r'\[data\] unknown key "steps"; write train.steps'):
        composer3d.load_manifest(loop)


def test_the_end_of_a_run_is_a_text():
    outcome = Outcome(status="finished", step=2, loss=0.5, output="out")
    result = composer3d.RunResult(
        status="finished", exit_code=0, outcome=outcome, failure=None, problems=(), output="out"
    )
    assert str(result) == "finished: 2 steps, loss 0.5000; out"
    assert str(replace(result, status="preempted", outcome=None)) == "preempted before the first step"
    left = "preempted: this machine has left the run, which the others go on with; started again, it takes part again"
    assert str(replace(result, exit_code=os.EX_TEMPFAIL)) == left


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
import json
import composer3d, torch
result = composer3d.run("small.toml", nproc_per_node=2, overrides=["run.output=out"])
print(json.dumps(result.to_json()))
torch.set_default_dtype(torch.float64)
with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
    other = composer3d.run("small.toml", nproc_per_node=2, overrides={"run.output": "other"})
assert str(result) == f"finished: 2 steps, loss {result.outcome.loss:.4f}; out"
assert (other.status, other.outcome.loss) == ("finished", result.outcome.loss)
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
