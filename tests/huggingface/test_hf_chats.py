"""Instruction data of Hugging Face models: packed chats, told by their positions, against every chat alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support.huggingface import make
from support.training import start

from composer3d.composition.loop.sampling import indices
from composer3d.huggingface.folder import import_transformers
from composer3d.manifest import load_manifest
from composer3d.runner import TABLES
from composer3d.runner.data import open_source
from composer3d.runner.reporting.metrics import read_metrics
from composer3d.testing import run_ranks

MANIFEST = """
composer3d = 1
model = { hf = "llama", dtype = "float64" }
train = { steps = 2, global_batch = 4, microbatch = 2, grad_clip = inf }
optimizer = { use = "sgd", lr = 0.05, momentum = 0.0, weight_decay = 0.0 }
lr_schedule.use = "constant"
run.device = "cpu"
data = { use = "chats.jsonl", seq_len = 32, evaluation_fraction = 0.0, chat = { packing = true } }
"""
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {% if m.role == 'assistant' %}{% generation %}{{ m.content }} {{ eos_token }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %} {% endfor %}"
)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    import_transformers()
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("chats")
    model = Path(make("llama", folder / "llama", dtype=torch.float64))
    words = "<end> ? user assistant a text of some length".split()
    tokenizer = Tokenizer(models.WordLevel({word: place for place, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "<end>"}}))
    (model / "chat_template.jinja").write_text(TEMPLATE)
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(32):
            said = [" ".join(words[4 : 5 + number % 5]), " ".join(words[8 - number % 4 :])]
            turns = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said, strict=True)]
            file.write(json.dumps({"messages": turns}) + "\n")
    (folder / "run.toml").write_text(MANIFEST + "[sharding.fsdp2]\n")
    return folder


def loop(folder):
    """Train on one device, each chat alone, without positions; return the losses of steps."""
    from transformers import AutoModelForCausalLM

    from composer3d.runner.tokenizer import with_tokenizer

    manifest = with_tokenizer(load_manifest(folder / "run.toml", tables=TABLES))
    source = open_source(manifest.tables["data"], seed=0, folder=folder, cache=folder / "cache")
    model = AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float64)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(2):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for number in indices(step * 4, 4, size=len(source), seed=0, shuffle=True).tolist():
            inputs, targets = source[number]
            firsts = [*(inputs.kwargs["position_ids"] == 0).nonzero()[:, 0].tolist(), len(targets)]
            assert len(firsts) > 2
            for first, end in zip(firsts, firsts[1:], strict=False):
                logits = model(inputs.args[0][None, first:end]).logits[0]
                total = total + F.cross_entropy(logits, targets[first:end], reduction="sum")
            count += int((targets >= 0).sum())
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        losses.append((total / count).item())
    return losses


def test_packed_chats_of_a_hugging_face_model_are_each_chat_alone(written):
    start(written / "run.toml", 2)
    losses = [row["loss"] for row in read_metrics(written / "out" / "metrics.jsonl")]
    ((alone,),) = [run_ranks(loop, 1, written)]
    assert losses == pytest.approx(alone, rel=1e-12, abs=0)


@pytest.mark.parametrize("verb", [("check",), ("plan", "--world-size", "2")])
def test_check_and_plan_take_chats(written, verb, command):
    code, out, err = command(verb[0], written / "run.toml", *verb[1:])
    assert code == 0, out + err
