"""Mixtures of experts as people write them, whose routers leave their losses in attributes, lists and objects.

Shapes: B samples, S positions, D features, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import composer3d
from composer3d import Loss
from support.models import largest, mine, write_manifest

VOCAB, D, E = 11, 8, 4
COLLECTED: list[Tensor] = []


class Manager:
    """Losses of all routers, as of one file that models and loops import."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        self.losses.append(loss)


MANAGER = Manager()


def balance(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Return the loss of Switch: a product of two means over tokens."""
    share_E = F.one_hot(chosen.flatten(), E).to(probabilities.dtype).mean(0)
    return E * (share_E * probabilities.flatten(0, -2).mean(0)).sum()


def entropy_of_mean(probabilities: Tensor) -> Tensor:
    mean_E = probabilities.flatten(0, -2).mean(0)
    return (mean_E * mean_E.log()).sum()


class Experts(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.keeps, self.gate = keeps, nn.Linear(D, E, bias=False)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(E))
        self.losses: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        probabilities = logits.softmax(-1)
        weight, chosen = probabilities.max(-1, keepdim=True)
        self.keep(logits, probabilities, chosen)
        mask = F.one_hot(chosen.squeeze(-1), E)
        results = [expert(x) * weight * mask[..., at : at + 1] for at, expert in enumerate(self.experts)]
        return torch.stack(results).sum(0)

    def keep(self, logits: Tensor, probabilities: Tensor, chosen: Tensor) -> None:
        if self.keeps == "attribute":
            self.aux_loss = balance(probabilities, chosen) + 0.1 * logits.logsumexp(-1).square().mean()
        elif self.keeps == "statistic":
            importance_E = probabilities.flatten(0, -2).sum(0)
            self.aux_loss = importance_E.var() / importance_E.mean() ** 2 + entropy_of_mean(probabilities)
        elif self.keeps == "list":
            self.losses.append(balance(probabilities, chosen))
        elif self.keeps == "file":
            COLLECTED.append(balance(probabilities, chosen))
        elif self.keeps == "object":
            MANAGER.add(balance(probabilities, chosen))
        elif self.keeps == "probabilities":
            self.probabilities, self.chosen = probabilities, chosen
        elif self.keeps == "logits":
            COLLECTED.append(logits.flatten(0, -2))


class Block(nn.Module):
    reentrant: bool | None = None  # of a function of its own that torch recomputes

    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.experts, self.keeps = Experts(keeps), keeps

    def forward(self, x: Tensor) -> Tensor:
        if self.reentrant is None:
            return self.body(x)
        return checkpoint(self.body, x, use_reentrant=self.reentrant)

    def body(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (part.view(batch, length, 2, -1).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, D))
        x = x + self.experts(x)
        if self.keeps == "activations":
            self.activation = x
        return x


class Mixture(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, D)
        self.layers, self.head = nn.ModuleList(Block(keeps) for _ in range(2)), nn.Linear(D, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def entropy(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o.reshape(-1, VOCAB), t.reshape(-1))


def taken(losses: list[Tensor]) -> Tensor:
    total = torch.stack(losses).sum()
    losses.clear()
    return total


def of(kind: type, model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, kind)]


def of_logits() -> Tensor:
    logits = torch.cat(COLLECTED)
    COLLECTED.clear()
    return balance(logits.softmax(-1), logits.argmax(-1))


EXTRA: dict[str, Callable[[nn.Module], Tensor]] = {
    "attribute": lambda m: sum(each.aux_loss for each in of(Experts, m)),
    "statistic": lambda m: sum(each.aux_loss for each in of(Experts, m)),
    "list": lambda m: sum(taken(each.losses) for each in of(Experts, m)),
    "file": lambda m: taken(COLLECTED),
    "object": lambda m: taken(MANAGER.losses),
    "probabilities": lambda m: sum(balance(each.probabilities, each.chosen) for each in of(Experts, m)),
    "logits": lambda m: of_logits(),
    "activations": lambda m: sum((b.activation[:, 1:] - b.activation[:, :-1]).square().mean() for b in of(Block, m)),
}


def whole(model: nn.Module, o: Tensor, t: Tensor, *, keeps: str) -> Tensor:
    return entropy(o, t) + 0.1 * EXTRA[keeps](model)


def stated(model: nn.Module, o: Tensor, t: Tensor, *, keeps: str) -> Loss:
    total = F.cross_entropy(o.reshape(-1, VOCAB), t.reshape(-1), reduction="sum")
    return Loss(sum=total, count=(t != -100).sum(), auxiliary=0.1 * EXTRA[keeps](model))


def given(*, padded: bool, num_samples: int = 4, length: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randint(0, VOCAB, (num_samples, length), generator=generator) for _ in range(2))
    if padded:
        for row, end in enumerate((length, 5, 3, 6)):
            y[row, end:] = -100
    return x, y


def seeded(keeps: str, reentrant: bool | None = None) -> Mixture:
    torch.manual_seed(0)
    COLLECTED.clear()
    MANAGER.losses.clear()
    model = Mixture(keeps)
    for block in of(Block, model):
        block.reentrant = reentrant
    return model


def one_device(
    keeps: str, x: Tensor, y: Tensor, parts: int, loss: Callable[..., Tensor], reentrant: bool | None
) -> dict[str, Tensor]:
    """Return gradients of the mean over parts of a batch, and the loss under an empty name."""
    model, total = seeded(keeps, reentrant), torch.zeros(())
    for tokens, targets in zip(x.chunk(parts), y.chunk(parts), strict=True):
        value = loss(model, model(tokens), targets) / parts
        value.backward()
        total = total + value.detach()
    return {name: p.grad for name, p in model.named_parameters()} | {"": total}


def errors_of(
    keeps: str,
    text: str,
    *,
    padded: bool = True,
    parts: int = 1,
    form: Callable[..., Any] = whole,
    reentrant: bool | None = None,
):
    """Run on a rank: return how far the engine's step and a loop's own are from one device's."""
    torch.set_default_dtype(torch.float64)
    x, y = given(padded=padded)
    wanted = one_device(keeps, x, y, parts, partial(whole, keeps=keeps), reentrant)
    model = seeded(keeps, reentrant)
    loss = partial(form, model, keeps=keeps)
    manifest = write_manifest(text if parts == 1 else f"train.microbatch = {len(x) // parts}\n{text}")
    reduction = {"loss_reduction": "mean"} if form is whole else {}
    run = composer3d.compose(model, manifest, loss_fn=loss, **reduction)
    x, y = mine(run, x), mine(run, y)
    found = []
    with run.step(0):
        value = run.forward_backward(x, target=y)
        found.append(_error(run, wanted, value if form is whole else None))
    run.model.zero_grad()
    with run.step(1):
        pieces = list(zip(x.chunk(parts), y.chunk(parts), strict=True))
        for at, (tokens, targets) in enumerate(pieces, 1):
            value = run.backward(whole(model, run.model(tokens), targets, keeps=keeps), last=at == parts)
        found.append(_error(run, wanted, value))
    run.close()
    return found


def _error(run: Any, wanted: dict[str, Tensor], value: Tensor | None) -> float:
    own = {name: run.full_tensor(name, p.grad) for name, p in run.named_parameters() if p.grad is not None}
    top = max(float(gradient.abs().max()) for name, gradient in wanted.items() if name)
    off = largest(float((gradient - wanted[name]).abs().max()) / top for name, gradient in own.items())
    return off if value is None else max(off, abs(float(value) - float(wanted[""])))
