"""Fake quantisation beside one device on which torchao itself converted the same layers."""

from __future__ import annotations

import pytest
import torch
from support.lowered import PP, TP, TP_FSDP, Wide, batch, counted, inside, plan, saved, trained
from support.models import composed, seeded

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


def converted_weights(model):
    weights = qat.IntxFakeQuantizeConfig(torch.int4, group_size=32)
    quantization.quantize_(model, qat.QATConfig(weight_config=weights, step="prepare"), filter_fn=inside)
    return model


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(1, ""), (2, "[sharding.fsdp2]\n"), (2, "[sharding.fsdp2]\nzero = 1\n"), (2, "[sharding.ddp]\n")],
)
def test_data_parallel_equals_one_device_bit_for_bit(world_size, layout):
    for losses, losses_1, gradients, weights in run_ranks(trained, world_size, layout + TABLE, converted, world_size):
        assert (gradients, weights) == (0.0, 0.0)
        assert losses == pytest.approx(losses_1, rel=1e-6)
        assert losses[-1] < losses[0]


def test_pipeline_parallel_equals_one_device():
    for losses, losses_1, gradients, weights in run_ranks(trained, 2, PP + TABLE, converted, 2):
        assert max(gradients, weights) < 1e-6
        assert losses == pytest.approx(losses_1, rel=1e-6)


# One step: the largest element of a group is rounded beyond the range, or not, as its last bit says, and has a gradient
# or none. So weights that differ by the order of sums may have other gradients in the next step.
@pytest.mark.parametrize(("world_size", "layout", "chunks"), [(2, TP, 1), (4, TP_FSDP, 2)])
def test_weights_alone_are_those_of_one_device_under_tp(world_size, layout, chunks):
    text = layout + TABLE + 'activations = "none"\n'
    for _, _, gradients, weights in run_ranks(trained, world_size, text, converted_weights, chunks, 1):
        assert max(gradients, weights) < 1e-6


def test_tensor_parallel_scales_shares_of_tokens():
    # Inputs of cut layers are rounded to 1/255 of their share's range instead of the whole's.
    for losses, losses_1, _, weights in run_ranks(trained, 2, TP + TABLE, converted, 1, 1):
        assert losses == pytest.approx(losses_1, rel=1e-2)
        assert weights < 3 / 255
    for losses, *_ in run_ranks(trained, 4, TP_FSDP + TABLE, converted, 2):
        assert losses[-1] < losses[0]


def test_collectives_are_those_without_it():
    for world_size, layout in ((2, "[sharding.fsdp2]\n"), (2, TP)):
        assert run_ranks(counted, world_size, layout + TABLE) == run_ranks(counted, world_size, layout)


def test_a_resumed_run_is_the_same_and_reshards(tmp_path):
    path, text = tmp_path / "step-2", "[sharding.fsdp2]\n" + TABLE
    whole = run_ranks(saved, 2, path, text, False, 4)[0]
    again = run_ranks(saved, 2, path, text, True, 2)[0]
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    # What is saved are the weights themselves: they load in any layout, also without it.
    two, plain = (run_ranks(saved, size, path, other, True, 0)[0] for size, other in ((2, text), (4, TP_FSDP)))
    assert all(torch.equal(two[name], plain[name]) for name in two)


def test_the_plan_says_what_is_converted():
    found, classes = run_ranks(plan, 1, TABLE)[0]
    assert found == [f"CONVERT      {'qat':<24} layers.0.up, layers.0.down, layers.1.up, ... 4 in all"]
    assert [fqn for fqn, name in classes.items() if name == "FakeQuantizedLinear"] == [
        f"layers.{index}.{name}" for index in range(2) for name in ("up", "down")
    ]


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


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('modules = ["norm"]\n', ':2:12: [precision.qat] the pattern "norm" matches modules without linear layers'),
        ("group_size = 1\n", ":3:1: [precision.qat] precision.qat.group_size must be at least 2, not 1"),
        (
            "group_size = 64\n",
            ":2:12: [precision.qat] no layer is left to convert: of 5 linear layers, 5 are named, and "
            "exclude or sizes that are no multiples of 64 leave out the rest",
        ),
        (
            "[precision.int8]\n",
            ':2:12: [precision.qat] "qat" cannot be combined with "int8": both replace what the same '
            "linear layers compute",
        ),
    ],
)
def test_refusals(text, message):
    assert run_ranks(refusal, 1, TABLE + text)[0] == message
