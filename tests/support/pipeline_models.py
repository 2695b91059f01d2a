"""Models written without a pipeline in mind, and a pipelined step beside one device's."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from composer3d import hookimpl, plugin
from composer3d.testing import count_collectives
from support.models import VOCAB, Block, Net, composed, full, largest, mine, padded, seeded, unpadded

DIM = 7


class Decoder(nn.Module):
    """Learned positions, keyword mask, a bias that all blocks share; blocks that return a tuple, two levels down."""

    def __init__(self, num_layers=4):
        super().__init__()
        # Norm and head are registered first: what counts is what the forward does.
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.body = Body(num_layers)

    def forward(self, tokens, mask=None, *, scale=1.0):
        return {"logits": self.head(self.body(tokens, mask=mask)) * scale, "unused": None}


class Body(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.blocks = nn.ModuleDict({f"block{index}": MaskedBlock() for index in range(num_layers)})
        self.embed = Embedding()
        self.bias = nn.Parameter(torch.linspace(-1, 1, DIM))

    def forward(self, tokens, mask):
        if mask is None:
            mask = torch.ones_like(tokens)
        x, bias = self.embed(tokens), torch.tanh(self.bias)
        for name in self.blocks:
            x, _ = self.blocks[name](x, bias, mask=mask.unsqueeze(-1).to(x.dtype))
        return self.norm(x)


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(16, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.register_buffer("numbers", torch.arange(16), persistent=False)

    def forward(self, tokens):
        return self.norm(self.tokens(tokens) + self.positions(self.numbers[: tokens.shape[1]]))


class MaskedBlock(nn.Module):
    kind = "masked"

    def __init__(self):
        super().__init__()
        self.inner = Block(DIM)

    def forward(self, x, bias, *, mask):
        return self.inner(x * mask + bias), self.kind


def chain(num_layers=4):
    """Embedding, blocks and head in one Sequential."""
    blocks = [(f"block{index}", Block(DIM)) for index in range(num_layers)]
    return nn.Sequential(OrderedDict([("tok", nn.Embedding(VOCAB, DIM)), *blocks, ("out", nn.Linear(DIM, VOCAB))]))


class Functional(nn.Module):
    """The head uses the embedding's weight as it is; a scale stands between the blocks."""

    def __init__(self, num_layers=4):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.layers = nn.ModuleList(Block(DIM) for _ in range(num_layers))

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers[:]:
            x = layer(x) * self.scale
        return F.linear(x, self.tok.weight) + 0.0


class InPlace(nn.Module):
    """Blocks add to what they are given; every block is a Sequential inside one."""

    def __init__(self, num_layers=4):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.trunk = nn.Sequential(*(Adding() for _ in range(num_layers)))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        return self.out(self.trunk(self.tok(tokens))) + 0.0


class Adding(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)

    def forward(self, x):
        x += torch.tanh(self.inner(x.clone()))
        return x


class Spans:
    """A recorder that writes down what stages do, in order."""

    kinds = {"forward": "F", "backward": "B", "backward_input": "I", "backward_weight": "W"}

    def __init__(self):
        self.actions = []

    def begin(self, name, attributes):
        if "stage" in attributes:
            self.actions.append((attributes["stage"], self.kinds[name], attributes["microbatch"]))

    def end(self, token):
        pass


@plugin(family="profiling")
class Watching:
    """Keeps a recorder of what stages do."""

    @hookimpl
    def composer3d_recorder(self, context):
        return context.state.setdefault(self, Spans())


@dataclass
class Out:
    logits: torch.Tensor


class Plain(nn.Module):
    """Blocks without a list, an output in a dataclass."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.block_a, self.block_b = Block(DIM), Block(DIM)
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        return Out(logits=self.out(self.block_b(self.block_a(self.tok(tokens)))))


def logits_of(output):
    if isinstance(output, dict):
        return output["logits"]
    return getattr(output, "logits", output)


def token_sum(output, targets):
    logits = logits_of(output)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    return total, (targets != -100).sum()


def reference(factory, tokens, targets, options, kwargs):
    """Return one device's model after its step, with gradients, its loss and norm."""
    model = seeded(factory, **options)
    total, count = token_sum(model(tokens, **kwargs), targets)
    (total / count).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    return model, (total / count).detach(), norm


def pipelined_step(text, factory, options=None, *, microbatch=3, kwargs=None, batch=padded):
    """Run one composed step in float64 on a rank; return distances from one device, names and collectives."""
    torch.set_default_dtype(torch.float64)
    options, kwargs = options or {}, kwargs or {}
    tokens, targets = batch()
    model, loss_1, norm_1 = reference(factory, tokens, targets, options, kwargs)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    run = composed(f"{text}\n[train]\nmicrobatch = {microbatch}\n", seeded(factory, **options), loss_fn=token_sum)
    optimizer = run.optimizer(torch.optim.SGD, lr=1e-3)
    tokens, targets = mine(run, tokens), mine(run, targets)
    kwargs = {name: mine(run, v) if isinstance(v, torch.Tensor) else v for name, v in kwargs.items()}
    with count_collectives(run.mesh) as collectives, run.step(0):
        loss = run.forward_backward(tokens, target=targets, **kwargs)
        norm = run.clip_grad_norm_(1e9)
        counted = {key: count for key, (count, _) in collectives.summary().items()}
        found = {name: full(p.grad) for name, p in run.named_parameters() if p.grad is not None}
        errors = {
            name: float((g - gradients[name]).abs().max() / gradients[name].abs().max()) for name, g in found.items()
        }
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return {
        "loss": float((loss - loss_1).abs()),
        "norm": float((norm - norm_1).abs() / norm_1),
        "gradients": largest(errors.values()),
        "names": set(found),
        "all_names": set(gradients),
        "collectives": counted,
    }


def assert_equal_to_one_device(results, tolerance=1e-12):
    """Assert that all ranks agree with one device, and that together they have every gradient."""
    for result in results:
        assert result["loss"] < tolerance
        assert result["norm"] < tolerance
        assert result["gradients"] < tolerance
    assert set().union(*(result["names"] for result in results)) == results[0]["all_names"]


def beside_one_device(text, factory=Net, options=None, *, num_steps=5):
    """Train on a rank and on one device, evaluating after every step.

    Returns (largest distance of norms, losses and weights, names of copies on this rank, names of parameters).
    """
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    model = seeded(factory, **(options or {}))
    optimizer_1 = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = composed(f"{text}\n[train]\nmicrobatch = 3\n", seeded(factory, **(options or {})), loss_fn=token_sum)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    errors = []
    for number in range(num_steps):
        total, count = token_sum(model(tokens), targets)
        (total / count).backward()
        expected = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer_1.step()
        optimizer_1.zero_grad()
        with run.step(number):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            norm = run.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        errors.append(float((norm - expected).abs() / expected))
        total, count = token_sum(model(tokens), targets)
        loss = run.evaluate(mine(run, tokens), target=mine(run, targets)).loss
        errors.append(float((loss - total.detach() / count).abs()))
    weights = dict(model.named_parameters(remove_duplicate=False))
    copies = []
    for part in run.parts:
        own = dict(part.module.named_parameters())
        copies += [name for name in part.copies if name in own]
        errors += [float((full(parameter) - weights[name].detach()).abs().max()) for name, parameter in own.items()]
    names = [name for name, _ in run.named_parameters()]
    run.close()
    return largest(errors), copies, names


def losses_of(text, factory=Net, options=None, *, microbatch=3):
    """Return on a rank the losses of a few steps in the run's own dtypes."""
    model = seeded(factory, **(options or {}))
    run = composed(f"{text}\n[train]\nmicrobatch = {microbatch}\n", model, loss_fn=token_sum)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = unpadded()
    losses = []
    for number in range(6):
        with run.step(number):
            losses.append(float(run.forward_backward(mine(run, tokens), target=mine(run, targets))))
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return losses
