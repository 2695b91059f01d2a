from __future__ import annotations

import itertools

import pytest
import torch
from support.models import composed, mine, padded, sum_loss
from support.narrow_dtypes import FLOAT16, LAYOUTS, narrow_reference
from support.shared_worlds import by_world_size, in_one_world
from torch import nn

from composer3d import ManifestError
from composer3d.testing import count_collectives, full, run_ranks

PP = "[mesh]\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 6\n"


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


@pytest.mark.parametrize(("world_size", "texts"), by_world_size(LAYOUTS))
def test_means_the_same_in_every_layout(world_size, texts):
    for error, kinds, seen, _ in itertools.chain(*in_one_world(step, world_size, *((text,) for text in texts))):
        # The same roundings in the same places: what is left is the order of float32 sums.
        assert error < 2e-6
        assert kinds == {(torch.float32, torch.float32)}
        assert seen == {(torch.bfloat16, torch.bfloat16)}


def test_collectives_carry_the_dtypes():
    *_, dtypes = run_ranks(step, 2, "[sharding.fsdp2]")[0]
    assert ("all_gather", "dp_shard", "torch.bfloat16") in dtypes
    assert ("reduce_scatter", "dp_shard", "torch.float32") in dtypes


def outputs(text, table):
    """Return the dtypes that the loss is given."""
    seen = set()

    def loss_fn(logits, targets):
        seen.add(logits.dtype)
        return sum_loss(logits.float(), targets)

    run = composed(f"{text}\n[precision.mixed]\n{table}", loss_fn=loss_fn)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    run.close()
    return seen


OUTPUTS = {
    "": torch.bfloat16,
    'output_dtype = "float32"\n': torch.float32,
    'output_dtype = "float16"\n': torch.float16,
    'param_dtype = "float16"\n': torch.float32,
    'param_dtype = "float16"\noutput_dtype = "float16"\n': torch.float16,
}


@pytest.mark.parametrize(("world_size", "texts"), by_world_size([*LAYOUTS[:4], pytest.param(2, PP)]))
def test_outputs_are_cast(world_size, texts):
    cases = [(text, table) for text in texts for table in OUTPUTS]
    for (text, table), ranks in zip(cases, in_one_world(outputs, world_size, *cases), strict=True):
        # Of a pipeline the last stage alone has outputs.
        assert [*filter(None, ranks)] == [{OUTPUTS[table]}] * (1 if text == PP else world_size)


# ---- training and refusals -------------------------------------------------------------------------------------------


def trains(text):
    run = composed(text)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for number in range(20):
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: full(p.detach()) for name, p in run.named_parameters()}
    run.close()
    return losses, weights


def test_the_loss_falls_and_ranks_agree():
    tables = ('[precision.mixed]\noutput_dtype = "float32"', FLOAT16)
    for (losses, first), (other, second) in in_one_world(trains, 2, *(("[sharding.fsdp2]\n" + t,) for t in tables)):
        assert losses[-1] < 0.5 * losses[0]
        assert losses == other
        assert all(torch.equal(first[name], second[name]) for name in first)


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


REFUSED = [
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
        'param_dtype = "float16"\nstatic_scale = 8.0\nhysteresis = 2',
        ":2:12: [precision.mixed] hysteresis has no effect with static_scale, which never changes; keep one of the two",
    ),
    (
        'param_dtype = "float16"\nmin_scale = 1e6',
        ":2:12: [precision.mixed] min_scale = 1e+06 is above the initial scale, 65536",
    ),
    (
        'param_dtype = "float16"\ninitial_scale = inf',
        ":4:1: [precision.mixed] precision.mixed.initial_scale must be a finite number, not inf",
    ),
    (
        'norm_modules = ["norm"]',
        ':2:12: [precision.mixed] norm_modules has no effect with norms = "as_others"; '
        'write norms = "float32" or "float32_units"',
    ),
    (
        'param_dtype = "float32"\nnorms = "float32"',
        ':2:12: [precision.mixed] norms = "float32" has no effect with param_dtype = "float32", in which all '
        "modules compute; remove norms",
    ),
    (
        'param_dtype = "float32"',
        ':2:12: [precision.mixed] param_dtype = "float32" has no effect with reduce_dtype = "float32": the model '
        'is in float32, and so are its gradients; write param_dtype = "bfloat16", or remove the table',
    ),
    (
        'buffer_dtype = "bfloat16"',
        ":2:12: [precision.mixed] buffer_dtype has no effect: the model has no floating-point buffer",
    ),
    (
        'norms = "float32"\nnorm_modules = ["layer_norm"]',
        ':4:1: [precision.mixed] the pattern "layer_norm" matches nothing in the model; did you mean "layers"?',
    ),
]


def test_refusals():
    found = in_one_world(refusal, 1, *(("[precision.mixed]\n" + text,) for text, _ in REFUSED))
    assert [message for (message,) in found] == [message for _, message in REFUSED]


def test_refuses_a_model_without_norms():
    def without():
        with pytest.raises(ManifestError) as caught:
            composed('[precision.mixed]\nnorms = "float32"', nn.Linear(3, 3))
        return str(caught.value).partition("run.toml")[2]

    assert run_ranks(without, 1)[0] == (
        ':2:12: [precision.mixed] norms = "float32", and the model has no norm that is known as one; '
        "name them: norm_modules = [...]"
    )


def composed_in_float32():
    """Return the dtypes of outputs: of a model in another dtype, of inputs in another, and what else has an effect."""
    table = '[precision.mixed]\nparam_dtype = "float32"\n'
    found = []
    for model in (nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 3)):
        x = torch.ones(2, 3, dtype=torch.float64)
        run = composed(table, model, loss_fn=lambda y, _: found.append(y.dtype) or y.sum(), example=((x,), {}))
        with run.step(0):
            run.forward_backward(x, target=x)
        run.close()
    for more in ('reduce_dtype = "bfloat16"\n', 'output_dtype = "bfloat16"\n', 'norms = "float32_units"\n'):
        composed(table + more).close()
    return found


def test_float32_throughout_is_kept_where_it_casts_something():
    assert run_ranks(composed_in_float32, 1) == [[torch.float32] * 2]


def test_buckets_refuse_a_narrow_reduction():
    text = '[sharding.ddp]\nreducer = "bucketed"\n[precision.mixed]\nreduce_dtype = "bfloat16"'
    assert run_ranks(refusal, 1, text)[0] == (
        ":2:11: [sharding.ddp] the buckets reduce gradients in the dtype of the weights, float32, and another "
        'reduce_dtype is asked for; write reducer = "unit"'
    )
