"""`composer3d import`: what it prints and writes, and what it refuses to read."""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from pathlib import Path

import pytest

import composer3d
from composer3d.cli import main
from composer3d.importing.commented_manifest import write_manifest
from composer3d.importing.importer import read_translation
from composer3d.importing.translation import Options

SMALL = """{ // comments are legal there
  "train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 4,
  "zero_optimization": {"stage": 2, "overlap_comm": true}, "zero_optimisation": {"stage": 3} }
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_manifest_is_written_and_checked(folder, capsys):
    (folder / "ds.json").write_text(SMALL)
    assert main(["import", "ds.json", "--output", "m.toml", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report) == ["composer3d", "ok", "source", "keys", "manifest", "problems"]
    assert report["ok"] and report["source"] == {"system": "deepspeed", "version": "0.19"}
    assert report["keys"][0] == {
        "key": "train_batch_size",
        "line": 2,
        "value": 32,
        "verdict": "carried",
        "to": "train.global_batch",
        "note": "",
    }
    assert report["manifest"] == (folder / "m.toml").read_text()
    (problem,) = report["problems"]
    assert (problem["severity"], problem["line"], problem["hint"]) == (
        "warning",
        3,
        'did you mean "zero_optimization"?',
    )
    assert main(["check", "m.toml", "--world-size", "2"]) == 0
    assert "for compose(): the loop has the model" in capsys.readouterr().out
    assert main(["import", "ds.json", "--output", "m.toml"]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err


def test_a_run_has_its_model_and_data_filled_in(folder, capsys):
    (folder / "ds.json").write_text(SMALL)
    result = composer3d.import_config("ds.json", target="run", name="run.toml")
    assert result.ok
    lines = result.manifest.splitlines()
    for problem, what in zip(result.problems[1:], ("model", "data", "steps"), strict=True):
        assert f'"FILL_IN:{what}" is to be filled in' in problem.message
        assert f'"FILL_IN:{what}"' in lines[problem.line - 1]
    (folder / "run.toml").write_text(result.manifest)
    assert main(["check", "run.toml"]) == 2
    said = capsys.readouterr().err
    assert 'run.toml:5:1: [model] "FILL_IN:model" is to be filled in' in said
    assert 'run.toml:8:1: [data] "FILL_IN:data" is to be filled in' in said
    filled = composer3d.import_config("ds.json", target="run", model="composer3d.models:llama", data="synthetic")
    assert "FILL_IN:model" not in filled.manifest and 'use = "synthetic"  # from --data' in filled.manifest


def test_a_refusal_writes_nothing_unless_it_is_allowed(folder, capsys):
    (folder / "ds.json").write_text('{"train_batch_size": 8,\n "msamp": {"enabled": true}}')
    assert main(["import", "ds.json", "--output", "m.toml"]) == 1
    assert not (folder / "m.toml").exists()
    said = capsys.readouterr().err
    assert said.startswith("refused (1):\n  line 2: msamp.enabled = true: ")
    assert "ds.json:2:12: [msamp] msamp.enabled is refused" in said and "--allow msamp.enabled" in said
    assert main(["import", "ds.json", "--output", "m.toml", "--allow", "msamp"]) == 0
    assert (folder / "m.toml").exists()
    assert main(["import", "ds.json", "--allow", "msmp"]) == 1
    assert "--allow msmp: no such key is refused" in capsys.readouterr().err


def test_secrets_are_not_copied(folder):
    (folder / "ds.json").write_text('{"train_batch_size": 8, "comet": {"enabled": true, "api_key": "abcd1234"}}')
    translation = read_translation(Path("ds.json"), Options())
    assert translation.verdicts["comet.api_key"].verdict == "missing"
    assert "abcd1234" not in json.dumps([entry.to_json() for entry in translation.verdicts.values()])
    assert "abcd1234" not in write_manifest(translation)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("nemo.yaml", b"trainer: {devices: 8}\nexp_manager: {name: a}\nmodel: {seed: 1}\n", "is a file of NeMo 1"),
        ("missing.json", None, 'there is no file "missing.json"'),
        (".", None, "cannot be read: it is a folder"),
        ("nul.json", b'{"a":\n "\0"}', "nul.json:2: holds a NUL, so it is no text"),
        ("latin.json", b'{"a": "\xe9"}', "latin.json:1: is not UTF-8: byte 0xe9"),
        ("large.json", b" " * 300_000, "it is larger than 256 KiB"),
        ("other.json", b'{"a": 1}', "no system is recognised by its keys"),
        ("run.toml", b'composer3d = 1\nmodel = "m:f"\n', "run.toml: is a manifest of composer3d already, which check"),
        ("deep.json", b'{"train_batch_size": ' + b"[" * 100_000, "nested deeper than 32 levels"),
    ],
)
def test_what_cannot_be_read_is_told_at_once(folder, capsys, name, content, said):
    if content is not None:
        (folder / name).write_bytes(content)
    before = time.process_time()
    assert main(["import", name]) == 2
    assert said in capsys.readouterr().err
    assert time.process_time() - before < 20


def test_a_pipe_is_not_waited_for(folder, capsys):
    os.mkfifo(folder / "pipe.json")
    assert main(["import", "pipe.json"]) == 2
    assert "it is a FIFO" in capsys.readouterr().err


def test_a_system_is_misspelt(folder, capsys):
    (folder / "ds.json").write_text(SMALL)
    assert main(["import", "ds.json", "--from", "deepsped"]) == 2
    assert 'there is no importer for "deepsped"; did you mean "deepspeed"?' in capsys.readouterr().err


def test_a_model_that_is_not_on_this_machine_is_a_warning(folder):
    (folder / "a.yaml").write_text("base_model: someone/a-model\nmax_steps: 3\nlearning_rate: 1e-3\n")
    result = composer3d.import_config("a.yaml", data="synthetic")
    assert result.ok and 'hf = "someone/a-model"' in result.manifest
    (problem,) = result.problems
    assert problem.severity == "warning" and "there is no folder" in problem.message and problem.hint


@pytest.mark.parametrize("system", ["fsdp", "trainer"])
def test_classes_of_a_model_that_is_not_here_are_carried_and_not_sought_in_a_stand_in(tmp_path, system):
    options = {"fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer", "fsdp_forward_prefetch": False}
    if system == "trainer":
        options = {"fsdp": "full_shard auto_wrap", "fsdp_config": options, "max_steps": 3}
    path = tmp_path / "source.json"
    path.write_text(json.dumps(options))
    result = composer3d.import_config(path, system=system)
    assert result.ok, result.problems
    assert 'unit_classes = ["LlamaDecoderLayer"]' in result.manifest


def test_what_is_of_the_models_names_is_not_sought_in_a_stand_in(tmp_path):
    """Experts and patterns are of a model that is to be filled in."""
    path = tmp_path / "job.toml"
    path.write_text(
        '[model]\nname = "deepseek_v3"\nflavor = "16B"\n[training]\nsteps = 10\nseq_len = 64\n'
        "[parallelism]\nexpert_parallel_degree = 2\ndata_parallel_shard_degree = -1\n"
        '[quantize.linear.float8]\nenable_fsdp_float8_all_gather = false\nfilter_fqns = ["router.gate"]\n'
    )
    result = composer3d.import_config(path, system="torchtitan")
    assert result.ok, result.problems
    assert "[sharding.expert_parallel]" in result.manifest and "router.gate" in path.read_text()
    assert any('"FILL_IN:model" is to be filled in' in problem.message for problem in result.problems)


def test_a_model_beside_the_output_is_checked(folder, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path[:])
    (folder / "beside_the_output.py").write_text("from torch.nn import Linear as Model\n")
    (folder / "ds.json").write_text(SMALL)
    result = composer3d.import_config("ds.json", target="run", model="beside_the_output:Model", name="run.toml")
    assert not [problem for problem in result.problems if problem.table == "model" and "no module" in problem.message]


def test_a_loop_that_keeps_everything_has_an_empty_manifest(tmp_path):
    (tmp_path / "one.yaml").write_text("distributed_type: NO\nmixed_precision: no\nnum_processes: 1\n")
    result = composer3d.import_config(tmp_path / "one.yaml", system="accelerate")
    assert result.ok
    assert tomllib.loads(result.manifest) == {"composer3d": 1}
