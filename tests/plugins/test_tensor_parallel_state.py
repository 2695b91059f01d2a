"""What ranks hold under tp, how it trains, and how it is saved."""

from __future__ import annotations

import tempfile

import pytest
import torch
from support.family_models import FAMILIES, batch_of, class_loss
from support.models import mine, write_manifest
from support.tensor_parallel import built, table
from torch.distributed.tensor import Replicate, Shard

import composer3d
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
LAYERS = 2
SP = "sequence_parallel = true"
FSDP = "[sharding.fsdp2]\n"


def tp(family, degree=2, settings="", more=""):
    return f"[mesh]\ntp = {degree}\n{more}\n" + table(family, settings)


def train(family, text, factory=True, steps=3):
    """Train; return the losses, every parameter in full, and those that are no DTensors."""
    torch.set_default_dtype(torch.float64)
    model = FAMILIES[family] if factory else built(family)
    run = composer3d.compose(model, write_manifest(text), loss_fn=class_loss)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    inputs, targets = (mine(run, tensor) for tensor in batch_of(family))
    losses = []
    for number in range(steps):
        with run.step(number):
            losses.append(float(run.forward_backward(inputs, target=targets)))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    values = {name: run.context.in_model_order(name, full(p)) for name, p in run.named_parameters()}
    plain = {name: p.detach().clone() for name, p in run.named_parameters() if not hasattr(p, "placements")}
    run.close()
    return losses, values, plain


@pytest.mark.parametrize("factory", [False, True], ids=["module", "factory"])
def test_training_goes_as_on_one_device(factory):
    alone, values, _ = run_ranks(train, 1, "gpt2", "", factory)[0]
    for losses, cut, _ in run_ranks(train, 2, "gpt2", tp("gpt2", 2, SP), factory):
        assert losses == pytest.approx(alone, abs=TIGHT)
        assert max(float((cut[name] - values[name]).abs().max()) for name in values) < 1e-9


def layout(text):
    run = composer3d.compose(FAMILIES["gpt2"], write_manifest(text), loss_fn=class_loss)
    model = run.model
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    placements = {
        name: (tuple(p.placements), tuple(p.to_local().shape))
        for name, p in run.named_parameters()
        if hasattr(p, "placements")
    }
    tied = model.lm_head.weight is model.wte.weight
    run.close()
    return names, placements, tied


def test_state():
    names = [name for name, _ in FAMILIES["gpt2"]().named_parameters(remove_duplicate=False)]
    of_layer = {
        "attn.c_attn.weight": ((Shard(0),), (24, 16)),
        "attn.c_attn.bias": ((Shard(0),), (24,)),
        "attn.c_proj.weight": ((Shard(1),), (16, 8)),
        "attn.c_proj.bias": ((Replicate(),), (16,)),
        "mlp.c_fc.weight": ((Shard(0),), (32, 16)),
        "mlp.c_fc.bias": ((Shard(0),), (32,)),
        "mlp.c_proj.weight": ((Shard(1),), (16, 32)),
        "mlp.c_proj.bias": ((Replicate(),), (16,)),
    }
    expected = {f"h.{layer}.{name}": value for layer in range(LAYERS) for name, value in of_layer.items()}
    for found, placements, tied in run_ranks(layout, 2, tp("gpt2")):
        assert found == names
        assert tied
        assert placements == {"wte.weight": ((Shard(0),), (6, 16)), **expected}


def test_replicated_parameters_stay_equal_to_the_last_bit():
    for settings in ("", SP):
        (_, one, plain), (_, other, also_plain) = run_ranks(train, 2, "gpt2", tp("gpt2", 2, settings), True, 5)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
        # Without sequence_parallel norms are plain parameters; with it every parameter is a DTensor.
        assert bool(plain) == (settings == "")
        assert all(torch.equal(plain[name], also_plain[name]) for name in plain)


TWO_BY_TWO = f"[mesh]\ntp = 2\ndp_shard = 2\n{FSDP}" + table("gpt2", SP)


def resumed(text, path, first, last):
    """Train from step `first`, loading what was saved there, to `last`, and save; return weights and moments."""
    torch.set_default_dtype(torch.float64)
    run = composer3d.compose(built("gpt2"), write_manifest(text), loss_fn=class_loss)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    average = Average(run)
    run.attach("average", average)
    inputs, targets = (mine(run, tensor) for tensor in batch_of("gpt2"))
    if first:
        run.load(path)
    for number in range(first, last):
        with run.step(number):
            run.forward_backward(inputs, target=targets)
            optimizer.step()
            optimizer.zero_grad()
            average.update()
    if not first and path:
        run.save(path)
    held = list(run.named_parameters())
    held += [(f"{name} exp_avg", optimizer.state[p]["exp_avg"]) for name, p in run.named_parameters()]
    held += [(f"{name} average", value) for name, value in average.values.items()]
    values = {name: run.context.in_model_order(name.partition(" ")[0], full(tensor)) for name, tensor in held}
    run.close()
    return values


class Average:
    """Something that is kept beside every parameter, and saved under its name."""

    def __init__(self, run):
        self.run = run
        self.values = {name: p.detach().clone() for name, p in run.named_parameters()}

    def update(self):
        for name, p in self.run.named_parameters():
            self.values[name] = (self.values[name] + p.detach()) / 2

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        self.values = dict(state)


LAYOUTS = {
    "1": (1, ""),
    "tp2": (2, tp("gpt2")),
    "tp4": (4, tp("gpt2", 4)),
    "dp4": (4, FSDP),
    "dp2 x tp2": (4, TWO_BY_TWO),
}


def test_checkpoints_load_in_any_layout():
    alone = run_ranks(resumed, 1, "", None, 0, 3)[0]
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/step-2"
        wrote = run_ranks(resumed, 4, TWO_BY_TWO, path, 0, 2)[0]
        for world_size, text in LAYOUTS.values():
            for read in run_ranks(resumed, world_size, text, path, 2, 2):
                assert all(torch.equal(wrote[name], read[name]) for name in wrote)
        went_on = run_ranks(resumed, 2, LAYOUTS["tp2"][1], path, 2, 3)[0]
    assert max(float((went_on[name] - alone[name]).abs().max()) for name in alone) < 1e-9
