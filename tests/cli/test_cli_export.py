from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from composer3d import checkpoint


@pytest.fixture
def weights():
    generator = torch.Generator().manual_seed(0)
    return {
        "head.weight": torch.randn(64, 32, generator=generator),
        "head.bias": torch.randn(64, generator=generator),
        "steps": torch.tensor([3]),
    }


@pytest.fixture
def run(tmp_path, monkeypatch, weights):
    """A run's folder with two checkpoints; the older one holds zeros."""
    monkeypatch.chdir(tmp_path)
    for step, values in ((1, {key: torch.zeros_like(tensor) for key, tensor in weights.items()}), (2, weights)):
        tensors = {f"model/{key}": tensor for key, tensor in values.items()}
        tensors["optimizer/head.weight/exp_avg"] = torch.ones(64, 32)
        checkpoint.save(tmp_path / "run" / "checkpoints" / f"step-{step}", tensors=tensors, state={})
    return tmp_path / "run"


def same(found, expected):
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("source", ["run", "run/checkpoints", "run/checkpoints/step-2"])
def test_the_newest_weights_of_a_run_under_their_own_names(source, run, command, weights):
    code, out, err = command("export", source, "--to", "out")
    assert (code, err) == (0, "")
    assert out == "run/checkpoints/step-2 -> out/model.safetensors: 3 tensors, 0.0 MiB\n"
    same(load_file("out/model.safetensors"), weights)
    assert sorted(path.name for path in (run.parent / "out").iterdir()) == ["model.safetensors"]
    with safe_open("out/model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_another_checkpoint_into_a_file(run, command, weights):
    assert command("export", "run/checkpoints/step-1", "--to", "deep/old.safetensors")[0] == 0
    same(load_file("deep/old.safetensors"), {key: torch.zeros_like(tensor) for key, tensor in weights.items()})


def test_a_dtype_is_for_floating_point_tensors(run, command, weights):
    assert command("export", "run", "--to", "out", "--dtype", "bfloat16")[0] == 0
    same(
        load_file("out/model.safetensors"),
        {key: tensor.bfloat16() if tensor.is_floating_point() else tensor for key, tensor in weights.items()},
    )


def test_large_models_become_several_files_with_an_index(run, command, weights):
    code, out, _ = command("export", "run", "--to", "out", "--max-shard", "8200")
    assert (code, out.count(".safetensors")) == (0, 2)
    index = json.loads((run.parent / "out" / "model.safetensors.index.json").read_text())
    size_bytes = sum(tensor.numel() * tensor.itemsize for tensor in weights.values())
    assert index == {
        "metadata": {"total_size": size_bytes},
        "weight_map": {
            "head.bias": "model-00001-of-00002.safetensors",
            "head.weight": "model-00002-of-00002.safetensors",
            "steps": "model-00002-of-00002.safetensors",
        },
    }
    found = {}
    for name in sorted(set(index["weight_map"].values())):
        found |= load_file(f"out/{name}")
    same(found, weights)


def test_files_are_as_readable_as_others(run, command):
    command("export", "run", "--to", "out")
    (run.parent / "other").touch()
    assert (run.parent / "out" / "model.safetensors").stat().st_mode == (run.parent / "other").stat().st_mode


def test_what_is_there_is_not_overwritten(run, command):
    assert command("export", "run", "--to", "out")[0] == 0
    told = "out/model.safetensors exists and is not overwritten; name another place with --to\n"
    assert command("export", "run", "--to", "out") == (2, "", told)


def test_one_file_that_is_too_small(run, command):
    told = "a.safetensors: one file would have 8456 bytes; name a folder, or raise --max-shard\n"
    assert command("export", "run", "--to", "a.safetensors", "--max-shard", "8KiB") == (2, "", told)


def test_checkpoints_that_are_not_there(run, command):
    assert command("export", "nowhere", "--to", "out") == (2, "", "nowhere: there is no checkpoint here\n")
    (run.parent / "fresh" / "checkpoints").mkdir(parents=True)
    assert command("export", "fresh", "--to", "out") == (2, "", "fresh: this run has no complete checkpoint\n")
    (run / "checkpoints" / "step-2" / ".metadata").unlink()
    code, _, err = command("export", "run/checkpoints/step-2", "--to", "out")
    assert (code, err) == (
        2,
        "run/checkpoints/step-2: half-written, or no checkpoint: .metadata is missing; complete ones there: step-1\n",
    )
    assert not (run.parent / "out").exists()


def test_a_checkpoint_without_a_model(run, command):
    checkpoint.save(run.parent / "other" / "step-1", tensors={"attached/x": torch.ones(1)}, state={})
    told = "other/step-1: holds no weights of a model\n"
    assert command("export", "other/step-1", "--to", "out") == (2, "", told)


def test_a_malicious_checkpoint_is_refused_and_does_nothing(run, command):
    (run / "checkpoints" / "step-2" / ".metadata").write_bytes(b"cos\nsystem\n(S'touch stolen'\ntR.")
    code, out, err = command("export", "run/checkpoints/step-2", "--to", "out")
    assert (code, out) == (2, "")
    assert "refused, nothing was executed" in err
    assert not (run.parent / "stolen").exists()


@pytest.mark.parametrize("place", ["taken", "taken/below"])
def test_a_place_that_cannot_be_a_folder_is_named(place, run, command):
    (run.parent / "taken").write_text("")
    code, out, err = command("export", "run", "--to", place)
    assert (code, out) == (2, "")
    assert f"{place}: {place} is no folder and cannot be made one; name another place with --to" in err
