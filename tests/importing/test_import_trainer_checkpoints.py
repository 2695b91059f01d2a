"""Checkpoints of transformers' Trainer: what it wrote is imported with its moments, by name."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from support.huggingface import batch, make

from composer3d.checkpoint import read_tensors
from composer3d.huggingface.folder import import_transformers
from composer3d.importing.foreign_checkpoints import import_checkpoint


class Rows(torch.utils.data.Dataset):
    """Eight rows of tokens."""

    def __init__(self):
        self.tokens, _ = batch(8)

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, number):
        return {"input_ids": self.tokens[number], "labels": self.tokens[number]}


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def trained(request, tmp_path_factory):
    """Train three steps with the Trainer; return its checkpoint, and the moments by name."""
    import_transformers()
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

    root = tmp_path_factory.mktemp(request.param)
    model = AutoModelForCausalLM.from_pretrained(make(request.param, root / "model"))
    arguments = TrainingArguments(
        output_dir=str(root / "out"),
        max_steps=3,
        save_steps=3,
        weight_decay=0.1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    state = trainer.optimizer.optimizer.state if hasattr(trainer.optimizer, "optimizer") else trainer.optimizer.state
    return root / "out" / "checkpoint-3", {name: state[p] for name, p in model.named_parameters()}


def test_the_trainers_moments_are_those_of_its_parameters(trained, tmp_path):
    folder, moments = trained
    result = import_checkpoint(folder, tmp_path / "own")
    assert result.step == 3 and result.num_states == len(moments)
    assert not any("optimizer" in line for line in result.skipped)
    kinds = ("exp_avg", "exp_avg_sq")
    found = dict(read_tensors(result.path, [f"optimizer/{name}/{kind}" for name in moments for kind in kinds]))
    for name, state in moments.items():
        for kind in kinds:
            assert torch.equal(found[f"optimizer/{name}/{kind}"], state[kind]), (name, kind)


def test_groups_of_a_program_s_own_are_not_guessed(trained, tmp_path):
    folder, _ = trained
    content = torch.load(folder / "optimizer.pt", weights_only=True)
    content["param_groups"][0]["params"] = content["param_groups"][0]["params"][:-1]
    copied = tmp_path / "checkpoint-3"
    copied.mkdir()
    for name in ("config.json", "model.safetensors"):
        (copied / name).write_bytes((folder / name).read_bytes())
    torch.save(content, copied / "optimizer.pt")
    result = import_checkpoint(copied, tmp_path / "own")
    assert result.num_states == 0 and len(load_file(folder / "model.safetensors")) == result.num_weights
    assert result.skipped[0] == (
        "optimizer.pt: numbers parameters in no order that fits the model: some may be frozen, or in groups of a "
        "program's own"
    )
