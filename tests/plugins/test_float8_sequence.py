"""Float8 under sequence parallelism, where activations and weights are gathered as bytes, beside one device."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.float8 import Wide, float8, table
from support.models import composed, full, mine, seeded, sum_loss
from support.shared_worlds import in_one_world
from torch import nn

SEQUENCE = (
    "[mesh]\ntp = 2\n{}[sharding.tensor_parallel]\nsequence_parallel = true\nsequence_dim = 1\n"
    '[sharding.tensor_parallel.plan]\ntok = "vocab"\n"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'
    'norm = "sequence"\nout = "head"\n'
)


def even():
    """A sequence and a vocabulary that divide by tp."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 16, (8, 7), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sequence_parallel(text, recipe, num_steps=2):
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    model = float8.convert_to_float8_training(
        seeded(Even), config=config, module_filter_fn=lambda module, fqn: fqn.startswith("layers.")
    )
    run = composed(text, seeded(Even))
    tokens, targets = even()
    degree = run.context.data_parallel_degree
    local = mine(run, tokens), mine(run, targets)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.2), run.optimizer(torch.optim.SGD, lr=0.2)]
    for number in range(num_steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for part, wanted in zip(tokens.chunk(degree), targets.chunk(degree), strict=True):
            (sum_loss(model(part), wanted)[0] / targets.numel()).backward()
        with run.step(number):
            run.forward_backward(local[0], target=local[1])
            optimizers[1].step()
        optimizers[0].step()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    error = max(
        float((full(p.grad) - gradients[name]).abs().max() / gradients[name].abs().max())
        for name, p in run.named_parameters()
    )
    run.close()
    return error


class Even(Wide):
    def __init__(self):
        super().__init__()
        self.tok, self.out = nn.Embedding(16, 16), nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("world_size", "layout", "cases"),
    [
        pytest.param(2, "", [("tensorwise", ""), ("rowwise", "")], marks=pytest.mark.slow),
        (4, "dp_shard = 2\n[sharding.fsdp2]\n", [("rowwise", ""), ("tensorwise", "all_gather = true\n")]),
    ],
)
def test_sequence_parallel_equals_one_device(world_size, layout, cases):
    texts = [SEQUENCE.format(layout) + table(recipe, more + 'modules = ["layers"]') for recipe, more in cases]
    recipes = [recipe for recipe, _ in cases]
    for ranks in in_one_world(sequence_parallel, world_size, *zip(texts, recipes, strict=True)):
        assert max(ranks) < 2e-6
