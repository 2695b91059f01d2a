"""Parameters that are stepped in the backward, beside the ordinary step: the same bits, fewer bytes of gradients."""

from __future__ import annotations

import gc

import pytest
import torch
from support.live_bytes import LiveBytes
from support.models import Even, composed, full, mine, padded, seeded
from support.training import losses, start, write

from composer3d import PluginError, StepError
from composer3d.runner.objective.muon import Muon, group_matrices, matrices_of
from composer3d.testing import count_collectives, run_ranks

FSDP = "[sharding.fsdp2]\n"
STEPS = 3
# Bytes of losses, counts, and one squared norm for each of 20 parameters.
SMALL = 2048


def step(run, optimizer, number, *, max_norm=float("inf")):
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(number):
        loss = float(run.forward_backward(tokens, target=targets))
        norm = float(run.clip_grad_norm_(max_norm))
        optimizer.step()
        optimizer.zero_grad()
    return loss, norm


def trained(text, cls, in_backward, options):
    """Return weights, losses, norms, and the collectives of the last step."""
    run = composed(text + f"[train]\nmicrobatch = {12 // run_degree()}\n", seeded(Even, num_layers=2))
    groups = [{"match": "bias$", "weight_decay": 0.0}]
    groups = group_matrices(groups, matrices_of(run, None)) if cls is Muon else groups
    optimizer = run.optimizer(cls, groups=groups, in_backward=in_backward, lr=1e-2, **options)
    found = []
    for number in range(STEPS):
        with count_collectives(run.mesh) as collectives:
            found.append(step(run, optimizer, number))
    weights = {name: full(p.detach()).clone() for name, p in run.named_parameters()}
    run.close()
    return weights, found, collectives.summary()


def run_degree():
    return torch.distributed.get_world_size()


def compared(cases):
    for text, cls, options in cases:
        weights, found, collectives = trained(text, cls, False, options)
        stepped, again, more = trained(text, cls, True, options)
        assert all(torch.equal(weights[name], stepped[name]) for name in weights), text
        assert [loss for loss, _ in again] == [loss for loss, _ in found]
        assert [norm for _, norm in again] == pytest.approx([norm for _, norm in found], rel=1e-6)
        assert found[-1][0] < found[0][0]
        if cls is Muon:  # its step gathers: of each of three units ranks agree which of 13 parameters were used
            number, size = collectives["all_reduce", "dp_shard"]
            collectives = {**collectives, ("all_reduce", "dp_shard"): (number + 3, size + 13)}
        assert more == collectives
    return True


ADAMW = (torch.optim.AdamW, {"fused": True})
SGD = (torch.optim.SGD, {"momentum": 0.9, "foreach": True})
LOW = "[precision.low_bit_optimizer]\nmin_numel = 16\nblock_size = 16\n"
AC = "[scheduling.activation_checkpoint]\n"
CASES = {
    1: [("", *ADAMW), (LOW, torch.optim.AdamW, {}), (AC + "[precision.mixed]\n", *SGD)],
    2: [
        *((FSDP + f"zero = {zero}\n", *ADAMW) for zero in (1, 3)),
        (FSDP + LOW, torch.optim.AdamW, {}),
        (FSDP, Muon, {"fused": True}),
        ("[sharding.ddp]\n", *ADAMW),
    ],
}


@pytest.mark.parametrize("world_size", CASES)
def test_equals_the_ordinary_step_bit_for_bit(world_size):
    assert all(run_ranks(compared, world_size, CASES[world_size]))


def peak(text, in_backward):
    """Return the bytes of a gradient of the whole model, of its largest unit, and the most alive in a second step."""
    run = composed(text, seeded(Even, dim=16))
    held, named = [], list(run.named_parameters())

    class Noting(torch.optim.SGD):
        def step(self, closure=None):
            held.append(sum(q.grad.numel() * 4 // run_degree() for _, q in named if q.grad is not None))
            return super().step(closure)

    optimizer = run.optimizer(Noting, lr=1e-2, in_backward=in_backward)
    parameters = [p.to_local() if hasattr(p, "to_local") else p for _, p in run.named_parameters()]
    sizes = {name: full(p).numel() * 4 // run_degree() for name, p in run.named_parameters()}
    blocks = [sum(size for name, size in sizes.items() if name.startswith(f"layers.{n}.")) for n in range(4)]
    tokens, targets = (mine(run, tensor) for tensor in padded(2 * run_degree()))
    points, kept = [], 0 if in_backward else sum(sizes.values())
    for number in range(2):
        gc.collect()
        with LiveBytes(tokens, targets, *parameters) as memory:
            base = memory.live
            with run.step(number):
                run.forward_backward(tokens, target=targets)
                gc.collect()
                points.append(memory.settled(base + kept + SMALL) - base)
                optimizer.step()
                optimizer.zero_grad()
    run.close()
    return sum(sizes.values()), max(blocks), points[-1], max(held)


def peaks(text):
    return peak(text, False), peak(text, True)


@pytest.mark.parametrize(
    ("world_size", "text"), [(1, "[train]\nmicrobatch = 2\n"), (2, FSDP + "[train]\nmicrobatch = 2\n")]
)
def test_gradients_are_freed_in_the_backward(world_size, text):
    for (whole, block, after, held), (_, _, after_stepping, held_stepping) in run_ranks(peaks, world_size, text):
        assert whole <= after <= whole + SMALL and held == whole
        assert after_stepping <= SMALL
        # The hook of this test runs after the one that frees: of a unit's gradients all but those are still to come.
        assert held_stepping <= block


def refused(text, options, message, error=PluginError):
    run = composed(text, seeded(Even))
    with pytest.raises(error) as caught:
        step(run, run.optimizer(torch.optim.AdamW, in_backward=True), 0, **options)
    run.close()
    assert message in str(caught.value)
    return True


def test_refusals_of_a_loop():
    one = "[train]\nmicrobatch = 12\n"

    def all_refused():
        refused(one, {"max_norm": 1.0}, "gradients are gone after the backward", StepError)
        refused("[train]\nmicrobatch = 6\n", {}, "when a gradient is complete after one micro-batch", StepError)
        refused(one + '[precision.mixed]\nparam_dtype = "float16"\n', {}, "run.toml:4) scales the loss")
        refused(one + "[profiling.anomaly]\n", {}, "needs gradients after the backward")
        return True

    assert run_ranks(all_refused, 1) == [True]
    bucketed = '[sharding.ddp]\nreducer = "bucketed"\n'
    assert all(run_ranks(refused, 2, bucketed, {}, 'the gradient of "tok.weight" is reduced over ranks after'))


def test_the_model_is_left_alone_when_the_run_ends():
    def closed():
        model = seeded(Even)
        run = composed("", model)
        run.optimizer(torch.optim.SGD, lr=1.0, in_backward=True)
        run.close()
        before = model.out.weight.detach().clone()
        model(padded()[0]).sum().backward()
        return torch.equal(model.out.weight, before) and model.out.weight.grad is not None

    assert run_ranks(closed, 1) == [True]


RUN = """
composer3d = 1
model.args = { dim = 32, num_layers = 1, num_heads = 2 }
data = { use = "synthetic", seq_len = 16, vocab_size = 32 }
train = { steps = 3, microbatch = 2, grad_clip = inf }
optimizer.lr = 1e-2
run.device = "cpu"
[mesh]
tp = 2
dp_shard = 2
[sharding.fsdp2]
[sharding.tensor_parallel]
sequence_parallel = true
"""


@pytest.mark.slow
def test_a_run_in_two_dimensions_is_the_same_and_goes_on_either_way(tmp_path):
    path, resume = write(tmp_path, RUN), str(tmp_path / "out" / "checkpoints" / "step-1")
    start(path, 4, "checkpoint.every=1")
    start(path, 4, "optimizer.in_backward=true", output=tmp_path / "stepped", resume=resume)
    assert losses(tmp_path / "stepped") == losses(tmp_path / "out")[1:]
