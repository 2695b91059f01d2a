"""Checkpoints of other systems, converted: a run goes on as if it had not been another system's."""

from __future__ import annotations

import json
import os
import pickle

import pytest
import torch
from safetensors.torch import save_file
from support.foreign_checkpoints import WRITERS, trained, write_universal, write_weights, write_zero_2
from support.models import composed, mean_loss, mine, seeded, unpadded
from support.training import MANIFEST, write
from support.training import start as start_run
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from composer3d import CheckpointError
from composer3d.checkpoint import contents, read_state, read_tensors
from composer3d.cli import main
from composer3d.importing.foreign_checkpoints import import_checkpoint
from composer3d.runner.reporting.metrics import read_metrics
from composer3d.testing import run_ranks

LAYOUT = "[sharding.fsdp2]\n"


def start():
    torch.set_default_dtype(torch.float64)
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
    return model, optimizer, [unpadded(seed=seed) for seed in range(5)]


def written(folder, write):
    """Train three steps and write them; return the losses of the two steps that follow."""
    model, optimizer, batches = start()
    trained(model, optimizer, batches[:3], mean_loss)
    write(folder / "step-3", model, optimizer, 3)
    return trained(model, optimizer, batches[3:], mean_loss)


def gone_on(folder):
    """Load what was imported into two ranks, and take two steps; return the losses."""
    torch.set_default_dtype(torch.float64)
    run = composed(LAYOUT)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
    run.load(folder / "own")
    losses = []
    for number in (3, 4):
        tokens, targets = unpadded(seed=number)
        loss = run.backward(mean_loss(run.model(mine(run, tokens)), mine(run, targets)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("system", WRITERS)
def test_a_run_goes_on_with_weights_and_moments(system, tmp_path):
    (wanted,) = run_ranks(written, 1, tmp_path, WRITERS[system])
    result = import_checkpoint(tmp_path / "step-3", tmp_path / "own")
    assert result.path == tmp_path / "own" / "step-3" and result.step == 3
    assert result.num_weights == result.num_states == len(dict(seeded().named_parameters()))
    for found in run_ranks(gone_on, 2, tmp_path):
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-12


def test_weights_alone_begin_with_new_moments(tmp_path):
    run_ranks(written, 1, tmp_path, write_weights)
    result = import_checkpoint(tmp_path / "step-3", tmp_path / "own")
    assert (result.step, result.num_states) == (3, 0)
    assert result.skipped == (
        "optimizer.pt: numbers parameters in the order of a model, and no config.json beside it says which",
    )
    assert len(run_ranks(gone_on, 2, tmp_path)) == 2


class Bomb:
    def __reduce__(self):
        return os.system, ("touch exploded",)


def test_nothing_in_a_checkpoint_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_ranks(written, 1, tmp_path, write_zero_2)
    file = tmp_path / "step-3" / "mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=False)
    torch.save({**content, "args": Bomb()}, file)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)
    result = import_checkpoint(tmp_path / "step-3", tmp_path / "own")
    assert not (tmp_path / "exploded").exists()
    assert result.skipped == (
        "loss_scaler: an object of support.foreign_checkpoints.Scaler, which is not made",
        f"args: an object of {os.system.__module__}.system, which is not made",
    )


def test_pickled_entries_are_skipped_and_named(tmp_path):
    run_ranks(written, 1, tmp_path, WRITERS["torchtitan"])
    skipped = import_checkpoint(tmp_path / "step-3", tmp_path / "own").skipped
    assert "lr_scheduler: pickled, which is not read" in skipped
    assert "train_state.step: of the loop that wrote it" in skipped


def test_what_a_state_dict_holds_beside_tensors_is_named(tmp_path):
    content = {"state_dict": {"w": torch.ones(2), "extra": Bomb(), "num": 3}, "epoch": 4}
    torch.save(content, tmp_path / "model.pt")
    assert import_checkpoint(tmp_path / "model.pt", tmp_path / "own").skipped == (
        "epoch: beside the weights in model.pt",
        "extra: pickled, which is not read",
        "num: a int, no tensor",
    )


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"weight_map": {"w": "../a.safetensors"}}, "names '../a.safetensors' for w, which is no file beside it"),
        ({"weight_map": {"w": "/a.safetensors"}}, "names '/a.safetensors' for w, which is no file beside it"),
        ({"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}}, "names b.safetensors for v, and there is no"),
        ({"weight_map": {"w": "a.safetensors", "v": "a.safetensors"}}, "its index names v in a.safetensors, and no su"),
        ({"weights": {}}, "cannot be read: KeyError"),
        ([], "cannot be read: TypeError"),
        ({"weight_map": {"w": "a.safetensors"}}, None),
    ],
)
def test_an_index_of_weights_is_held_to(tmp_path, index, said):
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if said is None:
        assert not import_checkpoint(folder, tmp_path / "own").skipped
    else:
        assert said in refusal(folder, tmp_path)


def refusal(source, tmp_path, **options):
    with pytest.raises(CheckpointError) as error:
        import_checkpoint(source, tmp_path / "own", **options)
    return str(error.value).removeprefix(f"{source}: ")


def test_what_cannot_be_imported_is_refused(tmp_path):
    run_ranks(written, 1, tmp_path, write_zero_2)
    source = tmp_path / "step-3"
    assert refusal(tmp_path / "nothing", tmp_path) == "is not there"
    assert refusal(tmp_path, tmp_path).startswith("is no checkpoint of a system that is read: a folder with .metadata")
    assert refusal(source, tmp_path, names={"net.": ""}).startswith('no name begins with "net."; there are ')
    import_checkpoint(source, tmp_path / "own")
    assert "exists, and is not overwritten" in refusal(source, tmp_path)
    lost = source / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    whole = lost.read_bytes()
    lost.write_bytes(whole[: len(whole) // 2])
    assert "cannot be read" in refusal(source, tmp_path) or "archive" in refusal(source, tmp_path)
    lost.unlink()
    assert refusal(source, tmp_path) == "was written by 2 ranks, and has files of 1"
    (source / "zero_pp_rank_0_mp_rank_01_optim_states.pt").touch()
    assert refusal(source, tmp_path).startswith("its model was over several model-parallel ranks")


def test_the_command_writes_renames_and_reports(tmp_path, capsys):
    run_ranks(written, 1, tmp_path, write_universal)
    arguments = ["import", str(tmp_path / "step-3"), "--to", str(tmp_path / "own"), "--step", "7"]
    assert main([*arguments, "--rename", "layers.=blocks.", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    path = tmp_path / "own" / "step-7"
    assert report["path"] == str(path) and report["system"] == "deepspeed-universal" and report["step"] == 7
    assert any(key.startswith("model/blocks.0.") for key in contents(path))
    assert not any(key.startswith("model/layers.") for key in contents(path))
    assert read_state(path)["imported"] == "deepspeed-universal"
    assert main([*arguments, "--rename", "layers"]) == 2
    assert capsys.readouterr().err == "--rename layers: write OLD=NEW\n"


def as_torchtitan(saved, folder):
    """Write a run's checkpoint as torchtitan would have written it."""
    tensors = dict(read_tensors(saved, list(contents(saved))))
    state = {key.removeprefix("model/"): tensor for key, tensor in tensors.items() if key.startswith("model/")}
    for key, tensor in tensors.items():
        if key.startswith("optimizer/"):
            _, fqn, name = key.split("/")
            state[f"optimizer.state.{fqn}.{name}"] = tensor
    dcp.save(state, checkpoint_id=folder)


def test_a_run_resumes_from_what_was_imported(tmp_path):
    path = write(tmp_path, MANIFEST.replace(", dropout = 0.1", ""))
    start_run(path, 1, "checkpoint.every=3", "checkpoint.keep=9", output=tmp_path / "whole")
    run_ranks(as_torchtitan, 1, tmp_path / "whole" / "checkpoints" / "step-3", tmp_path / "titan" / "step-3")
    imported = import_checkpoint(tmp_path / "titan" / "step-3", tmp_path / "imported").path
    start_run(path, 2, resume=str(imported), output=tmp_path / "rest")
    rows, wanted = (list(read_metrics(tmp_path / name / "metrics.jsonl")) for name in ("rest", "whole"))
    assert [row["step"] for row in rows] == [row["step"] for row in wanted[3:]]
    for key in ("loss", "grad_norm", "lr"):
        assert [row[key] for row in rows] == pytest.approx([row[key] for row in wanted[3:]], rel=1e-5)


def written_by_fsdp(folder):
    """Train three steps of FSDP2 on two ranks, saved as torch's tutorial does; return the losses of two more."""
    torch.set_default_dtype(torch.float64)
    rank, model = torch.distributed.get_rank(), seeded()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.8, 0.9), weight_decay=0.1)
    batches = [tuple(each.chunk(2)[rank] for each in unpadded(seed=seed)) for seed in range(5)]
    trained(model, optimizer, batches[:3], mean_loss)
    state = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save({"app": state}, checkpoint_id=folder / "checkpoint" / "step-3")
    return trained(model, optimizer, batches[3:], mean_loss)


def test_what_fsdp_wrote_on_two_ranks_goes_on(tmp_path):
    (first, second) = run_ranks(written_by_fsdp, 2, tmp_path)
    result = import_checkpoint(tmp_path / "checkpoint" / "step-3", tmp_path / "own")
    assert result.step == 3 and any("app.optim.param_groups" in each for each in result.skipped)
    for found in run_ranks(gone_on, 2, tmp_path):
        assert found == pytest.approx([(a + b) / 2 for a, b in zip(first, second, strict=True)], abs=1e-12)
