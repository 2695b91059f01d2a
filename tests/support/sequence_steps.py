"""One composed step of a model with a sharded sequence beside one device's."""

from __future__ import annotations

import torch

import composer3d
from composer3d.testing import count_collectives, full
from support.family_models import class_loss
from support.models import mine, write_manifest
from support.sequence_models import LENGTH, VOCAB

__all__ = ["context", "padded_batch", "seeded", "sequence_step", "sequence_steps", "two_lengths"]


def context(method="gather", *, degree=2, mesh="", more=""):
    """Return a manifest's text."""
    return f'[mesh]\ncp = {degree}\n{mesh}\n[sharding.context_parallel]\nmethod = "{method}"\n{more}'


def padded_batch(length=LENGTH):
    """Tokens with padding at a head and at a tail, id 0, and targets that are not counted there."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(1, VOCAB, (2, length), generator=generator)
    targets = torch.randint(0, VOCAB, (2, length), generator=generator)
    for where in ((0, slice(None, 3)), (1, slice(-4, None))):
        tokens[where], targets[where] = 0, -100
    return (tokens,), {}, targets


def two_lengths():
    """Inputs of an encoder that are longer than the decoder's, and have padding at their tail."""
    (tokens,), _, targets = padded_batch()
    (longer,), _, _ = padded_batch(LENGTH + 8)
    return (longer,), {"decoder_input_ids": tokens, "attention_mask": (longer != 0).long()}, targets


def sequence_step(factory, text, batch, reference=None):
    """Run on a rank: loss and gradients of one step in float64 beside one device's.

    Args:
        factory: Makes the model.
        text: Of the manifest.
        batch: Returns arguments, keyword arguments and targets.
        reference: Makes one device's model, where it is another one with the same parameters.

    Returns (loss error, largest relative error of a gradient, its name, {operator: (count, bytes)} over cp). Gradients
    that are zero in exact arithmetic are compared with the others.
    """
    torch.set_default_dtype(torch.float64)
    args, kwargs, target = batch()
    model = seeded(reference or factory)
    loss_1, count = class_loss(model(*args, **kwargs), target)
    (loss_1 / count).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    run = composer3d.compose(seeded(factory), write_manifest(text), loss_fn=class_loss, example=(args, kwargs))
    try:
        with run.step(0), count_collectives(run.mesh) as collectives:
            given = {name: mine(run, x) for name, x in kwargs.items()}
            loss = run.forward_backward(*(mine(run, x) for x in args), target=mine(run, target), **given)
            counted = {op: each for (op, axis), each in collectives.summary().items() if axis == "cp"}
            run.clip_grad_norm_(float("inf"))
        least = 1e-3 * max(float(g.abs().max()) for g in gradients.values())
        own = {name: p.grad for name, p in run.named_parameters()}  # of this stage
        assert {name for name, grad in own.items() if grad is not None} == own.keys() & gradients.keys()
        found = {name: run.context.in_model_order(name, full(own[name])) for name in own.keys() & gradients.keys()}
        errors = {
            name: float((grad - gradients[name]).abs().max()) / max(float(gradients[name].abs().max()), least)
            for name, grad in found.items()
        }
        worst = max(errors, key=errors.__getitem__)
        return float((loss - loss_1.detach() / count).abs()), errors[worst], worst, counted
    finally:
        run.close()


def sequence_steps(cases):
    """Run several steps on a rank: a world costs more than a step."""
    return [sequence_step(*case) for case in cases]


def seeded(factory):
    torch.manual_seed(0)
    return factory()
