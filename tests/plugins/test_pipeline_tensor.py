"""Pipelines whose stages are cut by tensor parallelism, and all three dimensions together."""

from __future__ import annotations

import copy

import pytest
import torch
from support.family_models import batch_of, class_loss
from support.models import largest, mine, write_manifest
from support.tensor_parallel import AUTO, built, reference, table
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.testing import count_collectives, full, run_ranks

TIGHT = 1e-12
SP, LP = "sequence_parallel = true", "loss_parallel = true"
SETTINGS = ["", SP, LP, f"{SP}\n{LP}"]
SAMPLES = 8


def layout(schedule="1F1B", more="", microbatch=1):
    return (
        f"[mesh]\npp = 2\ntp = 2\n{more}\n[train]\nmicrobatch = {microbatch}\n[scheduling.pipeline]\n"
        f'schedule = "{schedule}"\n'
    )


def steps_of(cases):
    return [one_step(family, text, dict(*options)) for family, text, *options in cases]


def one_step(family, text, options):
    """Return on a rank the distances of loss, norm, gradients and evaluation from one device, and what was sent."""
    torch.set_default_dtype(torch.float64)
    options = {"num_layers": 4} | options
    loss_1, gradients, norm_1 = reference(family, options, SAMPLES)
    inputs, targets = batch_of(family, SAMPLES)
    run = composer3d.compose(
        built(family, options), write_manifest(text), loss_fn=class_loss, example=((inputs[:1],), {})
    )
    inputs, targets = mine(run, inputs), mine(run, targets)
    with run.step(0):
        loss = run.forward_backward(inputs, target=targets)
        norm = run.clip_grad_norm_(float("inf"))
        least = 1e-3 * max(float(g.abs().max()) for g in gradients.values())
        found = {
            name: run.context.in_model_order(name, full(p.grad))
            for name, p in run.named_parameters()
            if p.grad is not None
        }
    worst = max(
        float((grad - gradients[name]).abs().max()) / max(float(gradients[name].abs().max()), least)
        for name, grad in found.items()
    )
    with count_collectives(run.mesh) as collectives:
        evaluated = run.evaluate(inputs, target=targets).loss
    sent = collectives.summary().get(("send", "pp"), (0, 0))[1]
    run.close()
    errors = (float((loss - loss_1).abs()), float((norm - norm_1).abs() / norm_1), worst)
    return (*errors, float((evaluated - loss_1).abs())), set(found), set(gradients), sent


def assert_equal_to_one_device(world_size, cases):
    """Assert it of every case; return what every rank sent in each."""
    results = run_ranks(steps_of, world_size, cases)
    for number, case in enumerate(cases):
        errors = [largest(rank[number][0]) for rank in results]
        assert largest(errors) < TIGHT, (case, errors)
        assert set().union(*(rank[number][1] for rank in results)) == results[0][number][2]
    return [[rank[number][3] for rank in results] for number in range(len(cases))]


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("llama", SETTINGS[-1:], id="llama-sequence-and-loss"),
        pytest.param("llama", SETTINGS[:-1], id="llama", marks=pytest.mark.slow),
        pytest.param("gpt2", SETTINGS, id="gpt2", marks=pytest.mark.slow),
    ],
)
def test_gradients_and_evaluation_equal_one_device(family, settings):
    assert_equal_to_one_device(4, [(family, layout() + table(family, chosen)) for chosen in settings])


@pytest.mark.slow
def test_gradients_of_encoders_and_of_images():
    # Where nothing puts the sequence together before a head, sequence_parallel has no place: vision transformers.
    cases = [("bert", layout() + table("bert", settings)) for settings in ("", SP)]
    assert_equal_to_one_device(4, [*cases, ("vit", layout() + table("vit")), ("mixer", layout() + table("mixer"))])


@pytest.mark.parametrize(
    "schedule",
    [
        "Interleaved1F1B",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("GPipe", "LoopedBFS", "InterleavedZeroBubble")),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("ZBVZeroBubble", "DualPipeV")),
    ],
)
def test_every_schedule(schedule):
    # The head of gpt2 is the embedding: on one rank, or on two.
    assert_equal_to_one_device(
        4, [("gpt2", layout(schedule) + table("gpt2", f"{SP}\n{LP}")), ("llama", layout(schedule) + AUTO + SP)]
    )


def test_recomputation():
    more = "[scheduling.activation_checkpoint]\n"
    assert_equal_to_one_device(
        4, [("llama", layout(schedule, more) + table("llama", SP)) for schedule in ("1F1B", "ZBVZeroBubble")]
    )


DATA_PARALLEL = {
    "zero1": ("dp_shard = 2", "[sharding.fsdp2]\nzero = 1\n"),
    "zero3": ("dp_shard = 2", "[sharding.fsdp2]\nzero = 3\n"),
    "ddp": ("dp_replicate = 2", "[sharding.ddp]\n"),
}


def three_dimensions(schedule, name, family, settings):
    axis, plugin = DATA_PARALLEL[name]
    return family, layout(schedule, f"{axis}\n{plugin}") + table(family, settings)


def test_three_dimensions():
    assert_equal_to_one_device(
        8,
        [
            three_dimensions("1F1B", "zero3", "llama", f"{SP}\n{LP}"),
            three_dimensions("1F1B", "ddp", "gpt2", SP),
            three_dimensions("Interleaved1F1B", "zero1", "gpt2", LP),
        ],
    )


@pytest.mark.slow
def test_three_dimensions_without_bubbles():
    # The composition keeps parameters whole between forward and backward, as the manifest is silent.
    unstated = layout("ZBVZeroBubble", "dp_shard = 2\n[sharding.fsdp2]\n") + table("gpt2", SP)
    assert_equal_to_one_device(8, [("gpt2", unstated), three_dimensions("ZBVZeroBubble", "ddp", "gpt2", f"{SP}\n{LP}")])


# ---- collectives -----------------------------------------------------------------------------------------------------


def test_each_rank_sends_its_own_part_of_a_sequence():
    whole, cut = assert_equal_to_one_device(
        4, [("llama", layout() + table("llama", settings)) for settings in ("", SP)]
    )
    headers = 16 * 8 * SAMPLES
    assert [sent > 0 for sent in whole] == [sent > 0 for sent in cut] == [True, True, False, False]
    for all_of_it, part in zip(whole[:2], cut[:2], strict=True):
        assert part - headers == (all_of_it - headers) / 2


class Coder(nn.Module):
    """Two layers read one activation, which tensor parallelism shards: an autoencoder's mean and variance."""

    def __init__(self):
        super().__init__()
        self.enter, self.mean, self.variance, self.leave = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        h = self.enter(x).relu()
        return self.leave(self.mean(h) + self.variance(h).exp())


def coded(place):
    """Return on a rank the gradients of a step whose second stage begins at a module, by how far off they are."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    model = Coder()
    mse_loss(model(x), y).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    text = f'split = {{ tracer = ["{place}"] }}\n[sharding.tensor_parallel]\n'
    run = composer3d.compose(
        copy.deepcopy(model),
        write_manifest(layout(more="", microbatch=2) + text),
        loss_fn=mse_loss,
        example=((x[:2],), {}),
    )
    with run.step(0):
        run.forward_backward(x, target=y)
        found = {name: full(parameter.grad) for name, parameter in run.named_parameters() if parameter.grad is not None}
    run.close()
    return max(float((grad - wanted[name]).abs().max() / wanted[name].abs().max()) for name, grad in found.items())


def test_modules_that_read_one_shard_are_in_one_stage():
    assert largest(run_ranks(coded, 4, "leave")) < TIGHT
    with pytest.raises(composer3d.RankError) as caught:
        run_ranks(coded, 4, "variance")
    assert (
        'a stage stands in for "mean", which another stage runs, and what that returns does not follow from what '
        "arrives, a shard perhaps (RuntimeError: "
    ) in str(caught.value)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Shared(nn.Module):
    """Blocks that stand in the list several times, as ALBERT's."""

    def __init__(self, times):
        super().__init__()
        blocks = [Residual(), Residual()]
        self.enter, self.layers, self.leave = nn.Linear(4, 4), nn.ModuleList(blocks * times), nn.Linear(4, 4)

    def forward(self, x):
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x)
        return self.leave(x)


def shared(times):
    """Return on a rank how far gradients of blocks are off of which each stage holds some, or all, and some twice."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    x, y, model = torch.randn(4, 4), torch.randn(4, 4), Shared(times)
    mse_loss(model(x), y).backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    model.zero_grad()
    text = layout(microbatch=2) + AUTO
    run = composer3d.compose(copy.deepcopy(model), write_manifest(text), loss_fn=mse_loss, example=((x[:2],), {}))
    with run.step(0):
        run.forward_backward(x, target=y)
        run.clip_grad_norm_(float("inf"))
        found = {name: full(parameter.grad) for name, parameter in run.named_parameters() if parameter.grad is not None}
    assert any(hasattr(parameter, "placements") for _, parameter in run.named_parameters())
    run.close()
    return max(float((grad - wanted[name]).abs().max() / wanted[name].abs().max()) for name, grad in found.items())


@pytest.mark.parametrize("times", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_blocks_that_stand_in_the_list_several_times(times):
    assert largest(run_ranks(shared, 4, times)) < TIGHT
