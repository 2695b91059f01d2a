"""A step over cp decides nothing about functions that an earlier step has decided, on other numbers and lengths too."""

from __future__ import annotations

import torch
from support.family_models import class_loss
from support.models import mine, write_manifest
from support.sequence_models import VOCAB, Imported
from support.sequence_steps import context, seeded

import composer3d
from composer3d.propagation import Placed, SequencePropagation, mark
from composer3d.propagation.decision_cache import Memory
from composer3d.testing import full, run_ranks


class Rotated(Imported):
    """A table of all positions, which ranks index, meets heads and a residual stream."""

    def attend(self, q, k, v, tokens):
        table = torch.linspace(0.5, 1.5, q.shape[2], dtype=q.dtype)[:, None]
        return super().attend(q * table, k * table, table * v, tokens)


class InPlace(Imported):
    """What decisions are looked up by is kept on tensors, whose dims change in place: of scores over equal numbers."""

    def attend(self, q, k, v, tokens):
        attended = super().attend(q, k, v, tokens)
        pairs = attended[..., :2, None] * attended[..., None, :2]
        before = pairs.clone()
        lower = pairs.tril().sum(-1)
        before.transpose_(-1, -2)
        upper = before.tril().sum(-1)
        before.unsqueeze_(0)
        return torch.cat([lower, upper * before.squeeze_(0).flatten(-2)[..., 1:3], attended[..., 4:]], -1)


def decided(lengths, kind=Rotated):
    """Train a step of each length; return the functions decided in each, and the largest error beside one device."""
    torch.set_default_dtype(torch.float64)
    names, run_one = [], SequencePropagation.run

    def noted(self, func, args, options):
        names.append(getattr(func, "__name__", str(func)))
        return run_one(self, func, args, options)

    SequencePropagation.run = noted
    alone, found, errors = seeded(kind), [], []
    run = composer3d.compose(
        seeded(kind), write_manifest(context(more="[sharding.fsdp2]\n")), loss_fn=class_loss,
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


def test_a_tensor_whose_dims_change_in_place_is_decided_about_as_what_it_is():
    for (first, second), error in run_ranks(decided, 2, (16, 16), InPlace):
        assert {"transpose_", "unsqueeze_", "squeeze_"} <= set(first)
        assert set(second) == {"scaled_dot_product_attention", "transpose_", "unsqueeze_", "squeeze_"}
        assert error <= 1e-12


def test_a_form_holds_for_one_mark_and_not_after_a_change_in_place():
    x = torch.zeros(2, 4, 4)
    mark(x, placed=Placed(dim=1, parts=(8,)), degree=2, axis="cp")
    memory, multiply = Memory("cp"), torch.Tensor.mul
    first = memory.key(multiply, (x, 2.0), {})
    assert memory.key(multiply, (x, 2.0), {}) == first != memory.key(multiply, (x, 2), {})
    x.requires_grad_()
    of_leaf = memory.key(multiply, (x, 2.0), {})
    assert of_leaf != first
    x.requires_grad_(False)
    x.transpose_(0, 2)
    memory.changed((x,), {})
    assert memory.key(multiply, (x, 2.0), {}) != first
    x.transpose_(0, 2)
    memory.changed([x])
    assert memory.key(multiply, (x, 2.0), {}) == first
    mark(x, placed=Placed(dim=2, parts=(8,)), degree=2, axis="cp")
    assert memory.key(multiply, (x, 2.0), {}) != first
