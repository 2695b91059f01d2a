"""Runs that are saved and go on, beside runs that load what these saved."""

from __future__ import annotations

from support.models import full, mine


def go_on(run, optimizer, batch, path, *, load, num_steps, saved_after=2, **options):
    """Train, saving after some steps, or from what was saved then; return full weights.

    Args:
        run: A composition.
        optimizer: Its own.
        batch: Tokens and targets of all ranks.
        path: Of the checkpoint.
        load: Whether the steps are those after it.
        num_steps: Steps of this run.
        saved_after: Steps before the checkpoint.
        options: Of `save`.
    """
    tokens, targets = (mine(run, tensor) for tensor in batch)
    if load:
        run.load(path)
    for step in range(num_steps):
        if step == saved_after and not load:
            run.save(path, **options)
        with run.step(step + saved_after if load else step):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
    return {name: full(p) for name, p in run.named_parameters()}
