"""What tensor parallelism refuses, with the whole message."""

from __future__ import annotations

import re
import warnings

import pytest
import torch
from support.family_models import batch_of, class_loss
from support.models import write_manifest
from support.tensor_parallel import built, errors, on_one_rank, table
from torch import nn

import composer3d
from composer3d import BatchError, ManifestError
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
SP = "sequence_parallel = true"


def tp(family, degree=2, settings="", more=""):
    return f"[mesh]\ntp = {degree}\n{more}\n" + table(family, settings)


def refusals(cases):
    found = []
    for family, text, *options in cases:
        with pytest.raises(ManifestError) as caught:
            composer3d.compose(built(family, *options), write_manifest(text), loss_fn=class_loss)
        found.append(str(caught.value).partition("run.toml:")[2])
    return found


def entries(degree, **plan):
    lines = "\n".join(f'"{pattern}" = {value}' for pattern, value in plan.items())
    return f"[mesh]\ntp = {degree}\n[sharding.tensor_parallel.plan]\n{lines}\n"


WQ, WO = "layers.*.attention.w[qkv]", "layers.*.attention.wo"
PAIR = {WQ: '"colwise"', WO: '"rowwise"'}
REFUSALS = [
    (
        ("llama", entries(3, **PAIR), {}),
        '"layers.0.attention.wq": its 16 output features do not divide by tp = 3',
    ),
    (
        ("llama", entries(4, **PAIR), {"num_kv_heads": 2}),
        '"layers.0.attention.wk": its 2 key-value heads do not divide by tp = 4',
    ),
    (
        ("llama", entries(2, **PAIR, **{"layers.*.attention.wx": '"colwise"'})),
        'the pattern "layers.*.attention.wx" matches nothing in the model; did you mean "layers.*.attention.wv"?',
    ),
    (
        ("llama", entries(2, **PAIR, **{"layers.0.attention.wk": '"rowwise"'})),
        'plan says of "layers.0.attention.wk" "colwise" by "layers.*.attention.w[qkv]", and "rowwise" by '
        '"layers.0.attention.wk"',
    ),
    (
        ("llama", entries(2, **{"output": '"colwise"'})),
        '"output" is "colwise", and no module around it holds a "rowwise" one that reduces its sharded result; '
        'plan that one, or write "head" for a projection whose result is the output',
    ),
    (
        ("llama", entries(2, **{WO: '"rowwise"'})),
        '"layers.0.attention.wo" is "rowwise", and no "colwise" module beside it gives it a sharded input; plan the '
        "projections that feed it too",
    ),
    (
        ("llama", entries(2, **PAIR, norm='"colwise"')),
        '"norm" is a RMSNorm, and "colwise" shards a linear layer with a weight of two dims',
    ),
    (
        ("llama", entries(5, tok_embeddings='"vocab"')),
        '"tok_embeddings": its 12 rows do not divide by tp = 5',
    ),
    (
        ("gpt2", entries(2, wte='"vocab"')),
        '"wte.weight" and "lm_head.weight" are one tensor, but "wte" is "vocab" and "lm_head" is "replicate"; '
        'give both one style in plan ("vocab" and "head": an embedding and its head), or neither',
    ),
    (
        (
            "gpt2",
            entries(
                2,
                **{"h.*.attn.c_attn": '{ style = "packed_colwise", parts = [16, 16] }', "h.*.attn.c_proj": '"rowwise"'},
            ),
        ),
        '"h.0.attn.c_attn": its parts [16, 16] are 32 features, and it has 48 output features',
    ),
    (
        (
            "gpt2",
            entries(
                4,
                **{
                    "h.*.attn.c_attn": '{ style = "packed_colwise", parts = [40, 6, 2] }',
                    "h.*.attn.c_proj": '"rowwise"',
                },
            ),
        ),
        '"h.0.attn.c_attn": its part of 6 features (of [40, 6, 2]) does not divide by tp = 4',
    ),
    (
        (
            "llama",
            "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true\n"
            + entries(2, **PAIR).partition("tp = 2")[2],
        ),
        'sequence_parallel: plan does not say whether "tok_embeddings", which has parameters, works on '
        "activations that "
        'are sharded along the sequence; write "sequence" if it does, else "replicate"',
    ),
    (
        (
            "llama",
            "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nloss_parallel = true\n"
            + entries(2, **PAIR).partition("tp = 2")[2],
        ),
        'loss_parallel has no effect: no module of the plan is a "head"',
    ),
    (
        ("llama", "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nloss_parallel = true\n", {"vocab_size": 65}),
        'loss_parallel has no effect: the 65 rows of "tok_embeddings" and the 65 rows of "output" do not divide by '
        "tp = 2, so that they stay whole",
    ),
]


def test_refusals():
    for degree in (2, 3, 4, 5):
        chosen = [(case, message) for case, message in REFUSALS if f"tp = {degree}\n" in case[1]]
        found = on_one_rank(refusals, degree, [case for case, _ in chosen])
        for (_, message), said in zip(chosen, found, strict=True):
            assert said.partition("] ")[2] == message


def uneven():
    run = composer3d.compose(built("llama"), write_manifest(tp("llama", 2, SP)), loss_fn=class_loss)
    inputs, targets = batch_of("llama")
    with pytest.raises(BatchError) as caught, run.step(0):
        run.forward_backward(inputs[:, :7], target=targets[:, :7])
    run.close()
    return str(caught.value)


def test_a_sequence_that_does_not_divide():
    said = (
        "a sequence of 7 does not divide by tp = 2, as sequence_parallel needs; choose a length that tp = 2 divides, "
    )
    assert run_ranks(uneven, 2)[0] == f"{said}or write sequence_parallel = false"


class Normed(nn.Module):
    """A norm between the projections, of which the plan says nothing."""

    def __init__(self, size):
        super().__init__()
        self.size, self.up, self.norm, self.down = size, nn.Linear(4, 8), nn.LayerNorm(size), nn.Linear(8, 4)

    def forward(self, x):
        x = self.up(x)
        return self.down(self.norm(x.view(*x.shape[:-1], -1, self.size)).flatten(-2))


def unplanned():
    text = write_manifest(entries(2, up='"colwise"', down='"rowwise"'))
    with pytest.raises(ManifestError) as caught:
        composer3d.compose(lambda: Normed(8), text, loss_fn=lambda output, target: output.sum())
    torch.set_default_dtype(torch.float64)
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    run = composer3d.compose(lambda: Normed(2), text, loss_fn=lambda output, target: output.square().sum())
    alone = Normed(2)
    alone.load_state_dict({name: full(p) for name, p in run.named_parameters()})
    (alone(x).square().sum() / 2).backward()
    with run.step(0):
        run.forward_backward(x, target=torch.zeros(2))
        assert errors(run, {name: p.grad for name, p in alone.named_parameters()}) < TIGHT
    run.close()
    return str(caught.value).partition("] ")[2]


def test_a_module_that_the_plan_does_not_mention():
    """Over all features a norm cannot work on a share of them; over a group of them it can, its gradient added up."""
    assert re.fullmatch(
        r'the plan does not fit the model\'s code: "Normed": layer_norm does not work on sharded features \(Given .*\) '
        r"\(\w+\.py:\d+\)",
        run_ranks(unplanned, 2)[0].partition("; ")[0],
    )


def compiled(function):
    """Have torch.jit compile a function; torch advises against it, and people's code has it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(function)


@compiled
def weights(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


class Weighing(nn.Module):
    """A softmax over features that ranks share, which no propagation sees: it was that of a rank's own."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.down(weights(self.up(x)))


def weighing():
    text = write_manifest(entries(2, up='"colwise"', down='"rowwise"'))
    with pytest.raises(ManifestError) as caught:
        composer3d.compose(Weighing, text, loss_fn=lambda output, target: output.sum())
    return str(caught.value).partition("] ")[2]


def test_a_compiled_function_that_may_relate_features_is_refused():
    assert run_ranks(weighing, 2) == 2 * [
        'tensor_parallel: "" calls weights, which torch.jit has compiled: whether it relates features that ranks share '
        "cannot be seen; call the function as it was, without torch.jit.script and torch.jit.trace"
    ]
