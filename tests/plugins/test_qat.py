"""Fake quantisation beside one device on which torchao itself converted the same layers."""

from __future__ import annotations

import pytest
import torch
from support.converted_linears import (
    DATA_PARALLEL,
    NUM_LAYERS,
    PP,
    SEQ_LEN,
    SIZE,
    TP,
    TP_FSDP,
    Wide,
    assert_bits_of_one_device,
    assert_converted,
    assert_resumes_and_reshards,
    batch,
    counted,
    inside,
    trained,
)
from support.models import composed, seeded
from support.shared_worlds import in_one_world

from composer3d import ManifestError, torch_compat
from composer3d.testing import run_ranks

# Before ranks are forked: each of them would import it anew.
qat = torch_compat.import_torchao("torchao.quantization.qat")
quantization = torch_compat.import_torchao("torchao.quantization")
TABLE = "[precision.qat]\n"


def converted(model):
    weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)
    tokens = qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
    config = qat.QATConfig(weight_config=weights, activation_config=tokens, step="prepare")
    quantization.quantize_(model, config, filter_fn=inside)
    return model


@pytest.mark.parametrize(("world_size", "layouts"), DATA_PARALLEL)
def test_data_parallel_equals_one_device_bit_for_bit(world_size, layouts):
    assert_bits_of_one_device(world_size, layouts, TABLE, converted)


def test_pipeline_parallel_equals_one_device():
    for losses, losses_1, gradients, weights in run_ranks(trained, 2, PP + TABLE, converted, 2):
        assert max(gradients, weights) < 1e-6
        assert losses == pytest.approx(losses_1, rel=1e-6)


CUT_GROUPS = TP.replace("tp = 2", "tp = 4")  # the inputs of `down` are two groups of 32: four ranks have halves of them


def alone(text):
    """Return how far a layer that is cut along its inputs is from one device, given the same: outputs, gradients."""
    reference = converted(seeded(Wide)).layers[0].down
    run = composed(text + TABLE, seeded(Wide))
    layer, tp = run.parts[0].module.layers[0].down, run.mesh["tp"]
    generator = torch.Generator().manual_seed(1)
    x, gradient = (torch.randn(16, SEQ_LEN, size, generator=generator) for size in (2 * SIZE, SIZE))
    x_1 = x.clone().requires_grad_()
    share = x.chunk(tp.size(), -1)[tp.get_local_rank()].clone().requires_grad_()
    y, y_1 = layer(share), reference(x_1)
    y.backward(gradient)
    y_1.backward(gradient)
    pairs = [
        (y, y_1),
        (share.grad, x_1.grad.chunk(tp.size(), -1)[tp.get_local_rank()]),
        (layer.weight.grad.full_tensor(), reference.weight.grad),
    ]
    run.close()
    return [float((found - wanted).detach().abs().max() / wanted.detach().abs().max()) for found, wanted in pairs]


@pytest.mark.parametrize(("world_size", "layout"), [(2, TP), (4, CUT_GROUPS)])
def test_tensor_parallel_rounds_as_one_device(world_size, layout):
    for errors in run_ranks(alone, world_size, layout):
        assert max(errors) < 1e-6


# Sums in another order may be rounded to other integers, and torchao's rounding knows no float64.
@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [pytest.param(2, [(TP, 1)], marks=pytest.mark.slow), (4, [(TP_FSDP, 2), (CUT_GROUPS, 1)])],
)
def test_tensor_parallel_trains_as_one_device(world_size, layouts):
    cases = ((layout + TABLE, converted, chunks) for layout, chunks in layouts)
    for ranks in in_one_world(trained, world_size, *cases):
        for losses, losses_1, *_ in ranks:
            assert losses == pytest.approx(losses_1, rel=1e-3)
            assert losses[-1] < losses[0]


def test_collectives_of_data_parallelism_are_those_without_it():
    text = "[sharding.fsdp2]\n"
    found, plain = in_one_world(counted, 2, (text + TABLE,), (text,))
    assert found == plain


@pytest.mark.parametrize(("degree", "activations"), [(2, ["int8", "none"]), (4, ["int8"])])
def test_collectives_of_tensor_parallelism(degree, activations):
    layout = TP.replace("tp = 2", f"tp = {degree}")
    tables = (TABLE + f'activations = "{each}"\n' for each in activations)
    (plain, *_), *others = in_one_world(counted, degree, (layout,), *((layout + table,) for table in tables))
    key = ("all_reduce", "tp")
    for each, (found, *_) in zip(activations, others, strict=True):
        # `down` agrees on the range of every token, and where ranks have halves of groups on two numbers a row.
        numbers = [2 * 16 * SEQ_LEN] * (each == "int8") + [2 * SIZE] * (degree == 4)
        assert found[key] == (plain[key][0] + NUM_LAYERS * len(numbers), plain[key][1] + 4 * NUM_LAYERS * sum(numbers))
        assert {k: v for k, v in found.items() if k != key} == {k: v for k, v in plain.items() if k != key}


@pytest.mark.parametrize("own", [range(8, 24), [0, 1, 2, 12, 13, 14, 24, 25], range(3)])
def test_pieces_of_groups_are_rounded_with_the_scales_of_the_whole(own):
    from composer3d_plugins.precision.qat.fake_quantised_linear import Pieces, Rounding

    class Alone:
        def __init__(self, whole):
            self.whole = whole.detach().abs().unflatten(1, (-1, 16)).amax(-1)

        def largest(self, values):
            assert (values <= self.whole).all()
            return self.whole

    whole = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    quantiser = Rounding.of(weights="int4", group_size=16, activations="none").of_weights
    pieces = Pieces.of(own, size=16, num_groups=2, device=torch.device("cpu"))
    found = pieces.rounded(whole[:, list(own)], quantiser, Alone(whole))
    assert torch.equal(found, quantiser(whole)[:, list(own)])
    assert Pieces.of(range(16, 32), size=16, num_groups=2, device=torch.device("cpu")) is None


def test_a_resumed_run_is_the_same_and_reshards(tmp_path):
    assert_resumes_and_reshards(tmp_path / "step-2", TABLE)


def test_the_plan_says_what_is_converted():
    assert_converted(TABLE, transform="qat", cls="FakeQuantizedLinear")


def test_what_was_trained_is_what_quantisation_gives():
    def rounded():
        run = composed(TABLE + 'activations = "none"\n', seeded(Wide))
        tokens, _ = batch()
        prepared = run.model(tokens)
        run.close()
        quantised = seeded(Wide)
        config = quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(32))
        quantization.quantize_(quantised, config, filter_fn=inside)
        return float((prepared - quantised(tokens)).detach().abs().max())

    assert run_ranks(rounded, 1)[0] < 1e-6


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text, seeded(Wide))
    return str(caught.value).partition("run.toml")[2]


REFUSED = [
    ('modules = ["norm"]\n', ':2:12: [precision.qat] the pattern "norm" matches modules without linear layers'),
    ("group_size = 1\n", ":3:1: [precision.qat] precision.qat.group_size must be at least 2, not 1"),
    (
        "group_size = 64\n",
        ":2:12: [precision.qat] no layer is left to convert: of 5 linear layers, 5 are named, and "
        "exclude or sizes that are no multiples of 64 leave out the rest",
    ),
    (
        "[precision.int8]\n",
        ':2:12: [precision.qat] "qat" cannot be combined with "int8": both replace what the same linear layers compute',
    ),
]


def test_refusals():
    found = in_one_world(refusal, 1, *((TABLE + text,) for text, _ in REFUSED))
    assert [message for (message,) in found] == [message for _, message in REFUSED]
