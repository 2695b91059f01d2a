"""Biases that balance experts by a step's counts: in every layout those of a plain loop on one device."""

from __future__ import annotations

import pytest
import torch
from support.mixtures import DIM, Looped, MixtureNet, shipped, token_sum, tokens_and_targets
from support.models import mine, seeded, write_manifest

import composer3d
from composer3d import PluginError, StepAction, StepPoint, hookimpl, plugin
from composer3d.testing import count_collectives, full, run_ranks

STEPS = 3
RATE = 0.01
FSDP = "[sharding.fsdp2]\n"
EP = "[sharding.expert_parallel]\n"
LAYOUTS = {
    "ep of micro-batches": (2, f"[mesh]\ndp_shard = 2\nep = 2\n{FSDP}{EP}[train]\nmicrobatch = 2\n"),
    "recomputed": (2, f"[mesh]\ndp_shard = 2\nep = 2\n{FSDP}{EP}[scheduling.activation_checkpoint]\n"),
    "hsdp": (4, f"[mesh]\ndp_replicate = 2\ndp_shard = 2\nep = 2\n{FSDP}{EP}"),
    "pipeline": (4, f"[mesh]\npp = 2\ndp_shard = 2\n{FSDP}[scheduling.pipeline]\n[train]\nmicrobatch = 2\n"),
    "context": (4, f"[mesh]\ncp = 2\ndp_shard = 2\nep = 4\n{FSDP}{EP}[sharding.context_parallel]\n"),
    "tensor": (4, f"[mesh]\ntp = 2\ndp_shard = 2\n{FSDP}[sharding.tensor_parallel]\n"),
    "sequence": (2, "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true\n"),
}
MODELS = {
    "topk": lambda: shipped(bias_rate=RATE),
    "grouped": lambda: shipped(bias_rate=RATE, scores="sigmoid", num_groups=2, top_groups=1, num_shared_experts=1),
}


class Counting(Looped):
    """A loop over experts that keeps counts and a bias of its own, as a user writes them."""

    summed_buffers = ("counts",)

    def __init__(self):
        super().__init__()
        self.register_buffer("bias", torch.zeros(4))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64), persistent=False)
        self.gate.register_forward_hook(self._count)

    def _count(self, gate, args, output):
        if self.training and torch.is_grad_enabled():
            self.counts += torch.stack([(output.detach().argmax(-1) == number).sum() for number in range(4)])
        return output + self.bias

    def after_step(self):
        self.bias += RATE * (self.counts.sum() - 4 * self.counts).sign()
        self.counts.zero_()


MODELS["looped"] = lambda: MixtureNet(Counting)


def reference(factory):
    """Train on one device with a plain loop; return buffers and parameters."""
    model = seeded(factory)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tokens, targets = tokens_and_targets(seq_len=8)
    for _ in range(STEPS):
        loss = token_sum(model(tokens), targets)
        (loss.sum / loss.count).backward()
        optimizer.step()
        optimizer.zero_grad()
        for module in model.modules():
            if getattr(module, "summed_buffers", ()):
                module.after_step()
    return dict(model.named_buffers()), dict(model.named_parameters())


def error_of(name, text):
    """Train with evaluations between steps; return the largest error of biases and of parameters."""
    torch.set_default_dtype(torch.float64)
    buffers, parameters = reference(MODELS[name])
    run = composer3d.compose(seeded(MODELS[name]), write_manifest(text), loss_fn=token_sum)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
    tokens, targets = (mine(run, tensor) for tensor in tokens_and_targets(seq_len=8))
    for number in range(STEPS):
        with run.step(number), count_collectives(run.mesh) as collectives:
            run.forward_backward(tokens, target=targets)
            before = collectives.summary()
            optimizer.step()
            after = collectives.summary()
            optimizer.zero_grad()
        run.evaluate(tokens, target=targets)
    data = [axis for axis in ("dp_replicate", "dp_shard") if run.context.degrees[axis] > 1]
    issued = [after["all_reduce", axis][0] - before.get(("all_reduce", axis), (0, 0))[0] for axis in data]
    found = {fqn: buffer for part in run.parts for fqn, buffer in part.module.named_buffers() if "bias" in fqn}
    assert any(bool(bias.any()) for bias in found.values()) or run.context.degrees["pp"] > 1
    off = [float((bias - buffers[fqn]).abs().max()) for fqn, bias in found.items()]
    wrong = [float((full(p) - parameters[fqn]).detach().abs().max()) for fqn, p in run.named_parameters()]
    run.close()
    return max(off), max(wrong), issued


@pytest.mark.parametrize("layout", LAYOUTS)
def test_biases_are_those_of_one_device(layout):
    world_size, text = LAYOUTS[layout]
    for name in MODELS if layout in ("ep of micro-batches", "recomputed") else ("grouped",):
        for off, wrong, issued in run_ranks(error_of, world_size, name, text):
            assert off == 0.0, name
            assert wrong <= 1e-12, name
            assert set(issued) <= {1}, name  # one all-reduce an axis of samples, of all layers' counts


@plugin(family="precision")
class Vetoing:
    """Skips the second step."""

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(
            name="vetoing", point=StepPoint.DECIDE, run=lambda state: "as a test asks" if state.step == 1 else None
        )


def vetoed():
    """Return the counts after a vetoed step, and biases before and after it."""
    run = composer3d.compose(
        seeded(MODELS["topk"]),
        write_manifest(f'{FSDP}[precision.vetoing]\nuse = "{__name__}:Vetoing"\n'),
        loss_fn=token_sum,
    )
    optimizer = run.optimizer(torch.optim.SGD, lr=0.0)
    found = []
    tokens, targets = (mine(run, tensor) for tensor in tokens_and_targets(seq_len=8))
    for number in range(3):
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
        router = run.model.layers[0].feed_forward.router
        found.append((router.bias_N.clone(), int(router.counts_N.sum())))
    run.close()
    return found


def test_a_vetoed_step_changes_no_bias_and_its_counts_are_dropped():
    for (one, _), (two, left), (three, _) in run_ranks(vetoed, 2):
        assert bool(one.any())
        assert torch.equal(one, two)
        assert left == 0
        assert not torch.equal(two, three)


class Narrow(torch.nn.Module):
    """Counts in floating point."""

    summed_buffers = ("counts",)

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(DIM, DIM)
        self.register_buffer("counts", torch.zeros(2))

    def after_step(self):
        pass


def test_counts_that_are_no_whole_numbers_are_refused():
    with pytest.raises(PluginError) as caught:
        composer3d.compose(Narrow(), write_manifest(""), loss_fn=token_sum)
    assert str(caught.value).startswith(
        'Narrow.summed_buffers names "counts", which is of torch.float32: sums of several ranks are those of one device'
    )
