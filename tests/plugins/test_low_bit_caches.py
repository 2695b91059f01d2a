"""Formats, dtypes and settings of quantised moments beside each other in one process.

torchao compiles a step for each of them, and the compiler's caches take one for another; here nothing is compiled.
"""

from __future__ import annotations

import torch
from support.models import composed, padded, seeded
from torch import nn

from composer3d import torch_compat
from composer3d.testing import run_ranks

# Before ranks are forked: each of them would import it anew.
for name in ("8bit", "4bit", "fp8"):
    torch_compat.import_torchao(f"torchao.optim.subclass_{name}")

VOCAB = 11
# Each: format, dtype of weights, width, further keys.
CASES = [
    ("8bit", torch.float32, 64, ""),
    ("4bit", torch.bfloat16, 96, ""),
    ("fp8", torch.float32, 64, ""),
    ("8bit", torch.bfloat16, 64, "block_size = 128\n"),
    ("4bit", torch.float32, 64, "block_size = 32\n"),
    ("fp8", torch.bfloat16, 128, "min_numel = 1\n"),
]


def model(dim):
    return nn.Sequential(nn.Embedding(VOCAB, dim), nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, VOCAB))


def stepped(kind, dtype, dim, more):
    """Take three steps; return the weights and what moments are kept in."""
    table = f'[precision.low_bit_optimizer]\nformat = "{kind}"\n{more}'
    run = composed(table, seeded(model, dim=dim).to(dtype))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = padded()
    for number in range(3):
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: p.detach().clone() for name, p in run.named_parameters()}
    kept = {type(state["exp_avg"]).__name__ for state in optimizer.state.values()}
    run.close()
    return weights, kept


def one_after_the_other(cases):
    from torch._dynamo.utils import counters

    counters.clear()  # of what this process was forked from
    return [stepped(*case) for case in cases], {name: dict(counts) for name, counts in counters.items() if counts}


def test_runs_in_one_process_are_those_in_processes_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    together, compiled = run_ranks(one_after_the_other, 1, [*CASES, *reversed(CASES)])[0]
    alone = [run_ranks(stepped, 1, *case)[0] for case in CASES]
    for (weights, kept), (wanted, wanted_kept) in zip(together, [*alone, *reversed(alone)], strict=True):
        assert kept == wanted_kept
        assert weights.keys() == wanted.keys()
        assert all(torch.equal(weights[name], value) for name, value in wanted.items())
    names = [min(kept - {"Tensor"}) for _, kept in alone]
    assert names == [{"8bit": "OptimState8bit", "4bit": "OptimState4bit", "fp8": "OptimStateFp8"}[c[0]] for c in CASES]
    assert not compiled and list(tmp_path.iterdir()) == []
