"""Islands in loops of one's own that announce no target: what their means were divided by weighs them."""

from __future__ import annotations

import pytest
import torch
from support.islands import LR, PLAIN, distance, mine, table, trained
from support.models import composed, full, mean_loss, padded, sum_loss

from composer3d import StepError
from composer3d.testing import run_ranks

STEPS = 3
SHARDED = "[mesh]\nisland = 2\ndp_shard = 2\n[sharding.fsdp2]\n"
WEIGHED = [
    PLAIN + table("average", every=2, weigh='"tokens"'),
    PLAIN + table("diloco", every=2, weigh='"tokens"'),
    PLAIN + table("post_local", every=1, warmup_steps=2),
    SHARDED + table("average", every=2, weigh='"tokens"'),
]


def untold(text, loss_of):
    """Return the parameters after every step of a loop that calls backward with a loss alone."""
    torch.set_default_dtype(torch.float64)
    run = composed(text)
    optimizer, found = run.optimizer(torch.optim.SGD, lr=LR), []
    for step in range(STEPS):
        tokens, targets = mine(run, step, padded)
        run.backward(loss_of(run.model(tokens), targets))
        optimizer.step()
        optimizer.zero_grad()
        found.append({fqn: full(p.detach()).clone() for fqn, p in run.named_parameters()})
    run.close()
    return found


def told(text):
    return trained(text, STEPS, make=padded)


@pytest.mark.parametrize("text", WEIGHED)
@pytest.mark.parametrize("loss_of", [mean_loss, sum_loss])
def test_islands_are_weighed_by_what_their_means_were_divided_by(text, loss_of):
    num_ranks = 4 if text.startswith(SHARDED) else 2
    for one, other in zip(run_ranks(told, num_ranks, text), run_ranks(untold, num_ranks, text, loss_of), strict=True):
        assert max(distance(a, b) for a, b in zip(one, other, strict=True)) < 1e-13


def unknown(logits, targets):
    """A loss whose normalisation no graph shows."""
    return logits.square().mean().exp()


def refused():
    with pytest.raises(StepError) as caught:
        untold(WEIGHED[0], unknown)
    return str(caught.value)


def test_islands_whose_targets_are_not_known_are_told():
    for said in run_ranks(refused, 2):
        assert said.startswith('weigh = "tokens": how many valid targets the loss of step 0 has is not known')
