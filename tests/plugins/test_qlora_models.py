"""Adapters of runs: a Hugging Face model, resume, and the merged model, which computes what the run computed."""

from __future__ import annotations

import json

import pytest
import torch
from support.huggingface import make
from support.training import losses, start

from composer3d import CheckpointError, torch_compat
from composer3d.checkpoint import contents, find_checkpoint
from composer3d.huggingface.folder import import_transformers
from composer3d.runner.weights.merged_weights import MergedWeights
from composer3d.runner.weights.weight_export import export, find_description

torch_compat.import_torchao("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")
import_transformers()

HF = """\
composer3d = 1
model.hf = "llama"
data = { use = "text.txt", seq_len = 16, tokenizer = "bytes" }
train = { steps = 6, global_batch = 4, microbatch = 2 }
optimizer.lr = 2e-2
lr_schedule.use = "constant"
run.device = "cpu"
evaluation = { every = 6, batches = 2 }
[sharding.fsdp2]
[precision.qlora]
rank = 4
"""
OWN = """\
composer3d = 1
model.args = { dim = 64, num_layers = 2, num_heads = 2 }
data = { use = "synthetic", seq_len = 16, vocab_size = 32 }
train = { steps = 4, global_batch = 4, microbatch = 2 }
run.device = "cpu"
evaluation = { every = 4, batches = 2 }
[sharding.fsdp2]
[precision.qlora]
rank = 4
"""


def write(folder, text):
    path = folder / "run.toml"
    path.write_text(text)
    return path


def merged(run, to):
    path = find_checkpoint(run)
    return export(path, to=to, description=find_description(path), merged=MergedWeights.open(path))


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def evaluated(model, text, folder):
    """Return the loss on what the run held out, batch by batch as its ranks cut it."""
    from composer3d.manifest import load_manifest
    from composer3d.runner import TABLES
    from composer3d.runner.data import Loader, open_source

    manifest = load_manifest(write(folder, text), tables=TABLES)
    source = open_source(manifest.tables["data"], seed=0, folder=folder, cache=folder / "cache")
    loader = Loader(
        source,
        manifest.tables["data"],
        seed=0,
        rank=0,
        degree=1,
        batch_size_of=lambda step: 4,
        position_of=lambda step: 4 * step,
        vocab_size=None,
    )
    total = count = 0.0
    with torch.no_grad():
        for batch in loader.evaluation_batches(2, batch_size=4):
            logits = model(batch.tokens)
            logits = getattr(logits, "logits", logits)
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="sum")
            total, count = total + float(loss), count + batch.targets.numel()
    loader.close()
    return total / count


@pytest.mark.parametrize("quantise", ["nf4", pytest.param("none", marks=pytest.mark.slow)])
def test_a_hugging_face_model_is_trained_and_merged(tmp_path, quantise):
    make("llama", tmp_path / "llama", hidden_size=64, intermediate_size=128, vocab_size=256)
    (tmp_path / "text.txt").write_text("a text of some length " * 400)
    text = HF + f'quantize = "{quantise}"\n'
    path = write(tmp_path, text)
    start(path, 2, "checkpoint.every=3", "checkpoint.keep=4")
    found = losses(tmp_path / "out")
    assert found[-1] < found[0]
    keys = [key for key in contents(find_checkpoint(tmp_path / "out")) if key.startswith("model/")]
    assert len(keys) == 2 * 2 * 7 and all("lora_" in key for key in keys)
    # Resumed from its adapters alone, it is the same run to the last bit.
    start(path, 2, output=tmp_path / "again", resume=str(tmp_path / "out" / "checkpoints" / "step-3"))
    assert losses(tmp_path / "again") == found[3:]
    with pytest.raises(CheckpointError, match="holds adapters such as .*export it with --merge"):
        newest = find_checkpoint(tmp_path / "out")
        export(newest, to=tmp_path / "alone", description=find_description(newest))
    merged(tmp_path / "out", tmp_path / "merged")
    from transformers import AutoModelForCausalLM

    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    wanted = rows(tmp_path / "out")[-1]["evaluation_loss"]
    assert evaluated(model, text, tmp_path) == pytest.approx(wanted, rel=1e-5)


def test_a_model_of_ones_own_is_merged_from_its_seed(tmp_path):
    from safetensors.torch import load_file

    from composer3d.models import llama

    path = write(tmp_path, OWN)
    start(path, 2)
    merged(tmp_path / "out", tmp_path / "merged.safetensors")
    weights = load_file(tmp_path / "merged.safetensors")
    model = llama(dim=64, num_layers=2, num_heads=2, vocab_size=32, max_seq_len=16)
    told = model.load_state_dict(weights, strict=False)
    assert not told.unexpected_keys and not any("weight" in key for key in told.missing_keys)
    wanted = rows(tmp_path / "out")[-1]["evaluation_loss"]
    assert evaluated(model, OWN, tmp_path) == pytest.approx(wanted, rel=1e-5)


def test_refuses_to_merge_what_is_whole_or_has_lost_its_manifest(tmp_path):
    start(write(tmp_path, OWN.partition("[precision.qlora]")[0]), 1)
    with pytest.raises(CheckpointError, match="holds all weights, there is nothing to merge"):
        MergedWeights.open(find_checkpoint(tmp_path / "out"))
    (tmp_path / "out" / "manifest.toml").unlink()
    with pytest.raises(CheckpointError, match="leave the checkpoint in the run's folder"):
        MergedWeights.open(find_checkpoint(tmp_path / "out"))
