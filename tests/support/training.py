"""A tiny run: two layers of width 32 on random tokens, and its files."""

from __future__ import annotations

from dataclasses import asdict

from torch import nn

from composer3d.manifest import load_manifest
from composer3d.runner import TABLES, train
from composer3d.runner.reporting.metrics import read_metrics
from composer3d.testing import run_ranks

MANIFEST = """
composer3d = 1
model.args = { dim = 32, num_layers = 2, num_heads = 2, dropout = 0.1 }
data = { use = "synthetic", seq_len = 16, vocab_size = 32 }
train = { steps = 12, global_batch = 8, microbatch = 2 }
optimizer.lr = 1e-2
lr_schedule.use = "constant"
run.device = "cpu"
[sharding.fsdp2]
"""


class Normed(nn.Module):
    """A token model with batch statistics."""

    def __init__(self, vocab_size=32):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, vocab_size)

    def forward(self, tokens):
        return self.out(self.norm(self.tok(tokens).flatten(0, 1)).unflatten(0, tokens.shape)) + 0.0


def normed(vocab_size=32):
    return Normed(vocab_size)


def write(folder, text=MANIFEST):
    path = folder / "run.toml"
    path.write_text(text)
    return path


def start(path, world_size, *overrides, resume="auto", output=None, silent=True):
    """Train on real ranks; return the first rank's outcome, after checking that the others ended alike."""
    sets = [f'run.output="{output or path.parent / "out"}"', *overrides]

    def rank():
        return asdict(train(load_manifest(path, tables=TABLES, overrides=sets), resume=resume, silent=silent))

    results = run_ranks(rank, world_size)
    assert all(result == results[0] for result in results)
    return results[0]


def losses(output):
    return [row["loss"] for row in read_metrics(output / "metrics.jsonl")]
