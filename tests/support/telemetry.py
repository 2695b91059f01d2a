"""A few traced steps of a small model on a rank, and the table that switches tracing on."""

from __future__ import annotations

import json
import time
from functools import partial

import torch

from support.models import composed, mine, padded, seeded

FSDP = "[sharding.fsdp2]\n"


def table(folder=None, **options):
    options = {**({"folder": str(folder)} if folder else {}), **options}
    return "[profiling.opentelemetry]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in options.items())


def train(text, *, steps=2, microbatch=3, options=None, report=True):
    """Train on a rank; return what became of its spans, and how long the steps took."""
    run = composed(f"{text}\n[train]\nmicrobatch = {microbatch}\n", partial(seeded, **(options or {})))
    optimizer = run.optimizer(torch.optim.SGD, lr=1e-3)
    tokens, targets = padded()
    times = []
    for number, (x, y) in enumerate([(mine(run, tokens), mine(run, targets))] * steps):
        started = time.perf_counter()
        with run.step(number):
            loss = run.forward_backward(x, target=y)
            norm = run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        times.append(time.perf_counter() - started)
        if report:
            row = {"loss": float(loss), "grad_norm": float(norm), "tokens": 7, "tokens_per_s": 1.0, "skipped_steps": 0}
            run.report(number, row)
    (session,) = [value for value in run.context.state.values() if hasattr(value, "courier")]
    run.close()
    return vars(session.counts), times
