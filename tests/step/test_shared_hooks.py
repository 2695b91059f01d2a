"""Hooks on gradients of several tensors, and on nodes of the graph, are called as on one device, or refused.

Shapes: B samples, S positions, D features.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.models import mine, write_manifest
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
LIMIT = 1e-3
VOCAB, D, HEADS = 13, 8, 2
FSDP = "[sharding.fsdp2]\n"
LAYOUTS = {
    "fsdp2": (2, f"mesh.dp_shard = 2\n{FSDP}"),
    "ddp": (2, "mesh.dp_replicate = 2\n[sharding.ddp]\n"),
    "recomputed": (2, f"mesh.dp_shard = 2\n{FSDP}[scheduling.activation_checkpoint]\nmode = 'full'\n"),
    "tp": (2, f"mesh.tp = 2\n{FSDP}[sharding.tensor_parallel]\n"),
    "cp": (2, f"mesh.cp = 2\n{FSDP}[sharding.context_parallel]\n"),
    "dp, cp": (4, f"mesh.dp_shard = 2\nmesh.cp = 2\n{FSDP}[sharding.context_parallel]\n"),
}
STAGES = f"mesh.pp = 2\nmesh.dp_shard = 2\ntrain.microbatch = 1\n{FSDP}[scheduling.pipeline]\n"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.mlp = nn.Linear(D, 3 * D), nn.Linear(D, D), nn.Sequential(nn.Linear(D, D), nn.GELU())

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    """Registers hooks of a kind in its forward; `seen` has what they were given."""

    def __init__(self, kind):
        super().__init__()
        self.tokens, self.blocks = nn.Embedding(VOCAB, D), nn.ModuleList(Block() for _ in range(2))
        self.head, self.kind, self.seen = nn.Linear(D, VOCAB), kind, []

    def forward(self, idx):
        x = self.tokens(idx)
        values = [x]
        for block in self.blocks:
            values.append(block(values[-1]))
        if values[-1].requires_grad:
            self.register(values)
        return self.head(values[-1])

    def register(self, values):
        if self.kind == "all":
            register_multi_grad_hook(values[1:], self.seen.extend)
        elif self.kind == "first":
            register_multi_grad_hook(values, self.seen.append, mode="any")
        elif self.kind == "related":
            norms = []
            register_multi_grad_hook(values[2:], lambda given: norms.append(given[0].norm(dim=(1, 2), keepdim=True)))
            values[1].register_hook(lambda g: g / (norms[-1] + LIMIT))
        elif self.kind == "node":
            values[1].grad_fn.register_hook(lambda into, outof: tuple(each.clamp(-LIMIT, LIMIT) for each in into))
        elif self.kind == "before a node":
            values[1].grad_fn.register_prehook(lambda given: self.seen.append(given[0]))
            values[1].grad_fn.register_prehook(lambda given: (given[0].clamp(-LIMIT, LIMIT),))
        elif self.kind == "in place":
            values[1].grad_fn.register_prehook(lambda given: given[0].clamp_(-LIMIT, LIMIT) is None or None)


def loss_of(o, t):
    return F.cross_entropy(o.flatten(0, 1), t.flatten(), reduction="sum"), torch.tensor(t.numel())


def model_of(kind):
    torch.manual_seed(0)
    model = Model(kind)
    if kind == "of a module, in place":
        model.blocks[1].register_full_backward_hook(
            lambda m, into, outof: into[0].clamp_(-LIMIT, LIMIT) is None or None
        )
    return model


def registered(model, parameters, kind):
    """Register what a loop does before its forward."""
    if kind == "parameters":
        register_multi_grad_hook(parameters, model.seen.extend)
    elif kind == "first parameter":
        register_multi_grad_hook(parameters, model.seen.append, mode="any")


def later(model, output, weight, kind):
    """Register what a loop does after its forward."""
    if kind == "output":
        register_multi_grad_hook([output], model.seen.extend)
    elif kind in ("output and parameter", "output or parameter"):
        mode = "all" if kind == "output and parameter" else "any"
        take = model.seen.extend if mode == "all" else model.seen.append
        register_multi_grad_hook([output, weight], take, mode=mode)


def batch(length):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (4, length), generator=generator) for _ in range(2)]


def reference_of(kind, x, y):
    model = model_of(kind)
    registered(model, list(model.parameters()), kind)
    output = model(x)
    later(model, output, model.head.weight, kind)
    total, count = loss_of(output, y)
    (total / count).backward()
    return model


def errors(kinds, text, own, length=8):
    """Return how far gradients, and what hooks were given, are from one device's, of the largest."""
    torch.set_default_dtype(torch.float64)
    (x, y), found = batch(length), {}
    for kind in kinds:
        reference, model = reference_of(kind, x, y), model_of(kind)
        run = composer3d.compose(model, write_manifest(text), loss_fn=loss_of, example=((x,), {}))
        model = run.parts[0].module if run.context.degrees["pp"] > 1 else run.model
        parameters, model.seen = dict(run.named_parameters()), []
        registered(model, list(parameters.values()), kind)
        with run.step(0):
            if own:
                output = run.model(mine(run, x))
                later(model, output, parameters["head.weight"], kind)
                total, count = loss_of(output, mine(run, y))
                run.backward(total / count, reduction="mean")
            else:
                run.forward_backward(mine(run, x), target=mine(run, y))
            pairs = [(run.full_tensor(fqn, p.grad), reference.get_parameter(fqn).grad) for fqn, p in parameters.items()]
            seen = list(model.seen) if run.context.degrees["pp"] == 1 else reference.seen
            assert len(seen) == len(reference.seen), kind
            for at, (one, other) in enumerate(zip(seen, reference.seen, strict=True)):
                is_parameter = "parameter" in kind and (at or "output" not in kind)
                fqn = list(parameters)[at if kind == "parameters" else -1 if kind == "first parameter" else -2]
                if is_parameter:
                    one = run.full_tensor(fqn, one)
                elif run.context.degrees["pp"] == 1:
                    other = mine(run, other)
                assert one.shape == other.shape, kind
                pairs.append((one, other))
        found[kind] = max(float((one - other).detach().abs().max() / other.abs().max()) for one, other in pairs)
        run.close()
    return found


def assert_one_devices(world_size, kinds, text, **options):
    for own in (False, True):
        if own and "pipeline" in text:
            continue
        for found in run_ranks(partial(errors, **options), world_size, kinds, text, own):
            assert not {kind: value for kind, value in found.items() if value > TIGHT}


SEVERAL = ("all", "first", "related", "parameters", "first parameter")
NODES = ("node", "before a node", "in place", "of a module, in place")
LOOP = ("output", "output and parameter", "output or parameter")


@pytest.mark.parametrize(
    "layout", [name if name in ("fsdp2", "cp") else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_hooks_on_gradients_of_several_tensors_are_given_one_devices(layout):
    world_size, text = LAYOUTS[layout]
    assert_one_devices(world_size, SEVERAL, text)


def test_they_see_no_padding():
    assert_one_devices(2, ("all", "first", "related"), LAYOUTS["cp"][1], length=7)


@pytest.mark.slow
def test_they_are_in_stages():
    assert_one_devices(4, ("related",), STAGES)


@pytest.mark.parametrize(
    "layout", [name if name in ("cp", "tp") else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_a_loop_registers_them_on_an_output_and_on_parameters(layout):
    world_size, text = LAYOUTS[layout]
    for found in run_ranks(errors, world_size, LOOP, text, True):
        assert not {kind: value for kind, value in found.items() if value > TIGHT}


@pytest.mark.parametrize("layout", ["fsdp2", *(pytest.param(each, marks=pytest.mark.slow) for each in ("ddp", "tp"))])
def test_hooks_on_nodes_are_given_one_devices_and_may_write_into_it(layout):
    world_size, text = LAYOUTS[layout]
    assert_one_devices(world_size, NODES, text)


@pytest.mark.slow
def test_those_on_nodes_are_in_stages():
    assert_one_devices(4, ("node", "in place"), STAGES)


class OnWeights(nn.Linear):
    def __init__(self, kind):
        super().__init__(4, 4)
        self.kind = kind

    def forward(self, x):
        if self.kind == "hook":
            self.weight.register_hook(lambda gradient: gradient.clamp(-LIMIT, LIMIT))
        elif self.kind == "several":
            register_multi_grad_hook([x, self.weight], lambda gradients: None)
        elif self.kind == "node":
            node = self.weight.view_as(self.weight).grad_fn.next_functions[0][0]
            node.register_prehook(lambda gradients: (gradients[0].clamp(-LIMIT, LIMIT),))
        return super().forward(x)


def refusals(kinds, text):
    found = []
    for kind in kinds:
        model = nn.Sequential(nn.Linear(4, 4), OnWeights(kind))
        run = composer3d.compose(model, write_manifest(text), loss_fn=F.mse_loss)
        with pytest.raises(composer3d.StepError) as caught, run.step(0):
            run.forward_backward(torch.ones(2, 4), target=torch.ones(2, 4))
        found.append(str(caught.value))
        run.close()
    return found


@pytest.mark.parametrize("layout", ["fsdp2", "ddp"])
def test_hooks_that_a_forward_registers_on_what_is_gathered_of_a_parameter_are_refused(layout):
    world_size, text = LAYOUTS[layout]
    gathered = (
        'a hook was registered on "1.weight" while a forward had gathered it, and would be called with this rank\'s '
        "gradient; register hooks before the forward"
    )
    accumulated = (
        "the hook <lambda> is on the node that accumulates the gradient of a leaf, and would be called with this "
        "rank's; register it on the leaf, as in p.register_hook, before the forward"
    )
    for found in run_ranks(refusals, world_size, ("hook", "several", "node"), text):
        assert found == [gathered, gathered, accumulated]


def refused_over_positions():
    torch.set_default_dtype(torch.float64)
    x, y = batch(8)
    run = composer3d.compose(model_of("node"), write_manifest(LAYOUTS["cp"][1]), loss_fn=loss_of, example=((x,), {}))
    with pytest.raises(composer3d.StepError) as caught, run.step(0):
        run.forward_backward(x, target=y)
    run.close()
    return str(caught.value)


def test_hooks_on_nodes_are_refused_where_positions_are_sharded():
    for text in run_ranks(refused_over_positions, 2):
        assert text.startswith("the hook <lambda> is registered on a node of the graph (test_shared_hooks.py:")
        assert text.endswith("register it on the tensor instead, as in t.register_hook")


def trained_in_evaluation_mode(path):
    torch.set_default_dtype(torch.float64)
    x, y = batch(8)
    reference, model = model_of("related").eval(), model_of("related").eval()
    total, count = loss_of(reference(x), y)
    (total / count).backward()
    run = composer3d.compose(model, path, loss_fn=loss_of, example=((x,), {}))
    run.model.eval()
    with run.step(0):
        total, count = loss_of(run.model(mine(run, x)), mine(run, y))
        run.backward(total / count, reduction="mean")
        off = [
            float((run.full_tensor(fqn, p.grad) - reference.get_parameter(fqn).grad).abs().max())
            for fqn, p in run.named_parameters()
        ]
    run.close()
    return max(off)


def test_hooks_of_a_model_that_a_loop_trains_in_evaluation_mode_are_seen():
    assert max(run_ranks(trained_in_evaluation_mode, 2, write_manifest(LAYOUTS["fsdp2"][1]))) < TIGHT
