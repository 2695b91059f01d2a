"""int8 beside one device on which torchao itself converted the same layers."""

from __future__ import annotations

import math

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
training = torch_compat.import_torchao("torchao.prototype.quantized_training")
quantization = torch_compat.import_torchao("torchao.quantization")
TABLE = "[precision.int8]\n"


def converted(model):
    quantization.quantize_(model, training.Int8MixedPrecisionTrainingConfig(module_swap=True), filter_fn=inside)
    return model


@pytest.mark.parametrize(("world_size", "layouts"), DATA_PARALLEL)
def test_data_parallel_equals_one_device_bit_for_bit(world_size, layouts):
    assert_bits_of_one_device(world_size, layouts, TABLE, converted)


def test_pipeline_parallel_equals_one_device():
    for losses, losses_1, gradients, weights in run_ranks(trained, 2, PP + TABLE, converted, 2):
        assert max(gradients, weights) < 1e-6
        assert losses == pytest.approx(losses_1, rel=1e-6)


# In float64 sums in another order are not rounded to other integers.
@pytest.mark.parametrize(
    ("world_size", "layout", "chunks"), [pytest.param(2, TP, 1, marks=pytest.mark.slow), (4, TP_FSDP, 2)]
)
def test_tensor_parallel_equals_one_device(world_size, layout, chunks):
    text = layout + TABLE
    for losses, losses_1, *errors in run_ranks(trained, world_size, text, converted, chunks, 3, torch.float64):
        assert max(errors) < 1e-12
        assert losses == pytest.approx(losses_1, rel=1e-12)
        assert losses[-1] < losses[0]


def test_collectives_of_data_parallelism_are_those_without_it():
    text = "[sharding.fsdp2]\n"
    found, plain = in_one_world(counted, 2, (text + TABLE,), (text,))
    assert found == plain


def test_collectives_of_tensor_parallelism():
    products = {"": 2, "output = false\n": 1, "grad_input = false\n": 1}
    (plain, *_), *others = in_one_world(counted, 2, (TP,), *((TP + TABLE + more,) for more in products))
    key, tokens = ("all_reduce", "tp"), 16 * SEQ_LEN
    for num_products, (found, *_) in zip(products.values(), others, strict=True):
        # `down` agrees in its forward on scales of tokens and outputs, `up` in its backward on those of tokens and
        # inputs.
        numbers = NUM_LAYERS * num_products * (tokens + SIZE)
        assert found[key] == (plain[key][0] + NUM_LAYERS * num_products, plain[key][1] + 4 * numbers)
        assert {k: v for k, v in found.items() if k != key} == {k: v for k, v in plain.items() if k != key}


def test_a_resumed_run_is_the_same_and_reshards(tmp_path):
    assert_resumes_and_reshards(tmp_path / "step-2", TABLE)


def test_the_plan_says_what_is_converted():
    assert_converted(TABLE, transform="int8", cls="Int8Linear")


def loss_in(mixed):
    run = composed("[sharding.fsdp2]\n" + mixed + TABLE, seeded(Wide))
    run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = batch()
    with run.step(0):
        loss = run.forward_backward(tokens, target=targets)
        norm = run.clip_grad_norm_(math.inf)
    run.close()
    return float(loss), float(norm)


def test_sums_of_products_are_not_bound_by_float16():
    float16 = '[precision.mixed]\nparam_dtype = "float16"\n'
    (wide,), (narrow,) = in_one_world(loss_in, 1, ("",), (float16,))
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


REFUSED = [
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
]


def test_refusals():
    found = in_one_world(refusal, 1, *((TABLE + text,) for text, _ in REFUSED))
    assert [message for (message,) in found] == [message for _, message in REFUSED]
