"""transformers' Trainer under a manifest, beside itself on one process."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from support.models import write_manifest

from composer3d import ComposerError
from composer3d.testing import run_ranks

pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
LAYOUTS = {
    "fsdp2": "[sharding.fsdp2]\n",
    "ddp": "[sharding.ddp]\n",
    "tp": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n",
}
SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}


def model():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    heads = {"num_attention_heads": 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **heads))


def dataset(seed, num):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(1, 32, (num, 8), generator=generator)
    lengths = torch.randint(0, 5, (num,), generator=generator)
    labels = [torch.where(torch.arange(8) < length, -100, row) for row, length in zip(rows, lengths, strict=True)]
    return [{"input_ids": row, "labels": label} for row, label in zip(rows, labels, strict=True)]


def accuracy(prediction):
    return {"right": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def arguments(folder, readers, **more):
    from transformers import TrainingArguments

    defaults = {
        "per_device_train_batch_size": 4 // readers, "per_device_eval_batch_size": 4 // readers,
        "gradient_accumulation_steps": 2, "num_train_epochs": 2, "learning_rate": 1e-2, "weight_decay": 0.1,
        "lr_scheduler_type": "cosine", "warmup_steps": 2, "logging_steps": 1, "eval_strategy": "steps",
        "eval_steps": 3, "save_strategy": "steps", "save_steps": 3, "max_grad_norm": 0.5, "report_to": "none",
        "use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**defaults, **more})


def rows(trainer):
    kept = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right")
    return [{key: row[key] for key in kept if key in row} for row in trainer.state.log_history]


def as_torchrun():
    """Set torchrun's environment, which accelerate reads, for the group that exists; without a world none."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    if torch.distributed.is_initialized():
        rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        os.environ.update(zip(names, map(str, (rank, rank, size, size)), strict=True))
    else:
        for name in names:
            os.environ.pop(name, None)


def trained(manifest, folder, resume, more):
    """Train on this rank, stopped and resumed if asked; return the logged rows and the weights."""
    from composer3d.integrations.transformers import Composer3DTrainer

    torch.set_default_dtype(torch.float64)
    as_torchrun()
    readers = 1 if "tensor_parallel" in manifest else 2
    data = {"train_dataset": dataset(2, 24), "eval_dataset": dataset(3, 8), "compute_metrics": accuracy}

    def make():
        return Composer3DTrainer(model(), arguments(folder, readers, **more), manifest=write_manifest(manifest), **data)

    trainer = make()
    result = trainer.train(resume_from_checkpoint=resume)
    trainer.save_model(str(folder / "last"))
    return rows(trainer), result.training_loss


def alone(folder, more):
    from transformers import Trainer

    torch.set_default_dtype(torch.float64)
    torch.distributed.destroy_process_group()
    as_torchrun()
    data = {"train_dataset": dataset(2, 24), "eval_dataset": dataset(3, 8), "compute_metrics": accuracy}
    trainer = Trainer(model(), arguments(folder, 1, **more), **data)
    result = trainer.train()
    trainer.save_model(str(folder / "last"))
    return rows(trainer), result.training_loss


def assert_alike(found, wanted):
    assert len(found) == len(wanted)
    for row, other in zip(found, wanted, strict=True):
        assert row.keys() == other.keys()
        # The Trainer keeps sums of losses, and models compute them of logits, in float32.
        assert max((abs(row[key] - other[key]) for key in row), default=0.0) < 2e-6, (row, other)


def weights(folder):
    from safetensors.torch import load_file

    return load_file(Path(folder, "last", "model.safetensors"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_logs_evaluates_and_saves_what_it_does_on_one_process(layout, tmp_path):
    (wanted, loss), *_ = run_ranks(alone, 1, tmp_path / "alone", {})
    for found, own_loss in run_ranks(trained, 2, LAYOUTS[layout], tmp_path / "together", None, {}):
        assert_alike(found, wanted)
        assert abs(own_loss - loss) < 2e-6
    assert sorted(path.name for path in Path(tmp_path, "together").iterdir()) == [
        "checkpoint-3",
        "checkpoint-6",
        "last",
    ]
    one, two = weights(tmp_path / "alone"), weights(tmp_path / "together")
    assert one.keys() == two.keys()
    assert max(float((one[key] - two[key]).abs().max()) for key in one) < 1e-7


@pytest.mark.slow
def test_it_resumes_in_another_layout(tmp_path):
    (wanted, _), *_ = run_ranks(alone, 1, tmp_path / "alone", {})
    run_ranks(trained, 2, LAYOUTS["fsdp2"], tmp_path / "together", None, {"save_total_limit": 2})
    checkpoint = str(tmp_path / "together" / "checkpoint-3")
    for found, _ in run_ranks(trained, 2, LAYOUTS["tp"], tmp_path / "resumed", checkpoint, {}):
        assert_alike(found, wanted)


def predicted(folder, manifest):
    """Evaluate before training, then predict samples that do not divide into batches; return both."""
    torch.set_default_dtype(torch.float64)
    data = {"eval_dataset": dataset(3, 8), "compute_metrics": accuracy}
    if manifest is None:
        from transformers import Trainer

        torch.distributed.destroy_process_group()
        as_torchrun()
        trainer = Trainer(model(), arguments(folder, 1), **data)
    else:
        from composer3d.integrations.transformers import Composer3DTrainer

        as_torchrun()
        readers = 1 if "tensor_parallel" in manifest else 2
        trainer = Composer3DTrainer(model(), arguments(folder, readers), manifest=write_manifest(manifest), **data)
    return trainer.evaluate()["eval_loss"], torch.from_numpy(trainer.predict(dataset(3, 10)).predictions)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp2", "tp"])
def test_it_evaluates_and_predicts_without_training(layout, tmp_path):
    ((loss, wanted),) = run_ranks(predicted, 1, tmp_path, None)
    for own_loss, found in run_ranks(predicted, 2, tmp_path, LAYOUTS[layout]):
        assert abs(own_loss - loss) < 2e-6 and found.shape == wanted.shape
        assert float((found - wanted).abs().max()) < 1e-12


def refused(folder):
    from composer3d.integrations.transformers import Composer3DTrainer

    torch.distributed.destroy_process_group()
    as_torchrun()
    with pytest.raises(ComposerError) as error:
        arguments_ = arguments(folder, 1, activation_checkpointing=True, eval_strategy="no")
        Composer3DTrainer(model(), arguments_, manifest=write_manifest("[sharding.fsdp2]\n"))
    return str(error.value)


def test_arguments_that_the_manifest_replaces_are_refused(tmp_path):
    (message,) = run_ranks(refused, 1, tmp_path)
    assert message == (
        "these training arguments are the manifest's to say: activation_checkpointing (write a plugin of "
        "[scheduling]); `composer3d plugins` lists what there is"
    )
