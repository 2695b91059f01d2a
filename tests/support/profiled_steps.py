"""A few steps of a small model with one profiling plugin, as a rank runs them."""

from __future__ import annotations

from functools import partial

import torch

from support.models import composed, mine, padded, seeded


def train(text, steps=3, microbatch=3, inside=None, options=None):
    """Return the rows of all steps, and what `inside(run)` gives after the last one."""
    run = composed(f"{text}\n[train]\nmicrobatch = {microbatch}\n", partial(seeded, **(options or {})))
    optimizer = run.optimizer(torch.optim.SGD, lr=1e-3)
    tokens, targets = padded()
    rows = []
    for number in range(steps):
        with run.step(number):
            loss = run.forward_backward(mine(run, tokens), target=mine(run, targets))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        rows.append(run.report(number, {"loss": float(loss), "tokens_per_s": 5.0}))
    result = inside(run) if inside else None
    run.close()
    return rows, result
