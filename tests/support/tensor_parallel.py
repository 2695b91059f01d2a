"""One composed step of any of the architectures beside one device's, and the plans that shard them."""

from __future__ import annotations

import contextlib

import torch
from torch.distributed.tensor import DTensor

import composer3d
from composer3d.step import gradients
from composer3d.testing import count_collectives, fake_world, full
from support.block_habits import MODELS
from support.branching_models import FLOWS
from support.family_models import FAMILIES, batch_of, class_loss
from support.foreign_models import STRANGERS
from support.models import largest, mine, write_manifest
from support.multiplied_models import MODELS as MULTIPLIED
from support.shared_parts import SHARED_PARTS

PLANS = {
    "llama": """
tok_embeddings = "vocab"
"layers.*.attention.w[qkv]" = "colwise"
"layers.*.attention.wo" = "rowwise"
"layers.*.feed_forward.w[13]" = "colwise"
"layers.*.feed_forward.w2" = "rowwise"
"layers.*.*_norm" = "sequence"
"layers.*.*_dropout" = "sequence"
norm = "sequence"
output = "head"
""",
    "gpt2": """
wte = "vocab"
wpe = "sequence"
drop = "sequence"
"h.*.ln_*" = "sequence"
"h.*.attn.c_attn" = "packed_colwise"
"h.*.attn.c_proj" = "rowwise"
"h.*.attn.resid_dropout" = "sequence"
"h.*.mlp.c_fc" = "colwise"
"h.*.mlp.c_proj" = "rowwise"
"h.*.mlp.dropout" = "sequence"
ln_f = "sequence"
lm_head = "head"
""",
    "bert": """
word = "vocab"
position = "sequence"
kind = "sequence"
"norm" = "sequence"
"layer.*.attention.query" = "colwise"
"layer.*.attention.key" = "colwise"
"layer.*.attention.value" = "colwise"
"layer.*.attention.dense" = "rowwise"
"layer.*.**.norm" = "sequence"
"layer.*.intermediate" = "colwise"
"layer.*.output" = "rowwise"
"transform*" = "sequence"
decoder = "head"
""",
    "vit": """
"blocks.*.attn.qkv" = { style = "packed_colwise", parts = [16, 16, 16] }
"blocks.*.attn.proj" = "rowwise"
"blocks.*.mlp.0" = "colwise"
"blocks.*.mlp.2" = "rowwise"
head = "head"
""",
    "mixer": """
"blocks.*.*_up" = "colwise"
"blocks.*.*_down" = "rowwise"
""",
}


AUTO = "[sharding.tensor_parallel]\n"


def table(family, settings="", more=""):
    """Return a manifest's text with the family's plan."""
    plan = PLANS[family]
    return f"[sharding.tensor_parallel]\n{settings}\n[sharding.tensor_parallel.plan]{plan}\n{more}"


def built(family, options=None):
    torch.manual_seed(0)
    return {**FAMILIES, **MODELS, **STRANGERS, **FLOWS, **SHARED_PARTS, **MULTIPLIED}[family](**(options or {}))


def reference(family, options=None, num_samples=4):
    """One device, one batch: loss, gradients and norm."""
    inputs, targets = batch_of(family, num_samples)
    model = built(family, options)
    loss, count = class_loss(model(inputs), targets)
    (loss / count).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.get_total_norm(list(gradients.values()))
    return (loss / count).detach(), gradients, norm


def errors(run, gradients):
    """Return the largest relative error of a gradient, in the model's own order of rows.

    Some gradients are zero in exact arithmetic, such as that of a key's bias: they are compared with the others.
    """
    found = {name: run.context.in_model_order(name, full(p.grad)) for name, p in run.named_parameters()}
    assert found.keys() == gradients.keys(), found.keys() ^ gradients.keys()
    least = 1e-3 * max(float(g.abs().max()) for g in gradients.values())
    return largest(
        float((found[name] - g).abs().max()) / max(float(g.abs().max()), least) for name, g in gradients.items()
    )


@contextlib.contextmanager
def watch_partial_sums(run):
    """Yield the set to which the name of every parameter is added whose gradient is a partial sum after the backward.

    By the function that completes them: a hook on a parameter would be called with the completed gradient.
    """
    found, names, settle = set(), {id(p): name for name, p in run.named_parameters()}, gradients.settle_partial

    def noting(parameters):
        parameters = list(parameters)
        for each in parameters:
            if isinstance(each.grad, DTensor) and any(placement.is_partial() for placement in each.grad.placements):
                found.add(names[id(each)])
        settle(parameters)

    gradients.settle_partial = noting
    try:
        yield found
    finally:
        gradients.settle_partial = settle


def steps_of(cases):
    """Run steps on a rank, each of (family, text) or (family, text, options): a world costs more than a step."""
    return [one_step(family, text, options=dict(*options)) for family, text, *options in cases]


def one_step(family, text, *, options=None, num_samples=4):
    """Run on a rank: one composed step in float64.

    Returns (loss error, norm error, largest relative gradient error, collectives of forward and backward, without the
    one that ends it for each gradient that is a partial sum then).
    """
    torch.set_default_dtype(torch.float64)
    loss_1, wanted, norm_1 = reference(family, options, num_samples)
    run = composer3d.compose(built(family, options), write_manifest(text), loss_fn=class_loss)
    inputs, targets = (mine(run, tensor) for tensor in batch_of(family, num_samples))
    with run.step(0), watch_partial_sums(run) as partial:
        # Dynamo refuses to work under the mode that counts.
        with contextlib.nullcontext() if "scheduling.compile" in text else count_collectives(run.mesh) as collectives:
            loss = run.forward_backward(inputs, target=targets)
        counted = {key: count for key, (count, _) in collectives.summary().items()} if collectives else {}
        if partial and counted:
            counted["all_reduce", "tp"] -= len(partial)
        norm = run.clip_grad_norm_(float("inf"))
        error = errors(run, wanted)
    run.close()
    return float((loss - loss_1).abs()), float((norm - norm_1).abs() / norm_1), error, counted


def on_one_rank(function, world_size, *args):
    """Return what a function finds on the first rank of a fake world, for what is known without values of others."""
    with fake_world(world_size):
        return function(*args)
