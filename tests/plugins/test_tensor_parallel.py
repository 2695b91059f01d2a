from __future__ import annotations

import pytest
import torch
from support.family_models import FAMILIES, batch_of, class_loss
from support.models import largest, write_manifest
from support.tensor_parallel import built, steps_of, table

import composer3d
from composer3d import torch_compat
from composer3d.testing import full, run_ranks

# Dynamo looks at the .grad of everything that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
TIGHT = 1e-12
LAYERS = 2
SP, LP = "sequence_parallel = true", "loss_parallel = true"
SETTINGS = ["", SP, LP, f"{SP}\n{LP}"]
FSDP = "[sharding.fsdp2]\n"


def tp(family, degree=2, settings="", more=""):
    return f"[mesh]\ntp = {degree}\n{more}\n" + table(family, settings)


def assert_equal_to_one_device(world_size, cases):
    """Compare loss, norm and gradients of every case with one device; return the collectives."""
    for results in run_ranks(steps_of, world_size, cases):
        errors = [largest(result[:3]) for result in results]
        assert largest(errors) < TIGHT, dict(zip([case[:2] for case in cases], errors, strict=True))
    return [result[3] for result in results]


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("families", [("llama", "bert"), tuple(FAMILIES)], ids=["two families", "families"])
def test_gradients_equal_one_device(families):
    assert_equal_to_one_device(2, [(family, tp(family)) for family in families] + [("bert", tp("bert", 2, SP))])


def test_gradients_equal_one_device_in_every_setting():
    assert_equal_to_one_device(
        2, [(family, tp(family, 2, settings)) for family in ("llama", "gpt2") for settings in SETTINGS]
    )


def test_gradients_equal_one_device_on_four_ranks():
    assert_equal_to_one_device(4, [("llama", tp("llama", 4)), ("gpt2", tp("gpt2", 4, f"{SP}\n{LP}"))])


def test_gradients_of_grouped_heads_ties_and_one_head_a_rank():
    llama, gpt2 = tp("llama", 2, SP), tp("gpt2", 2, "")
    assert_equal_to_one_device(
        2,
        [
            ("llama", llama, {"num_kv_heads": 2}),
            ("llama", llama, {"tie_embeddings": True}),
            ("gpt2", gpt2, {"num_layers": 1, "num_heads": 2}),
        ],
    )


def with_data(data, family, settings="", axis="dp_shard"):
    return family, f"[mesh]\ntp = 2\n{axis} = 2\n[train]\nmicrobatch = 1\n{data}\n" + table(family, settings)


def test_gradients_with_data_parallelism():
    cases = [with_data(f"{FSDP}zero = {zero}", "llama", SP) for zero in (1, 2, 3)]
    cases += [
        with_data(FSDP, "gpt2", LP),
        with_data("[sharding.ddp]", "llama", LP, "dp_replicate"),
        with_data("[sharding.ddp]", "gpt2", SP, "dp_replicate"),
    ]
    assert_equal_to_one_device(4, cases)


@pytest.mark.slow
def test_gradients_with_hybrid_sharding():
    text = f"[mesh]\ntp = 2\ndp_shard = 2\ndp_replicate = 2\n{FSDP}\n" + table("gpt2", SP)
    assert_equal_to_one_device(8, [("gpt2", text)])


def test_compiled_blocks():
    more = '[scheduling.compile]\nbackend = "aot_eager"'
    assert_equal_to_one_device(2, [("llama", tp("llama", 2, SP, more))])


def test_mixed_precision():
    text = f"[mesh]\ntp = 2\n{FSDP}[precision.mixed]\n" + table("llama", SP)
    for results in run_ranks(steps_of, 4, [("llama", text)]):
        loss, norm, gradients, _ = results[0]
        assert 0 < loss < 0.05 and norm < 0.05 and 0 < gradients < 0.1


# ---- random streams --------------------------------------------------------------------------------------------------


def masks(settings):
    """Record what each dropout module of the first block did."""
    torch.set_default_dtype(torch.float64)
    text = write_manifest(tp("gpt2", 2, settings))
    run = composer3d.compose(built("gpt2", {"dropout": 0.5}), text, loss_fn=class_loss)
    seen = {}
    block = run.model.h[0]

    def keep(name):
        def hook(module, args, output):
            with torch_compat.without_torch_functions():
                seen.setdefault(name, (output == 0).flatten()[:64].clone())

        return hook

    run.model.drop.register_forward_hook(keep("drop"))
    block.attn.resid_dropout.register_forward_hook(keep("attention residual"))
    block.mlp.dropout.register_forward_hook(keep("feed-forward residual"))
    inputs, targets = batch_of("gpt2")
    with run.step(0):
        run.forward_backward(inputs, target=targets)
    run.close()
    return seen


@pytest.mark.parametrize(("settings", "alike"), [("", True), (SP, False)])
def test_dropout_draws_alike_where_activations_are_alike(settings, alike):
    one, other = run_ranks(masks, 2, settings)
    assert len(one) == 3
    for name in one:
        assert torch.equal(one[name], other[name]) == alike, name
    assert len({tuple(mask.tolist()) for mask in one.values()}) == 3


def gradients_with_dropout(texts):
    found = []
    for text in texts:
        run = composer3d.compose(built("gpt2", {"dropout": 0.5}), write_manifest(text), loss_fn=class_loss)
        inputs, targets = batch_of("gpt2")
        with run.step(0):
            run.forward_backward(inputs.clone(), target=targets)
            found.append({name: full(p.grad) for name, p in run.named_parameters()})
        run.close()
    return found


def test_recomputation_draws_the_same():
    texts = [tp("gpt2", 2, SP, more) for more in ("", "[scheduling.activation_checkpoint]")]
    plain, again = run_ranks(gradients_with_dropout, 2, texts)[0]
    assert all(torch.equal(plain[name], again[name]) for name in plain)


# ---- collectives -----------------------------------------------------------------------------------------------------


def counts(settings, layers=LAYERS):
    """Return the collectives of a step of one micro-batch: Megatron's two a layer and direction."""
    control = 2  # what a step agrees on, and the loss
    pairs = 2 * (2 * layers + 1)  # two a layer, one at embedding or head; forward and backward
    if SP in settings:
        expected = {("all_gather", "tp"): pairs, ("reduce_scatter", "tp"): pairs, ("all_reduce", "tp"): control}
    else:
        expected = {("all_gather", "tp"): 0, ("all_reduce", "tp"): pairs + control}
    expected["all_reduce", "tp"] += 2 if LP in settings else 0
    expected["all_gather", "tp"] += 0 if LP in settings else 1
    return {key: count for key, count in expected.items() if count}


@pytest.mark.parametrize("settings", SETTINGS, ids=["plain", "sp", "lp", "sp-lp"])
def test_collectives(settings):
    sizes = [("llama", 1), ("gpt2", 3), ("bert", 2)]
    cases = [(family, tp(family, 2, settings), {"num_layers": layers}) for family, layers in sizes]
    for (_, _, options), counted in zip(cases, assert_equal_to_one_device(2, cases), strict=True):
        assert counted == counts(settings, options["num_layers"])


# Full recomputation repeats the forward's collectives, but for the last of a block: nothing needs its result again.
RECOMPUTED = [
    pytest.param('mode = "full"', {"all_reduce": 1}, {"all_gather": 2, "reduce_scatter": 1}, id="full"),
    pytest.param('mode = "selective"', {}, {}, id="selective"),
]


@pytest.mark.parametrize(("mode", "plain", "sequence"), RECOMPUTED)
def test_collectives_of_recomputation(mode, plain, sequence):
    more = f"[scheduling.activation_checkpoint]\n{mode}"
    counted = assert_equal_to_one_device(2, [("gpt2", tp("gpt2", 2, settings, more)) for settings in ("", SP)])
    for settings, extra, found in zip(("", SP), (plain, sequence), counted, strict=True):
        expected = counts(settings)
        for op, number in extra.items():
            expected[op, "tp"] += number * LAYERS
        assert found == expected
