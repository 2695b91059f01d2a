"""A step over cp decides nothing about functions that an earlier step has decided, on other numbers and lengths too."""

from __future__ import annotations

import torch
from support.family_models import class_loss
from support.models import mine, write_manifest
from support.sequence_models import VOCAB, Imported
from support.sequence_steps import context, seeded

import composer3d
from composer3d.propagation import SequencePropagation
from composer3d.testing import full, run_ranks


class Rotated(Imported):
    """A table of all positions, which ranks index, meets heads and a residual stream."""

    def attend(self, q, k, v, tokens):
        table = torch.linspace(0.5, 1.5, q.shape[2], dtype=q.dtype)[:, None]
        return super().attend(q * table, k * table, table * v, tokens)


def decided(lengths):
    """Train a step of each length; return the functions decided in each, and the largest error beside one device."""
    torch.set_default_dtype(torch.float64)
    names, run_one = [], SequencePropagation.run

    def noted(self, func, args, options):
        names.append(getattr(func, "__name__", str(func)))
        return run_one(self, func, args, options)

    SequencePropagation.run = noted
    alone, found, errors = seeded(Rotated), [], []
    run = composer3d.compose(
        seeded(Rotated), write_manifest(context(more="[sharding.fsdp2]\n")), loss_fn=class_loss,
        example=((torch.zeros(2, lengths[0], dtype=torch.int64),), {}),
    )  # fmt: skip
    for step, length in enumerate(lengths):
        tokens, targets = torch.randint(0, VOCAB, (2, 2, length), generator=torch.Generator().manual_seed(step))
        total, count = class_loss(alone(tokens), targets)
        alone.zero_grad()
        (total / count).backward()
        names.clear()
        with run.step(step):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            own = {name: full(p.grad) for name, p in run.named_parameters()}
            for _, parameter in run.named_parameters():
                parameter.grad = None
        found.append(sorted(set(names)))
        errors += [float((own[name] - p.grad).abs().max()) for name, p in alone.named_parameters()]
    run.close()
    return found, max(errors)


def test_a_later_step_decides_attention_alone():
    for (first, second, longer, again), error in run_ranks(decided, 2, (16, 16, 24, 16)):
        assert {"linear", "mul", "scaled_dot_product_attention"} <= set(first) & set(longer)
        assert second == again == ["scaled_dot_product_attention"]
        assert error <= 1e-12
