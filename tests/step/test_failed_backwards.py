"""A loop that goes on after a backward that raised, as where memory ran out for one batch, trains as on one device."""

from __future__ import annotations

import pytest
import torch
from support.models import composed, mean_loss, mine, seeded, unpadded

from composer3d.testing import full, run_ranks

LAYOUTS = [
    "[sharding.fsdp2]\n",
    "[sharding.fsdp2]\nzero = 1\n",
    "[sharding.ddp]\n",
]
FAILING = 1


def fail(_):
    raise MemoryError


def skipping(model, optimizer, backward, part):
    """Skip the batch whose backward runs out of memory, in the model's middle; return how many were."""
    skipped = 0
    for number in range(4):
        tokens, targets = (part(tensor) for tensor in unpadded(seed=number))
        hook = model.layers[1].register_forward_hook(
            lambda module, args, output, number=number: (
                output.register_hook(fail) and None if number == FAILING else None
            )
        )
        try:
            backward(mean_loss(model(tokens), targets))
            optimizer.step()
        except MemoryError:
            skipped += 1
        hook.remove()
        optimizer.zero_grad()
    return skipped


def beside_one_device(layout):
    torch.set_default_dtype(torch.float64)
    reference = seeded()
    alone = skipping(reference, torch.optim.AdamW(reference.parameters(), lr=0.01), torch.Tensor.backward, lambda t: t)
    run = composed(layout)
    together = skipping(
        run.model, run.optimizer(torch.optim.AdamW, lr=0.01), run.backward, lambda tensor: mine(run, tensor)
    )
    found = {fqn: full(parameter.detach()) for fqn, parameter in run.named_parameters()}
    run.close()
    return alone, together, max(float((found[fqn] - p.detach()).abs().max()) for fqn, p in reference.named_parameters())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_whose_backward_raised_is_skipped_as_on_one_device(layout):
    for alone, together, error in run_ranks(beside_one_device, 2, layout):
        assert alone == together == 1 and error < 1e-12
