"""`composer3d suggest`: layouts that check accepts, as text, JSON and files."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from composer3d import ComposerError
from composer3d.cli import main
from composer3d.manifest import load_manifest
from composer3d.planning.suggesting.manifest_suggestions import SuggestResult
from composer3d.runner import TABLES

MODEL = 'use = "composer3d.models:llama"\nargs = { dim = 1024, num_layers = 4, num_heads = 8, vocab_size = 32000 }\n'


@pytest.fixture
def manifest(tmp_path, monkeypatch):
    """Write a manifest of a small Llama."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(
        "composer3d = 1\n[mesh]\ndp_shard = 4\n[model]\n" + MODEL + '[data]\nuse = "synthetic"\nseq_len = 512\n'
        "[train]\nsteps = 1\nglobal_batch = 16\n[sharding.fsdp2]\n[precision.mixed]\n"
        "[scheduling.activation_checkpoint]\n"
    )
    return "run.toml"


def as_sets(changes):
    return [word for change in changes for word in ("--set", change)]


def test_what_it_proposes_is_accepted_by_check(manifest, capsys, tmp_path):
    code = main(["suggest", manifest, "--world-size", "4", "--keep", "tp<=2", "--json", "--write", "found"])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert report["given"].startswith("the given manifest fits")
    assert 1 <= len(report["suggestions"]) <= 5
    first = report["suggestions"][0]
    assert "scheduling.activation_checkpoint=false" in first["set"]
    assert any("x the speed of the given manifest" in reason for reason in first["why"])
    assert first["time"]["step_s"]["known"] == "modelled"
    assert first["memory"]["known"] == "traced"
    code = main(["plan", manifest, "--world-size", "4", "--hardware", "h100", "--json", *as_sets(first["set"])])
    planned = json.loads(capsys.readouterr().out)
    assert code == 0
    assert int(first["memory"]["reserved"]) == max(rank["memory"]["total"] for rank in planned["ranks"])
    assert first["time"]["step_s"] == planned["time"]["step_s"]
    assert first["time"]["mfu"]["convention"] == planned["time"]["convention"]
    files = sorted((tmp_path / "found").iterdir())
    assert len(files) == len(report["suggestions"])
    for file in files:
        assert main(["check", str(file), "--world-size", "4"]) == 0, file.read_text()


def test_a_manifest_that_was_changed_by_hand_is_not_overwritten(manifest, tmp_path):
    given, patches = load_manifest(manifest, tables=TABLES), [["train.microbatch=2"]]
    found: Any = SimpleNamespace(manifest=given, patches=patches, overrides=())
    file = tmp_path / "found" / "suggestion-1.toml"
    for _ in range(2):
        SuggestResult.write(found, file.parent)
    changed = file.read_text() + "train.seed = 3\n"
    file.write_text(changed)
    with pytest.raises(ComposerError, match="suggestion-1.toml exists, differs and is not overwritten; name another"):
        SuggestResult.write(found, file.parent)
    assert file.read_text() == changed


def test_a_folder_with_suggestions_for_another_manifest_is_refused_before_the_search(manifest, tmp_path, capsys):
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "suggestion-2.toml").write_text('composer3d = 1\nextends = "/elsewhere/other.toml"\n')
    # A world size that nothing fits: a search would end with 1.
    assert main(["suggest", manifest, "--world-size", "1000003", "--write", "found"]) == 2
    assert (
        "found/suggestion-2.toml is no suggestion for run.toml, and is not overwritten; name another folder with "
        "--write" in " ".join(capsys.readouterr().err.split())
    )


def test_text(manifest, capsys):
    pins = [word for key in ("dp_shard", "recompute", "zero", "microbatch", "precision") for word in ("--keep", key)]
    assert main(["suggest", manifest, "--world-size", "4", *pins]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("the given manifest fits")
    assert any(line.startswith("1. ") for line in lines)
    assert lines[-1].endswith("composer3d plan says between which bounds their times lie")


def test_nothing_fits(manifest, capsys):
    assert main(["suggest", manifest, "--world-size", "1", "--memory", "1MiB", "--keep", "tp=1"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("the given manifest")
    assert "no layout fits 0.000977 GiB; the least memory that was found is" in out
    assert "of which the device's context has" in out


def test_why_every_layout_is_refused_is_said(manifest, tmp_path, monkeypatch, capsys):
    # No list of equal blocks to recompute.
    (tmp_path / "bare.py").write_text(
        "from torch import nn\n\n\ndef build(*, vocab_size):\n"
        "    return nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(8, 12), nn.Linear(12, vocab_size))\n"
    )
    text = (tmp_path / manifest).read_text().replace(MODEL, 'use = "bare:build"\n').replace("512", "16")
    (tmp_path / manifest).write_text(text.replace("[scheduling.activation_checkpoint]\n", ""))
    monkeypatch.syspath_prepend(tmp_path)
    keep = ["--keep", "recompute=full", "--keep", "tp=1", "--keep", "microbatch", "--keep", "precision"]
    assert main(["suggest", manifest, "--world-size", "2", *keep]) == 1
    out = capsys.readouterr().out
    told = "every layout that the search found is refused by check, or does not fit by the plan: --set scheduling.act"
    assert told in out and "the model has no single list of equal blocks; name the repeated blocks" in out


def test_what_is_proposed_of_sharded_stages_fits_by_the_plan(manifest, capsys):
    keep = ["--keep", "pp=2", "--keep", "dp_shard=2", "--keep", "tp=1", "--keep", "schedule=1F1B"]
    code = main(["suggest", manifest, "--world-size", "4", "--memory", "8GiB", *keep, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["suggestions"] else 1)
    for suggestion in report["suggestions"]:
        sets = as_sets(suggestion["set"])
        assert main(["plan", manifest, "--world-size", "4", "--hardware", "h100", "--memory", "8GiB", *sets]) == 0
        capsys.readouterr()
    assert report["suggestions"] or any("by the plan" in reason for reason in report["searched"]["refused_by_check"])


def test_pins_that_leave_nothing(manifest, capsys):
    assert main(["suggest", manifest, "--world-size", "8", "--keep", "pp=8"]) == 1  # of four layers
    assert "no layout of so many ranks keeps what is pinned" in capsys.readouterr().out
    assert main(["suggest", manifest, "--world-size", "4", "--keep", "tp=3"]) == 2
    assert capsys.readouterr().err == "--keep: tp=3 does not divide 4 ranks\n"


def test_a_world_without_a_layout_is_told_which_have_one(manifest, capsys):
    assert main(["suggest", manifest, "--world-size", "7", "--keep", "tp=1"]) == 1
    told = "the batch, the heads or the layers do not divide so (6 and 8 ranks have a layout)"
    assert told in capsys.readouterr().out
    assert main(["suggest", manifest, "--world-size", "7"]) == 2
    assert (
        "7 ranks cannot share 16 samples a step (6 and 8 ranks have a layout), and no layout" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--hardware", "h10"], 'there is no hardware "h10"; did you mean "h100"?'),
        (["--keep", "tpp=2"], '"tpp" cannot be kept'),
        (["--set", "model.use=composer3d.models:lama"], 'has no "lama"'),
        (["--set", "train.step=1"], 'unknown key "step"'),
    ],
)
def test_what_is_refused(manifest, capsys, arguments, told):
    assert main(["suggest", manifest, "--world-size", "4", *arguments]) == 2
    assert told in capsys.readouterr().err


def test_a_model_without_blocks(manifest, capsys, tmp_path):
    (tmp_path / "flat.py").write_text(
        "from torch import nn\n\n\ndef build(vocab_size):\n"
        "    return nn.Sequential(nn.Embedding(vocab_size, 8), nn.Linear(8, vocab_size))\n"
    )
    changes = ["--set", "model=false", "--set", 'model.use="flat:build"', "--set", "data.vocab_size=32"]
    pins = ["--keep", "zero=3", "--keep", "microbatch=1", "--keep", "precision"]
    assert main(["suggest", manifest, "--world-size", "4", *changes, "--set", "scheduling=false", *pins]) == 0
    out = capsys.readouterr().out
    assert "\n1. dp_shard=" in out and "pp=" not in out
