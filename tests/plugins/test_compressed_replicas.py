"""Compression over replicas: ddp's all-reduces and hybrid sharding's second stage, and both stages together."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from composer3d_plugins.communication.compression.codecs import make_codec
from composer3d_plugins.communication.compression.frozen_adam import FrozenAdamW
from support.models import composed, gradient_error, mine, padded, reference_gradients, seeded
from support.replicated_gradients import Recorded, power_sgd, rows_of_codec

from composer3d import ComposerError
from composer3d.testing import count_collectives, full, run_ranks

UNITS = 4  # three blocks and the root
UNIT, BUCKETS = "[sharding.ddp]\n", '[sharding.ddp]\nreducer = "bucketed"\n'
HYBRID = "[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n"
NODES = "mesh.gpus_per_node = 1\n"  # int4 is for ranks of different ones
FSDP = "[sharding.fsdp2]\n"
LAYOUTS = [
    pytest.param(UNIT, 2, id="units"),
    pytest.param(BUCKETS, 2, id="buckets"),
    pytest.param(HYBRID, 4, id="hsdp"),
]


def table(**options):
    values = {key: f'"{value}"' if isinstance(value, str) else value for key, value in options.items()}
    lines = (f"{key} = {str(value).lower() if isinstance(value, bool) else value}\n" for key, value in values.items())
    return "[communication.compression]\n" + "".join(lines)


def stepped(text, steps=1, dtype=torch.float32, *, clip=None, model=None, optimizer=torch.optim.SGD, calls=None):
    """Run steps on a rank; return the gradients of each as they were applied, collectives of the last, and calls."""
    torch.set_default_dtype(dtype)
    recorded = Recorded()
    if calls:
        recorded.attach(setattr)
    run = composed(text, None if model is None else seeded(model))
    made = run.optimizer(optimizer, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    found = []
    for step in range(steps):
        with count_collectives(run.mesh) as collectives, run.step(step):
            run.forward_backward(tokens, target=targets)
            norm = None if clip is None else float(run.clip_grad_norm_(clip))
            found.append({name: full(p.grad).clone() for name, p in run.named_parameters()})
            made.step()
            made.zero_grad()
    run.close()
    return found, collectives.summary(), recorded.calls, norm


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


# ---- codecs of rows --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_what_is_sent_as_it_is_is_the_all_reduce_of_torch_to_the_bit(layout, world_size):
    axes = {"axes": '["dp_replicate"]'} if layout == HYBRID else {}
    text = layout + table(gradients="int8", start_step=1).replace('"[', "[")
    text += "".join(f"{key} = {value}\n" for key, value in axes.items())
    native, compressed = (run_ranks(stepped, world_size, each) for each in (layout, text))
    for (one, counted, *_), (other, expected, *_) in zip(compressed, native, strict=True):
        assert same(one[0], other[0]) and counted == expected


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_means_are_those_of_the_same_codec_on_one_device(layout, world_size):
    """Over both stages of hybrid sharding; the bytes are those of payloads, there and back."""
    run = partial(stepped, steps=2, dtype=torch.float64, calls=True)
    results = run_ranks(run, world_size, layout + table(gradients="int8", block=16))
    assert rows_of_codec([calls for *_, calls, _ in results], codec=make_codec("int8", block=16), feedback=False) < 1e-6
    assert all(same(found[-1], results[0][0][-1]) for found, *_ in results)
    _, counted, calls, _ = results[0]
    lengths = [sum(g.size for g in before.values()) for _, before, _ in calls[len(calls) // 2 :]]
    sent = sum(2 * make_codec("int8", block=16).num_bytes(-(-length // 2)) for length in lengths)
    assert counted["all_to_all", "dp_replicate"] == counted["all_gather", "dp_replicate"] == (len(lengths), sent)
    assert (("all_to_all", "dp_shard") in counted) == (layout == HYBRID)


def first_error(text):
    tokens, targets = padded()
    _, gradients = reference_gradients(seeded(), tokens, targets)
    run = composed(text)
    tokens, targets = mine(run, tokens), mine(run, targets)
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        error = gradient_error(run, gradients)
    run.close()
    return error


def test_axes_choose_what_is_compressed():
    """Two stages add their errors; one alone leaves the other's exchange to torch."""
    errors = {}
    for axes in ('["dp_shard"]', '["dp_replicate"]', '["dp_shard", "dp_replicate"]'):
        text = HYBRID + table(gradients="int8", block=16) + f"axes = {axes}\n"
        ((_, counted, *_), *_) = run_ranks(stepped, 4, text)
        errors[axes] = run_ranks(first_error, 4, text)[0]
        assert (("reduce_scatter", "dp_shard") in counted) == ("dp_shard" not in axes)
        assert (("all_reduce", "dp_replicate") in counted) == ("dp_replicate" not in axes)
    assert all(1e-3 < error < 5e-2 for error in errors.values()) and len(set(errors.values())) == 3


# ---- error feedback --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_products_of_low_rank_are_those_of_power_sgd_on_one_device(layout, world_size):
    axes = 'axes = ["dp_replicate"]\n' if layout == HYBRID else ""
    run = partial(stepped, steps=3, dtype=torch.float64, calls=True)
    results = run_ranks(run, world_size, layout + table(gradients="powersgd", rank=1) + axes)
    assert power_sgd([calls for *_, calls, _ in results], rank=1) < 1e-12
    assert all(same(found[-1], results[0][0][-1]) for found, *_ in results)


@pytest.mark.parametrize(
    ("options", "codec"),
    [
        ({"gradients": "topk", "ratio": 0.25, "block": 16}, make_codec("topk", block=16, ratio=0.25)),
        ({"gradients": "onebit", "block": 16, "start_step": 0}, make_codec("onebit", block=16)),
        ({"gradients": "int4", "block": 16, "error_feedback": True}, make_codec("int4", block=16)),
    ],
    ids=["topk", "onebit", "int4"],
)
def test_what_a_codec_loses_is_sent_later(options, codec):
    results = run_ranks(partial(stepped, steps=3, dtype=torch.float64, calls=True), 2, NODES + UNIT + table(**options))
    calls = [calls for *_, calls, _ in results]
    assert rows_of_codec(calls, codec=codec) < 1e-6
    assert rows_of_codec(calls, codec=codec, feedback=False) > 1e-2


def trained(text, steps=4, *, save=None, load=None, first=0, veto=None):
    run = composed(text)
    optimizer = run.optimizer(torch.optim.SGD, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    if load is not None:
        run.load(load)
    for step in range(first, steps):
        with run.step(step):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
        if save is not None and step == 1:
            run.save(save)
    owed = debts(run)
    found = {name: full(p.detach()).clone() for name, p in run.named_parameters()}
    run.close()
    return found, owed


def debts(run):
    """Return what is owed to every parameter: the mean of what senders have left over, and the sum of owners'."""
    (plugin,) = (each.instance for each in run.context.plugins if each.name == "compression")
    state = run.context.state[plugin].residuals.state_dict()
    sender = {name: full(tensor).mean(0) for name, tensor in state["sender"].items()}
    return {name: mean + full(state["owner"][name]).sum(0) for name, mean in sender.items()}


@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
@pytest.mark.parametrize(
    "options",
    [{"gradients": "powersgd", "rank": 1}, {"gradients": "topk", "ratio": 0.25}],
    ids=["powersgd", "topk"],
)
def test_a_resumed_run_is_the_undisturbed_one(layout, world_size, options, tmp_path):
    text = layout + table(**options) + ('axes = ["dp_replicate"]\n' if layout == HYBRID else "")
    whole = run_ranks(partial(trained, save=tmp_path / "saved"), world_size, text)
    resumed = run_ranks(partial(trained, load=tmp_path / "saved", first=2), world_size, text)
    for (one, owed), (other, also) in zip(whole, resumed, strict=True):
        assert same(one, other) and same(owed, also) and any(tensor.any() for tensor in owed.values())


@pytest.mark.parametrize(
    ("before", "after"),
    [((UNIT, 2), (UNIT, 4)), ((UNIT, 4), (BUCKETS, 2)), ((HYBRID, 4), (UNIT, 2))],
    ids=["2 to 4", "4 to 2", "hsdp to ddp"],
)
def test_another_number_of_replicas_owes_the_same(before, after, tmp_path):
    (layout, world_size), (other, others) = before, after
    options = table(gradients="topk", ratio=0.25)
    text = layout + options + ('axes = ["dp_replicate"]\n' if layout == HYBRID else "")
    (_, owed), *_ = run_ranks(partial(trained, steps=2, save=tmp_path / "saved"), world_size, text)
    for _, found in run_ranks(partial(trained, steps=2, load=tmp_path / "saved", first=2), others, other + options):
        assert found.keys() == owed.keys()
        assert all(torch.allclose(found[name], owed[name], rtol=1e-6, atol=1e-9) for name in owed)


def vetoed(text, vetoes):
    """Train, with a step that one rank vetoes, or without it."""
    journal = '[profiling.journal]\nuse = "support.plugins:Journal"\nveto_rank = 1\nveto_step = 1\n'
    run = composed(text + (journal if vetoes else ""))
    optimizer = run.optimizer(torch.optim.SGD, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    for step in range(4):
        if step == 1 and not vetoes:
            continue
        with run.step(step):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
    found = {name: full(p.detach()).clone() for name, p in run.named_parameters()}, debts(run)
    run.close()
    return found


@pytest.mark.parametrize(
    "options", [{"gradients": "powersgd", "rank": 1}, {"gradients": "topk"}], ids=["powersgd", "topk"]
)
def test_a_step_that_is_vetoed_leaves_nothing_behind(options):
    for (one, owed), (other, also) in zip(
        run_ranks(vetoed, 2, UNIT + table(**options), True),
        run_ranks(vetoed, 2, UNIT + table(**options), False),
        strict=True,
    ):
        assert same(one, other) and same(owed, also)


def test_a_scaled_loss_is_refused_error_feedback():
    text = UNIT + '[precision.mixed]\nparam_dtype = "float16"\n' + table(gradients="topk")
    assert "scales the losses of both by factors of its own" in run_ranks(refusal, 2, text)[0]


# ---- signs, for a second moment that stands still --------------------------------------------------------------------


def adam(use, **options):
    """Return the parameters of one device after each of six steps."""
    model = seeded()
    made = use(model.parameters(), lr=1e-2, **options)
    tokens, targets = padded()
    found = []
    for _ in range(6):
        reference_gradients(model, tokens, targets)
        made.step()
        made.zero_grad()
        found.append({name: p.detach().clone() for name, p in model.named_parameters()})
    return found


def frozen_and_own():
    torch.set_default_dtype(torch.float64)
    return adam(FrozenAdamW, freeze_step=4), adam(torch.optim.AdamW), adam(FrozenAdamW, freeze_step=9)


def test_the_second_moment_is_that_of_adam_until_it_stands_still():
    ((frozen, own, late),) = run_ranks(frozen_and_own, 1)
    far = [max(float((one[n] - other[n]).abs().max()) for n in one) for one, other in zip(frozen, own, strict=True)]
    assert max(far[:4]) < 1e-15 and min(far[4:]) > 1e-6
    assert all(
        torch.allclose(one[n], other[n], rtol=0, atol=1e-15) for one, other in zip(late, own, strict=True) for n in one
    )


SIGNS = UNIT + table(gradients="onebit", start_step=3)


def signed(text, freeze_step):
    """Return losses of steps with and after the warm-up, and this rank's parameters."""
    run = composed(text)
    optimizer = run.optimizer(FrozenAdamW, lr=1e-2, freeze_step=freeze_step)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for step in range(12):
        with run.step(step):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            optimizer.step()
            optimizer.zero_grad()
    found = {name: full(p.detach()).clone() for name, p in run.named_parameters()}
    run.close()
    return losses, found


def signed_and_plain(freeze_step):
    return signed(SIGNS, freeze_step), signed(UNIT, freeze_step)


def test_one_bit_adam_is_adam_in_its_warm_up_and_learns_on():
    ((losses, one), (plain, _)), ((_, other), _) = run_ranks(signed_and_plain, 2, 3)
    assert losses[:4] == plain[:4] and losses[4:] != plain[4:]
    assert losses[-1] < losses[3] and same(one, other)


@pytest.mark.parametrize(
    ("start_step", "optimizer", "options", "said"),
    [
        (3, "AdamW", {}, "AdamW is not known as one"),
        (3, "AdamW", {}, "freeze_step = 3"),
        (3, "FrozenAdamW", {"freeze_step": 5}, "in between it would go on with signs"),
        (0, "FrozenAdamW", {"freeze_step": 1}, "has no second moment yet"),
    ],
)
def test_signs_are_refused_a_second_moment_that_goes_on(start_step, optimizer, options, said):
    cls = FrozenAdamW if optimizer == "FrozenAdamW" else torch.optim.AdamW
    text = UNIT + table(gradients="onebit", start_step=start_step)
    assert said in run_ranks(partial(refusal, optimizer=cls, **options), 2, text)[0]


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text, optimizer=None, **options):
    with pytest.raises(ComposerError) as caught:
        run = composed(text)
        if optimizer is not None:
            run.optimizer(optimizer, lr=0.1, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (UNIT + table(gradients="int8") + 'axes = ["tp"]\n', "data parallelism sends nothing over tp"),
        (UNIT + table(gradients="int8") + 'axes = ["dp_shard"]\n', "no plugin of this manifest shards parameters"),
        (UNIT + table(gradients="int8", weights="int8"), "no plugin of this manifest shards parameters"),
        (FSDP + table(gradients="int8") + 'axes = ["dp_replicate"]\n', "dp_replicate = 1: no rank sends"),
        (FSDP + table(weights="int8") + 'axes = ["dp_shard"]\n', "axes are of gradients"),
        (FSDP + table(gradients="topk"), "would be the whole gradient on every rank"),
        (FSDP + table(gradients="int8", error_feedback=True), "would be the whole gradient"),
        (FSDP + table(gradients="powersgd", error_feedback=False), "its products are of whole matrices"),
        (UNIT + table(gradients="int8", rank=2), 'rank has no effect without gradients = "powersgd"'),
        (UNIT + table(gradients="int8", ratio=0.5), 'ratio has no effect without gradients = "topk"'),
        (FSDP + table(weights="int8", error_feedback=True), "error_feedback is of gradients"),
    ],
)
def test_refusals(text, said):
    assert said in run_ranks(refusal, 2, text)[0]
