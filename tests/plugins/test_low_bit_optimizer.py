"""Quantised moments beside torchao's own optimizers, run without its compiler."""

from __future__ import annotations

import contextlib
import types
from unittest import mock

import pytest
import torch
from support.interrupted_runs import go_on
from support.models import composed, full, mine, padded, seeded, sum_loss
from support.shared_worlds import by_world_size, in_one_world
from torch import nn

from composer3d import ComposerError, torch_compat
from composer3d.testing import count_collectives, run_ranks

# Before ranks are forked: each of them would import it anew.
optim = torch_compat.import_torchao("torchao.optim")

TABLE = "[precision.low_bit_optimizer]\n"
FORMATS = {"8bit": "AdamW8bit", "4bit": "AdamW4bit", "fp8": "AdamWFp8"}
VOCAB, DIM = 11, 64


class Wide(nn.Module):
    """Matrices of 64 x 128, which are whole blocks on every rank, and one that is not."""

    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM, bias=False)
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.tok(tokens)
        return self.out(x + self.down(torch.tanh(self.up(x)))) + 0.0


@contextlib.contextmanager
def eager():
    """Let torchao's optimizers step without compiling; what they compute is the same."""
    namespace = types.SimpleNamespace(**{name: getattr(torch, name) for name in dir(torch) if name[0] != "_"})
    namespace.compile, namespace._dynamo = (lambda function, **_: function), torch._dynamo
    with mock.patch.object(torch_compat.import_torchao("torchao.optim.adam"), "torch", namespace):
        yield


def raise_zeros(optimizer):
    """Give second moments that torchao rounded to zero the smallest code above it; in 4 bits there is no zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            moment = optimizer.state[parameter]["exp_avg_sq"]
            if type(moment).__name__ in ("OptimState8bit", "OptimStateFp8"):
                zero = (moment.dequantize() == 0) & (parameter.grad != 0)
                moment.codes.view(torch.uint8)[zero.view_as(moment.codes)] = 1


def reference(kind, chunks, num_steps):
    """Train one device with torchao's optimizer, chunk by chunk as ranks do, and no second moment becomes zero."""
    model = seeded(Wide)
    options = {"lr": 1e-2, "weight_decay": 0.1}
    optimizer = (getattr(optim, FORMATS[kind]) if kind else torch.optim.AdamW)(model.parameters(), **options)
    tokens, targets = padded()
    losses = []
    with eager():
        for _ in range(num_steps):
            optimizer.zero_grad()
            total = 0.0
            for part, wanted in zip(tokens.chunk(chunks), targets.chunk(chunks), strict=True):
                loss, _ = sum_loss(model(part), wanted)
                (loss / (targets != -100).sum()).backward()
                total += float(loss.detach())
            optimizer.step()
            if kind:
                raise_zeros(optimizer)
            losses.append(total / int((targets != -100).sum()))
    return losses, {name: p.detach() for name, p in model.named_parameters()}


def trained(text, kind, chunks, num_steps=8):
    losses_1, weights = reference(kind, chunks, num_steps)
    plain, _ = reference(None, chunks, num_steps)
    run = composed(text, seeded(Wide))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for number in range(num_steps):
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            optimizer.step()
            optimizer.zero_grad()
    found = {name: full(p) for name, p in run.named_parameters()}
    error = max(float((found[name] - weight).abs().max() / weight.abs().max()) for name, weight in weights.items())
    kinds = {name: type(state["exp_avg"]).__name__ for name, state in named_state(run, optimizer).items()}
    run.close()
    return losses, losses_1, plain, error, kinds, isinstance(optimizer, torch.optim.AdamW)


def named_state(run, optimizer):
    return {name: optimizer.state[p] for name, p in run.named_parameters() if p in optimizer.state}


LAYOUTS = [
    pytest.param(1, "", id="plain"),
    pytest.param(2, "[sharding.fsdp2]\n", id="fsdp2"),
    pytest.param(2, "[sharding.ddp]\n", id="ddp"),
]


@pytest.mark.parametrize(("world_size", "layouts"), by_world_size(LAYOUTS))
def test_equals_torchao_on_one_device(world_size, layouts):
    # Blocks lie within shards, so they are the same, and so is every bit.
    cases = [(f'{layout}{TABLE}format = "{kind}"\n', kind, world_size) for layout in layouts for kind in FORMATS]
    names = ["8bit", "4bit", "Fp8"] * len(layouts)
    for name, results in zip(names, in_one_world(trained, world_size, *cases), strict=True):
        for losses, losses_1, plain, error, kinds, is_adamw in results:
            assert losses == results[0][0]
            assert losses == pytest.approx(losses_1, rel=1e-6)
            assert losses == pytest.approx(plain, rel=0.1)
            assert losses[-1] < 0.8 * losses[0]
            assert error == 0.0
            assert is_adamw
            assert (kinds["up.weight"], kinds["up.bias"]) == (f"OptimState{name}", "Tensor")


TP = '[mesh]\ntp = 2\n[sharding.tensor_parallel.plan]\nup = "colwise"\ndown = "rowwise"\n'


def test_tensor_parallel_shards():
    # What is cut along its columns has other blocks than on one device.
    for losses, losses_1, _, error, kinds, _ in run_ranks(trained, 2, TP + TABLE, "8bit", 1):
        assert losses == pytest.approx(losses_1, rel=1e-2)
        assert 0.0 < error < 0.1
        assert (kinds["up.weight"], kinds["down.weight"]) == ("OptimState8bit", "OptimState8bit")


# ---- memory ----------------------------------------------------------------------------------------------------------


def state_bytes(text, model_size):
    run = composed(text, nn.Linear(model_size, model_size, bias=False), loss_fn=lambda y, _: y.sum())
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    rows = torch.ones(2 // run.context.data_parallel_degree, model_size)
    with run.step(0):
        run.forward_backward(rows, target=rows)
        optimizer.step()
    (state,) = optimizer.state.values()
    run.close()
    return sum(storage_bytes(state[name]) for name in ("exp_avg", "exp_avg_sq"))


def storage_bytes(tensor):
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]] if hasattr(tensor, "codes") else [tensor]
    return sum(each.untyped_storage().nbytes() for each in inner)


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS[:2])
def test_bytes_of_the_state(world_size, layout):
    n = 256 * 256 // world_size
    wanted = {
        "8bit": (2 * (n + 4 * n // 256 + 1024), 0.30),
        "4bit": (2 * (n // 2 + 4 * n // 128 + 64), 0.15),
        "fp8": (2 * (n + 4 * n // 256), 0.26),
    }
    cases = ((f'{layout}{TABLE}format = "{kind}"\n', 256) for kind in wanted)
    *low, plain = in_one_world(state_bytes, world_size, *cases, (layout, 256))
    for ranks, (num_bytes, ratio) in zip(low, wanted.values(), strict=True):
        assert ranks == [num_bytes] * world_size
        assert num_bytes < ratio * 8 * n
    assert plain == [8 * n] * world_size


# ---- collectives and state -------------------------------------------------------------------------------------------


def counts(text):
    run = composed(text, seeded(Wide))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with count_collectives(run.mesh) as collectives, run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
    run.close()
    return collectives.summary()


def test_collectives_are_those_without_it():
    low, plain = in_one_world(counts, 2, *(("[sharding.fsdp2]\n" + text,) for text in (TABLE, "")))
    assert low == plain


def resumed(path, text, load, num_steps):
    """Train to a checkpoint and on, or from it; return weights, moments and names."""
    run = composed(text, seeded(Wide))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    weights = go_on(run, optimizer, padded(), path, load=load, num_steps=num_steps, saved_after=3)
    with optimizer.plain_state(write=False) if hasattr(optimizer, "plain_state") else contextlib.nullcontext():
        moments = {name: full(state["exp_avg"]) for name, state in named_state(run, optimizer).items()}
    run.close()
    return weights, moments


@pytest.mark.parametrize("kind", ["8bit", "4bit", pytest.param("fp8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["[sharding.fsdp2]\n", pytest.param("[sharding.ddp]\n", marks=pytest.mark.slow)])
def test_a_resumed_run_is_the_same_and_reshards(tmp_path, layout, kind):
    path, text = tmp_path / "step-3", f'{layout}{TABLE}format = "{kind}"\n'
    cases = ((path, text, False, 6), (path, text, True, 3), (path, text, True, 0))
    (whole, _), (again, _), (_, moments) = (ranks[0] for ranks in in_one_world(resumed, 2, *cases))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    # Into AdamW itself they come as they were, and into other shards within a block's rounding.
    whole_blocks = f'{TABLE}format = "{kind}"\n'
    ((_, plain),), ((_, other),) = in_one_world(resumed, 1, (path, "", True, 0), (path, whole_blocks, True, 0))
    for name, moment in moments.items():
        assert torch.equal(plain[name], moment)
        assert (other[name] - moment).abs().max() <= 0.15 * moment.abs().max()


def longest_step(optimizer, parameter, small):
    """Return the longest step, in learning rates, of an element whose gradient is small three times and then zero."""
    longest = 0.0
    for number in range(8):
        before = parameter.detach().clone()
        parameter.grad = torch.zeros(64, 256)
        parameter.grad[:, 0] = 1.0
        parameter.grad[:, 1] = small if number < 3 else 0.0
        optimizer.step()
        longest = max(longest, float((parameter.detach() - before)[:, 1].abs().max()) / 1e-3)
    return longest


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_small_gradients_do_not_make_large_steps(kind, amsgrad):
    # torchao's own second moments are zero here beside first ones that are not: 6.9e4 learning rates in one step.
    from composer3d_plugins.precision.low_bit_optimizer.adam import low_bit
    from composer3d_plugins.precision.low_bit_optimizer.moments import FORMATS as ALL

    for small in (1e-2, 1e-3, 3e-4, 1e-4, 1e-5, 1e-6, 1e-12):
        parameter = nn.Parameter(torch.zeros(64, 256))
        options = {"lr": 1e-3, "weight_decay": 0.0, "amsgrad": amsgrad}
        assert longest_step(low_bit(torch.optim.AdamW, ALL[kind])([parameter], **options), parameter, small) < 1.1
        assert not parameter.detach()[:, 2:].any()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("signed", [True, False])
def test_what_was_quantised_is_quantised_alike(kind, signed):
    from composer3d_plugins.precision.low_bit_optimizer.moments import FORMATS as ALL
    from composer3d_plugins.precision.low_bit_optimizer.moments import dequantised, kept_above_zero, requantise_

    torch.manual_seed(0)
    values = torch.randn(4096, 256) * torch.logspace(-30, 3, 4096)[:, None]
    values[:8] = 0.0
    moment, other = (ALL[kind].zeros(values, signed=signed) for _ in range(2))
    moment.copy_(values if signed else kept_above_zero(moment, values.square()))
    held = dequantised(moment)
    requantise_(other, held if signed else kept_above_zero(other, held))
    assert torch.equal(dequantised(other), held)
    if not signed and kind != "4bit":
        assert torch.equal(held > 0, values.square() > 0)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(cls, options):
    run = composed(TABLE, seeded(Wide))
    with pytest.raises(ComposerError) as caught:
        run.optimizer(cls, lr=1e-2, **options)
    run.close()
    return str(caught.value)


REFUSED = [
    (
        torch.optim.SGD,
        {},
        "low_bit_optimizer keeps the moments of Adam and AdamW, and the optimizer is SGD; choose another "
        "optimizer, or leave [precision.low_bit_optimizer] out",
    ),
    (
        torch.optim.AdamW,
        {"maximize": True},
        "low_bit_optimizer does not do what maximize = true asks of AdamW",
    ),
]


def test_refusals():
    found = in_one_world(refusal, 1, *((cls, options) for cls, options, _ in REFUSED))
    assert [message for (message,) in found] == [message for *_, message in REFUSED]


def both():
    with pytest.raises(ComposerError) as caught:
        composed(TABLE + "[sharding.cpu_offload]\n", seeded(Wide))
    return str(caught.value)


def test_refuses_an_optimizer_that_cpu_offload_makes():
    message = run_ranks(both, 1)[0]
    assert "both make the optimizer, and a run has one; remove one of them" in message
    assert "low_bit_optimizer" in message and "cpu_offload" in message


def test_amsgrad_and_adam():
    def losses(text):
        run = composed(text, seeded(Wide))
        optimizer = run.optimizer(torch.optim.Adam, lr=1e-2, amsgrad=True, weight_decay=0.01)
        tokens, targets = padded()
        found = []
        for number in range(6):
            with run.step(number):
                found.append(float(run.forward_backward(tokens, target=targets)))
                optimizer.step()
                optimizer.zero_grad()
        run.close()
        return found

    (low,), (plain,) = in_one_world(losses, 1, (TABLE,), ("",))
    assert low == pytest.approx(plain, rel=2e-2)
    assert low[-1] < 0.9 * low[0]
