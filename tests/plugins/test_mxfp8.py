"""MXFP8 beside one device on which torchao itself converted the same layers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.converted_linears import (
    DATA_PARALLEL,
    PP,
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
from torch import nn

from composer3d import ManifestError, torch_compat
from composer3d.testing import fake_world, run_ranks

# Before ranks are forked: each of them would import it anew.
config = torch_compat.import_torchao("torchao.prototype.moe_training.config")
quantization = torch_compat.import_torchao("torchao.quantization")
torch_compat.import_torchao("torchao.prototype.moe_training.mxfp8_linear")
TABLE = "[precision.mxfp8]\n"


class Biased(nn.Linear):
    """torchao's product of a wrapped weight leaves out a bias that it is given, and says nothing."""

    def forward(self, x):
        y = F.linear(x, self.weight)
        return y if self.bias is None else y + self.bias


def converted(model):
    # torchao refuses torch 2.11 for what sharded weights of experts need, which one device's layers do not.
    if not hasattr(torch.distributed.tensor._ops, "scaled_mm_single_dim_strategy"):
        torch.distributed.tensor._ops.scaled_mm_single_dim_strategy = None
    if not hasattr(torch.distributed.tensor._dispatch, "is_pinned_handler"):
        torch.distributed.tensor._dispatch.is_pinned_handler = None
    recipe = config.MXFP8TrainingOpConfig.from_recipe(config.MXFP8TrainingRecipe("mxfp8_emulated_rceil"))
    biases = {fqn: module.bias for fqn, module in model.named_modules() if inside(module, fqn)}
    quantization.quantize_(model, recipe, filter_fn=inside)
    for fqn, bias in biases.items():
        module = model.get_submodule(fqn)
        module.bias, module.__class__ = bias, Biased
    return model


@pytest.mark.parametrize(("world_size", "layouts"), DATA_PARALLEL)
def test_data_parallel_equals_one_device_bit_for_bit(world_size, layouts):
    assert_bits_of_one_device(world_size, layouts, TABLE, converted)


@pytest.mark.parametrize(
    ("world_size", "layout", "chunks"), [pytest.param(2, TP, 1, marks=pytest.mark.slow), (4, TP_FSDP, 2), (2, PP, 2)]
)
def test_tensor_and_pipeline_parallel_equal_one_device(world_size, layout, chunks):
    # Blocks stay whole; what is left is the order of sums, which now and then rounds an element to the next float8.
    for losses, losses_1, gradients, weights in run_ranks(trained, world_size, layout + TABLE, converted, chunks):
        assert gradients < 2**-4
        assert weights < 1e-2
        assert losses == pytest.approx(losses_1, rel=1e-3)


def test_collectives_are_those_without_it():
    layouts = ("[sharding.fsdp2]\n", TP)
    found = in_one_world(counted, 2, *((layout + text,) for layout in layouts for text in (TABLE, "")))
    assert found[::2] == found[1::2]


def test_a_resumed_run_is_the_same_and_reshards(tmp_path):
    assert_resumes_and_reshards(tmp_path / "step-2", TABLE)


def test_the_plan_says_what_is_converted():
    assert_converted(TABLE, transform="mxfp8.mxfp8_emulated", cls="MXFP8Linear")


def in_precision(mixed):
    run = composed("[sharding.fsdp2]\n" + mixed + TABLE, seeded(Wide))
    run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = batch()
    with run.step(0):
        loss = run.forward_backward(tokens, target=targets)
        run.clip_grad_norm_(math.inf)  # of a scaled loss they are unscaled here
    found = {fqn: p.grad.to_local().clone() for fqn, p in run.named_parameters() if p.grad is not None}
    run.close()
    return float(loss), found


def test_float16_is_multiplied_too():
    float16 = '[precision.mixed]\nparam_dtype = "float16"\n'
    (wide,), (narrow,) = in_one_world(in_precision, 1, ("",), (float16,))
    assert narrow[0] == pytest.approx(wide[0], rel=2**-8)
    for fqn, gradient in wide[1].items():
        # float8 rounds to 3 bits after the leading one, so what float16 rounds moves single elements by that.
        assert float((narrow[1][fqn] - gradient).norm()) <= 2**-3 * float(gradient.norm()), fqn


def test_refuses_a_cut_through_a_block_before_it_runs():
    with fake_world(4), pytest.raises(ManifestError) as caught:
        composed(TP.replace("tp = 2", "tp = 4") + TABLE, Wide)
    assert str(caught.value).partition("run.toml")[2] == (
        ':8:12: [precision.mxfp8] mxfp8 multiplies blocks of 32, and tp = 4 shards "layers.0.up" into '
        "16 outputs; exclude it, or choose a smaller tp"
    )


def gradient_of(recipe, *size):
    """Return the gradient of the last converted weight, whose outputs' gradients are those of the layers after it."""
    run = composed(f'[precision.mxfp8]\nrecipe = "{recipe}"\n', seeded(Wide))
    tokens, targets = batch(*size)
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    gradient = dict(run.named_parameters())["layers.1.down.weight"].grad.clone()
    run.close()
    return gradient


@pytest.mark.parametrize("num_sequences", [16, 3], ids=["whole blocks of tokens", "24 tokens"])
def test_gradients_of_weights_can_be_left_in_full_precision(num_sequences):
    low, kept = (run_ranks(gradient_of, 1, recipe, num_sequences)[0] for recipe in ("mxfp8", "mxfp8_wgrad_hp"))
    # Both operands are rounded to 3 bits after the leading one, or neither.
    assert 0.0 < float((low - kept).abs().max() / kept.abs().max()) < 2 * 2**-4


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text, seeded(Wide))
    return str(caught.value).partition("run.toml")[2]


REFUSED = [
    (
        "emulate = false\n",
        ":2:12: [precision.mxfp8] emulate = false, and this device (cpu) has no MXFP8 products; "
        "leave emulate out; the plan says where products are emulated",
    ),
    (
        'modules = ["out"]\n',
        ':2:12: [precision.mxfp8] "out" is a linear layer of 32 x 11, and both must be multiples of 32; exclude it',
    ),
    (
        "[precision.float8]\n",
        ':2:12: [precision.mxfp8] "mxfp8" cannot be combined with "float8": both replace what '
        "the same linear layers compute",
    ),
]


def test_refusals():
    found = in_one_world(refusal, 1, *((TABLE + text,) for text, _ in REFUSED))
    assert [message for (message,) in found] == [message for _, message in REFUSED]
