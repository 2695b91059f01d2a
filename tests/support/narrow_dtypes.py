"""Layouts that compute in a narrow dtype, and one device with the same micro-batches."""

from __future__ import annotations

import pytest
import torch

from support.models import Net, seeded, sum_loss

FLOAT16 = '[precision.mixed]\nparam_dtype = "float16"\n'
LAYOUTS = [
    pytest.param(1, "", id="plain"),
    pytest.param(2, "[sharding.fsdp2]", id="fsdp2"),
    pytest.param(2, "[sharding.ddp]", id="ddp"),
    pytest.param(2, '[sharding.ddp]\nreducer = "bucketed"', id="ddp-bucketed"),
    pytest.param(2, '[scheduling.activation_checkpoint]\n[sharding.ddp]\nreducer = "bucketed"', id="ddp-bucketed-ac"),
]


def narrow_reference(tokens, targets, chunks, dtype=torch.bfloat16, scale=1.0, change=lambda model: model, factory=Net):
    """One device with the run's micro-batches: narrow compute, float32 weights and sums of gradients."""
    total = {}
    count = (targets != -100).sum()
    model = seeded(factory)
    for part in range(chunks):
        narrow = change(seeded(factory).to(dtype))
        size = tokens.shape[0] // chunks
        cut = slice(part * size, (part + 1) * size)
        logits = narrow(tokens[cut])
        loss, _ = sum_loss(logits.float() if dtype is torch.float16 else logits, targets[cut])
        (loss * (chunks / count) * scale).backward()
        for name, p in narrow.named_parameters():
            total[name] = total.get(name, 0) + p.grad.float() / chunks / scale
    assert dict(model.named_parameters()).keys() == total.keys()
    return total
