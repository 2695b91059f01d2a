"""Activations in host memory: the same bits, fetched ahead, counted to the byte."""

from __future__ import annotations

import functools
import io
import logging

import pytest
import torch
from support.models import Net, composed, mine, one_step, padded, seeded, sum_loss, write_manifest
from support.offloading import DDP, FSDP, PP, TP, Even, assert_same, resumed, trained
from support.shared_worlds import by_world_size, in_one_world

from composer3d import Batch, ManifestError
from composer3d.testing import assert_parity, run_ranks

TABLE = "[scheduling.activation_offload]\nmin_mib = 0.0\n"
AC = "[scheduling.activation_checkpoint]\n"
LAYOUTS = [
    pytest.param(1, "", id="plain"),
    # Of fsdp2 alone the gradients are below, and the bits with recomputation.
    pytest.param(2, FSDP, id="fsdp2", marks=pytest.mark.slow),
    pytest.param(2, DDP, id="ddp"),
    pytest.param(2, PP, id="pp"),
    pytest.param(2, PP.replace("]\n[train]", ']\nschedule = "ZBVZeroBubble"\n[train]'), id="zero bubble"),
    pytest.param(2, TP, id="tp"),
    pytest.param(2, FSDP + AC, id="recomputed"),
]


@pytest.mark.parametrize(("world_size", "layouts"), by_world_size(LAYOUTS))
def test_every_bit_is_that_of_the_run_without_it(world_size, layouts):
    factories = [functools.partial(Even, num_layers=4) if "ZBV" in layout else Even for layout in layouts]
    cases = [
        (layout + text, torch.optim.AdamW, {}, 2, factory)
        for layout, factory in zip(layouts, factories, strict=True)
        for text in ("", TABLE)
    ]
    results = in_one_world(trained, world_size, *cases)
    for layout, plain, ranks in zip(layouts, results[::2], results[1::2], strict=True):
        compare(layout, plain, ranks)


def compare(layout, plain, ranks):
    """Compare the ranks of a run with those of the run without it."""
    for found, wanted in zip(ranks, plain, strict=True):
        assert_same(found, wanted)
        assert found[3] == wanted[3]
        metrics = found[4]
        assert metrics["activation_offload_out_bytes"] > 0
        # Whatever is saved is needed, and comes back once. A pipeline's first forward only shows shapes; a zero-bubble
        # backward reads what it needs in both of its halves.
        times = metrics["activation_offload_back_bytes"] / metrics["activation_offload_out_bytes"]
        assert 0.5 < times <= 2 if "pp" in layout else times == 1


@pytest.mark.parametrize(("world_size", "layouts"), [(1, [""]), (2, [FSDP, DDP])])
def test_gradients_equal_one_device_and_collectives_those_without_it(world_size, layouts):
    step = functools.partial(one_step, microbatch=2)
    results = in_one_world(step, world_size, *((layout + text,) for layout in layouts for text in ("", TABLE)))
    for plain, found in zip(results[::2], results[1::2], strict=True):
        for (*error, collectives), (*_, wanted) in zip(found, plain, strict=True):
            assert max(error) < 1e-12
            assert collectives == wanted and collectives


@pytest.mark.slow  # the fast tests prove it beside cpu_offload, in tests/verification/test_verify_plugins.py
def test_verify_passes():
    tokens, targets = padded()
    path = write_manifest(FSDP + "[mesh]\ndp_shard = 2\n" + TABLE)
    assert_parity(Net, path, Batch(args=(tokens,), target=targets), loss_fn=sum_loss)


# ---- order and bytes -------------------------------------------------------------------------------------------------


def stepped(text):
    """Run a step of 12 sequences of 5 tokens in float32; return the log, the metrics, and what is left on the host."""
    run = composed(text, seeded(dim=8))
    run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    traffic = next(value for value in run.context.state.values() if type(value).__name__ == "Traffic")
    metrics = run.report(0, {})
    run.close()
    return list(traffic.transfers.log), metrics, traffic.host_bytes


def order(log):
    """Shorten a log: what happens several times in a row happens once."""
    return [entry for before, entry in zip([None, *log], log, strict=False) if before != entry]


def test_units_are_fetched_ahead():
    ((log, _, left),), ((one_by_one, *_),) = in_one_world(stepped, 1, (TABLE,), (TABLE + "prefetch = 0\n",))
    assert order(log) == [
        *(("store", f"layers.{index}") for index in range(3)),
        # The block before is on its way before the last one's activations are waited for.
        ("fetch", "layers.2"),
        ("fetch", "layers.1"),
        ("wait", "layers.2"),
        ("fetch", "layers.0"),
        ("wait", "layers.1"),
        ("wait", "layers.0"),
    ]
    assert left == 0
    backward = [("fetch", "layers.2"), ("wait", "layers.2"), ("fetch", "layers.1"), ("wait", "layers.1")]
    assert order(one_by_one)[3:7] == backward


# Of a block of width 8 and inner width 17 the backward needs, of 60 tokens: its input, for the first weight's
# gradient, and the result of tanh, for its own and for the second weight's: one storage, seen twice.
INPUT_BYTES, TANH_BYTES = 60 * 8 * 4, 60 * 17 * 4


def test_bytes_out_and_back():
    wanted = {
        TABLE: 3 * (INPUT_BYTES + TANH_BYTES),
        TABLE + 'units = ["layers.1", "layers.2"]\n': 2 * (INPUT_BYTES + TANH_BYTES),
        TABLE.replace("0.0", "0.003"): 3 * TANH_BYTES,
        TABLE + AC: 3 * INPUT_BYTES,
    }
    found = in_one_world(stepped, 1, *((text,) for text in wanted))
    for num_bytes, ((_, metrics, left),) in zip(wanted.values(), found, strict=True):
        assert metrics == {
            "activation_offload_out_bytes": num_bytes,
            "activation_offload_back_bytes": num_bytes,
            "activation_offload_host_bytes": num_bytes,
        }
        assert left == 0


def warned(text):
    """Run three forwards; return what is warned of, and how often."""
    with io.StringIO() as told:
        handler = logging.StreamHandler(told)
        logging.getLogger("composer3d_plugins").addHandler(handler)
        run = composed(text, seeded(dim=8))
        tokens, targets = (mine(run, tensor) for tensor in padded())
        for number in range(3):
            with run.step(number):
                run.forward_backward(tokens, target=targets)
        run.close()
        return told.getvalue().splitlines()


def test_that_nothing_travels_is_said_once():
    least = f"{60 * 17 * 4 / 2**20:.3g}"
    (nothing,), (some,) = in_one_world(warned, 1, (TABLE.replace("0.0", "0.5"),), (TABLE,))
    assert nothing == [
        f"activation_offload moves nothing: the largest storage that was saved has {least} MiB, less than min_mib = 0.5"
    ]
    assert some == []


def test_bytes_are_those_of_all_ranks():
    for _, metrics, _ in run_ranks(stepped, 2, FSDP + TABLE):
        assert metrics["activation_offload_out_bytes"] == 3 * (INPUT_BYTES + TANH_BYTES)
        assert metrics["activation_offload_host_bytes"] == 3 * (INPUT_BYTES + TANH_BYTES) / 2


class Parts(torch.nn.Module):
    """A block that saves parts of a fused projection, expanded and transposed views, and a buffer's product."""

    def __init__(self):
        super().__init__()
        self.fused = torch.nn.Linear(4, 12)
        self.register_buffer("scale", torch.linspace(1, 2, 4))

    def forward(self, x):
        q, k, v = self.fused(x).chunk(3, -1)
        weights = torch.softmax(q @ k.transpose(-1, -2), -1)
        return x + (weights @ v) * self.scale + x[:, :1].expand_as(x) * v


class Views(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Parts() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + 0.0


def views(text):
    run = composed(text, seeded(Views), loss_fn=lambda y, _: (y**2).sum())
    x = torch.randn(6, 5, 4, generator=torch.Generator().manual_seed(1))
    with run.step(0):
        run.forward_backward(x, target=x)
    found = {name: p.grad for name, p in run.named_parameters()}, run.report(0, {})
    run.close()
    return found


def test_views_of_one_storage_travel_once():
    ((plain, _),), ((found, metrics),) = in_one_world(views, 1, ("",), (TABLE,))
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    # Input, fused projection, attention weights: three views of the projection are one storage, the buffer stays.
    assert metrics["activation_offload_out_bytes"] == 2 * 4 * 6 * 5 * (4 + 12 + 5)


# ---- state -----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_same_and_reshards(tmp_path):
    path = tmp_path / "step-2"
    text = FSDP + TABLE
    (whole, _), (again, _) = in_one_world(resumed, 2, (path, text, False, 4), (path, text, True, 2))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    moved = run_ranks(resumed, 1, path, TABLE, True, 2)[0]
    assert all(torch.allclose(whole[name], moved[name], atol=1e-5) for name in whole)


def evaluated():
    run = composed(TABLE)
    tokens, targets = padded()
    run.evaluate(tokens, target=targets)
    metrics = run.report(0, {})
    run.close()
    return metrics["activation_offload_out_bytes"]


def test_an_evaluation_moves_nothing():
    assert run_ranks(evaluated, 1)[0] == 0


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


REFUSED = [
    (
        TABLE + 'units = ["blocks.*"]\n',
        ':4:1: [scheduling.activation_offload] the pattern "blocks.*" matches nothing in the model; '
        "the model has tok, layers, layers.0, layers.0.up, layers.0.down, layers.0.dropout, layers.1, layers.1.up",
    ),
    (
        TABLE + "[scheduling.compile]\n",
        ':2:13: [scheduling.activation_offload] "activation_offload" cannot be combined with "compile": the '
        "compiler decides itself what a block keeps for its backward, and cannot trace copies to the host",
    ),
    (
        "[scheduling.activation_offload]\nmin_mib = -1.0\n",
        ":3:1: [scheduling.activation_offload] scheduling.activation_offload.min_mib must be at least 0.0, not -1.0",
    ),
]


def test_refusals():
    found = in_one_world(refusal, 1, *((text,) for text, _ in REFUSED))
    assert [message for (message,) in found] == [message for _, message in REFUSED]
