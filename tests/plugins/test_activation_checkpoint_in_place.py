"""Changes in place around recomputed blocks: results of their own, values between them, arguments, and buffers."""

from __future__ import annotations

import pytest
import torch
from plugins.test_activation_checkpoint import AC, BUDGET, MODES, SQRT
from support.models import composed, seeded
from support.shared_worlds import in_one_world
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

from composer3d import PluginError
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


def test_what_a_selective_checkpoint_keeps_and_its_block_writes_into_is_kept_as_it_was():
    selective = AC + 'units = ["*"]\nmode = "selective"\n'
    texts = (selective, selective + 'save = ["aten.topk", "aten.sigmoid"]\n')
    (plain,), *others = in_one_world(routed, 1, ("",), *((text,) for text in texts))
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


class Block(nn.Module):
    """Takes an argument by name, which its backward needs in a recomputation alone."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, shift=None):
        return self.down(torch.nn.functional.gelu(self.up(x if shift is None else x + shift)))


class Between(nn.Module):
    """Changes in place, between its blocks, what they return."""

    def __init__(self, change):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.change = change

    def forward(self, x):
        shift = torch.ones(8)
        for layer in self.layers:
            if self.change == "argument":
                x = x + layer(x, shift=shift)
                shift += 1
                continue
            h = layer(x)
            if self.change == "add":
                h += x
            elif self.change == "scale":
                h.mul_(2)
            else:
                h[:, :2] = 0
            x = h
        return x


def between(text, change):
    model = seeded(lambda: Between(change))
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    run = composed(text, model, loss_fn=lambda output, target: output.square().sum())
    try:
        for number in range(2):
            with run.step(number):
                model.zero_grad()
                run.forward_backward(x, target=torch.zeros(4))
    except PluginError as error:
        return str(error)
    finally:
        run.close()
    return [p.grad.tolist() for p in model.parameters()]


@pytest.mark.parametrize("change", ["add", "scale", "slice"])
def test_code_between_blocks_may_change_what_they_return(change):
    (plain,), *others = in_one_world(between, 1, ("", change), *((AC + mode, change) for mode in MODES))
    assert others == [[plain]] * len(others)


def test_an_argument_that_changes_before_the_recomputation_is_refused():
    # The first of a run is recomputed first.
    expected = {"": "layers.3", 'mode = "selective"\n': "layers.3", SQRT: "layers.2"}
    found = in_one_world(between, 1, *((AC + mode, "argument") for mode in expected))
    for fqn, (message,) in zip(expected.values(), found, strict=True):
        assert message == (
            f"{fqn} is recomputed from its arguments, and one of them, of shape (8,), was changed in place after its "
            "forward began; change a copy (x = x + h for x += h), or leave this block out with units"
        )


class OnInput(nn.Module):
    """A block that scales what it is given, in place."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x):
        x.mul_(2)
        return self.up(x)


def scaled(text):
    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), OnInput()))
    run = composed(text, model, loss_fn=lambda output, target: output.square().sum())
    try:
        with pytest.raises(PluginError) as caught, run.step(0):
            run.forward_backward(torch.ones(4, 8), target=torch.zeros(4))
    finally:
        run.close()
    return str(caught.value)


def test_a_block_that_changes_its_input_is_refused_while_a_budget_is_measured():
    ((message,),) = in_one_world(scaled, 1, (AC + 'units = ["1"]\n' + BUDGET.format(1.0),))
    assert message.startswith("1 is recomputed from its arguments, and one of them, of shape (4, 8), was changed in ")


class Codebook(nn.Module):
    """Reads buffers that it changes: in place, by a new tensor, and once; with spectral norm's vectors inside."""

    def __init__(self):
        super().__init__()
        self.up = spectral_norm(nn.Linear(8, 8))
        self.register_buffer("book", torch.randn(5, 8))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()), persistent=False)
        self.register_buffer("cache", None)

    def forward(self, x):
        h = self.up(x)
        chosen = self.book[torch.cdist(h.detach(), self.book).argmin(-1)]
        h = torch.tanh(h * chosen - self.mean) / (1 + self.count)
        if self.cache is None:
            self.cache = x.detach().mean(0).exp()
        with torch.no_grad():
            self.book.mul_(0.9).add_(0.1 * h.mean(0))
            self.mean = 0.9 * self.mean + 0.1 * h.mean(0)
            self.count += 1
        return x + h * self.cache


def codebooks(text):
    model = seeded(lambda: nn.Sequential(*(Codebook() for _ in range(4))))
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    text = f"{text}\n[train]\nmicrobatch = 4\n"
    run = composed(text, model, loss_fn=lambda output, target: output.square().sum())
    for number in range(2):
        with run.step(number):
            model.zero_grad()
            run.forward_backward(x, target=torch.zeros(8))
    run.close()
    gradients = [p.grad.tolist() for p in model.parameters()]
    return gradients, {fqn: buffer.tolist() for fqn, buffer in model.named_buffers()}


def test_a_recomputation_reads_buffers_as_the_forward_found_them():
    cases = [(AC + 'units = ["*"]\n' + mode,) for mode in MODES]
    (plain,), *others = in_one_world(codebooks, 1, ("",), *cases)
    assert plain[1]["3.count"] == 4
    for text, (found,) in zip(cases, others, strict=True):
        assert found == plain, text
