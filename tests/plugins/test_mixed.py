from __future__ import annotations

import pytest
import torch
from support.models import Net, composed, mine, padded, seeded, sum_loss
from torch import nn
from torch.distributed.tensor import DTensor

from composer3d import ManifestError, StepAction, StepPoint, hookimpl, plugin
from composer3d.testing import count_collectives, full, run_ranks

LAYOUTS = [
    pytest.param(1, "", id="plain"),
    pytest.param(2, "[sharding.fsdp2]", id="fsdp2"),
    pytest.param(2, "[sharding.ddp]", id="ddp"),
    pytest.param(2, '[sharding.ddp]\nreducer = "bucketed"', id="ddp-bucketed"),
    pytest.param(2, '[scheduling.activation_checkpoint]\n[sharding.ddp]\nreducer = "bucketed"', id="ddp-bucketed-ac"),
]


def narrow_reference(tokens, targets, chunks, dtype=torch.bfloat16, scale=1.0, change=lambda model: model):
    """One device that cuts the batch as the run does: narrow compute, float32 weights and sums of gradients."""
    total = {}
    count = (targets != -100).sum()
    model = seeded()
    for part in range(chunks):
        narrow = change(seeded().to(dtype))
        size = tokens.shape[0] // chunks
        cut = slice(part * size, (part + 1) * size)
        logits = narrow(tokens[cut])
        loss, _ = sum_loss(logits.float() if dtype is torch.float16 else logits, targets[cut])
        (loss * (chunks / count) * scale).backward()
        for name, p in narrow.named_parameters():
            total[name] = total.get(name, 0) + p.grad.float() / chunks / scale
    assert dict(model.named_parameters()).keys() == total.keys()
    return total


def step(text):
    tokens, targets = padded()
    run = composed(text + "\n[precision.mixed]")
    reference = narrow_reference(tokens, targets, run.context.data_parallel_degree)
    seen = []
    run.parts[0].module.layers[0].up.register_forward_hook(lambda m, args, out: seen.append((args[0].dtype, out.dtype)))
    with count_collectives(run.mesh) as collectives, run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        dtypes = {(row.op, row.axis, str(row.dtype)) for row in collectives.rows}
        run.clip_grad_norm_(float("inf"))
        error = max(
            float((full(p.grad) - reference[name]).abs().max() / reference[name].abs().max())
            for name, p in run.named_parameters()
        )
        kinds = {(p.dtype, p.grad.dtype) for _, p in run.named_parameters()}
    run.close()
    return error, kinds, set(seen), dtypes


@pytest.mark.parametrize(("world_size", "text"), LAYOUTS)
def test_means_the_same_in_every_layout(world_size, text):
    for error, kinds, seen, _ in run_ranks(step, world_size, text):
        # The same roundings in the same places: what is left is the order of float32 sums.
        assert error < 2e-6
        assert kinds == {(torch.float32, torch.float32)}
        assert seen == {(torch.bfloat16, torch.bfloat16)}


def test_collectives_carry_the_dtypes():
    *_, dtypes = run_ranks(step, 2, "[sharding.fsdp2]")[0]
    assert ("all_gather", "dp_shard", "torch.bfloat16") in dtypes
    assert ("reduce_scatter", "dp_shard", "torch.float32") in dtypes


# ---- float16 ---------------------------------------------------------------------------------------------------------

FLOAT16 = '[precision.mixed]\nparam_dtype = "float16"\n'


def float16_step(text):
    tokens, targets = padded()
    run = composed(f"{text}\n{FLOAT16}initial_scale = 1024.0\n")
    run.optimizer(torch.optim.SGD, lr=0.1)
    reference = narrow_reference(tokens, targets, run.context.data_parallel_degree, torch.float16, 1024.0)
    with run.step(0), count_collectives(run.mesh) as collectives:
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        dtypes = {(row.op, row.axis, str(row.dtype)) for row in collectives.rows}
        run.clip_grad_norm_(float("inf"))
    error = max(
        float((full(p.grad) - reference[name]).abs().max() / reference[name].abs().max())
        for name, p in run.named_parameters()
    )
    run.close()
    return error, dtypes


@pytest.mark.parametrize(("world_size", "text"), LAYOUTS)
def test_float16_means_the_same_in_every_layout(world_size, text):
    for error, dtypes in run_ranks(float16_step, world_size, text):
        assert error < 2e-6
        if "fsdp2" in text:
            assert ("all_gather", "dp_shard", "torch.float16") in dtypes
            assert ("reduce_scatter", "dp_shard", "torch.float32") in dtypes


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@plugin(family="profiling")
class Overflowing:
    """Puts an infinity into one gradient of one rank.

    Args:
        rank: Which.
        steps: When.
    """

    rank: int = 0
    steps: tuple[int, ...] = (1,)

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="overflowing", point=StepPoint.GRADIENTS_REDUCED, run=self._overflow)

    def _overflow(self, state):
        if state.context.rank == self.rank and state.step in self.steps:
            gradient = next(p.grad for p in state.parts[0].module.parameters() if p.grad is not None)
            local(gradient).view(-1)[0] = float("inf")


OVERFLOWING = '[profiling.overflowing]\nuse = "plugins.test_mixed:Overflowing"\n'


def overflowing(text, num_steps=4):
    """Train with an overflow on one rank; return scales, skipped steps, whether weights stayed, and the weights."""
    run = composed(text)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    rows, unchanged = [], []
    for number in range(num_steps):
        before = [local(p.detach()).clone() for _, p in run.named_parameters()]
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        rows.append(run.report(number, {}))
        unchanged.append(
            all(torch.equal(a, local(p)) for a, (_, p) in zip(before, run.named_parameters(), strict=True))
        )
    run.close()
    return [row["loss_scale"] for row in rows], [row["overflow_steps"] for row in rows], unchanged


@pytest.mark.parametrize(
    ("world_size", "text"),
    [
        (2, "[sharding.fsdp2]\n"),
        (2, "[sharding.ddp]\n"),
        # Stages have other parameters: torch's own scaler would desynchronise here.
        (2, "[mesh]\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 3\n"),
        (4, "[mesh]\npp = 2\ndp_shard = 2\n[scheduling.pipeline]\n[sharding.fsdp2]\n[train]\nmicrobatch = 3\n"),
    ],
)
def test_an_overflow_on_one_rank_is_agreed_over_all(world_size, text):
    settings = "initial_scale = 1024.0\ngrowth_interval = 1\nbackoff_factor = 0.25\ngrowth_factor = 4.0\n"
    manifest = text + FLOAT16 + settings + OVERFLOWING + f"rank = {world_size - 1}\n"
    for scales, skipped, unchanged in run_ranks(overflowing, world_size, manifest):
        assert scales == [4096.0, 1024.0, 4096.0, 16384.0]
        assert skipped == [0, 1, 1, 1]
        assert unchanged == [False, True, False, False]


def test_a_scale_that_is_too_high_comes_down_by_itself():
    manifest = "[sharding.fsdp2]\n" + FLOAT16 + f"initial_scale = {2.0**24}\n"
    for scales, skipped, unchanged in run_ranks(overflowing, 2, manifest, 12):
        assert scales[0] == 2.0**23
        assert 0 < skipped[-1] < 12
        assert scales[-1] == 2.0 ** (24 - skipped[-1])
        assert unchanged == [True] * int(skipped[-1]) + [False] * (12 - int(skipped[-1]))


def test_the_vote_is_the_only_collective_of_its_own():
    def counts(text):
        run = composed(text)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        tokens, targets = (mine(run, tensor) for tensor in padded())
        with count_collectives(run.mesh) as collectives, run.step(0):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
        run.close()
        return {key: count for key, (count, _) in collectives.summary().items()}

    plain, scaled = (run_ranks(counts, 2, f"[sharding.fsdp2]\n{text}")[0] for text in ("[precision.mixed]", FLOAT16))
    (key,) = (key for key in scaled if scaled[key] != plain.get(key, 0))
    assert (key[0], scaled.pop(key) - plain.pop(key)) == ("all_reduce", 1)
    assert scaled == plain


def resumed(path, text, cut):
    """Train six steps, or load after three and train the other three; return scale, weights and state."""
    run = composed(text)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    start = 0
    if cut:
        run.load(path)
        start = 3
    for number in range(start, 6):
        if number == 3 and not cut:
            run.save(path)
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: full(p) for name, p in run.named_parameters()}
    row = run.report(6, {})
    run.close()
    return weights, row


@pytest.mark.parametrize("layout", ["", "[mesh]\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 3\n"])
def test_a_resumed_run_is_the_same_and_reshards(tmp_path, layout):
    settings = "initial_scale = 64.0\ngrowth_interval = 2\n" + OVERFLOWING + "steps = [1]\n"
    sharded = "[sharding.fsdp2]\n" + FLOAT16 + settings
    whole = run_ranks(resumed, 2, tmp_path / "step-3", sharded, False)
    again = run_ranks(resumed, 2, tmp_path / "step-3", sharded, True)
    for (weights, row), (other, other_row) in zip(whole, again, strict=True):
        assert row == other_row == {"loss_scale": 128.0, "overflow_steps": 1.0}
        assert all(torch.equal(weights[name], other[name]) for name in weights)
    # In another layout the same scale goes on, and the same weights up to float16's rounding.
    for weights, row in run_ranks(resumed, 2 if layout else 1, tmp_path / "step-3", layout + FLOAT16 + settings, True):
        assert row == {"loss_scale": 128.0, "overflow_steps": 1.0}
        for name, weight in weights.items():
            assert torch.allclose(weight, whole[0][0][name], atol=2e-2)


# ---- norms and buffers -----------------------------------------------------------------------------------------------


class CustomNorm(nn.Module):
    """Computes in the dtype that it is given, as many hand-written norms do."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.register_buffer("bias", torch.full((dim,), 0.1))

    def forward(self, x):
        self.seen = x.dtype, self.weight.dtype, self.bias.dtype
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight + self.bias.to(x.dtype)


class Normed(Net):
    def __init__(self, **options):
        super().__init__(**options)
        self.norm = CustomNorm(7)


def normed_step(text, mode, more=""):
    tokens, targets = padded()
    run = composed(f'{text}\n[precision.mixed]\nnorms = "{mode}"\n{more}', seeded(Normed))
    with count_collectives(run.mesh) as collectives, run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        counts = {
            key: count
            for key, (count, _) in collectives.summary().items()
            if (key[0], key[1]) != ("all_reduce", "dp_shard")
        }
        dtypes = {str(row.dtype) for row in collectives.rows if row.op == "all_gather"}
    gradients = {name: full(p.grad) for name, p in run.named_parameters()}
    seen = run.parts[0].module.norm.seen
    run.close()
    return gradients, seen, counts, dtypes


def in_float32(module):
    """Compute a reference's norm in float32 on rounded weights."""
    forward = module.norm.forward

    def wide(x):
        kept = module.norm.weight
        module.norm.__dict__["weight"] = kept.float()
        try:
            return forward(x.float()).to(x.dtype)
        finally:
            del module.norm.__dict__["weight"]

    module.norm.forward = wide
    return module


@pytest.mark.parametrize(("world_size", "text"), LAYOUTS)
@pytest.mark.parametrize("mode", ["float32", "float32_units"])
def test_norms_compute_in_float32(world_size, text, mode):
    wide = torch.float32
    (reference, _, plain, _) = run_ranks(normed_step, world_size, text, "as_others")[0]
    for gradients, seen, counts, _ in run_ranks(normed_step, world_size, text, mode):
        assert seen == (wide, wide, wide)
        # bfloat16 has 8 bits; rounding a norm less changes gradients by a few of its last ones.
        errors = [float((gradients[n] - g).abs().max() / g.abs().max()) for n, g in reference.items()]
        assert 0 < max(errors) < 0.05
        if mode == "float32":
            assert counts == plain
        elif "fsdp2" in text:
            # The norm is one unit more: gathered forward and backward, reduced once.
            assert counts == {
                ("all_gather", "dp_shard"): plain["all_gather", "dp_shard"] + 2,
                ("reduce_scatter", "dp_shard"): plain["reduce_scatter", "dp_shard"] + 1,
            }
        elif text == "[sharding.ddp]":
            assert counts["all_reduce", "dp_replicate"] == plain["all_reduce", "dp_replicate"] + 1


def test_a_norm_of_its_own_is_gathered_in_float32():
    *_, dtypes = run_ranks(normed_step, 2, "[sharding.fsdp2]", "float32_units")[0]
    assert dtypes == {"torch.bfloat16", "torch.float32"}


def test_buffers_are_kept_in_their_dtype():
    for layout in ("", "[sharding.fsdp2]"):
        *_, (x, weight, buffer) = run_ranks(normed_step, 1, layout, "as_others", 'buffer_dtype = "bfloat16"\n')[0][:2]
        assert (x, weight, buffer) == (torch.bfloat16,) * 3


def described(text):
    run = composed(text, seeded(Normed))
    plan = run.describe()
    run.close()
    return plan


def test_the_plan_names_norms_and_buffers():
    text = '[sharding.fsdp2]\n[precision.mixed]\nnorms = "float32_units"\nbuffer_dtype = "bfloat16"\n'
    assert run_ranks(described, 1, text)[0].splitlines()[1:] == [
        "CONVERT      mixed.buffers            norm",
        "CONVERT      mixed.norms              norm",
        "DATA         fsdp2                    layers.0, layers.1, layers.2, ... 5 in all",
    ]


# ---- training and refusals -------------------------------------------------------------------------------------------


def trains(text):
    run = composed(text)
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for number in range(60):
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: full(p.detach()) for name, p in run.named_parameters()}
    run.close()
    return losses, weights


@pytest.mark.parametrize("table", ['[precision.mixed]\noutput_dtype = "float32"', FLOAT16])
def test_the_loss_falls_and_ranks_agree(table):
    (losses, first), (other, second) = run_ranks(trains, 2, "[sharding.fsdp2]\n" + table)
    assert losses[-1] < 0.5 * losses[0]
    assert losses == other
    assert all(torch.equal(first[name], second[name]) for name in first)


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'param_dtype = "bf16"',
            ':3:1: [precision.mixed] param_dtype = "bf16" is not one of "bfloat16", "float16", "float32"; '
            'did you mean "bfloat16"?',
        ),
        (
            "initial_scale = 2.0",
            ':2:12: [precision.mixed] initial_scale has no effect with param_dtype = "bfloat16": its exponents need no '
            'loss scale; write param_dtype = "float16"',
        ),
        (
            'norm_modules = ["norm"]',
            ':2:12: [precision.mixed] norm_modules has no effect with norms = "as_others"; '
            'write norms = "float32" or "float32_units"',
        ),
        (
            'buffer_dtype = "bfloat16"',
            ":2:12: [precision.mixed] buffer_dtype has no effect: the model has no floating-point buffer",
        ),
        (
            'norms = "float32"\nnorm_modules = ["layer_norm"]',
            ':4:1: [precision.mixed] the pattern "layer_norm" matches nothing in the model; did you mean "layers"?',
        ),
    ],
)
def test_refusals(text, message):
    assert run_ranks(refusal, 1, "[precision.mixed]\n" + text)[0] == message


def test_refuses_a_model_without_norms():
    def without():
        with pytest.raises(ManifestError) as caught:
            composed('[precision.mixed]\nnorms = "float32"', nn.Linear(3, 3))
        return str(caught.value).partition("run.toml")[2]

    assert run_ranks(without, 1)[0] == (
        ':2:12: [precision.mixed] norms = "float32", and the model has no norm that is known as one; '
        "name them: norm_modules = [...]"
    )


def test_buckets_refuse_a_narrow_reduction():
    text = '[sharding.ddp]\nreducer = "bucketed"\n[precision.mixed]\nreduce_dtype = "bfloat16"'
    assert run_ranks(refusal, 1, text)[0] == (
        ":2:11: [sharding.ddp] the buckets reduce gradients in the dtype of the weights, float32, and another "
        'reduce_dtype is asked for; write reducer = "unit"'
    )
