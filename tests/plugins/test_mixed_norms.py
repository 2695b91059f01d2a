"""Norms and buffers under `mixed`: computed and kept in float32, gathered in it, and named by the plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import Net, composed, mine, padded, seeded
from support.narrow_dtypes import LAYOUTS, narrow_reference
from support.planned_runs import Case, figures, measured, tracer_of
from support.shared_worlds import by_world_size, in_one_world
from torch import nn

from composer3d.testing import count_collectives, full, run_ranks

BF16 = torch.bfloat16


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


@pytest.mark.parametrize(("world_size", "texts"), by_world_size(LAYOUTS))
def test_norms_compute_in_float32(world_size, texts):
    modes = ("as_others", "float32", "float32_units")
    found = in_one_world(normed_step, world_size, *((text, mode) for text in texts for mode in modes))
    for index, text in enumerate(texts):
        assert_norms_are_wide(text, modes, found[3 * index : 3 * index + 3])


def assert_norms_are_wide(text, modes, found):
    wide = torch.float32
    ((reference, _, plain, _), *_), *others = found
    for mode, (gradients, seen, counts, _) in (
        (mode, one) for mode, r in zip(modes[1:], others, strict=True) for one in r
    ):
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


def test_a_plan_counts_the_units_of_norms(tmp_path):
    text = 'mesh.dp_shard = 2\n[sharding.fsdp2]\n[precision.mixed]\nnorms = "{}"\n'
    cases = [Case(text.format(m), num_layers=2, num_microbatches=1) for m in ("float32_units", "as_others")]

    def counts(rows):
        return {key[0]: count for key, (count, _) in rows.items() if key[:2] != ("all_reduce", "dp_shard")}

    happened, without = (
        ranks[0]["collectives"] for ranks in in_one_world(measured, 2, *((c, tmp_path) for c in cases))
    )
    planned = figures(tracer_of(cases[0], tmp_path, extrapolate=False).trace(0))["collectives"]
    assert planned == happened
    # Two norms a block and the last one: each is gathered forward and backward, and reduced once.
    many, few = counts(planned), counts(without)
    assert many["all_gather"] == few["all_gather"] + 2 * 5
    assert many["reduce_scatter"] == few["reduce_scatter"] + 5


def test_a_norm_of_its_own_is_gathered_in_float32():
    *_, dtypes = run_ranks(normed_step, 2, "[sharding.fsdp2]", "float32_units")[0]
    assert dtypes == {"torch.bfloat16", "torch.float32"}


def test_buffers_are_kept_in_their_dtype():
    for layout in ("", "[sharding.fsdp2]"):
        *_, (x, weight, buffer) = run_ranks(normed_step, 1, layout, "as_others", 'buffer_dtype = "bfloat16"\n')[0][:2]
        assert (x, weight, buffer) == (torch.bfloat16,) * 3


class Statistics(nn.BatchNorm1d):
    """Of all tokens."""

    def forward(self, x):
        return super().forward(x.flatten(0, 1)).view_as(x)


class Counted(Net):
    def __init__(self, **options):
        super().__init__(**options)
        self.norm = Statistics(7)


def wide_statistics(model):
    """Let a narrow reference's norm compute in float32 on rounded weights, and keep its statistics in float32."""
    norm, mean, variance = model.norm, torch.zeros(7), torch.ones(7)

    def forward(x):
        flat, weight, bias = x.flatten(0, 1).float(), norm.weight.float(), norm.bias.float()
        return F.batch_norm(flat, mean, variance, weight, bias, training=True).to(x.dtype).view_as(x)

    norm.forward = forward
    model.expected = mean, variance
    return model


def counted_step(text, dtype):
    """Return the error of gradients, those of the running statistics, and the statistics' dtype and the plan's row."""
    tokens, targets = padded()
    run = composed(text, seeded(Counted))
    references = []
    wanted = narrow_reference(
        *(tokens, targets, run.context.data_parallel_degree, dtype, 1024.0 if dtype is torch.float16 else 1.0),
        change=lambda model: references.append(wide_statistics(model)) or references[-1],
        factory=Counted,
    )
    run.optimizer(torch.optim.SGD, lr=0.1)
    with run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        run.clip_grad_norm_(float("inf"))
    named = dict(run.named_parameters())
    errors = [float((full(named[name].grad) - grad).abs().max() / grad.abs().max()) for name, grad in wanted.items()]
    norm, expected = run.parts[0].module.norm, references[run.context.data_parallel_rank].expected
    found = norm.running_mean, norm.running_var
    apart = max(float((one.float() - other).abs().max()) for one, other in zip(found, expected, strict=True))
    plan, kept = run.describe(), norm.running_mean.dtype
    run.close()
    return max(errors), apart, kept, [row for row in plan.splitlines() if "mixed" in row]


@pytest.mark.parametrize(("world_size", "layout"), [LAYOUTS[0], LAYOUTS[1]])
def test_norms_with_running_statistics_compute_in_float32(world_size, layout):
    row = f"CONVERT      {'mixed.statistics':<24} norm"
    text = layout + '\n[precision.mixed]\nparam_dtype = "{}"\n{}'
    cases = [(text.format("bfloat16", ""), BF16), (text.format("float16", "initial_scale = 1024.0\n"), torch.float16)]
    cases += [(text.format("bfloat16", 'norms = "float32"\n'), BF16)]
    cases += [(text.format("bfloat16", 'norms = "float32"\nbuffer_dtype = "bfloat16"\n'), BF16)]
    *wide, narrow = in_one_world(counted_step, world_size, *cases)
    for ranks in wide:
        for error, apart, kept, _ in ranks:
            assert error < 2e-6 and apart < 1e-6 and kept is torch.float32
    assert row in wide[0][0][3] and row not in wide[2][0][3]
    for error, apart, kept, _ in narrow:
        assert error < 2e-6 and 0.0 < apart <= 2**-8 and kept is BF16


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
