"""Experts sharded over ep: any mixture equals one device, with exactly the exchanges of its formula."""

from __future__ import annotations

import itertools

import pytest
import torch
from composer3d_plugins.sharding.expert_parallel.listed_experts import shard_listed
from support.mixtures import (
    DIM,
    MIXTURES,
    Looped,
    Masked,
    MixtureNet,
    Stacked,
    mixture_steps,
    shipped,
    token_sum,
    tokens_and_targets,
)
from support.models import largest, mine, seeded, write_manifest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composer3d
from composer3d import CheckpointError, DataDependent, PatternError, PluginError
from composer3d.checkpoint import contents
from composer3d.testing import fake_world, full, run_ranks

EP = "[sharding.expert_parallel]\n"
FSDP = "[sharding.fsdp2]\n"
LAYERS = 2


def ep(degree, mesh, more=FSDP, table=""):
    return f"[mesh]\nep = {degree}\n{mesh}\n{more}{EP}{table}"


def assert_equal_to_one_device(world_size, cases):
    """Compare loss, norm and gradients of every case with one device; return what each rank issued, by case."""
    ranks = run_ranks(mixture_steps, world_size, cases)
    for results in ranks:
        for case, (loss, norm, gradient, _) in zip(cases, results, strict=True):
            assert max(loss, norm, gradient) <= 1e-12, (case, loss, norm, gradient)
    return [[counted for *_, counted in of_case] for of_case in zip(*ranks, strict=True)]


# Loops over experts in a list and a dict, one over masks, two over one list, and stacks, one with a norm that experts
# share, one of rows: what others vary.
FORMS = ("looped", "named", "masked", "tied", "two lists", "stacked", "stacked of three", "normed", "flat")
MORE = [name for name in MIXTURES if name not in (*FORMS, "looped starved", "stacked starved", "shipped of four heads")]


@pytest.mark.parametrize("names", [FORMS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["forms", "more"])
def test_collectives_and_gradients_of_mixtures_as_people_write_them(names):
    cases = [(name, ep(2, "dp_shard = 2", table="[train]\nmicrobatch = 2\n")) for name in names]
    for (name, _), (first, second) in zip(cases, assert_equal_to_one_device(2, cases), strict=True):
        if name == "two lists":  # rows of one list are made of the other's results, and exchanged after them
            assert first["all_to_all", "ep"][0] == 2 * 5 * LAYERS * 2
            continue
        if name == "stacked of three":  # more experts a token than ranks: all of them gather the tokens
            assert (first["all_gather", "ep"][0], first["reduce_scatter", "ep"][0]) == (5 * LAYERS * 2, 3 * LAYERS * 2)
            continue
        count, size = first["all_to_all", "ep"]
        assert count == second["all_to_all", "ep"][0] == 5 * LAYERS * 2  # layers and micro-batches
        experts = 1 if name in ("masked", "named", "token by token") else 2
        width = 3 if name == "widened" else 2  # of a row and its result
        rows = width * 2 * 8 * 6 * experts * DIM * 8  # forth and back, of all tokens in float64
        counts = 2 * 4 * 8 * 2  # int64 of 4 experts, of each of two ranks and micro-batches
        assert size + second["all_to_all", "ep"][1] == LAYERS * (rows + counts)


@pytest.mark.parametrize(
    ("mesh", "more", "degree"),
    [
        ("dp_shard = 4", f"{FSDP}zero = 1\n", 4),
        ("dp_shard = 4", f"{FSDP}zero = 2\n", 2),
        ("dp_shard = 2\ndp_replicate = 2", FSDP, 2),
        ("dp_shard = 2\npp = 2", f"{FSDP}[scheduling.pipeline]\n[train]\nmicrobatch = 2\n", 2),
        ("dp_shard = 2\ntp = 2", f"{FSDP}[sharding.tensor_parallel]\n", 2),
        ("dp_shard = 4", f"{FSDP}[scheduling.activation_checkpoint]\n", 2),
    ],
    ids=["zero1", "zero2", "hsdp", "pipeline", "tensor_parallel", "recomputed"],
)
def test_layouts(mesh, more, degree):
    assert_equal_to_one_device(4, [(name, ep(degree, mesh, more)) for name in ("looped starved", "shipped")])


@pytest.mark.parametrize(
    ("name", "mesh", "more", "degree"),
    [
        ("dense", "dp_shard = 2\ntp = 2", f"{FSDP}[sharding.tensor_parallel]\n", 4),
        ("shipped", "dp_shard = 2\ntp = 2", f"{FSDP}[sharding.tensor_parallel]\n", 4),
        pytest.param("flat", "dp_shard = 2\ntp = 2", f"{FSDP}[sharding.tensor_parallel]\n", 4, marks=pytest.mark.slow),
        ("shipped", "dp_shard = 2\ntp = 2", f"{FSDP}[sharding.tensor_parallel]\nsequence_parallel = true\n", 4),
        ("shipped", "dp_shard = 2\ntp = 2", f"{FSDP}[sharding.tensor_parallel]\nsequence_parallel = true\n", 2),
        ("shipped", "dp_replicate = 2\ntp = 2", f"{FSDP}[sharding.tensor_parallel]\n", 2),
        (
            "shipped of four heads",
            "dp_shard = 1\ntp = 4",
            f"{FSDP}[sharding.tensor_parallel]\n[scheduling.activation_checkpoint]\n",
            4,
        ),
    ],
    ids=[
        "products of all",
        "dp and tp",
        "rows of all",
        "sequence_parallel",
        "apart from sequence_parallel",
        "tp alone",
        "four of tp",
    ],
)
def test_ranks_of_tp_hold_experts_too(name, mesh, more, degree):
    for first, *_ in assert_equal_to_one_device(4, [(name, ep(degree, mesh, more))]):
        assert first["all_to_all", "ep"][0] == (8 if "activation_checkpoint" in more else 5) * LAYERS


def test_gathered_tokens():
    mixtures, table = {"stacked starved": 2, "stacked": 4, "shipped": 4}, 'dispatch = "all_gather"\n'
    cases = [(name, ep(degree, "dp_shard = 4", table=table)) for name, degree in mixtures.items()]
    assert_equal_to_one_device(4, cases)


def trained(path, text):
    """Load a checkpoint if there is one, train a step, and save one if there was none; return parameters by FQN."""
    torch.set_default_dtype(torch.float64)
    run = composer3d.compose(seeded(MIXTURES["looped"]), write_manifest(text), loss_fn=token_sum)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    if path.exists():
        run.load(path)
    tokens, targets = (mine(run, tensor) for tensor in tokens_and_targets())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    held = {fqn: full(parameter.detach()) for fqn, parameter in run.named_parameters()}
    if not path.exists():
        run.save(path)
    run.close()
    return held


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_checkpoint_of_four_ranks_of_experts_is_loaded_by_two_and_by_one(tmp_path, world_size):
    run_ranks(trained, 4, tmp_path / "saved", ep(4, "dp_shard = 4"))
    (alone,) = run_ranks(trained, 1, tmp_path / "saved", FSDP)
    ranks = run_ranks(trained, world_size, tmp_path / "saved", ep(world_size, f"dp_shard = {world_size}"))
    assert {fqn for held in ranks for fqn in held} == alone.keys()
    assert largest(float((p - alone[fqn]).abs().max()) for held in ranks for fqn, p in held.items()) < 1e-12


def loaded(path, sizes):
    """Save a checkpoint if there is none; else return what is said of one that is loaded."""
    run = composer3d.compose(seeded(lambda: shipped(**sizes)), write_manifest(ep(2, "dp_shard = 2")), loss_fn=token_sum)
    try:
        if not path.exists():
            return run.save(path)
        with pytest.raises(CheckpointError) as caught:
            run.load(path)
        return str(caught.value)
    finally:
        run.close()


def full_states(name, text, path):
    """Return what every rank is given of the whole state, and what a checkpoint of it holds."""
    run = composer3d.compose(seeded(MIXTURES[name]), write_manifest(text))
    run.save(path)
    found = run.full_state_dict(), set(contents(path))
    run.close()
    return found


@pytest.mark.parametrize("name", ["looped", "stacked"])
def test_the_first_rank_is_given_the_experts_of_all(name, tmp_path):
    (state, saved), (other, _) = run_ranks(full_states, 2, name, ep(2, "dp_shard = 2"), tmp_path / "saved")
    whole = seeded(MIXTURES[name]).state_dict()
    assert list(state) == list(whole) and not other
    assert all(torch.equal(state[fqn], tensor) for fqn, tensor in whole.items())
    assert saved == {f"model/{fqn}" for fqn in whole}


def test_experts_of_another_checkpoint_are_refused_with_both_shapes(tmp_path):
    run_ranks(loaded, 2, tmp_path / "saved", {})
    for said in run_ranks(loaded, 2, tmp_path / "saved", {"num_experts": 8}):
        assert "w1_NDF of shape [4, 8, 12], the model has [8, 8, 12]" in said


# ---- refusals --------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.layers = nn.Embedding(11, 8), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


class InPlace(Looped):
    """Changes what it is given."""

    def forward(self, x_BSD):
        x_BSD += 1.0
        return super().forward(x_BSD)


class Changing(Looped):
    """Gives experts other rows in every run."""

    num_runs = itertools.count(1)

    def forward(self, x_BSD):
        return super().forward(x_BSD * next(self.num_runs))


class Reading(Looped):
    """Reads a weight of its experts."""

    def forward(self, x_BSD):
        return super().forward(x_BSD) + self.experts[0][0].weight.sum()


@pytest.mark.parametrize(
    ("model", "text", "message"),
    [
        (Plain, ep(2, "dp_shard = 2"), "expert_parallel found no experts in Plain: it looked for a module with"),
        (Plain, ep(2, "dp_shard = 2", table='experts = ["layers.0"]\n'), 'expert_parallel: "layers.0" (Linear) holds'),
        (MIXTURES["looped"], ep(3, "dp_shard = 3"), "has 4 experts, which do not divide by ep = 3; ep may be 2, 4"),
        (MIXTURES["looped"], ep(8, "dp_shard = 8"), 'ep = 8 is more than the 4 experts of "layers.0.experts"'),
        (MIXTURES["looped"], ep(2, "dp_shard = 2", table='experts = ["nothing.*"]\n'), '"nothing.*"'),
        (
            MIXTURES["looped"],
            ep(2, "dp_shard = 2", table='experts = ["layers"]\n'),
            '"layers" is the list of the model\'s blocks, and their experts are in "layers.0.experts" and others; name',
        ),
        (
            MIXTURES["looped"],
            ep(2, "dp_shard = 2", table='dispatch = "all_gather"\n'),
            'dispatch = "all_gather" does nothing for "layers.0.experts": tokens are gathered for modules with stacked',
        ),
        (
            MIXTURES["looped"],
            ep(2, "dp_shard = 1\ntp = 2", f"{FSDP}[sharding.tensor_parallel]\n"),
            'ep = 2 does not divide dp_shard x cp = 1, so that it takes ranks of tp, and "layers.0.experts" is a list',
        ),
    ],
    ids=[
        "none",
        "another module",
        "does not divide",
        "too many ranks",
        "pattern",
        "blocks",
        "gathered rows",
        "lists out of tp",
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(model, text, message):
    world_size = int(text.partition("dp_shard = ")[2].split()[0]) * (
        2 if "\ntp = 2" in text or "\ncp = 2" in text else 1
    )
    with fake_world(world_size), pytest.raises((composer3d.ManifestError, PluginError, PatternError)) as caught:
        composer3d.compose(seeded(model), write_manifest(text), loss_fn=token_sum)
    assert message in str(caught.value)


def test_experts_whose_gradients_nobody_averages_are_refused():
    text = f"[mesh]\nep = 2\ndp_shard = 2\n{EP}"
    with fake_world(2), pytest.raises(composer3d.ManifestError) as caught:
        composer3d.compose(seeded(MIXTURES["looped"]), write_manifest(text), loss_fn=token_sum)
    assert "dp_shard" in str(caught.value)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Changing, 'the forward of "layers.0" gives what it calls of "experts" other rows when it runs again'),
        (Reading, 'the forward of "layers.0" reads "[0]" of an expert, which another rank may hold'),
    ],
)
def test_blocks_that_cannot_run_twice_are_refused_in_their_step(layer, message):
    def step():
        run = composer3d.compose(
            seeded(lambda: MixtureNet(layer)), write_manifest(ep(2, "dp_shard = 2")), loss_fn=token_sum
        )
        tokens, targets = (mine(run, tensor) for tensor in tokens_and_targets())
        with pytest.raises(Exception) as caught, run.step(0):
            run.forward_backward(tokens, target=targets)
        return str(caught.value)

    for said in run_ranks(step, 2):
        assert message in said


class Forces(MixtureNet):
    """Adds to its logits what a gradient of its own is."""

    def forward(self, tokens_BS):
        x_BSD = hidden_BSD = self.tok(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        (found,) = torch.autograd.grad(self.out(x_BSD).logsumexp(-1).sum(), hidden_BSD, create_graph=True)
        return self.out(x_BSD) + found.square().sum(-1, keepdim=True)


@pytest.mark.parametrize("layer", [Looped, Stacked])
def test_losses_made_of_gradients_through_experts_are_refused(layer):
    def step():
        text = write_manifest(ep(2, "dp_shard = 2"))
        run = composer3d.compose(seeded(lambda: Forces(layer)), text, loss_fn=token_sum)
        tokens, targets = (mine(run, tensor) for tensor in tokens_and_targets())
        with pytest.raises(PluginError) as caught, run.step(0):
            run.forward_backward(tokens, target=targets)
        return str(caught.value)

    for said in run_ranks(step, 2):
        assert said.startswith("expert_parallel: a loss is made of gradients (create_graph=True) that pass through")


def in_unwritten_memory_of_nan(cases):
    torch.use_deterministic_algorithms(True)  # which fills it
    return mixture_steps(cases)


def test_stages_infer_their_shapes_from_values_that_are_numbers():
    # Of rows that are NaN, two runs of a block differ.
    text = ep(2, "dp_shard = 2\npp = 2", f"{FSDP}[scheduling.pipeline]\n[train]\nmicrobatch = 2\n")
    for results in run_ranks(in_unwritten_memory_of_nan, 4, [("looped", text)]):
        assert max(results[0][:3]) <= 1e-12


def test_rows_that_are_not_a_number_are_those_of_the_first_run():
    def step():
        layer, mesh = Looped(), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        shard_listed(layer, "experts", mesh, fqn="layer", note=lambda *rows: None, dependent=DataDependent())
        return bool(layer(torch.full((1, 2, DIM), float("nan"))).isnan().all())

    assert run_ranks(step, 2) == [True] * 2


def test_a_block_that_changes_its_input_cannot_run_twice():
    def step():
        layer, mesh = InPlace(), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        shard_listed(layer, "experts", mesh, fqn="layer", note=lambda rows: None, dependent=DataDependent())
        with pytest.raises(PluginError) as caught:
            layer(torch.ones(1, 2, DIM))
        return str(caught.value)

    for said in run_ranks(step, 2):
        assert said.startswith('expert_parallel: the forward of "layer" changes its input in place, and runs twice')


def test_what_a_block_keeps_is_kept_once():
    class Keeping(Looped):
        def __init__(self):
            super().__init__()
            self.sizes, self.calls = [], 0

        def forward(self, x_BSD):
            self.sizes.append(x_BSD.shape[0])
            self.calls += 1
            self.last = x_BSD.detach()
            return super().forward(x_BSD)

    def step():
        layer, mesh = Keeping(), init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        shard_listed(layer, "experts", mesh, fqn="layer", note=lambda *rows: None, dependent=DataDependent())
        layer(torch.ones(1, 2, DIM))
        layer(torch.ones(3, 2, DIM))
        return layer.sizes, layer.calls, layer.last.shape[0]

    assert run_ranks(step, 2) == [([1, 3], 2, 3)] * 2


def test_a_block_that_draws_runs_twice_with_the_same_numbers():
    class Drawing(Masked):
        dropout = 0.4

    def step():
        torch.set_default_dtype(torch.float64)
        found = []
        for text in (ep(2, "dp_shard = 2"), "[mesh]\ndp_shard = 2\n" + FSDP):
            run = composer3d.compose(seeded(lambda: MixtureNet(Drawing)), write_manifest(text), loss_fn=token_sum)
            tokens, targets = (mine(run, tensor) for tensor in tokens_and_targets())
            with run.step(0):
                found.append(float(run.forward_backward(tokens, target=targets)))
            run.close()
        return found

    for sharded, whole in run_ranks(step, 2):
        assert abs(sharded - whole) < 1e-12
