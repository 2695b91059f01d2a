"""Narrow dtypes with sequences sharded over cp: rounded no more than by data parallelism over as many ranks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import largest, mine, write_manifest

import composer3d
from composer3d import torch_compat
from composer3d.models import llama
from composer3d.testing import full, run_ranks

VOCAB = 64
# A sum in another order differs by about so much.
ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 1e-6}
TABLES = {
    "bf16": ('[precision.mixed]\nparam_dtype = "bfloat16"\n', "bfloat16"),
    "fp16": ('[precision.mixed]\nparam_dtype = "float16"\n', "float16"),
    "float8": ("[precision.float8]\n", "float32"),
    "mxfp8": ("[precision.mxfp8]\n", "float32"),
    "int8": ("[precision.int8]\n", "float32"),
    "qlora": ("[precision.qlora]\nrank = 4\n", "float32"),
    "qat": ("[precision.qat]\n", "float32"),
}


def factory():
    return llama(dim=64, num_layers=2, num_heads=4, num_kv_heads=2, vocab_size=VOCAB, ffn_dim=64, max_seq_len=32)


def loss_fn(logits, targets):
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return loss, (targets != -100).sum()


def gradients(text):
    """Return the gradients of one step, in full."""
    torch_compat.silence_redistribution()
    # Of these mxfp8 meets no value between two codes that the order of the ring's sums decides on.
    tokens = torch.randint(0, VOCAB, (4, 33), generator=torch.Generator().manual_seed(4))
    targets = tokens[:, 1:].masked_fill(torch.arange(32) < 3, -100)
    with (
        composer3d.compose(
            factory, write_manifest(text.removeprefix("composer3d = 1\n")), loss_fn=loss_fn, device="cpu"
        ) as run,
        run.step(0),
    ):
        run.forward_backward(mine(run, tokens[:, :-1].contiguous()), target=mine(run, targets))
        return {
            name: run.context.in_model_order(name, full(parameter.grad)).float().clone()
            for name, parameter in run.named_parameters()
            if parameter.grad is not None
        }


def error(found, reference):
    assert found.keys() == reference.keys()
    return largest(
        float((found[name] - g).abs().max() / g.abs().max().clamp_min(1e-9)) for name, g in reference.items()
    )


@pytest.mark.parametrize(
    "name", [each if each in ("bf16", "int8") else pytest.param(each, marks=pytest.mark.slow) for each in TABLES]
)
def test_rounding_is_that_of_data_parallelism(name):
    table, dtype = TABLES[name]
    text = f"composer3d = 1\n[sharding.fsdp2]\n{table}[mesh]\n"
    (one,) = run_ranks(gradients, 1, text)
    samples = error(run_ranks(gradients, 2, f"{text}dp_shard = 2\n")[0], one)
    for method in ("ring", "ulysses"):
        tables = f'{text}cp = 2\n[sharding.context_parallel]\nmethod = "{method}"\n'
        first, second = run_ranks(gradients, 2, tables)
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert error(first, one) <= 2 * max(samples, ROUNDING[dtype])
