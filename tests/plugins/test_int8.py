"""int8 beside one device on which torchao itself converted the same layers."""

from __future__ import annotations

import math

import pytest
import torch
from support.lowered import PP, TP, TP_FSDP, Wide, batch, counted, inside, plan, saved, trained
from support.models import composed, seeded

from composer3d import ManifestError, torch_compat
from composer3d.testing import run_ranks

# Before ranks are forked: each of them would import it anew.
training = torch_compat.import_torchao("torchao.prototype.quantized_training")
quantization = torch_compat.import_torchao("torchao.quantization")
TABLE = "[precision.int8]\n"


def converted(model):
    quantization.quantize_(model, training.Int8MixedPrecisionTrainingConfig(module_swap=True), filter_fn=inside)
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


@pytest.mark.parametrize(("world_size", "layout", "chunks"), [(2, TP, 1), (4, TP_FSDP, 2)])
def test_tensor_parallel_is_as_near_to_full_precision_as_one_device(world_size, layout, chunks):
    # A scale is rounded to 1/127 of the largest element, and every product has two rounded operands.
    bound = 2 / 127 * 3
    for losses, losses_1, gradients, weights in run_ranks(trained, world_size, layout + TABLE, converted, chunks):
        assert gradients < bound
        assert weights < bound
        assert losses == pytest.approx(losses_1, rel=1e-2)


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
    assert found == [f"CONVERT      {'int8':<24} layers.0.up, layers.0.down, layers.1.up, ... 4 in all"]
    assert [fqn for fqn, name in classes.items() if name == "Int8Linear"] == [
        f"layers.{index}.{name}" for index in range(2) for name in ("up", "down")
    ]


def loss_in(dtype):
    run = composed(f'[sharding.fsdp2]\n[precision.mixed]\nparam_dtype = "{dtype}"\n' + TABLE, seeded(Wide))
    run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = batch()
    with run.step(0):
        loss = run.forward_backward(tokens, target=targets)
        norm = run.clip_grad_norm_(math.inf)
    run.close()
    return float(loss), float(norm)


def test_sums_of_products_are_not_bound_by_float16():
    wide, narrow = (run_ranks(loss_in, 1, dtype)[0] for dtype in ("float32", "float16"))
    assert narrow == pytest.approx(wide, rel=2**-6)  # what float16 rounds moves single elements by a step of int8


def errors_of(more):
    return trained(TABLE + more, lambda model: model, 1, num_steps=1)[2]


def test_products_can_be_left_as_they_are():
    all_three, one = (run_ranks(errors_of, 1, more)[0] for more in ("", "grad_input = false\noutput = false\n"))
    assert 0.0 < one < all_three < 0.1


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text, seeded(Wide))
    return str(caught.value).partition("run.toml")[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "output = false\ngrad_input = false\ngrad_weight = false\n",
            ":2:12: [precision.int8] output, grad_input and grad_weight are false, so nothing is multiplied in int8",
        ),
        (
            'exclude = ["layers"]\n',
            ":2:12: [precision.int8] no layer is left to convert: of 5 linear layers, 5 are "
            "named, and exclude or sizes that are no multiples of 16 leave out the rest",
        ),
        (
            "[precision.mxfp8]\n",
            ':2:12: [precision.int8] "int8" cannot be combined with "mxfp8": both replace what the '
            "same linear layers compute",
        ),
    ],
)
def test_refusals(text, message):
    assert run_ranks(refusal, 1, TABLE + text)[0] == message
