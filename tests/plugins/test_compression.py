"""Compressed gradients and weights: codecs within their bounds, the exchange of exact numbers, replicas, bytes."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from composer3d_plugins.communication.compression.codecs import make_codec
from composer3d_plugins.communication.compression.exchange import Owed, gather_rows, mean_of_replicas, reduce_rows
from support.models import (
    composed,
    gradient_error,
    mine,
    one_step,
    padded,
    reference_gradients,
    seeded,
    write_manifest,
)
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d import ManifestError, block_codec
from composer3d.communication import IntegerBlocks, block_codecs
from composer3d.testing import count_collectives, full, run_ranks

NAMES = ("bf16", "int8", "fp8", "int4")
BIASED = ("topk", "onebit")
UNITS = 4  # three blocks and the root
NODES = "mesh.gpus_per_node = 1\n"  # int4 is for ranks of different ones
FSDP = "[sharding.fsdp2]\n"
PIPELINE = "[mesh]\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 6\n"


def table(**options):
    values = {key: f'"{value}"' if isinstance(value, str) else value for key, value in options.items()}
    return "[communication.compression]\n" + "".join(f"{key} = {value}\n" for key, value in values.items())


# ---- codecs ----------------------------------------------------------------------------------------------------------


def numbers(rows, length):
    generator = torch.Generator().manual_seed(length)
    magnitudes = 10.0 ** (torch.arange(length) % 9 - 4)
    return torch.randn(rows, length, generator=generator) * magnitudes


@pytest.mark.parametrize("block", [15, 16])
@pytest.mark.parametrize("length", [0, 1, 2, 7, 16, 255, 256, 257, 1000])
@pytest.mark.parametrize("name", [*NAMES, *BIASED])
def test_errors_are_within_the_bound_and_payloads_have_their_bytes(name, length, block):
    codec, x = make_codec(name, block=block), numbers(3, length)
    payload = codec.encode(x)
    assert payload.dtype == torch.uint8 and payload.shape == (3, codec.num_bytes(length))
    decoded = codec.decode(payload, length)
    assert decoded.dtype == torch.float32 and decoded.shape == x.shape
    assert bool(((decoded - x).abs() <= codec.bound(x)).all())
    # A bound that is as large as the numbers would hold nothing.
    if name not in BIASED and length:
        assert float(codec.bound(x).mean()) < 0.1 * float(x.abs().max())


@pytest.mark.parametrize("name", [*NAMES, *BIASED])
def test_a_row_has_the_payload_that_it_has_alone(name):
    codec, x = make_codec(name, block=16), numbers(4, 37)
    assert all(torch.equal(codec.encode(x)[row], codec.encode(x[row : row + 1])[0]) for row in range(4))


@pytest.mark.parametrize("rounding", [None, 1])
@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_a_piece_has_the_payload_that_it_has_in_the_whole(name, rounding, monkeypatch):
    x, found = numbers(3, 1000), []
    for cached in (2**20, 64):
        monkeypatch.setattr(block_codecs, "_CACHED_ELEMENTS", cached)
        generator = None if rounding is None else torch.Generator().manual_seed(rounding)
        codec = block_codec(name, block=16, generator=generator)
        payload = codec.encode(x)
        found += [payload, codec.decode(payload, 1000)]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("name", [*NAMES, *BIASED])
def test_zeros_stay_zeros(name):
    codec = make_codec(name, block=16)
    assert not codec.decode(codec.encode(torch.zeros(2, 33)), 33).any()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", [*NAMES, *BIASED])
def test_what_is_not_finite_is_seen_by_the_receiver(name, value):
    codec, x = make_codec(name, block=16), numbers(1, 48)
    x[0, 20] = value
    decoded = codec.decode(codec.encode(x), 48)[0]
    assert not decoded[20].isfinite()
    assert bool(decoded[:16].isfinite().all()) and bool(decoded[32:].isfinite().all())


@pytest.mark.parametrize(("name", "bits"), [("bf16", 16), ("int8", 8 + 1 / 8), ("fp8", 8 + 1 / 8), ("int4", 4 + 1 / 8)])
def test_bits_of_an_element(name, bits):
    assert make_codec(name, block=256).num_bytes(1 << 16) * 8 == bits * (1 << 16)


def test_stochastic_rounding_is_unbiased():
    """The mean of 4000 payloads is within 5 standard errors: a step has at most half a step's deviation."""
    generator = torch.Generator().manual_seed(0)
    codec = IntegerBlocks(bits=4, block=16, generator=generator)
    x = torch.randn(1, 16, generator=torch.Generator().manual_seed(1))
    repeated = x.expand(4000, 16)
    decoded = codec.decode(codec.encode(repeated), 16)
    step = float(x.abs().max()) / 7
    assert bool(((decoded - x).abs() <= codec.bound(x)).all())
    assert float((decoded.mean(0) - x[0]).abs().max()) < 5 * 0.5 * step / math.sqrt(4000)
    assert not torch.equal(decoded[0], decoded[1])


def exchanged_nothing():
    """Exchange rows without elements by every codec; return the shapes of what a rank has then."""
    found = {}
    for name in (*NAMES, *BIASED, None):
        codec, group = None if name is None else make_codec(name, block=16), dist.group.WORLD
        owed = Owed(sender_N=torch.zeros(0), owner_N=torch.zeros(0))
        found[name] = [
            tuple(each.shape)
            for each in (
                reduce_rows(torch.zeros(2, 0), codec, group),
                gather_rows(torch.zeros(0), codec, group),
                mean_of_replicas(torch.zeros(0), codec, group),
                mean_of_replicas(torch.zeros(0), codec, group, owed),
            )
        ]
    return found


def test_a_rank_whose_shards_are_empty_exchanges_payloads_of_no_bytes():
    assert all(make_codec(name, block=16).num_bytes(0) == 0 for name in (*NAMES, *BIASED))
    for found in run_ranks(exchanged_nothing, 2):
        assert found == dict.fromkeys((*NAMES, *BIASED, None), [(0,), (2, 0), (0,), (0,)])


# ---- runs ------------------------------------------------------------------------------------------------------------


def narrow_step(text):
    """Return the sizes of a rank's shards of a layer with one output, and its gradients beside one device's."""
    torch.manual_seed(0)
    model, reference, x, y = nn.Linear(5, 1), nn.Linear(5, 1), torch.randn(4, 5), torch.randn(4, 1)
    reference.load_state_dict(model.state_dict())
    mse_loss(reference(x), y).backward()
    run = composer3d.compose(model, write_manifest(text), loss_fn=mse_loss)
    here = run.context.data_parallel_rank
    with run.step(0):
        run.forward_backward(x[here : here + 1], target=y[here : here + 1])
        run.clip_grad_norm_(math.inf)
        found = {name: full(p.grad) for name, p in run.named_parameters()}
    sizes = [parameter.to_local().numel() for parameter in model.parameters()]
    run.close()
    errors = [(found[name] - p.grad).abs().max() / p.grad.abs().max() for name, p in reference.named_parameters()]
    return sizes, float(max(errors))


def test_a_rank_whose_shards_are_empty_takes_part():
    mesh = "[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n"
    found = run_ranks(narrow_step, 4, mesh + table(gradients="int8", weights="int8"))
    assert [sizes for sizes, _ in found] == [[5, 1], [0, 0]] * 2
    assert max(error for _, error in found) < 0.05  # of 8 bits, three times


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_what_is_sent_as_it_is_has_the_gradients_of_one_device(zero):
    """Units below `min_numel` take the same exchange, in float64."""
    text = f"[sharding.fsdp2]\nzero = {zero}\n" + table(gradients="int8", weights="int8", min_numel=875)
    for *errors, counted in run_ranks(partial(one_step, microbatch=3), 2, text):
        assert max(errors) < 1e-12
        assert ("reduce_scatter", "dp_shard") not in counted
        assert counted["all_to_all", "dp_shard"] == UNITS * (2 if zero == 3 else 1)


def compressed_step(text, world_size):
    """Return the distance of gradients from one device, and how many are not those of the codec on one device."""
    tokens, targets = padded()
    reference = seeded()
    _, gradients = reference_gradients(reference, tokens, targets)
    run = composed(text)
    mine_tokens, mine_targets = mine(run, tokens), mine(run, targets)
    with count_collectives(run.mesh) as collectives, run.step(0):
        run.forward_backward(mine_tokens, target=mine_targets)
        summary = collectives.summary()
        error = gradient_error(run, gradients)
    found = {name: full(p.grad).clone() for name, p in run.named_parameters()}
    units = {"": ["tok", "norm", "out"], **{f"layers.{n}": ["up", "down"] for n in range(3)}}
    expected = expected_gradients(units, tokens, targets, world_size)
    run.close()
    others = sum(int(((found[n] - expected[n]).abs() > 1e-6 * expected[n].abs().max()).sum()) for n in expected)
    return error, others, found, summary


def expected_gradients(units, tokens, targets, world_size, name="int8"):
    """Encode every rank's gradients on one device: rows of a unit are its parameters' chunks along dim 0, padded."""
    count = int((targets != -100).sum())
    parts = []
    for rank in range(world_size):
        model = seeded()
        rows = slice(rank * len(tokens) // world_size, (rank + 1) * len(tokens) // world_size)
        loss = torch.nn.functional.cross_entropy(
            model(tokens[rows]).flatten(0, 1), targets[rows].flatten(), reduction="sum", ignore_index=-100
        )
        loss.backward()
        parts.append({n: p.grad for n, p in model.named_parameters()})
    codec, result = make_codec(name, block=16), {}
    for prefix, modules in units.items():
        names = [n for n in parts[0] if n.startswith(tuple(f"{prefix}.{m}.".lstrip(".") for m in modules))]
        total = 0.0
        for part in parts:
            chunks = [padded_chunks(part[n], world_size) for n in names]
            rows = torch.cat(chunks, dim=1)
            total = total + codec.decode(codec.encode(rows), rows.shape[1])
        for n, piece in zip(names, total.split([c.shape[1] for c in chunks], dim=1), strict=True):
            shape = parts[0][n].shape
            result[n] = piece.reshape(-1, *shape[1:])[: shape[0]] / count
    return result


def padded_chunks(tensor, world_size):
    rows = -(-tensor.shape[0] // world_size)
    padding = torch.zeros(rows * world_size - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, padding]).reshape(world_size, -1)


@pytest.mark.parametrize("world_size", [2, 4])
def test_gradients_are_those_of_the_same_codec_on_one_device(world_size):
    text = FSDP + table(gradients="int8", block=16)
    results = run_ranks(partial(compressed_step, world_size=world_size), world_size, text)
    for error, others, found, _ in results:
        assert 1e-4 < error < 2e-2
        # Of 1,000 elements two may lie so near to the middle of two integers that a rounding of float32 decides.
        assert others <= 2
        assert all(torch.equal(found[name], other) for name, other in results[0][2].items())


def test_collectives_have_the_bytes_of_payloads():
    """Each unit sends a payload a rank; its weights are gathered as a payload a rank, twice but for the root's."""
    both = FSDP + table(gradients="int8", weights="fp8", block=16)
    codec = make_codec("int8", block=16)
    (*_, summary), *_ = run_ranks(partial(compressed_step, world_size=2), 2, both)
    lengths = [sum(padded_chunks(p, 2).shape[1] for p in unit) for unit in unit_parameters()]
    count, num_bytes = summary["all_to_all", "dp_shard"]
    assert (count, num_bytes) == (UNITS, sum(2 * codec.num_bytes(length) for length in lengths))
    gathered = sum(2 * codec.num_bytes(length) * (1 if index == 3 else 2) for index, length in enumerate(lengths))
    assert summary["all_gather", "dp_shard"] == (2 * UNITS - 1, gathered)


def unit_parameters():
    model = seeded()
    blocks = [list(layer.parameters()) for layer in model.layers]
    inside = {id(p) for block in blocks for p in block}
    return [*blocks, [p for p in model.parameters() if id(p) not in inside]]


def trained(text, steps=4, load=None, save=None, first=0):
    run = composed(text)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
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
    found = {name: full(p.detach()).clone() for name, p in run.named_parameters()}
    run.close()
    return found


def equal(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_steps_before_the_first_compressed_one_are_exact():
    plain = run_ranks(trained, 2, FSDP, 2)[0]
    begun = run_ranks(trained, 2, NODES + FSDP + table(gradients="int4", start_step=2), 2)[0]
    worst = max(float((plain[name] - begun[name]).abs().max()) for name in plain)
    assert worst < 1e-6
    later = run_ranks(trained, 2, NODES + FSDP + table(gradients="int4", start_step=2), 3)[0]
    assert not equal(run_ranks(trained, 2, FSDP, 3)[0], later)


def test_stochastic_rounding_resumes_bit_for_bit(tmp_path):
    text = NODES + FSDP + table(gradients="int4", rounding="stochastic")
    (whole, *_) = run_ranks(partial(trained, save=tmp_path / "saved"), 2, text)
    (resumed, *_) = run_ranks(partial(trained, load=tmp_path / "saved", first=2), 2, text)
    assert equal(whole, resumed)


def test_hybrid_sharding_keeps_replicas_equal():
    text = "[mesh]\ndp_replicate = 2\n" + FSDP + table(gradients="int8", weights="int8")
    first, *others = run_ranks(trained, 4, text)
    assert all(equal(first, other) for other in others)


def test_sharding_of_float8_weights_and_compressed_gradients_compose():
    text = FSDP + "[precision.mixed]\n" + table(gradients="bf16")
    first, second = run_ranks(trained, 2, text)
    assert equal(first, second)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (FSDP + table(block=16), "neither gradients nor weights"),
        (FSDP + table(gradients="fp8", rounding="stochastic"), "is for integers"),
        (FSDP + table(gradients="int7"), 'gradients = "int7" is no codec'),
        (FSDP + table(weights="int4"), 'weights = "int4" is no codec'),
        (FSDP + table(gradients="builtins:dict"), "returns dict, which has no num_bytes"),
        (
            FSDP + table(gradients="fractions:Fraction.from_float"),
            "is called without arguments, and takes others: missing",
        ),
        (FSDP + table(gradients="int8", axes=[]), "axes = []: nothing is compressed"),
        (FSDP + table(gradients="int8", axes=["dp_shard", "dp_shard"]), 'axes: "dp_shard" stands twice'),
        (FSDP + table(gradients="int8", min_numel=10**8), "min_numel = 100000000, and the whole model has"),
        (FSDP + table(gradients="bf16", block=64), 'block has no effect with gradients = "bf16"'),
        (PIPELINE + table(gradients="int8"), "no plugin of this manifest shards or replicates parameters"),
        (
            FSDP + '[precision.float8]\nall_gather = true\nmodules = ["layers"]\n' + table(weights="int8"),
            "both replace the all-gather",
        ),
    ],
)
def test_refusals(text, said):
    assert said in run_ranks(refusal, 2, text)[0]


def test_a_run_that_ends_before_it_compresses(tmp_path):
    path = tmp_path / "run.toml"
    text = 'composer3d = 1\nextends = "quickstart"\ntrain.steps = 40\n' + table(gradients="int8", start_step=40)
    path.write_text(text)
    found = composer3d.check(path)
    assert not found.ok
    assert str(found).endswith(
        "run.toml:6:1: [communication.compression] start_step = 40, and the run has 40 steps, the last of which is "
        "39: nothing is compressed; lower start_step, or train for longer"
    )
    path.write_text(text.replace("start_step = 40", "start_step = 39"))
    assert composer3d.check(path).ok


def test_one_rank_sends_nothing():
    assert (
        "dp_shard = 1 and dp_replicate = 1 and cp = 1: no rank sends anything"
        in run_ranks(refusal, 1, FSDP + table(gradients="int8"))[0]
    )
