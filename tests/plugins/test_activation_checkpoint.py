from __future__ import annotations

import functools

import pytest
import torch
from composer3d_plugins.scheduling.activation_checkpoint import segments
from composer3d_plugins.scheduling.activation_checkpoint.budget import Measured, Result, choose
from support.models import Net, composed, mine, one_step, padded, seeded, sum_loss, write_manifest
from support.offloading import PP, TP, Even, assert_same, resumed, trained
from support.shared_worlds import in_one_world
from torch import nn

from composer3d import Batch, ManifestError, PluginError
from composer3d.testing import assert_parity, fake_world, run_ranks

TIGHT = 1e-12
AC = "[scheduling.activation_checkpoint]\n"
FSDP = "[sharding.fsdp2]\n"
SELECTIVE = 'mode = "selective"\n'
EVERY_SECOND = SELECTIVE + 'policy = "every_second_product"\n'
OWN = SELECTIVE + 'policy = "plugins.test_activation_checkpoint:keep_tanh"\n'
SQRT = 'mode = "sqrt"\n'
BUDGET = 'mode = "budget"\nbudget_fraction = {}\n'
MODES = [
    "",
    "every = 2\n",
    SELECTIVE,
    SELECTIVE + 'save = ["aten.tanh"]\n',
    EVERY_SECOND,
    OWN,
    SQRT,
    BUDGET.format(0.6),
]


def keep_tanh(operator, *args, **kwargs):
    """A user's policy."""
    return operator is torch.ops.aten.tanh.default


def step_with(text, microbatch=None, options=None):
    return one_step(text, microbatch=microbatch, options=options)


# What is recomputed does not hang on who reduces: with ddp one mode of each kind.
# Nor does a mode hang on another: beside fsdp2 every second is for every day.
@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        pytest.param(1, {"": MODES}, id="one device"),
        pytest.param(2, {FSDP: MODES[::2]}, id="sharded"),
        pytest.param(
            2, {FSDP: MODES[1::2], "[sharding.ddp]\n": ["", SELECTIVE, SQRT]}, id="more", marks=pytest.mark.slow
        ),
    ],
)
def test_gradients_equal_one_device(world_size, layouts):
    cases = [(sharding + AC + mode, 2) for sharding, modes in layouts.items() for mode in modes]
    for (text, _), found in zip(cases, in_one_world(step_with, world_size, *cases), strict=True):
        for loss, norm, gradients, _ in found:
            assert max(loss, norm, gradients) < TIGHT, text


def operations(mode):
    """Count matrix products and tanhs of one forward and backward."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts = {"addmm": 0, "tanh": 0}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            counts[name] = counts.get(name, 0) + 1
            return function(*args, **(kwargs or {}))

    run = composed(mode)
    tokens, targets = padded()
    with Count(), run.step(0):
        run.forward_backward(tokens, target=targets)
    run.close()
    return counts["addmm"], counts["tanh"]


def test_what_is_recomputed():
    cases = [
        # Three blocks with two products and a tanh each, and the output's product.
        ("", 7, 3),
        # The last product of a block is not recomputed: nothing needs its result.
        (AC, 7 + 3, 3 + 3),
        (AC + "every = 2", 7 + 2, 3 + 2),
        (AC + 'mode = "selective"', 7, 3 + 3),
        (AC + 'mode = "selective"\nsave = ["aten.tanh"]', 7 + 3, 3),
        (AC + OWN, 7 + 3, 3),
        (AC + SELECTIVE + 'policy = "expensive"', 7, 3 + 3),
        (AC + SELECTIVE + 'policy = "attention"', 7 + 3, 3 + 3),
        # Of a block's two products the first is kept; the second is its last operation, whose result nothing needs.
        (AC + EVERY_SECOND, 7, 3 + 3),
        # Two runs, of one block and of two, from which nothing is left out.
        (AC + SQRT, 7 + 6, 3 + 3),
        # Every block is measured once: three blocks more, and after that as if there were no plugin, or as "full".
        (AC + BUDGET.format(1.0), 7 + 6 + 3, 3 + 3 + 3),
    ]
    found = in_one_world(operations, 1, *((mode,) for mode, *_ in cases))
    assert [(mode, *counts) for (mode, *_), (counts,) in zip(cases, found, strict=True)] == cases


class ThreeProducts(nn.Module):
    """A chain, of whose products all but the last are needed again."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh()) for _ in range(5))) for _ in range(2)
        )

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + 0.0


def products(mode):
    from torch.utils.flop_counter import FlopCounterMode

    run = composed(mode, seeded(ThreeProducts), loss_fn=lambda y, _: y.sum())
    rows = torch.ones(2, 4)
    with FlopCounterMode(display=False) as counter, run.step(0):
        run.forward_backward(rows, target=rows)
    run.close()
    return counter.get_total_flops() // (2 * 2 * 4 * 4)


def test_every_second_product_is_recomputed():
    (plain,), *found = in_one_world(products, 1, ("",), (AC,), (AC + SELECTIVE,), (AC + EVERY_SECOND,))
    # Two blocks of five products: the second and the fourth of each.
    assert [more - plain for (more,) in found] == [10, 0, 4]


def test_collectives_of_fsdp2_are_not_repeated():
    texts = (FSDP, FSDP + AC, FSDP + AC + SQRT)
    plain, *others = (ranks[0][3] for ranks in in_one_world(step_with, 2, *((text, 3) for text in texts)))
    assert all(found == plain for found in others) and plain


def names():
    run = composed(AC + FSDP)
    found = [name for name, _ in run.parts[0].module.named_parameters()], run.describe()
    run.close()
    return found


def test_state():
    found, plan = run_ranks(names, 1)[0]
    assert found == [name for name, _ in Net().named_parameters()]
    assert plan.splitlines()[1:] == [
        "RECOMPUTE    activation_checkpoint    layers.0, layers.1, layers.2",
        "DATA         fsdp2                    layers.0, layers.1, layers.2, ... 4 in all",
    ]


def dropout(mode):
    run = composed("[train]\nseed = 5\n" + mode, seeded(dropout=0.5))
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(3):
        run.forward_backward(tokens, target=targets)
    grads = {name: p.grad for name, p in run.named_parameters()}
    run.close()
    return grads


def test_recomputation_draws_the_same_dropout():
    modes = ("", SQRT, BUDGET.format(0.7))
    (plain,), *others = in_one_world(dropout, 1, ("",), *((AC + mode,) for mode in modes))
    for (recomputed,) in others:
        assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


# ---- budget and sqrt -------------------------------------------------------------------------------------------------


# A budget keeps what zero-bubble schedules would need twice: see the refusals.
ZERO_BUBBLE = (PP.replace("]\n[train]", ']\nschedule = "ZBVZeroBubble"\n[train]'), [SQRT])
BOTH = [SQRT, BUDGET.format(0.7)]


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        pytest.param(2, [ZERO_BUBBLE, (TP, BOTH)], id="2 ranks"),
        # Each of the two with recomputation is above, and the gradients of fsdp2 with every mode.
        pytest.param(
            4, [(TP.replace("tp = 2", "tp = 2\ndp_shard = 2") + FSDP, BOTH)], id="4 ranks", marks=pytest.mark.slow
        ),
    ],
)
def test_every_bit_is_that_of_the_run_without_it(world_size, layouts):
    texts = [layout + text for layout, modes in layouts for text in ("", *(AC + mode for mode in modes))]
    factory = functools.partial(Even, num_layers=4)
    results = iter(in_one_world(trained, world_size, *((text, torch.optim.AdamW, {}, 2, factory) for text in texts)))
    for _, modes in layouts:
        plain = next(results)
        for _ in modes:
            for found, wanted in zip(next(results), plain, strict=True):
                assert_same(found, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [SQRT, BUDGET.format(0.7)])
def test_verify_passes(mode):
    tokens, targets = padded()
    path = write_manifest(FSDP + "[mesh]\ndp_shard = 2\n" + AC + mode)
    assert_parity(Net, path, Batch(args=(tokens,), target=targets), loss_fn=sum_loss)


def test_a_resumed_run_is_the_same_and_reshards(tmp_path):
    # A checkpoint knows nothing of modes: a run goes on in the others, one of each kind, bit for bit.
    path, others = tmp_path / "step-2", ("", SELECTIVE, BUDGET.format(0.6))
    going_on = [(path, FSDP + AC + mode, True, 2, 2) for mode in others]
    cases = (path, FSDP + AC + SQRT, False, 4), *going_on, (path, TP + AC + SQRT, True, 2, 2)
    (whole, _), *again, (resharded, _) = in_one_world(resumed, 2, *cases)
    for weights, _ in again:
        assert all(torch.equal(whole[name], weights[name]) for name in whole)
    for weights in (resharded, run_ranks(resumed, 1, path, AC, True, 2, 2)[0]):
        assert all(torch.allclose(whole[name], weights[name], atol=1e-5) for name in whole)


def measured(*times):
    """A unit whose inputs are 10 bytes, and whose results are 30 bytes each."""
    results = {("op", index): Result(num_bytes=30, time_s=time_s) for index, time_s in enumerate(times)}
    return Measured(input_bytes=10, saved_bytes=10 + 30 * len(times) + 5, time_s=sum(times), results=results)


@pytest.mark.parametrize(
    ("budget", "kept", "recomputed"),
    [
        (20, [set(), set()], [True, True]),
        (50, [{0}, set()], [True, True]),
        # The dearest result of the second block comes before the cheap one of the first.
        (80, [{0}, {1}], [True, True]),
        (110, [{0}, {0, 1}], [True, True]),
        # Five bytes more, and the second block is left alone.
        (115, [{0}, set()], [True, False]),
        (150, [set(), set()], [False, False]),
    ],
)
def test_what_saves_most_time_a_byte_is_kept(budget, kept, recomputed):
    chosen = choose({"a": measured(9.0, 1.0), "b": measured(2.0, 5.0)}, budget)
    assert [{index for _, index in choice.kept} for choice in chosen.values()] == kept
    assert [choice.is_recomputed for choice in chosen.values()] == recomputed
    assert sum(choice.num_bytes for choice in chosen.values()) <= budget


def test_a_budget_below_the_inputs_is_refused():
    with pytest.raises(PluginError) as caught:
        choose({"a": measured(1.0), "b": measured(1.0)}, 19)
    assert str(caught.value) == (
        "the budget is 19 bytes a forward, and with everything recomputed the inputs of 2 units still take 20; "
        "raise the budget, or recompute larger units"
    )


def test_runs_are_as_many_as_they_are_long():
    names = [str(index) for index in range(12)]
    sizes = {count: [len(run) for run in segments.split_into_runs(names[:count])] for count in range(12)}
    assert (
        sizes[0] == []
        and sizes[1] == [1]
        and sizes[3] == [1, 2]
        and sizes[9] == [3, 3, 3]
        and sizes[11] == [2, 3, 3, 3]
    )
    assert all(sum(lengths) == count for count, lengths in sizes.items())


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


def test_refusals():
    cases = [
        (
            'save = ["aten.mm"]',
            ':2:13: [scheduling.activation_checkpoint] save has no effect with mode = "full"; write mode = "selective"',
        ),
        (
            'mode = "selective"\nsave = ["aten.mmm"]',
            ':2:13: [scheduling.activation_checkpoint] save names the operator "aten.mmm", which torch does not have',
        ),
        (
            'policy = "attention"',
            ':2:13: [scheduling.activation_checkpoint] policy has no effect with mode = "full"; write mode = '
            '"selective"',
        ),
        (
            SELECTIVE + 'policy = "attention"\nsave = ["aten.mm"]',
            ":2:13: [scheduling.activation_checkpoint] policy and save both say what is kept; leave one of them out",
        ),
        (
            SELECTIVE + 'policy = "attn"',
            ':2:13: [scheduling.activation_checkpoint] policy = "attn" is not one of expensive, attention, '
            "every_second_product, nor a function as module:function",
        ),
        (
            SELECTIVE + 'policy = "math:pi"',
            ':2:13: [scheduling.activation_checkpoint] policy = "math:pi" is no function',
        ),
        (
            SELECTIVE + 'policy = "math:pie"',
            ':2:13: [scheduling.activation_checkpoint] module "math" has no "pie"; did you mean "pi"?',
        ),
        (
            'mode = "budget"',
            ':2:13: [scheduling.activation_checkpoint] mode = "budget" needs one budget, and there are none; write '
            "budget_fraction = 0.5, or budget_gib",
        ),
        (
            "budget_gib = 1.0",
            ':2:13: [scheduling.activation_checkpoint] budget_gib has no effect with mode = "full"; '
            'write mode = "budget"',
        ),
        (
            SQRT + "every = 2",
            ':2:13: [scheduling.activation_checkpoint] every has no effect with mode = "sqrt"; leave it out',
        ),
        (
            SQRT + "[scheduling.compile]",
            ':2:13: [scheduling.activation_checkpoint] "activation_checkpoint" cannot be combined with "compile": '
            'mode = "sqrt" puts numbers in the place of what a block saves, which the compiler cannot trace',
        ),
        (
            'units = ["blocks.*"]',
            ':3:1: [scheduling.activation_checkpoint] the pattern "blocks.*" matches nothing in the model; '
            "the model has tok, layers, layers.0, layers.0.up, layers.0.down, layers.0.dropout, layers.1, layers.1.up",
        ),
    ]
    found = in_one_world(refusal, 1, *((AC + text,) for text, _ in cases))
    assert [message for (message,) in found] == [message for _, message in cases]


@pytest.mark.parametrize("mode", [SELECTIVE, BUDGET.format(0.7)])
def test_selective_checkpoints_and_halved_backwards_are_refused(mode):
    text = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "InterleavedZeroBubble"\n' + AC + mode
    with fake_world(2), pytest.raises(ManifestError) as caught:
        composed(text, lambda: Net(num_layers=4))
    assert str(caught.value).partition("[scheduling.activation_checkpoint] ")[2] == (
        '"activation_checkpoint" cannot be combined with "zero_bubble_pipeline": its backward comes in two halves, and '
        'what torch\'s selective checkpoints keep can be used once; write mode = "full"'
    )
