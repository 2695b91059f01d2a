"""Hooks on the whole model, or on all of it but its head, that relate positions.

Shapes: B samples, S positions, D features, V words.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import composer3d
from support.late_hooks import VOCAB, Block, D
from support.models import mine, write_manifest

KEPT: list[Tensor] = []


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(16, D)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, idx: Tensor) -> Tensor:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        for block in self.blocks:
            x = block(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Body(), nn.Linear(D, VOCAB)

    def forward(self, idx: Tensor) -> Tensor:
        return self.head(self.body(idx))


def last(module: nn.Module, given: Any, output: Tensor) -> Tensor:
    return output * output.shape[1] - output[:, -1:]


def of_words(module: nn.Module, given: Any, kwargs: Any, output: Tensor) -> Tensor:
    return output + F.one_hot(given[0], VOCAB).cumsum(1)[..., : output.shape[-1]] / 2


def shifted(module: nn.Module, given: Any) -> Any:
    return ((given[0] + given[0][:, :1] + given[0].shape[1]) % VOCAB,)


def turned(module: nn.Module, given: Any, kwargs: Any) -> Any:
    return (given[0].flip(1),), kwargs


def kept(module: nn.Module, given: Any, output: Tensor) -> None:
    KEPT.append(output)


def without_mean(module: nn.Module, given: Any) -> Any:
    return (given[0] - given[0].mean(1, keepdim=True),)


HOOKS: dict[str, Callable[[Model], Any]] = {
    "output": lambda m: m.register_forward_hook(last),
    "output by name": lambda m: m.register_forward_hook(of_words, with_kwargs=True),
    "of features": lambda m: m.register_forward_hook(lambda _, given, o: o.tanh()),
    "input": lambda m: m.register_forward_pre_hook(shifted),
    "input by name": lambda m: m.register_forward_pre_hook(turned, with_kwargs=True),
    "several": lambda m: [
        m.register_forward_pre_hook(shifted),
        m.register_forward_hook(last),
        m.register_forward_hook(of_words, with_kwargs=True, prepend=True),
    ],
    "gradient": lambda m: m.register_full_backward_pre_hook(without_mean),
    "body": lambda m: m.body.register_forward_hook(last),
    "body's input": lambda m: m.body.register_forward_pre_hook(shifted),
    "body's gradient": lambda m: m.body.register_full_backward_pre_hook(without_mean),
    "kept": lambda m: m.register_forward_hook(kept),
}


def loss_of(o: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    """Return a sum of losses, and their number."""
    return F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum"), torch.tensor(t.numel())


def errors(names: list[str], text: str, *, late: bool = False, loop: bool = False) -> dict[str, float]:
    """Return how far gradients are from one device's, of the largest, by hook."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, VOCAB, (4, 8), generator=generator) for _ in range(2))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Full backward hook is firing")  # tokens have no gradient
        return {name: _error(HOOKS[name], text, x, y, late=late, loop=loop) for name in names}


def _error(register: Callable[[Any], Any], text: str, x: Tensor, y: Tensor, *, late: bool, loop: bool) -> float:
    def mean(o: Tensor, t: Tensor) -> Tensor:
        total, count = loss_of(o, t)
        return (total + sum(each.mean(1).square().sum() for each in KEPT)) / count

    torch.manual_seed(0)
    reference, model = Model(), Model()
    model.load_state_dict(reference.state_dict())
    register(reference)
    mean(reference(x), y).backward()
    KEPT.clear()
    if not late:
        register(model)
    run = composer3d.compose(model, write_manifest(text), loss_fn=None if loop else loss_of, example=((x,), {}))
    try:
        if late:
            register(run.model)
        KEPT.clear()
        with run.step(0):
            if loop:
                run.backward(mean(run.model(mine(run, x)), mine(run, y)))
            else:
                run.forward_backward(mine(run, x), target=mine(run, y))
            own = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters() if p.grad is not None}
    finally:
        KEPT.clear()
        run.close()
    wanted = {fqn: p.grad for fqn, p in reference.named_parameters() if p.grad is not None}
    top = max(float(each.abs().max()) for each in wanted.values())
    return max(float((own[fqn] - wanted[fqn]).abs().max()) / top for fqn in own)
