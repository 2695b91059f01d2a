"""Parameters that code multiplies itself, by einsum, matmul or a linear function, and that are no layers."""

from __future__ import annotations

import pytest
import torch
from support.family_models import class_loss
from support.models import VOCAB, write_manifest
from support.multiplied_models import DIM, MODELS, Lent, drawn
from support.tensor_parallel import AUTO, built, on_one_rank, steps_of
from torch import nn

import composer3d
from composer3d import ManifestError
from composer3d.testing import run_ranks

TIGHT = 1e-12
PLAIN = f"[mesh]\ntp = 2\n{AUTO}"
SP = f"{PLAIN}sequence_parallel = true\n"


FEW = ("MultipliedFusedAttention", "MultipliedBoth", "MultipliedFed")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        pytest.param(SP, FEW, id="few"),
        pytest.param(PLAIN, MODELS, id="plain", marks=pytest.mark.slow),
        pytest.param(SP, MODELS.keys() - FEW, id="sequence", marks=pytest.mark.slow),
    ],
)
def test_gradients_equal_one_device(text, names):
    names = sorted(names)
    for results in run_ranks(steps_of, 2, [(name, text) for name in names]):
        found = {name: max(result[:3]) for name, result in zip(names, results, strict=True)}
        assert {name: error for name, error in found.items() if not error < TIGHT} == {}


def test_gradients_with_fsdp2_and_recomputed_blocks():
    text = f"[mesh]\ntp = 2\ndp_shard = 2\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n{AUTO}"
    cases = [(name, text) for name in ("MultipliedBoth", "MultipliedFusedAttention", "MultipliedLayers")]
    for results in run_ranks(steps_of, 4, cases):
        assert max(max(result[:3]) for result in results) < TIGHT


SHARDED = {
    "MultipliedEinsumAttention": {"w_q": 0, "w_k": 0, "w_v": 0, "w_o": 0},
    "MultipliedFusedAttention": {"qkv": 1, "out": 0},
    "MultipliedGated": {"w1": 1, "w3": 1, "w2": 1},
    "MultipliedFunctional": {"up": 0, "down": 1},
    "MultipliedLayers": {"first": 1, "second": 0},
    "MultipliedFed": {"first": 1, "second": 0, "layer.weight": 1},
    "MultipliedListed": {
        **{"pair.0": 1, "pair.1": 0, "named.up": 1, "named.down": 0},
        **{f"heads.{name}.{at}": 1 - at for name in "ab" for at in range(2)},
    },
    "MultipliedContracted": {
        **{"first": 1, "second": 0, "third": 1, "fourth": 0},
        **{"fifth": 1, "sixth": 0, "seventh": 1, "eighth": 0},
    },
}


def shards(names):
    """Return the dim along which each parameter of the first block is sharded, and the local part of its elements."""
    found = {}
    for name in names:
        run = composer3d.compose(built(name), write_manifest(PLAIN), loss_fn=class_loss)
        own = {key.removeprefix("layers.0.parts.0."): p for key, p in run.named_parameters()}
        own = {key: p for key, p in own.items() if key in SHARDED[name]}
        found[name] = {key: (p.placements[0].dim, p.to_local().numel() * 2 == p.numel()) for key, p in own.items()}
        run.close()
    return found


def test_what_is_sharded():
    expected = {name: {key: (dim, True) for key, dim in dims.items()} for name, dims in SHARDED.items()}
    assert on_one_rank(shards, 2, list(SHARDED)) == expected


def test_collectives():
    """An all-reduce forward and one backward for a pair of weights, as for a pair of layers."""
    [(_, _, _, found)] = run_ranks(steps_of, 2, [("MultipliedGated", PLAIN)])[0]
    control = 2
    assert found == {("all_reduce", "tp"): 2 * 2 + control}


def left_whole():
    run = composer3d.compose(Lent, write_manifest(PLAIN), loss_fn=class_loss)
    rows = {row.name: row.fqns for row in run.plan if ".whole" in row.name}
    run.close()
    return rows


def test_what_stays_whole_is_listed_with_the_reason():
    names = tuple(f"layers.{layer}.{name}" for name in ("first", "second") for layer in range(2))
    assert on_one_rank(left_whole, 2) == {"tensor_parallel.whole (it is a parameter of several modules)": names}


class Mixed(nn.Module):
    """Every sum over features is over what a softmax has mixed."""

    def __init__(self):
        super().__init__()
        self.table, self.mix = drawn(VOCAB, DIM), drawn(DIM, DIM)

    def forward(self, tokens):
        return (self.table[tokens] @ self.mix).softmax(-1) @ self.table.T


def refused(factory):
    with pytest.raises(ManifestError) as caught:
        composer3d.compose(factory, write_manifest(PLAIN), loss_fn=class_loss)
    return str(caught.value).partition("run.toml:")[2].partition("] ")[2]


def test_a_model_of_which_nothing_can_be_sharded_names_its_parameters():
    said = on_one_rank(refused, 2, Mixed)
    assert said.startswith("no plan can be derived for this model: ") and '"mix": ' in said


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.ConvTranspose2d(8, 3, 3))


class Unrunnable(nn.Sequential):
    """What the dry run is given does not fit: its sizes match for no input."""

    def forward(self, x):
        return torch.cat([super().forward(x), x[:, :, :1]], 1)


def unrunnable():
    return Unrunnable(*convolutions())


@pytest.mark.parametrize("factory", [convolutions, unrunnable])
def test_a_model_of_convolutions_alone_is_told_so(factory):
    assert on_one_rank(refused, 2, factory) == (
        "no plan can be derived for this model: it has no linear layers and no embeddings; weights of Conv2d and "
        "ConvTranspose2d stay whole; leave tp at 1: a data-parallel plugin shards any model"
    )


class Halves(nn.Module):
    """Two networks that a loop calls one after the other; it has no forward."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)), nn.Linear(8, 8)


def test_a_model_without_a_forward_is_told_what_to_write():
    assert on_one_rank(refused, 2, Halves) == (
        "Halves has no forward of its own, in which it would be seen how tensors go through it; write one that calls "
        "its modules as the loop does, which may go on to call them one by one, or write the plan where the plugin has "
        "one"
    )


class BareLayers(nn.Module):
    """Blocks that are linear layers, and whose outputs the model's own code mixes."""

    def __init__(self):
        super().__init__()
        self.enter, self.layers = nn.Embedding(VOCAB, DIM), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, tokens):
        x = self.enter(tokens)
        for layer in self.layers:
            x = x + layer(x).roll(1, 1).relu()
        return x


def trained(plan):
    """Return the error of a gradient, and the size of a layer's shard."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, reference, tokens = BareLayers(), BareLayers(), torch.arange(8).view(2, 4)
    reference.load_state_dict(model.state_dict())
    text = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n" + plan
    run = composer3d.compose(model, write_manifest(text), example=((tokens,), {}))
    run.backward(run.model(tokens).square().mean())
    reference(tokens).square().mean().backward()
    wanted = {fqn: parameter.grad for fqn, parameter in reference.named_parameters()}
    errors = [float((run.full_tensor(fqn, p.grad) - wanted[fqn]).abs().max()) for fqn, p in run.named_parameters()]
    return max(errors), dict(run.named_parameters())["layers.1.weight"].to_local().shape[0]


@pytest.mark.parametrize("plan", ["", "sequence_parallel = true\n", 'plan = { "layers.*" = "head" }\n'])
def test_bare_layers_are_sharded_and_gather_their_results(plan):
    for error, rows in run_ranks(trained, 2, plan):
        assert error < 1e-12 and rows == DIM // 2
