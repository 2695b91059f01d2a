"""Losses put together at random, in a loop of one's own on two ranks with unequal targets, beside one device.

    python benchmarks/random_losses.py --count 300 --seed 0 [--tables '[sharding.ddp]']

A loss is the sum of one to three terms: means over targets that are valid, over all positions or over weights; sums
that the loop divides, with and without a bound; functions of a mean; terms of parameters; each alone, times a constant,
divided, or weighed by what is learned. Every third batch leaves its last samples without a target. In float64, value
and gradients are compared with plain autograd on the whole batch. A case is a function of its seed: `--count 1 --seed
9` repeats one. Exit code 1 if any differs, or raises what is no LossError.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import note, say
from torch import Tensor, nn

import composer3d
from composer3d.testing import run_ranks

__all__ = ["main"]

VOCAB, WIDTH, TOKENS = 7, 5, 11
SAMPLES, LENGTH = 6, 8
TOLERANCE = 1e-9
IGNORED = -100


class Net(nn.Module):
    """A token model that returns its logits and hidden state, with a learned weight of a task."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = (
            nn.Embedding(TOKENS, WIDTH),
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, VOCAB),
        )
        self.log_variance = nn.Parameter(torch.tensor(0.3))

    def forward(self, tokens_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits_BSV and the hidden state x_BSD."""
        x_BSD = torch.tanh(self.hidden(self.embedding(tokens_BS)))
        return self.head(x_BSD), x_BSD


@dataclass(frozen=True, kw_only=True)
class Given:
    """What a term is made of, of one rank's samples or of all.

    Args:
        model: Composed or not.
        logits: logits_NV of all N positions.
        hidden: x_BSD.
        targets: targets_N.
        mask: mask_N of zeros and ones, which has nothing to do with padding.
        weights: weights_N, positive.
    """

    model: nn.Module
    logits: Tensor
    hidden: Tensor
    targets: Tensor
    mask: Tensor
    weights: Tensor

    @property
    def valid(self) -> Tensor:
        """Where targets are no padding."""
        return self.targets != IGNORED

    @property
    def each(self) -> Tensor:
        """The loss of every position, 0 at padding."""
        return self.entropy(reduction="none")

    def entropy(self, **options: Any) -> Tensor:
        """Return the cross-entropy."""
        return F.cross_entropy(self.logits, self.targets, ignore_index=IGNORED, **options)


def _selected(given: Given) -> Tensor:
    chosen = given.logits.logsumexp(-1).square()[given.valid]
    return chosen.mean() if len(chosen) else given.logits.sum() * 0


TERMS: Mapping[str, Callable[[Given], Tensor]] = {
    "entropy": lambda g: g.entropy(),
    "entropy, smoothed": lambda g: g.entropy(label_smoothing=0.1),
    "entropy, class weights": lambda g: g.entropy(weight=torch.linspace(0.5, 2, VOCAB)),
    "sum / count, bounded": lambda g: g.each.sum() / g.valid.sum().clamp(min=1),
    "sum / largest of count and 1": lambda g: g.each.sum() / max(int(g.valid.sum()), 1),
    "sum / count and a constant": lambda g: g.each.sum() / (g.valid.sum() + 1e-8),
    "masked sum / mask": lambda g: (g.each * g.mask).sum() / g.mask.sum().clamp(min=1e-6),
    "masked sum by einsum": lambda g: torch.einsum("n,n->", g.each, g.mask) / g.mask.sum().clamp(min=1),
    "weighed sum / weights": lambda g: (g.each * g.weights).sum() / (g.weights * g.valid).sum().clamp(min=1e-3),
    "weighed sum / weights and 1": lambda g: (g.each * g.weights).sum() / ((g.weights * g.valid).sum() + 1),
    "masked sum / mask and 5": lambda g: (g.each * g.mask).sum() / (g.mask.sum() + 5),
    "mean over samples": lambda g: (_rows(g.each).sum(1) / _rows(g.valid).sum(1).clamp(min=1)).mean(),
    "z, all positions": lambda g: g.logits.logsumexp(-1).square().mean(),
    "z, valid positions": _selected,
    "hidden, squared": lambda g: g.hidden.pow(2).mean(),
    "squared error": lambda g: F.mse_loss(g.logits, torch.ones_like(g.logits)),
    "margin": lambda g: F.relu(1 - g.logits.max(-1).values).mean(),
    "flooded": lambda g: (g.entropy() - 0.5).abs() + 0.5,
    "root": lambda g: torch.sqrt(g.logits.square().mean() + 1e-3),
    "exponential": lambda g: torch.exp(-g.entropy()),
    "logarithm": lambda g: torch.log(1 + g.logits.square().mean()),
    "cube": lambda g: g.entropy() ** 3,
    "softplus": lambda g: F.softplus(g.entropy() - 1),
    "error of a mean": lambda g: F.mse_loss(g.logits.mean(), torch.tensor(0.3)),
    "bounded mean": lambda g: g.entropy().clamp(min=0.1, max=2.0),
    "larger of two": lambda g: torch.maximum(g.logits.square().mean(), g.logits.abs().mean()),
    "parameters": lambda g: 0.01 * sum((p.square().sum() for p in g.model.parameters()), torch.zeros(())),
}
FACTORS: Mapping[str, Callable[[Tensor, Any], Tensor]] = {
    "": lambda value, model: value,
    "times 0.3": lambda value, model: value * 0.3,
    "a third": lambda value, model: value / 3,
    "less 0.1": lambda value, model: value - 0.1,
    "learned": lambda value, model: value * torch.exp(-model.log_variance) + model.log_variance * 0.5,
}


def _rows(values_N: Tensor) -> Tensor:
    return values_N.view(-1, LENGTH)


def loss_of(seed: int, model: nn.Module, batch: tuple[Tensor, ...]) -> tuple[str, Tensor]:
    """Return the name and the value of a seed's loss.

    Args:
        seed: Of the case.
        model: Composed or not.
        batch: Tokens, targets, mask and weights, BS.
    """
    chosen = random.Random(seed)
    tokens, *others = batch
    logits, hidden = model(tokens)
    targets, mask, weights = (each.flatten() for each in others)
    given = Given(model=model, logits=logits.flatten(0, 1), hidden=hidden, targets=targets, mask=mask, weights=weights)
    names, total = [], torch.zeros(())
    for _ in range(chosen.choice([1, 1, 2, 2, 3])):
        term, factor = chosen.choice(list(TERMS)), chosen.choice(list(FACTORS))
        names.append(f"{term} ({factor})" if factor else term)
        value = FACTORS[factor](TERMS[term](given), model)
        total = value if len(names) == 1 else total + value
    return " + ".join(names), total


def batch_of(seed: int) -> tuple[Tensor, ...]:
    """Return the global batch of a seed: tokens, targets, mask and weights, BS."""
    generator = torch.Generator().manual_seed(seed)
    size = (SAMPLES, LENGTH)
    tokens = torch.randint(0, TOKENS, size, generator=generator)
    targets = torch.randint(0, VOCAB, size, generator=generator)
    lengths = torch.randint(0, LENGTH + 1, (SAMPLES, 1), generator=generator)
    targets[torch.arange(LENGTH) >= lengths] = IGNORED
    if seed % 3 == 0:
        targets[SAMPLES // 2 + 1 :] = IGNORED
    if bool((targets == IGNORED).all()):
        targets[0, 0] = 1
    mask = (torch.rand(size, generator=generator) < 0.5).double()
    return tokens, targets, mask, torch.rand(size, generator=generator).double()


def compared(manifest: Path, seeds: range) -> list[tuple[int, str, str, str]]:
    """Return seed, verdict, loss and detail of every case, on one of two ranks."""
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.WARNING)
    found = []
    for seed in seeds:
        torch.manual_seed(0)
        alone, model, batch = Net(), Net(), batch_of(seed)
        model.load_state_dict(alone.state_dict())
        name, expected = loss_of(seed, alone, batch)
        expected.backward()
        run = composer3d.compose(model, manifest)
        half = SAMPLES // run.context.data_parallel_degree
        mine = slice(run.context.data_parallel_rank * half, (run.context.data_parallel_rank + 1) * half)
        try:
            value = run.backward(loss_of(seed, run.model, tuple(each[mine] for each in batch))[1])
            assert value is not None, "the step's last backward"
            worst = max(_distance(float(value), float(expected.detach())), _distance_of_gradients(run, alone))
            found.append((seed, "equal" if worst < TOLERANCE else "DIFFERS", name, f"{worst:.2g}"))
        except composer3d.LossError as error:
            found.append((seed, "refused", name, str(error)))
        except Exception as error:
            found.append((seed, "RAISED", name, f"{type(error).__name__}: {error}"))
        run.close()
    return found


def _distance(one: float, other: float) -> float:
    return abs(one - other) / (1e-6 + abs(other))


def _distance_of_gradients(run: Any, alone: nn.Module) -> float:
    whole = {fqn: p.new_zeros(p.shape) if p.grad is None else p.grad for fqn, p in alone.named_parameters()}
    return max(
        float((run.full_tensor(fqn, torch.zeros_like(p) if p.grad is None else p.grad) - whole[fqn]).abs().max())
        / (1e-3 + float(whole[fqn].abs().max()))
        for fqn, p in run.named_parameters()
    )


def main() -> int:
    """Compare, and print the counts and what is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--tables", default="[sharding.fsdp2]", help="of the manifest")
    parser.add_argument("--refusals", action="store_true", help="print them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder, "run.toml")
        manifest.write_text(f"composer3d = 1\n{arguments.tables}\n", encoding="utf-8")
        seeds = range(arguments.seed, arguments.seed + arguments.count)
        found = run_ranks(compared, 2, manifest, seeds, timeout_s=60 + 10 * arguments.count)[0]
    verdicts = Counter(verdict for _, verdict, *_ in found)
    say("  ".join(f"{verdict} {verdicts[verdict]}" for verdict in ("equal", "refused", "DIFFERS", "RAISED")))
    for seed, verdict, name, detail in found:
        if verdict in ("DIFFERS", "RAISED") or (verdict == "refused" and arguments.refusals):
            note(f"{seed}  {verdict}  {name}: {detail}")
    return int(verdicts["DIFFERS"] + verdicts["RAISED"] > 0)


if __name__ == "__main__":
    sys.exit(main())
