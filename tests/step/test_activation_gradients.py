"""Backwards that are not linear in their gradient have one device's: hooks on activations, own autograd functions."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
import torch.distributed as dist
from support.models import composed, write_manifest
from torch import nn
from torch.nn import functional
from torch.nn.functional import mse_loss

import composer3d
from composer3d import torch_compat
from composer3d.step.suspect_functions import is_suspect
from composer3d.testing import run_ranks

LAYOUTS = {
    "fsdp2": (2, "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"),
    "fsdp2, 3 ranks": (3, "[mesh]\ndp_shard = 3\n[sharding.fsdp2]\n"),
    "ddp": (2, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"),
    "ddp, bucketed": (2, '[mesh]\ndp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n'),
    "recomputed": (2, "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n"),
    "pp, fsdp2": (4, "[mesh]\npp = 2\ndp_shard = 2\n[sharding.fsdp2]\n[scheduling.pipeline]\n"),
}
LIMIT = 2e-3
TOLERANCE = 1e-12


def clipped(gradient):
    return gradient.clamp(-LIMIT, LIMIT)


class Clip(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return clipped(gradient)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def normalised(gradient):
    return gradient / (gradient.norm(dim=-1, keepdim=True) + LIMIT)


REGISTERED = {
    "clamp": clipped,
    "normalise": normalised,
    "torch's function": functional.normalize,
    "torch's operator": torch.sgn,
    "partial": functools.partial(torch.clamp, min=-LIMIT, max=LIMIT),
}


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.up, self.down, self.kind = nn.Linear(6, 9), nn.Linear(9, 6), kind

    def forward(self, x):
        h = torch.tanh(self.up(x))
        if self.kind in REGISTERED and h.requires_grad:
            h.register_hook(REGISTERED[self.kind])
        return x + self.down(Clip.apply(Double.apply(h)) if self.kind == "function" else h)


def net(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Block(kind), Block(kind), nn.Linear(6, 2))
    if kind == "module":
        model[1].down.register_full_backward_hook(lambda module, into, outof: tuple(clipped(each) for each in into))
    return model


def differences(path, kinds):
    """Return the largest relative difference of gradients to one device's, of each kind and form of a loop."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for kind in kinds:
        torch.manual_seed(1)
        x, y, reference, composed = torch.randn(12, 4), torch.randn(12, 2), net(kind), net(kind)
        mse_loss(reference(x), y).backward()
        run = composer3d.compose(composed, path, loss_fn=mse_loss, example=((x[:2],), {}))
        rank, size = run.context.data_parallel_rank, 12 // run.context.data_parallel_degree
        optimizer = run.optimizer(torch.optim.SGD, lr=0.0)
        mine, expected = slice(rank * size, (rank + 1) * size), dict(reference.named_parameters())
        for own in (False, True) if run.context.degrees["pp"] == 1 else (False,):
            if own:
                for half in (x[mine][::2], y[mine][::2]), (x[mine][1::2], y[mine][1::2]):
                    run.backward(mse_loss(run.model(half[0]), half[1]) / 2)
            else:
                run.forward_backward(x[mine], target=y[mine])
            run.clip_grad_norm_(float("inf"))
            each = {fqn: run.full_tensor(fqn, p.grad) - expected[fqn].grad for fqn, p in run.named_parameters()}
            found[kind, own] = max(float(d.abs().max() / expected[fqn].grad.abs().max()) for fqn, d in each.items())
            optimizer.step()
            optimizer.zero_grad()
        run.close()
    return found


@pytest.mark.parametrize(
    "layout", [name if name == "fsdp2" else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_what_is_not_linear_in_a_gradient_is_given_one_devices(layout):
    world_size, text = LAYOUTS[layout]
    path = write_manifest("model.blocks = '[12]'\ntrain.microbatch = 2\n" + text)
    for found in run_ranks(differences, world_size, path, (*REGISTERED, "function", "module")):
        assert not {each: value for each, value in found.items() if value > TOLERANCE}


class CountsModes(nn.Linear):
    def forward(self, x):
        MODES.append(len(torch_compat.function_modes()))
        return super().forward(x)


MODES: list[int] = []


def modes_in_forwards(path):
    run = composer3d.compose(nn.Sequential(nn.Linear(4, 4), CountsModes(4, 2)), path, loss_fn=mse_loss)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    MODES.clear()
    for _ in range(5):
        run.forward_backward(torch.ones(2, 4), target=torch.ones(2, 2))
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return MODES


@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
def test_a_model_that_registers_no_hook_pays_for_none_after_three_forwards(layout):
    for modes in run_ranks(modes_in_forwards, 2, write_manifest(LAYOUTS[layout][1])):
        assert modes[-1] == 0, modes
        assert max(modes) > 0, "hooks were not looked for"


def kept_by_a_hook(path):
    """Return what hooks are given by the run, on an output and in a forward, and by the loop's own `autograd.grad`."""
    torch.set_default_dtype(torch.float64)
    seen, x = [], torch.ones(2, 4)
    run = composer3d.compose(net("none"), path)
    run.optimizer(torch.optim.SGD, lr=0.0)
    output = run.model(x)
    output.register_hook(seen.append)
    run.backward(output.mean())
    with run.rank_gradients():
        output = run.model(x)
        output.register_hook(seen.append)
        torch.autograd.grad(output.mean(), list(run.model.parameters()), allow_unused=True)
    run.close()
    return [float(each[0, 0]) for each in seen]


def test_a_hook_that_looks_is_given_one_devices_gradient_and_a_ranks_own_where_that_is_asked_for():
    assert run_ranks(kept_by_a_hook, 2, write_manifest(LAYOUTS["fsdp2"][1])) == [[1 / 8, 1 / 4]] * 2


def test_functions_with_linear_backwards_are_left_alone():
    assert is_suspect(Clip)
    assert not is_suspect(Double)
    assert not is_suspect(torch.utils.checkpoint.CheckpointFunction)


def over_all_ranks(gradient):
    total = gradient.pow(2).sum()
    dist.all_reduce(total)
    return gradient / total.sqrt()


def in_place(gradient):
    gradient.div_(gradient.abs().max())


def by_a_number(gradient):
    norm = gradient.norm().item()
    return gradient * min(1.0, LIMIT / norm)


def assigned(gradient):
    changed = gradient.clone()
    changed[:] = changed - changed.mean(0)
    return changed


def looked_at(gradient):
    KEPT.append(gradient.norm().item())
    return gradient.clamp(-1, 1)


KEPT: list[float] = []
# What code in a backward does with a gradient, and what is named.
MIXING = {
    "norm": ("norm over the samples", lambda g: g / g.norm()),
    "a vector's norm": ("vector_norm over the samples", lambda g: g / torch.linalg.vector_norm(g)),
    "flat": ("norm over the samples", lambda g: g / g.flatten().norm()),
    "in place": ("max over the samples", in_place),
    "mean": ("mean over the samples", lambda g: g - g.mean(0)),
    "normalize": ("normalize over the samples", lambda g: nn.functional.normalize(g, dim=0)),
    "assigned": ("mean over the samples", assigned),
    "a number": ("norm over the samples", by_a_number),
    "how many": ("the number of samples", lambda g: g / len(g)),
    "a size": ("the number of samples", lambda g: -g * g.shape[0]),
    "each sample": ("", normalised),
    "each one's greatest": ("", lambda g: g / g.abs().amax(-1, keepdim=True)),
    "clamp": ("", clipped),
    "features": ("", lambda g: g / g.shape[-1] ** 0.5),
    "reversed": ("", lambda g: -2 * g),
    "looked at": ("", looked_at),
    "all ranks'": ("", over_all_ranks),
}


class Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, change):
        ctx.change = change
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        changed = ctx.change(gradient)
        return gradient if changed is None else changed, None


class TimesSamples(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, kept):
        ctx.number = x.shape[0] if kept else 2
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient * ctx.number, None


class Changed(nn.Module):
    def __init__(self, changes, place):
        super().__init__()
        self.up, self.down, self.changes, self.place = nn.Linear(4, 7), nn.Linear(7, 2), changes, place
        for change in changes if place == "module" else ():
            self.up.register_full_backward_hook(lambda module, into, outof, change=change: self.each(change, into))

    def each(self, change, gradients):
        changed = [None if each is None else change(each) for each in gradients]
        return tuple(was if now is None else now for was, now in zip(gradients, changed, strict=True))

    def forward(self, x):
        h = self.up(x + torch.zeros_like(x).requires_grad_())
        for change in self.changes:
            if self.place == "hook":
                h.register_hook(change)
            if self.place == "function":
                h = Through.apply(h, change)
            if self.place == "kept":
                h = TimesSamples.apply(h, change)
        return self.down(h)


def said_of(cases):
    """Return what is warned of each in a step, or in four of what is silent, and the calls of `looked_at`."""
    torch.set_default_dtype(torch.float64)
    records, found = [], []
    logging.getLogger("composer3d.step.mixed_gradients").addFilter(lambda record: records.append(record.getMessage()))
    for place, names in cases:
        torch.manual_seed(0)
        changes = [MIXING[name][1] if name in MIXING else name == "kept" for name in names]
        run = composed("[sharding.fsdp2]\n", Changed(changes, place), loss_fn=mse_loss)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(4 if len(names) > 1 else 1):
            run.forward_backward(torch.randn(6, 4), target=torch.randn(6, 2))
            optimizer.step()
            optimizer.zero_grad()
        assert not torch.overrides._get_current_function_mode_stack()
        run.close()
        found.append(list(records))
        records.clear()
    return found, len(KEPT)


def test_what_relates_a_ranks_samples_in_a_backward_is_named_with_its_line():
    places = "hook", "function", "module"
    said = [(places[index % 3], name) for index, name in enumerate(name for name in MIXING if MIXING[name][0])]
    silent = [(place, [name for name in MIXING if not MIXING[name][0]]) for place in places]
    cases = [*((place, [name]) for place, name in said), ("kept", ["kept"]), ("kept", ["constant"]), *silent]
    (first, num_calls), (second, _) = run_ranks(said_of, 2, cases)
    assert not any(second) and num_calls == 4 * 3  # nothing is called twice
    for (place, names), messages in zip(cases, first, strict=True):
        wanted = MIXING[names[0]][0] if names[0] in MIXING else "the number of samples" if names[0] == "kept" else ""
        assert len(messages) == bool(wanted), (place, names, messages)
        if wanted:
            assert messages[0].startswith("test_activation_gradients.py:") and wanted in messages[0]
            assert "relates a rank's samples to one another in the backward" in messages[0]
