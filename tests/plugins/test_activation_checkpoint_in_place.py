"""What blocks that are computed again change in place: results of their own, and buffers."""

from __future__ import annotations

import torch
from plugins.test_activation_checkpoint import AC, BUDGET, MODES
from support.models import composed, seeded
from support.shared_worlds import in_one_world
from torch import nn

from composer3d.testing import run_ranks


class Routed(nn.Module):
    """Changes one of the two results of an operator in place, and needs the other in its backward, as routers do."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        weights, places = torch.sigmoid(self.up(x)).topk(3)
        weights /= weights.sum(-1, keepdim=True)
        return x + torch.zeros_like(x).scatter(-1, places, weights)


def routed(text):
    model = seeded(lambda: nn.Sequential(*(Routed() for _ in range(3))))
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    run = composed(text, model, loss_fn=lambda output, target: output.square().sum())
    for number in range(2):  # the first measures
        with run.step(number):
            run.forward_backward(x, target=torch.zeros(4))
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
    run.close()
    return gradients


def test_what_a_block_changes_in_place_is_not_kept():
    budgets = (AC + 'units = ["*"]\n' + BUDGET.format(part) for part in (0.5, 0.7, 0.9))
    (plain,), *others = in_one_world(routed, 1, ("",), *((text,) for text in budgets))
    for (found,) in others:
        assert all(torch.equal(one, other) for one, other in zip(found, plain, strict=True))


class Counted(nn.Module):
    """A block with running statistics."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x):
        return x + torch.tanh(self.norm(self.up(x)))


class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Counted() for _ in range(4))
        self.out = nn.Linear(8, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def statistics(texts):
    """Return all buffers after a step of two micro-batches, of every manifest."""
    found = []
    for text in texts:
        model, x = seeded(Stacked), torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
        text = f"{text}\n[train]\nmicrobatch = 4\n"
        run = composed(text, model, loss_fn=lambda output, target: output.square().sum())
        with run.step(0):
            run.forward_backward(x, target=torch.zeros(8))
        found.append({fqn: buffer.tolist() for fqn, buffer in model.named_buffers()})
        run.close()
    return found


def test_buffers_change_once_however_often_a_block_is_computed():
    compiled = AC + '[scheduling.compile]\nbackend = "aot_eager"\n'
    plain, *others = run_ranks(statistics, 1, ["", *(AC + mode for mode in MODES), compiled])[0]
    assert plain["layers.0.norm.num_batches_tracked"] == 2
    assert others == [plain] * len(others)
