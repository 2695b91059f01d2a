"""Gradients of a model whose sequence is sharded over cp, with its random numbers, beside those of one device."""

from __future__ import annotations

import random
import traceback

import numpy as np
import torch

import composer3d
from composer3d.testing import run_ranks
from support.family_models import class_loss
from support.models import mine, seeded, write_manifest

VOCAB, LENGTH = 11, 8
TIGHT = 1e-12


def cp(text="", *, more="balanced = false\n", mesh=""):
    return f"[mesh]\ncp = 2\n{mesh}[sharding.context_parallel]\n{more}{text}"


def loss(output, target):
    return class_loss(getattr(output, "logits", output), target)


def gradients(factory, text, length):
    """Return gradients of two steps in float64, and the sites that do not draw by sample."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(3)
    tokens, targets = (torch.randint(0, VOCAB, (4, length), generator=generator) for _ in range(2))
    run = composer3d.compose(seeded(factory), write_manifest(text), loss_fn=loss, example=((tokens,), {}))
    found = []
    for number in range(2):
        random.seed(number)
        np.random.seed(number)
        with run.step(number):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            run.clip_grad_norm_(float("inf"))
            trained = [(name, p.grad) for name, p in run.named_parameters() if p.grad is not None]
            found.append({name: run.full_tensor(name, grad).clone() for name, grad in trained})
            for part in run.parts:
                for parameter in part.module.parameters():
                    parameter.grad = None
    sites = [str(site) for site in run.context.streams.sites.values() if not site.by_sample]
    run.close()
    return found, sites


def several(cases):
    found = []
    for name, case in cases.items():
        try:
            found.append(gradients(*case))
        except Exception as error:
            raise AssertionError(f"{name}: {''.join(traceback.format_exception(error))}") from error
    return found


def beside_one_device(cases, *, world_size=2, alone=""):
    """Return, by case, what one device finds, and what ranks do.

    Args:
        cases: (factory, manifest, length).
        world_size: Of the ranks.
        alone: Manifest of the one device.
    """
    plain = {name: (factory, alone, length) for name, (factory, _, length) in cases.items()}
    (expected,) = run_ranks(several, 1, plain)
    ranks = run_ranks(several, world_size, cases)
    return {name: (expected[at], [rank[at] for rank in ranks]) for at, name in enumerate(cases)}


def assert_same_draws(alone, ranks, *, sites=()):
    """Check that gradients are one device's, that steps draw other numbers, and where they are not by sample."""
    expected, known = alone
    for found, others in ranks:
        assert [site.partition(",")[0] for site in others] == [*sites] == [site.partition(",")[0] for site in known]
        for step, one in zip(found, expected, strict=True):
            assert step
            for fqn in step:
                gradient = one[fqn]
                assert float((step[fqn] - gradient).abs().max()) <= TIGHT * max(1e-3, float(gradient.abs().max())), fqn
    assert any(not torch.equal(expected[0][fqn], expected[1][fqn]) for fqn in expected[0])
