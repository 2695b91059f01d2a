"""Experts that are called with sorted rows, and loops of helpers: gradients equal one device's, wherever they are."""

from __future__ import annotations

import pytest
import torch
from support.further_mixtures import FURTHER
from support.handwritten_mixtures import HANDWRITTEN, CallsWeightless, UncountedStack
from support.mixtures import DIM, MIXTURES, FlatStack, Looped, mixture_steps
from support.models import seeded, write_manifest
from support.sorted_mixtures import FORMS, Counted, Grouped
from torch import nn

import composer3d
from composer3d.testing import fake_world, run_ranks

EP = "[mesh]\ndp_shard = 2\nep = 2\n{}\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"
LOCAL = "[sharding.context_parallel]\nbalanced = false\n[train]\nmicrobatch = 1\n"
CP = EP.format("cp = 2").replace("dp_shard = 2\n", "") + LOCAL


def assert_equal_to_one_device(world_size, cases):
    known = FORMS | HANDWRITTEN | FURTHER
    results = run_ranks(mixture_steps, world_size, [(known[name], text) for name, text in cases], timeout_s=600)
    for ranks in zip(cases, *results, strict=True):
        for loss, norm, error, _ in ranks[1:]:
            assert max(loss, norm, error) <= 1e-12, ranks[0][0]
    return dict(zip([name for name, _ in cases], [found[3] for found in results[0]], strict=True))


def test_every_form_equals_one_device():
    found = assert_equal_to_one_device(2, [(name, EP.format("")) for name in FORMS])
    for name, counted in found.items():
        num_exchanges = 2 if name.startswith("counted") else 1
        layers = 2
        assert counted["all_to_all", "ep"][0] == 5 * num_exchanges * layers, name


def test_experts_that_are_known_by_their_name_equal_one_device():
    found = assert_equal_to_one_device(2, [(name, EP.format("")) for name in HANDWRITTEN])
    for name, counted in found.items():
        assert counted["all_to_all", "ep"][0] == 5 * 2, name  # layers


@pytest.mark.slow
@pytest.mark.parametrize(("text", "num_microbatches"), [(EP.format(""), 1), (CP, 8)], ids=["dp_shard", "cp"])
def test_further_ways_to_write_a_mixture_equal_one_device(text, num_microbatches):
    found = assert_equal_to_one_device(2, [(name, text) for name in FURTHER])
    for name, counted in found.items():
        assert counted["all_to_all", "ep"][0] == 5 * 2 * num_microbatches, name  # layers


@pytest.mark.slow
def test_layers_of_other_numbers_of_experts_on_stages_equal_one_device():
    text = EP.format("pp = 2") + "[scheduling.pipeline]\n[train]\nmicrobatch = 2\n"
    assert_equal_to_one_device(4, [("other experts", text)])


@pytest.mark.slow
def test_experts_are_not_sharded_inside_where_they_are_given_the_whole_sequence():
    assert_equal_to_one_device(2, [("counted in attention", CP)])


class Several(nn.Module):
    """Stacked experts among modules that only look like some."""

    def __init__(self):
        super().__init__()
        self.experts, self.gate, self.num_experts = Counted(4, 4), nn.Linear(4, 4, bias=False), 4

    def forward(self, x):
        return x


class Router(nn.Module):
    """A row for each expert, and one argument."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(nn.Linear(6, 4).weight.detach())

    def forward(self, x):
        return x


def test_forms_are_known_by_arguments_and_weights():
    assert composer3d.expert_form(Counted(4, 4)) == "counted"
    assert composer3d.expert_form(Grouped(4)) == "grouped"
    assert composer3d.expert_form(FlatStack()) == "chosen"
    assert [composer3d.expert_form(module) for module in (Several(), Router())] == [None, None]


def test_forms_of_modules_that_are_said_to_hold_experts():
    weightless, said = CallsWeightless().experts, nn.Sequential(nn.Conv1d(4, 4, 1, bias=False))
    assert composer3d.expert_form(UncountedStack()) is None
    assert composer3d.expert_form(UncountedStack(), is_stated=True) == "grouped"
    assert composer3d.expert_form(said, is_stated=True) is None  # a convolution's weight stacks nothing
    assert (composer3d.stacked_number(weightless), *composer3d.shared_by_experts(weightless)) == (4, "up_MFD")


class Unequal(nn.Module):
    """Two stacks of different numbers."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.head = 4, nn.Linear(4, 4)
        self.up, self.down = (
            nn.Parameter(nn.init.normal_(Counted(4, 4).weight_NFD.detach().repeat(n, 1, 1))) for n in (2, 1)
        )

    def forward(self, x, chosen, weights):
        return x


class Mixed(nn.Module):
    """A dict of experts that holds weights that they share."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleDict({str(number): nn.Linear(4, 4) for number in range(4)} | {"norm": nn.LayerNorm(4)})

    def forward(self, x):
        return x


class Flat(nn.Module):
    """The rows of all experts below one another."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.up, self.down = 4, nn.Linear(4, 8, bias=False), nn.Embedding(8, 4)

    def forward(self, x, chosen, weights):
        return x


class Twofold(Looped):
    """An expert that stands in its list twice."""

    def __init__(self):
        super().__init__()
        self.experts[3] = self.experts[0]


class Interleaved(FlatStack):
    """Rows of all experts in turn: the first is the first expert's, the second the second's."""

    def forward(self, hidden_states, top_k_index, top_k_weights):
        up, down = (weight.view(-1, self.num_experts, DIM)[:, top_k_index[0, 0]] for weight in (self.up, self.down))
        return torch.tanh(hidden_states.matmul(up.T)).matmul(down)


class Shared(Counted):
    """Experts that all tokens have, and a weight of each token and expert."""

    def __init__(self):
        super().__init__(4, 4)
        self.n_shared_experts = self.num_experts
        del self.num_experts


UNKNOWN = {
    Unequal: 'of modules with weights of three dims "" (Unequal) stacks 8 in up, 4 in down',
    Mixed: 'of dicts of modules "experts" (ModuleDict) holds 4 Linear and 1 LayerNorm',
    Flat: '; "" (Flat) says num_experts = 4, and has weights of two dims, up.weight, down.weight, of which no rows are '
    "known to be one expert's",
    Twofold: 'expert_parallel: "experts.3.0.weight" is also "experts.0.0.weight": a rank of ep has an expert of a list '
    "as a whole, and ranks would train two of what several experts hold (in modules with stacked weights what all "
    "experts share stays whole); call it in the forward around the experts, give each weights of its own, or leave",
    Interleaved: '; "" (Interleaved) says num_experts = 4, and has weights of two dims, up, down, of which no rows are '
    "known to be one expert's",
}


def refused():
    said = []
    for factory in UNKNOWN:
        with pytest.raises(composer3d.ComposerError) as caught:
            composer3d.compose(factory(), write_manifest(EP.format("")), loss_fn=nn.functional.mse_loss)
        said.append(str(caught.value))
    return said


def test_a_model_without_known_experts_is_told_what_was_found():
    for said in run_ranks(refused, 2):
        assert [part in text for part, text in zip(UNKNOWN.values(), said, strict=True)] == [True] * len(UNKNOWN)


def test_shared_experts_are_none_that_tokens_choose():
    assert composer3d.expert_form(Shared()) is None


class Crossed(nn.Module):
    """The first expert of one layer is the last of the other, which another rank holds."""

    def __init__(self):
        super().__init__()
        self.one, self.two = Looped(), Looped()
        self.two.experts[3] = self.one.experts[0]

    def forward(self, x_BSD):
        return self.two(self.one(x_BSD))


PIPELINE = EP.format("pp = 2") + "[scheduling.pipeline]\n"


@pytest.mark.parametrize(
    ("model", "text", "message"),
    [
        (
            Crossed,
            EP.format(""),
            '"two.experts.3.0.weight" is also "one.experts.0.0.weight": lists may share experts, of which ep = 2 gives '
            "each rank the same ones, in the same places",
        ),
        *(
            (MIXTURES[name], PIPELINE, "have the same experts, of which each stage of a pipeline holds a replica")
            for name in ("tied", "tied in two lists")
        ),
    ],
    ids=["in other places", "one list over pp", "two lists over pp"],
)
def test_experts_of_several_layers_are_refused_where_ranks_would_not_hold_them_alike(model, text, message):
    with fake_world(4 if text == PIPELINE else 2), pytest.raises(composer3d.ManifestError) as caught:
        composer3d.compose(seeded(model), write_manifest(text), loss_fn=nn.functional.mse_loss)
    assert message in str(caught.value)
