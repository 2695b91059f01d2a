"""Experts of a list that relate positions, or keep a state: what they are given is exchanged in samples, once."""

from __future__ import annotations

import functools

import pytest
import torch
from support.mixtures import DIM, NUM_EXPERTS, MixtureNet, mine, mixture_steps, seeded, token_sum, tokens_and_targets
from support.models import write_manifest
from torch import nn

import composer3d
from composer3d.errors import PluginError
from composer3d.testing import run_ranks

TIGHT = 1e-12
EP = "[mesh]\ndp_shard = 2\nep = 2\n{}[sharding.fsdp2]\n[sharding.expert_parallel]\n"
LAYOUTS = {
    "ep": (2, EP.format("")),
    "ep, micro-batches": (2, EP.format("[train]\nmicrobatch = 2\n")),
    "replicas of experts": (4, EP.format("").replace("dp_shard = 2", "dp_shard = 4")),
    "cp": (4, EP.format("cp = 2\n") + "[sharding.context_parallel]\nbalanced = false\n"),
    "tp": (4, EP.format("tp = 2\n") + "[sharding.tensor_parallel]\n"),
    "sequence_parallel": (4, EP.format("tp = 2\n") + "[sharding.tensor_parallel]\nsequence_parallel = true\n"),
    "recomputation": (2, EP.format("") + "[scheduling.activation_checkpoint]\n"),
}


def feed_forward():
    return nn.Sequential(nn.Linear(DIM, 12), nn.GELU(), nn.Linear(12, DIM))


class Function(nn.Module):
    """A feed-forward of a function of all positions."""

    def __init__(self, function):
        super().__init__()
        self.inner, self.function = feed_forward(), function

    def forward(self, x_BSD):
        return self.inner(self.function(x_BSD))


class Unpacked(nn.Module):
    """Attention whose code unpacks the sizes of samples."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x_BSD):
        b, s, d = x_BSD.shape
        q, k, v = self.qkv(x_BSD).view(b, s, 3, 2, d // 2).permute(2, 0, 3, 1, 4)
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(o.transpose(1, 2).reshape(b, s, d))


class Dense(nn.Module):
    """Every expert is called with all samples."""

    def __init__(self, expert):
        super().__init__()
        self.gate = nn.Linear(DIM, NUM_EXPERTS)
        self.experts = nn.ModuleList(expert() for _ in range(NUM_EXPERTS))

    def forward(self, x_BSD):
        gates_BSE = self.gate(x_BSD).softmax(-1)
        return x_BSD + sum(gates_BSE[..., n : n + 1] * self.called(e, x_BSD) for n, e in enumerate(self.experts))

    def called(self, expert, x_BSD):
        return expert(x_BSD)


class Convolved(Dense):
    """Causal convolutions, whose results have fewer positions than they are given."""

    def __init__(self):
        super().__init__(lambda: nn.Conv1d(DIM, DIM, 3))

    def called(self, expert, x_BSD):
        return expert(nn.functional.pad(x_BSD.transpose(1, 2), (2, 0))).transpose(1, 2)


class Pooled(Dense):
    """Results have no positions."""

    def __init__(self):
        super().__init__(lambda: Function(lambda x_BSD: x_BSD.amax(1)))

    def called(self, expert, x_BSD):
        return expert(x_BSD).unsqueeze(1)


class Routed(Dense):
    """A sample goes to one expert; some get none."""

    def __init__(self):
        super().__init__(Unpacked)

    def forward(self, x_BSD):
        weights_B, chosen_B = self.gate(x_BSD.mean(1)).softmax(-1).max(-1)
        out_BSD = torch.zeros_like(x_BSD)
        for number, expert in enumerate(self.experts[:]):
            rows = chosen_B == number
            if rows.any():
                out_BSD[rows] = expert(x_BSD[rows]) * weights_B[rows, None, None]
        return x_BSD + out_BSD


class OfRecurrent(Dense):
    """Modules around recurrent layers."""

    def __init__(self):
        super().__init__(lambda: Wrapped(nn.LSTM(DIM, DIM, batch_first=True, bidirectional=True)))


class Wrapped(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer, self.out = layer, nn.Linear(2 * DIM, DIM)

    def forward(self, x_BSD):
        return self.out(self.layer(x_BSD)[0])


MIXERS = {
    "encoder layers": lambda: Dense(lambda: nn.TransformerEncoderLayer(DIM, 2, 12, 0.0, batch_first=True)),
    "attention": lambda: Dense(Unpacked),
    "means": lambda: Dense(lambda: Function(lambda x: x - x.mean(1, keepdim=True))),
    "shifts": lambda: Dense(lambda: Function(lambda x: x + torch.roll(x, 1, -2))),
    "sums": lambda: Dense(lambda: Function(lambda x: x.cumsum(-2))),
    "lengths": lambda: Dense(lambda: Function(lambda x: x / x.shape[1])),
    "convolutions": Convolved,
    "pools": Pooled,
    "routed samples": Routed,
    "recurrent layers": OfRecurrent,
    "rows": lambda: Dense(feed_forward),
}
FAST = ("recurrent layers", "attention", "lengths", "convolutions", "routed samples")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MIXERS]
)
def test_experts_that_relate_positions_are_one_devices(name):
    for ((loss, norm, gradients, _),) in run_ranks(
        mixture_steps, 2, [(lambda: MixtureNet(MIXERS[name]), EP.format(""))]
    ):
        assert max(loss, norm, gradients) < TIGHT


@pytest.mark.slow
@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "ep"])
@pytest.mark.parametrize("name", ["encoder layers", "convolutions", "sums"])
def test_layouts(name, layout):
    num_ranks, text = LAYOUTS[layout]
    for ((loss, norm, gradients, _),) in run_ranks(
        mixture_steps, num_ranks, [(lambda: MixtureNet(MIXERS[name]), text)]
    ):
        assert max(loss, norm, gradients) < TIGHT


@pytest.mark.parametrize(("name", "words"), [("rows", 1), ("attention", 2)])
def test_sizes_of_samples_travel_with_the_counts(name, words):
    cases = [(lambda: MixtureNet(MIXERS[name]), EP.format(""))]
    for ((*_, collectives),) in run_ranks(mixture_steps, 2, cases):
        elements = 2 * 8 * 6 * DIM * NUM_EXPERTS // 2  # samples of both ranks' layers, to and from a rank
        assert collectives["all_to_all", "ep"] == (10, 2 * 8 * words * NUM_EXPERTS + 4 * 8 * elements)


class Counting(nn.Module):
    """A feed-forward that counts its calls and rows, and uses what it counts."""

    def __init__(self):
        super().__init__()
        self.inner, self.norm, self.calls = feed_forward(), nn.BatchNorm1d(DIM), 0
        self.register_buffer("rows", torch.zeros((), dtype=torch.int64))

    def forward(self, x_RD):
        self.calls += 1
        self.rows += x_RD.shape[0]
        return self.norm(self.inner(x_RD)) * (1 + 0.1 * self.calls)


class Starving(Dense):
    """Experts keep a state, and hooks of theirs one of the block; nobody calls the last one."""

    def __init__(self, expert):
        super().__init__(expert)
        self.calls = [0] * NUM_EXPERTS
        for number, module in enumerate(self.experts):
            module.register_forward_hook(functools.partial(self._count, number))

    def _count(self, number, module, args, output):
        self.calls[number] += 1
        return output * (1 + 0.05 * self.calls[number])

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD)[:, : NUM_EXPERTS - 1].softmax(-1).topk(2, -1)
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen_TK == number)
            if token.numel():
                out_TD = out_TD.index_add(0, token, expert(x_TD[token]) * weights_TK[token, slot, None])
        return x_BSD + out_TD.view_as(x_BSD)


def states(layer, text):
    """Return loss errors of three steps, and what differs of the state that experts here have from one device's."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = tokens_and_targets()
    single, called = seeded(lambda: MixtureNet(layer)), []
    model = seeded(lambda: MixtureNet(layer))
    for expert in model.layers[0].experts:
        expert.register_forward_hook(lambda module, args, output: called.append(args[0].shape[0]))
    errors = []
    with composer3d.compose(model, write_manifest(text), loss_fn=token_sum) as run:
        composed, called[:] = len(called), []
        optimizers = [run.optimizer(torch.optim.SGD, lr=0.1), torch.optim.SGD(single.parameters(), lr=0.1)]
        for number in range(3):
            with run.step(number):
                loss = run.forward_backward(mine(run, tokens), target=mine(run, targets))
                optimizers[0].step()
                optimizers[0].zero_grad()
            theirs = token_sum(single(tokens), targets)
            (theirs.sum / theirs.count).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            errors.append(float((loss - theirs.sum.detach() / theirs.count).abs()))
        found = []
        for number in range(NUM_EXPERTS):
            ours, other = model.layers[0].experts[number], single.layers[0].experts[number]
            if any(True for _ in ours.parameters()):
                found.append((number, ours.calls - other.calls, int(ours.rows - other.rows)))
                torch.testing.assert_close(ours.norm.running_mean, other.norm.running_mean, rtol=TIGHT, atol=TIGHT)
                assert ours.norm.num_batches_tracked == other.norm.num_batches_tracked
    return composed, called, errors, found


def test_experts_are_called_once_and_keep_their_state():
    for rank, (composed, called, errors, found) in enumerate(
        run_ranks(states, 2, lambda: Starving(Counting), EP.format(""))
    ):
        assert composed == 0, "rows that no model has made"
        assert max(errors) < TIGHT
        assert found == [(2 * rank + at, 0, 0) for at in range(2)]
        assert len(called) == 6


def refused(layer):
    with pytest.raises(PluginError) as caught:
        composer3d.compose(seeded(lambda: MixtureNet(layer)), write_manifest(EP.format("")), loss_fn=token_sum)
    return str(caught.value)


class Several(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


def test_an_expert_that_returns_several_tensors_is_refused():
    for said in run_ranks(refused, 2, lambda: Dense(lambda: Several(DIM, DIM))):
        assert 'an expert of "layers.0.experts" returns a tuple' in said


def refused_step(layer, text):
    tokens, targets = tokens_and_targets()
    with composer3d.compose(seeded(lambda: MixtureNet(layer)), write_manifest(text), loss_fn=token_sum) as run:
        with pytest.raises(PluginError) as caught:
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
    return str(caught.value)


@pytest.mark.slow
def test_sequence_parallelism_that_would_shard_what_an_expert_is_given_is_refused():
    for said in run_ranks(refused_step, 4, MIXERS["shifts"], LAYOUTS["sequence_parallel"][1]):
        assert "write sequence_parallel = false" in said


def test_samples_of_several_lengths_are_refused():
    for said in run_ranks(refused_lengths, 2, EP.format("")):
        assert "samples, by rank, of 5 x 8 and 6 x 8 elements, which it relates" in said


def refused_lengths(text):
    tokens, targets = tokens_and_targets()
    with composer3d.compose(seeded(lambda: MixtureNet(MIXERS["attention"])), write_manifest(text)) as run:
        length = 5 + run.context.rank
        with pytest.raises(PluginError) as caught:
            run.model(mine(run, tokens)[:, :length])
    return str(caught.value)
