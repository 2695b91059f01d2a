"""`nn.MultiheadAttention`, and torch's own layers around it, cut along their heads."""

from __future__ import annotations

import pytest
import torch
from support.models import largest, write_manifest
from support.tensor_parallel import AUTO
from torch import nn

import composer3d
from composer3d import ManifestError
from composer3d.testing import count_collectives, full, run_ranks

TIGHT = 1e-12
B, S, T, E, H = 2, 3, 5, 16, 4
TEXT = '[mesh]\ntp = 2\n[sharding.tensor_parallel.plan]\nattention = { style = "attention" }\n'


class Attending(nn.Module):
    """One attention module, called as the options say."""

    def __init__(self, call, **options):
        super().__init__()
        self.call, self.attention = call, nn.MultiheadAttention(E, H, **options)

    def forward(self, x, memory):
        first = x.transpose(0, 1) if not self.attention.batch_first and x.dim() == 3 else x
        second = memory.transpose(0, 1) if not self.attention.batch_first and x.dim() == 3 else memory
        return self.call(self.attention, first, second)


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def summed(result):
    out, weights = result
    return out.square().sum() + (weights.square().sum() if weights is not None else 0.0)


PADDING = torch.tensor([[False] * T, [False] * 3 + [True] * 2])
PER_HEAD = random(B * H, S, T) > 1.0
CALLS = {
    "self": (lambda a, x, m: summed(a(x, x, x, need_weights=False)), {"batch_first": True}, (1, 1)),
    "weights": (lambda a, x, m: summed(a(x, x, x)), {"batch_first": True, "bias": False}, (1, 1)),
    "weights a head": (lambda a, x, m: summed(a(x, m, m, average_attn_weights=False)), {}, (1, 2)),
    "cross": (lambda a, x, m: summed(a(x, m, m.flip(0), need_weights=False)), {}, (1, 3)),
    "sizes of its own": (lambda a, x, m: summed(a(x, m, m, need_weights=False)), {"kdim": E, "vdim": E}, (1, 2)),
    "padding": (lambda a, x, m: summed(a(x, m, m, PADDING, need_weights=False)), {"batch_first": True}, (1, 2)),
    "padding and weights": (lambda a, x, m: summed(a(x, m, m, PADDING)), {"batch_first": True}, (1, 2)),
    "mask a head": (
        lambda a, x, m: summed(a(x, m, m, need_weights=False, attn_mask=PER_HEAD)),
        {"batch_first": True},
        (1, 2),
    ),
    "causal": (
        lambda a, x, m: summed(
            a(x, x, x, need_weights=False, attn_mask=nn.Transformer.generate_square_subsequent_mask(S), is_causal=True)
        ),
        {"batch_first": True},
        (1, 1),
    ),
    "no batch": (lambda a, x, m: summed(a(x[0], m[0], m[0])), {"batch_first": True}, (1, 3)),
}


def errors_of(names):
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        call, options, expected = CALLS[name]
        torch.manual_seed(0)
        model = Attending(call, **options)
        inputs = [random(B, S, E).requires_grad_(), random(B, T, E).requires_grad_()]
        total = model(*inputs)
        total.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        of_inputs = [x.grad for x in inputs]
        model.zero_grad()
        run = composer3d.compose(model, write_manifest(TEXT), loss_fn=lambda output, target: output)
        mine = [x.detach().clone().requires_grad_() for x in inputs]
        with count_collectives(run.mesh) as collectives:
            again = run.model(*mine)
            again.backward()
        reduced = collectives.summary().get(("all_reduce", "tp"), (0, 0))[0]
        pairs = [(total.detach(), again.detach())]
        pairs += [(a, b.grad) for a, b in zip(of_inputs, mine, strict=True) if a is not None]
        named = dict(run.named_parameters())
        pairs += [(g, run.context.in_model_order(n, full(named[n].grad))) for n, g in gradients.items()]
        least = 1e-3 * max(float(a.abs().max()) for a, _ in pairs[1:])
        error = largest(float((a - b).abs().max()) / max(float(a.abs().max()), least) for a, b in pairs)
        found[name] = (error, reduced == sum(expected))
        run.close()
    return found


def test_every_call_gives_what_torchs_own_does():
    for found in run_ranks(errors_of, 2, list(CALLS)):
        assert {name: seen for name, seen in found.items() if not (seen[0] < TIGHT and seen[1])} == {}


class Layers(nn.Module):
    """torch's own layers, of which evaluation has a fast path."""

    def __init__(self):
        super().__init__()
        layer = {"d_model": E, "nhead": H, "dim_feedforward": 32, "dropout": 0.0, "batch_first": True}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**layer), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**layer, norm_first=True), 2)

    def forward(self, x):
        return self.decoder(x.flip(1), self.encoder(x))


def layers_evaluated():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, x = Layers(), random(B, 8, E)
    with torch.no_grad():
        expected = model.eval()(x)
    run = composer3d.compose(
        model.train(), write_manifest(f"[mesh]\ntp = 2\n{AUTO}"), loss_fn=lambda output, target: output.sum()
    )
    with torch.no_grad():
        found = run.model.eval()(x)
    rows = {row.name: row.fqns for row in run.plan}
    shapes = {n: tuple(p.to_local().shape) for n, p in run.named_parameters() if n.startswith("encoder.layers.0.self")}
    run.close()
    return float((found - expected).abs().max()), rows["tensor_parallel.attention"], shapes


def test_layers_are_cut_and_evaluate_as_torchs_own():
    error, cut, shapes = run_ranks(layers_evaluated, 2)[0]
    assert error < TIGHT
    inside = [f"encoder.layers.{n}.self_attn" for n in range(2)]
    inside += [f"decoder.layers.{n}.{name}" for n in range(2) for name in ("self_attn", "multihead_attn")]
    assert sorted(cut) == sorted(inside)
    assert shapes == {
        "encoder.layers.0.self_attn.in_proj_weight": (24, 16),
        "encoder.layers.0.self_attn.in_proj_bias": (24,),
        "encoder.layers.0.self_attn.out_proj.weight": (16, 8),
        "encoder.layers.0.self_attn.out_proj.bias": (16,),
    }


def refused():
    said = []
    for options in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(ManifestError) as caught:
            composer3d.compose(Attending(None, **options), write_manifest(TEXT), loss_fn=lambda output, target: output)
        said.append(str(caught.value).partition("] ")[2])
    return said


def test_refusals():
    reason = "it adds a key and a value of its own, which belong to all heads"
    assert run_ranks(refused, 2)[0] == [f'"attention" cannot be sharded: {reason}; write "replicate"'] * 2
