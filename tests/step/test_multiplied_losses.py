"""Means that a loop multiplies by the number of what it counted: sums over the global batch, as on one device."""

from __future__ import annotations

import logging
import math
import re

import pytest
import torch
import torch.nn.functional as F
from support.models import composed, gradient_error, mine, padded, seeded, unpadded

from composer3d import LossError
from composer3d.testing import run_ranks


def over_valid(model, tokens, targets, number):
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    return loss * number(tokens, targets)


def valid(tokens, targets):
    return (targets != -100).sum()


def twice_valid(tokens, targets):
    return 2.0 * valid(tokens, targets)


def valid_as_number(tokens, targets):
    return int(valid(tokens, targets))


def seven(tokens, targets):
    return 7.0


def errors(samples, number, with_target):
    """Return the distance of the gradients, and of what `backward` returns, from one device's."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = samples()
    reference, returned, wanted_loss = seeded(), 0.0, 0.0
    run = composed("[sharding.fsdp2]\n")
    own_tokens, own_targets = mine(run, tokens), mine(run, targets)
    with run.step(0, target=own_targets if with_target else None):
        for part in range(2):
            loss = over_valid(reference, tokens[part::2], targets[part::2], number)
            loss.backward()
            wanted_loss += loss.item()
            loss = over_valid(run.model, own_tokens[part::2], own_targets[part::2], number)
            returned += run.backward(loss).item()
        run.clip_grad_norm_(float("inf"))
        wanted = {name: p.grad for name, p in reference.named_parameters()}
        return gradient_error(run, wanted), abs(returned - wanted_loss) / wanted_loss


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize(
    ("samples", "number"),
    [(padded, valid), (unpadded, valid), (padded, twice_valid), (padded, valid_as_number), (unpadded, seven)],
)
def test_gradients_are_those_of_one_device(samples, number, with_target):
    for gradients, loss in run_ranks(errors, 2, samples, number, with_target):
        assert gradients < 1e-12 and loss < 1e-12


def by_other_numbers():
    tokens, targets = padded()
    run = composed("[sharding.fsdp2]\n")
    with run.step(0):
        loss = F.cross_entropy(run.model(mine(run, tokens)).flatten(0, 1), mine(run, targets).flatten())
        with pytest.raises(LossError, match="ranks multiply their losses by 3, 4, each by a number of its own"):
            run.backward(loss * (3 + run.context.rank))
    return True


def test_numbers_of_ranks_that_no_mean_was_divided_by_are_refused():
    assert all(run_ranks(by_other_numbers, 2))


def by_nan(ranks):
    """Return what is warned of a factor that is no number on some ranks, and whether loss and gradients are none."""
    tokens, targets = padded()
    records, run = [], composed("[sharding.fsdp2]\n")
    logging.getLogger("composer3d.step.losses.rank_weights").addFilter(
        lambda record: records.append(record.getMessage())
    )
    with run.step(0):
        loss = F.cross_entropy(run.model(mine(run, tokens)).flatten(0, 1), mine(run, targets).flatten())
        returned = run.backward(loss * (math.nan if run.context.rank in ranks else 0.5))
        norm = run.clip_grad_norm_(1.0)
    return records, math.isnan(returned), math.isnan(norm)


def test_a_factor_that_is_no_number_is_one_devices_and_named_with_its_ranks():
    for ranks, named in (((0, 1), "0, 1"), ((1,), "1")):
        (first, *are_nan), (second, *are_nan_too) = run_ranks(by_nan, 2, ranks)
        assert all(are_nan) and all(are_nan_too) and not second
        assert re.fullmatch(
            rf"test_multiplied_losses.py:\d+: the loss is multiplied by nan on data-parallel rank {named}, so that "
            "loss and gradients of this step are no numbers on any rank, as on one device",
            *first,
        )
