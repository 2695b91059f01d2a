"""Rows of several chats against every chat alone on one device: losses of steps depend on all gradients before."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import plain_models
from support.plain_models import settled
from support.training import start

from composer3d.composition.loop.sampling import indices
from composer3d.manifest import load_manifest
from composer3d.models import llama, moe
from composer3d.runner import TABLES
from composer3d.runner.data import open_source
from composer3d.runner.reporting.metrics import read_metrics
from composer3d.testing import run_ranks

STEPS, BATCH = 3, 4
MODELS = """
from plain_models import settled
from composer3d.models import llama, moe

SIZES = dict(dim=16, num_layers=2, num_heads=2, vocab_size=256)

def decoder():
    return settled(llama(**SIZES))

def mixture():
    return settled(moe(**SIZES, num_experts=2, top_k=1, balance_loss=0.0))
"""
MANIFEST = """
composer3d = 1
model = { use = "chat_models:MODEL", build = "host" }
train = { steps = 3, global_batch = 4, microbatch = 1, grad_clip = inf }
optimizer = { use = "sgd", lr = 0.05, momentum = 0.0, weight_decay = 0.0 }
lr_schedule.use = "constant"
evaluation = { every = 3, batches = 1 }
run.device = "cpu"
[data]
DATA
documents = { positions = "positions", numbers = "documents"ENDS }
"""
CHATS = 'use = "chats.jsonl"\nseq_len = 64\nchat = { template = "chatml", packing = true }\nevaluation_fraction = 0.25'
TOKENS = 'use = "tokens.bin"\nseq_len = 32\nvocab_size = 256'
LAYOUTS = {
    "fsdp2": "[sharding.fsdp2]\n",
    "tensor parallel": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true\n",
    "context parallel": "[mesh]\ncp = 2\n[sharding.fsdp2]\n[sharding.context_parallel]\n",
    "pipeline": "[mesh]\npp = 2\n[scheduling.pipeline]\n",
}


def write_chats(folder):
    words = random.Random(0)
    with (folder / "chats.jsonl").open("w") as file:
        for number in range(48):
            said = ["".join(words.choices("abcdef", k=words.randint(1, 4))) for _ in range(2)]
            asked = {"messages": [{"role": "u", "content": said[0]}, {"role": "assistant", "content": said[1]}]}
            file.write(json.dumps(asked if number % 2 else {"prompt": said[0], "completion": said[1] * 3}) + "\n")


def documents_of(row):
    """Return (tokens, targets) of each document of a row alone, by the numbers that the model is given."""
    inputs, targets = row
    numbers = inputs.kwargs["documents"]
    return [(inputs.args[0][numbers == n], targets[numbers == n]) for n in numbers.unique().tolist()]


def loop(path, name):
    """Train on one device, each document alone; return the losses of steps, and of what is held out."""
    manifest = load_manifest(path, tables=TABLES)
    folder = path.parent
    source = open_source(manifest.tables["data"], seed=0, folder=folder, cache=folder / "cache")
    sizes = {"dim": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 256}
    model = settled(llama(**sizes) if name == "decoder" else moe(**sizes, num_experts=2, top_k=1, balance_loss=0.0))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def loss_of(rows):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for tokens, targets in (document for row in rows for document in documents_of(row)):
            total = total + F.cross_entropy(model(tokens[None])[0], targets, reduction="sum")
            count += int((targets >= 0).sum())
        return total / count

    losses = []
    for step in range(STEPS):
        numbers = indices(step * BATCH, BATCH, size=len(source), seed=0, shuffle=True)
        loss = loss_of([source[int(number)] for number in numbers])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return losses, float(loss_of([source.evaluation[number] for number in range(BATCH)]))


def prepared(folder, data, layout, *, model="decoder", ends=""):
    shutil.copy(Path(plain_models.__file__), folder / "plain_models.py")
    (folder / "chat_models.py").write_text(MODELS)
    text = MANIFEST.replace("MODEL", model).replace("DATA", data).replace("ENDS", ends)
    (folder / "run.toml").write_text(text + LAYOUTS[layout])
    return folder / "run.toml"


def assert_equal_to_one_device(path, model="decoder"):
    start(path, 2)
    rows = list(read_metrics(path.parent / "out" / "metrics.jsonl"))
    ((losses, held_out),) = run_ranks(loop, 1, path, model)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-12, abs=0)
    assert rows[-1]["evaluation_loss"] == pytest.approx(held_out, rel=1e-12, abs=0)
    return losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_chats_are_each_chat_alone(layout, tmp_path):
    write_chats(tmp_path)
    assert_equal_to_one_device(prepared(tmp_path, CHATS, layout))


def test_packed_chats_of_a_mixture_are_each_chat_alone(tmp_path):
    write_chats(tmp_path)
    assert_equal_to_one_device(prepared(tmp_path, CHATS, "fsdp2", model="mixture"), "mixture")


def test_documents_of_token_files_are_each_document_alone(tmp_path):
    tokens = torch.randint(0, 24, (2048,), generator=torch.Generator().manual_seed(0))
    (tmp_path / "tokens.bin").write_bytes(tokens.to(torch.uint16).numpy().tobytes())
    ends = ", end = 0, loss_after_end = false"
    assert_equal_to_one_device(prepared(tmp_path, TOKENS, "fsdp2", ends=ends))
