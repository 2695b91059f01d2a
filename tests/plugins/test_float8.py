"""Float8 beside one device that converts the same layers and cuts the batch as the run does."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from support.float8 import CONVERTED, NUM_LAYERS, Wide, float8, table
from support.interrupted_runs import go_on
from support.models import composed, full, mine, padded, seeded, sum_loss, write_manifest
from support.shared_worlds import in_one_world
from torch import nn
from torch.distributed.tensor import DTensor

from composer3d import Batch, ManifestError
from composer3d.models import llama
from composer3d.testing import assert_parity, count_collectives, run_ranks

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def converted(recipe):
    """One device's model, converted by torchao itself."""
    config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    return float8.convert_to_float8_training(
        seeded(Wide), config=config, module_filter_fn=lambda module, fqn: fqn.startswith("layers.")
    )


@functools.cache
def reference(recipe, chunks, num_steps):
    """Train one device, chunk by chunk as ranks do; return losses, the last gradients, and weights."""
    model = converted(recipe)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    tokens, targets = padded()
    count, losses = (targets != -100).sum(), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        pairs = zip(tokens.chunk(chunks), targets.chunk(chunks), strict=True)
        total = 0.0
        for part, wanted in pairs:
            loss, _ = sum_loss(model(part), wanted)
            (loss * (1 / count)).backward()
            total += float(loss.detach())
        losses.append(total / int(count))
        optimizer.step()
    named = dict(model.named_parameters())
    return losses, {name: p.grad for name, p in named.items()}, {name: p.detach() for name, p in named.items()}


def trained(text, recipe, chunks, num_steps=3):
    """Train in a layout; return losses beside the reference's, and the largest errors of gradients and weights."""
    losses_1, gradients, weights = reference(recipe, chunks, num_steps)
    run = composed(text, seeded(Wide))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for number in range(num_steps):
        optimizer.zero_grad()
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            optimizer.step()
    found = {name: (full(p.grad), full(p)) for name, p in run.named_parameters()}
    run.close()
    errors = [
        max(float((pair[index] - wanted[name]).abs().max() / wanted[name].abs().max()) for name, pair in found.items())
        for index, wanted in enumerate((gradients, weights))
    ]
    return losses, losses_1, *errors


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        (1, [""]),
        (2, ["[sharding.fsdp2]\n", "[sharding.fsdp2]\nzero = 1\n"]),
        (2, ["[sharding.ddp]\n", '[sharding.ddp]\nreducer = "bucketed"\n']),
    ],
)
def test_data_parallel_equals_one_device_bit_for_bit(world_size, layouts):
    cases = ((layout + table(recipe), recipe, world_size) for layout in layouts for recipe in RECIPES)
    for ranks in in_one_world(trained, world_size, *cases):
        for losses, losses_1, gradients, weights in ranks:
            assert (gradients, weights) == (0.0, 0.0)
            assert losses == pytest.approx(losses_1, rel=1e-6)
            assert losses[-1] < losses[0]


def test_gathered_in_float8_equals_one_device_bit_for_bit():
    # From the second step on with the scales that were agreed on after the first.
    text = "[sharding.fsdp2]\n" + table("tensorwise", "all_gather = true")
    for losses, _, gradients, weights in run_ranks(trained, 2, text, "tensorwise", 2):
        assert (gradients, weights) == (0.0, 0.0)
        assert losses[-1] < losses[0]


FSDP = "[sharding.fsdp2]\n"
TP_PLAN = '"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'
TP = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n{}[sharding.tensor_parallel.plan]\n" + TP_PLAN


PP = "[mesh]\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 6\n"


@pytest.mark.parametrize(("layout", "chunks"), [(TP.format(""), 1), (PP, 2)])
def test_tensor_and_pipeline_parallel_equal_one_device(layout, chunks):
    # Scales are those of the whole tensor, on every rank; what is left is the order of float32 sums.
    for ranks in in_one_world(trained, 2, *((layout + table(recipe), recipe, chunks) for recipe in RECIPES)):
        for _, _, gradients, weights in ranks:
            assert gradients < 2e-6
            assert weights < 2e-6


@pytest.mark.slow
def test_gradients_of_both_halves_of_a_backward_are_reduced_together():
    # With one micro-batch, what FSDP2 took over after the inputs' half and what the weights' half left differ in dtype.
    text = """[mesh]\npp = 2\ndp_shard = 2\n[scheduling.pipeline]\nschedule = "ZBVZeroBubble"\n[sharding.fsdp2]
[precision.mixed]\nparam_dtype = "bfloat16"\nreduce_dtype = "float32"\n"""
    batch = Batch(args=(padded()[0],), target=padded()[1])
    model = functools.partial(llama, dim=32, num_layers=4, num_heads=4, vocab_size=16)
    assert_parity(model, write_manifest(text + table("tensorwise")), batch, loss_fn=sum_loss, microbatch=6)


class Turned(Wide):
    """Its blocks are given views whose rows do not follow each other, as behind a convolution."""

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x.transpose(0, 1)).transpose(0, 1)
        return self.out(self.norm(x)) + 0.0


def gradients_of(factory, recipe):
    run = composed(table(recipe), seeded(factory))
    run.optimizer(torch.optim.SGD, lr=0.2)
    with run.step(0):
        run.forward_backward(padded()[0], target=padded()[1])
    found = {name: full(p.grad) for name, p in run.named_parameters()}
    run.close()
    return found


def test_inputs_need_not_be_contiguous():
    cases = [(factory, recipe) for recipe in RECIPES for factory in (Wide, Turned)]
    found = in_one_world(gradients_of, 1, *cases)
    for (plain,), (turned,) in zip(found[::2], found[1::2], strict=True):
        assert all((turned[name] - grad).abs().max() <= 2e-6 * grad.abs().max() for name, grad in plain.items())


def test_auto_decides_as_torchao():
    from composer3d_plugins.precision.float8.float8_layers import is_worthwhile
    from torchao.float8.float8_linear_utils import _auto_filter_for_recipe

    sizes = (1000, 1024, 1040, 2048, 2064, 4096, 4112)
    for recipe in RECIPES[:2]:
        wanted = _auto_filter_for_recipe(recipe, filter_fqns=[])
        decisions = set()
        for inputs in sizes:
            for outputs in sizes:
                decision = wanted(nn.Linear(inputs, outputs, device="meta"), "x")
                assert is_worthwhile(inputs, outputs, recipe=recipe) == decision, (recipe, inputs, outputs)
                decisions.add(decision)
        assert decisions == {True, False}


# ---- collectives -----------------------------------------------------------------------------------------------------


def counted(text, number=0):
    """Return the collectives of one step as (op, axis): (count, bytes), and what all-gathers carry."""
    run = composed(text, seeded(Wide))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    for step in range(number + 1):
        optimizer.zero_grad()
        with count_collectives(run.mesh) as collectives, run.step(step):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
    dtypes = {str(row.dtype) for row in collectives.rows if row.op == "all_gather"}
    run.close()
    return collectives.summary(), dtypes


def test_data_parallel_collectives_are_those_without_it():
    texts = ("", *map(table, RECIPES))
    plain, *others = (ranks[0][0] for ranks in in_one_world(counted, 2, *((FSDP + text,) for text in texts)))
    assert all(with_float8 == plain for with_float8 in others) and plain


def test_all_gathers_carry_bytes_and_scales_need_one_all_reduce():
    texts = (FSDP, FSDP + table("tensorwise", "all_gather = true"))
    (plain, _), (gathered, dtypes) = (ranks[0] for ranks in in_one_world(counted, 2, *((text, 1) for text in texts)))
    assert dtypes == {"torch.uint8"}
    gather, scales = ("all_gather", "dp_shard"), ("all_reduce", "dp_shard")
    assert gathered[gather][0] == plain[gather][0]
    # Twice a step each converted weight, 3 bytes an element less.
    assert plain[gather][1] - gathered[gather][1] == 2 * 3 * CONVERTED
    assert gathered[scales][0] - plain[scales][0] == 1
    assert gathered[scales][1] - plain[scales][1] == 4 * 2 * NUM_LAYERS


def test_scales_of_cut_operands_are_agreed_under_tp():
    more = {"tensorwise": 8, "rowwise": 4, "rowwise_with_gw_hp": 5}
    texts = ("", *map(table, more))
    plain, *others = (ranks[0][0] for ranks in in_one_world(counted, 2, *((TP.format("") + text,) for text in texts)))
    key = ("all_reduce", "tp")
    for with_float8, num in zip(others, more.values(), strict=True):
        assert with_float8[key][0] - plain[key][0] == num * NUM_LAYERS
        assert {k: v for k, v in with_float8.items() if k != key} == {k: v for k, v in plain.items() if k != key}


# ---- state -----------------------------------------------------------------------------------------------------------


def saved(path, text, load, num_steps):
    """Train from a checkpoint or to one; return full weights."""
    run = composed(text, seeded(Wide))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
    weights = go_on(run, optimizer, padded(), path, load=load, num_steps=num_steps)
    plain = {type(p.to_local() if isinstance(p, DTensor) else p) for p in weights.values()}
    run.close()
    return weights, plain


@pytest.mark.parametrize("more", [pytest.param("", marks=pytest.mark.slow), "all_gather = true\n"])
def test_a_resumed_run_is_the_same_and_reshards(tmp_path, more):
    text = "[sharding.fsdp2]\n" + table("tensorwise", more)
    cases = ((tmp_path / "step-2", text, *case) for case in ((False, 4), (True, 2), (True, 0)))
    (whole, _), (resumed, _), (two, _) = (ranks[0] for ranks in in_one_world(saved, 2, *cases))
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    # What is saved are the weights themselves: they load without float8, in any layout.
    one, _ = run_ranks(saved, 1, tmp_path / "step-2", "", True, 0)[0]
    assert all(torch.equal(two[name], one[name]) for name in two)


def names(text, tied=False):
    run = composed(text, seeded(Wide, tied=tied))
    found = [name for name, _ in run.parts[0].module.named_parameters()]
    classes = {fqn: type(module).__name__ for fqn, module in run.parts[0].module.named_modules()}
    hooks = len(run.parts[0].module.layers[0].up._forward_hooks)
    plan = run.describe().splitlines()[1:]
    run.close()
    return found, classes, plan, hooks


def test_names_stay_and_the_plan_says_that_products_are_emulated():
    found, classes, plan, _ = run_ranks(names, 1, table("rowwise"))[0]
    assert found == [name for name, _ in Wide().named_parameters()]
    assert [fqn for fqn, name in classes.items() if name == "Float8Linear"] == [
        f"layers.{index}.{name}" for index in range(NUM_LAYERS) for name in ("up", "down")
    ]
    assert plan == ["CONVERT      float8.rowwise_emulated  layers.0.up, layers.0.down, layers.1.up, ... 6 in all"]


def test_a_tied_weight_is_gathered_as_it_is():
    text = "[sharding.fsdp2]\n" + table("tensorwise", "all_gather = true")
    found, classes, _, _ = run_ranks(names, 1, text, True)[0]
    assert found == [name for name, _ in Wide(tied=True).named_parameters()]
    assert classes["out"] == "Float8Linear"


def kept_by_verify(text):
    from composer3d.verification.one_device import copies

    run = composed(text, seeded(Wide))
    wrapped = {type(p.to_local()).__name__ for _, p in run.named_parameters()}
    copied = {type(value) for value in copies(dict(run.named_parameters())).values()}
    run.close()
    return wrapped, copied


def test_verify_writes_no_tensors_of_torchao():
    wrapped, copied = run_ranks(kept_by_verify, 1, FSDP + table("tensorwise", "all_gather = true"))[0]
    assert "WeightWithDynamicFloat8CastTensor" in wrapped and copied == {torch.Tensor}


def test_which_layers():
    cases = {
        'modules = ["layers.0", "layers.2.down"]': "layers.0.up, layers.0.down, layers.2.down",
        'exclude = ["layers.*.up"]': "layers.0.down, layers.1.down, layers.2.down",
        'exclude = ["layers.1"]\nmin_dim = 16': "layers.0.up, layers.0.down, layers.2.up, ... 4 in all",
    }
    found = in_one_world(names, 1, *((table("tensorwise", more),) for more in cases))
    assert [ranks[0][2][0].partition("emulated ")[2] for ranks in found] == [*cases.values()]


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text, seeded(Wide))
    return str(caught.value).partition("run.toml")[2]


LEFT = (
    ":2:12: [precision.float8] no layer is left to convert: of 7 linear layers, 6 are named or have dims that are "
    "multiples of 16, and exclude, min_dim or auto leave out the rest"
)


REFUSED = [
    (
        'recipe = "rowwise"\nall_gather = true\n[sharding.fsdp2]',
        ':2:12: [precision.float8] all_gather = true needs one scale a weight, and recipe = "rowwise" has one a '
        'row; a rank holds only some of a weight\'s rows; write recipe = "tensorwise", or leave all_gather out',
    ),
    (
        "all_gather = true",
        ':2:12: [precision.float8] "float8" requires "fsdp2", which the manifest does not have: all_gather = true: '
        "weights are gathered in float8 by FSDP2; nothing else gathers them",
    ),
    (
        'recipe = "rowwise_with_gw_hp"\nauto = true',
        ':2:12: [precision.float8] auto = true has no thresholds for recipe = "rowwise_with_gw_hp": none were '
        "measured; state min_dim, modules or exclude",
    ),
    (
        "emulate = false",
        ":2:12: [precision.float8] emulate = false, and this device (cpu) has no float8 products; leave emulate "
        "out; the plan says where products are emulated",
    ),
    ("min_dim = 17", LEFT),
    ("auto = true", LEFT),
    (
        'modules = ["out"]',
        ':2:12: [precision.float8] "out" is a linear layer of 16 x 11; float8 products need multiples of 16; '
        "exclude it",
    ),
    (
        'modules = ["norm"]',
        ':2:12: [precision.float8] the pattern "norm" matches modules without linear layers',
    ),
    (
        'recipe = "blockwise"',
        ':3:1: [precision.float8] recipe = "blockwise" is not one of "tensorwise", "rowwise", '
        '"rowwise_with_gw_hp"; did you mean "rowwise"?',
    ),
]


def test_refusals():
    found = in_one_world(refusal, 1, *(("[precision.float8]\n" + text,) for text, _ in REFUSED))
    assert [message for (message,) in found] == [message for _, message in REFUSED]


def test_torchao_is_imported_only_where_it_is_named():
    import subprocess
    import sys

    code = (
        "import sys; from composer3d_plugins.precision import float8; from composer3d.registry import info_of\n"
        "info_of(float8.Float8); sys.exit('torchao' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
