from __future__ import annotations

import copy
import logging
import math

import numpy as np
import pytest
import torch
from torch import nn

from composer3d.errors import InitialisationError
from composer3d.initialisation import (
    Recipe,
    record,
)

DIM = 40


class OwnInit(nn.Module):
    """Everything in __init__, with every initialiser that looks at its tensor."""

    def __init__(self):
        super().__init__()
        self.scaled = nn.Parameter(torch.randn(DIM, DIM) * 0.02)
        self.truncated = nn.Parameter(nn.init.trunc_normal_(torch.empty(DIM, DIM), std=0.5, a=-1.0, b=1.0))
        self.tail = nn.Parameter(nn.init.trunc_normal_(torch.empty(DIM, DIM), a=2.0, b=3.0))
        self.orthogonal = nn.Parameter(nn.init.orthogonal_(torch.empty(DIM, DIM), gain=2.0))
        self.sparse = nn.Parameter(nn.init.sparse_(torch.empty(DIM, DIM), sparsity=0.25, std=1.0))
        self.dirac = nn.Parameter(nn.init.dirac_(torch.empty(DIM, DIM, 3)))
        self.eye = nn.Parameter(nn.init.eye_(torch.Tensor(DIM, DIM)))
        self.joined = nn.Parameter(torch.cat([torch.rand(DIM, DIM), torch.zeros(3, DIM)]))


class Resetting(nn.Module):
    """Convolution, norms, embedding with padding, recurrence, attention; half of it cast afterwards."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 3)
        self.norm = nn.BatchNorm1d(DIM)
        self.embedding = nn.Embedding(50, DIM, padding_idx=7)
        self.recurrent = nn.LSTM(DIM, DIM)
        self.attention = nn.MultiheadAttention(DIM, 4)
        self.half = nn.Linear(DIM, DIM).to(torch.bfloat16)
        self.single = nn.Linear(DIM, DIM).half().float()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(DIM, DIM))


class Gpt2(nn.Module):
    """apply(init), then output projections scaled down by name; the head is the embedding."""

    def __init__(self, num_layers=4):
        super().__init__()
        self.embedding = nn.Embedding(50, DIM)
        layer = nn.TransformerEncoderLayer(DIM, 4, dim_feedforward=2 * DIM)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(num_layers))
        self.head = nn.Linear(DIM, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.apply(self.initialise)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * num_layers))

    @staticmethod
    def initialise(module):
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        frequency = 1.0 / 10000 ** (torch.arange(0, 8, 2, device="cpu").float() / 8)
        angles = torch.outer(torch.arange(6), frequency)
        self.register_buffer("mask", torch.tril(torch.ones(8, 8, dtype=torch.bool)), persistent=False)
        self.register_buffer("rope", torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("conjugate", self.rope.conj())
        self.register_buffer("imaginary", self.rope.conj().imag)
        self.register_buffer("table", torch.tensor([[0.5, 1.0], [2.0, 4.0]]))
        self.register_buffer("array", torch.from_numpy(np.arange(6.0).reshape(2, 3)).float())
        self.register_buffer("alike", self.table.new_tensor([1, 2, 3]))
        self.register_buffer("legacy", torch.LongTensor([3, 1]))
        self.register_buffer("spread", torch.ones(1).expand(4))
        self.register_buffer("tail", torch.arange(10)[7:])
        self.register_buffer("infinite", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("masked", torch.arange(5.0))
        self.masked[torch.tensor([True, False, True, False, False])] = 9
        self.register_buffer("third", torch.tensor(1) / 3)
        self.plain = torch.arange(4) * 2


def made(factory, seed=0):
    recipe = record(factory)[1]
    return {fqn: recipe.full(fqn, seed=seed) for fqn in recipe.fqns}


def tensors_of(module):
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


@pytest.mark.parametrize("factory", [OwnInit, Resetting, Gpt2])
def test_statistics_are_those_of_the_factory_run_eagerly(factory):
    torch.manual_seed(0)
    eager = tensors_of(factory())
    recorded = made(factory)
    assert list(recorded) == list(eager)
    for fqn, expected in eager.items():
        tensor = recorded[fqn]
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), fqn
        tensor, expected = tensor.detach().double(), expected.detach().double()
        if torch.equal(tensor, expected):
            continue
        # Both are spread by about std / sqrt(n); their difference stays within six times that.
        tolerance = 6 * float(expected.std()) * math.sqrt(2 / expected.numel())
        assert float(tensor.mean()) == pytest.approx(float(expected.mean()), abs=tolerance), fqn
        assert float(tensor.std()) == pytest.approx(float(expected.std()), abs=tolerance), fqn


def test_initialisers_that_look_at_their_tensor_did_their_work():
    full = made(OwnInit)
    assert full["truncated"].abs().max() <= 1.0 and full["truncated"].unique().numel() > 1000
    assert 2.0 <= full["tail"].min() and full["tail"].max() <= 3.0
    torch.testing.assert_close(full["orthogonal"] @ full["orthogonal"].T, 4.0 * torch.eye(DIM), atol=1e-5, rtol=0)
    assert ((full["sparse"] == 0).sum(dim=0) == DIM // 4).all()
    assert torch.equal(full["dirac"], nn.init.dirac_(torch.empty(DIM, DIM, 3)))
    assert torch.equal(full["eye"], torch.eye(DIM))
    assert (full["joined"][DIM:] == 0).all()


def test_details_of_modules():
    full = made(Resetting)
    assert (full["embedding.weight"][7] == 0).all() and (full["embedding.weight"][8] != 0).all()
    assert full["norm.num_batches_tracked"].dtype == torch.int64
    assert full["half.weight"].dtype == torch.bfloat16
    assert torch.equal(full["single.weight"], full["single.weight"].half().float())
    weight = full["normed.parametrizations.weight.original1"]
    torch.testing.assert_close(full["normed.parametrizations.weight.original0"], weight.norm(dim=1, keepdim=True))


def test_scaled_initialisation_by_name():
    for layers in (2, 8):
        full = made(lambda n=layers: Gpt2(n))
        for index in range(layers):
            weight = full[f"layers.{index}.linear2.weight"]
            expected = 0.02 / math.sqrt(2 * layers)
            assert float(weight.std()) == pytest.approx(expected, rel=6 / math.sqrt(2 * weight.numel()))


def test_buffers_are_exactly_those_of_the_factory():
    eager, full = Buffers(), made(Buffers)
    expected = {**tensors_of(eager), "plain": eager.plain}
    assert set(full) == set(expected)
    for fqn, tensor in expected.items():
        assert full[fqn].dtype == tensor.dtype and torch.equal(full[fqn], tensor), fqn


@pytest.mark.parametrize("factory", [OwnInit, Resetting, Gpt2, Buffers])
def test_a_tensor_is_the_same_asked_alone_in_any_order_and_from_another_recording(factory):
    recipe, again = record(factory)[1], record(factory)[1]
    full = {fqn: recipe.full(fqn, seed=5) for fqn in recipe.fqns}
    for fqn in reversed(recipe.fqns):
        assert torch.equal(recipe.full(fqn, seed=5), full[fqn])
        assert torch.equal(again.full(fqn, seed=5), full[fqn])
    assert again.fingerprint() == recipe.fingerprint()


def test_only_the_seed_and_the_fqn_decide():
    small, large, other = made(lambda: Gpt2(2)), made(lambda: Gpt2(3)), made(lambda: Gpt2(2), seed=1)
    same = [fqn for fqn in small if not fqn.endswith("linear2.weight")]
    assert all(torch.equal(small[fqn], large[fqn]) for fqn in same)
    assert not torch.equal(small["embedding.weight"], other["embedding.weight"])
    weights = [small[f"layers.{index}.linear1.weight"] for index in range(2)]
    assert not torch.equal(weights[0], weights[1])
    # A deep copy starts from the values it was copied from, as it does eagerly.
    assert torch.equal(*(small[f"layers.{index}.linear1.bias"] for index in range(2)))


def dependent(*, again=False, between=False):
    module = nn.Module()
    module.first = nn.Parameter(torch.randn(DIM, DIM))
    if between:
        module.unrelated = nn.Parameter(torch.randn(DIM))
    module.second = nn.Parameter(torch.empty(DIM, DIM))
    module.second.data.copy_(module.first * 2)
    module.noisy = nn.Parameter(module.first.detach() + torch.randn(DIM, DIM))
    if again:
        nn.init.normal_(module.first)
    return module


def test_a_parameter_made_from_another_sees_its_values():
    full = made(dependent)
    assert torch.equal(full["second"], full["first"] * 2)
    noise = full["noisy"] - full["first"]
    assert abs(float((noise * full["first"]).mean())) < 0.15 and 0.9 < float(noise.std()) < 1.1


def test_a_parameter_made_from_another_keeps_its_values_when_that_one_is_made_anew():
    once, twice = made(dependent), made(lambda: dependent(again=True))
    assert torch.equal(twice["second"], once["second"])
    assert torch.equal(twice["noisy"], once["noisy"])
    assert not torch.equal(twice["first"], once["first"])


def test_unrelated_tensors_change_nothing():
    alone, between = made(dependent), made(lambda: dependent(between=True))
    assert all(torch.equal(between[fqn], tensor) for fqn, tensor in alone.items())


def test_parameters_cut_from_one_draw():
    def factory():
        module = nn.Module()
        one, two = torch.randn(2 * DIM, DIM).chunk(2)
        module.one, module.two = nn.Parameter(one), nn.Parameter(two)
        return module

    full = made(factory)
    assert not torch.equal(full["one"], full["two"])
    assert full["two"].untyped_storage().nbytes() == DIM * DIM * 4


def test_default_dtype_is_the_factorys_and_comes_back():
    def factory():
        torch.set_default_dtype(torch.float64)
        try:
            module = nn.Linear(4, 4)
            module.register_buffer("third", torch.tensor(1) / 3)
            return module
        finally:
            torch.set_default_dtype(torch.float32)

    full = made(factory)
    assert {tensor.dtype for tensor in full.values()} == {torch.float64}
    assert float(full["third"]) == 1 / 3
    assert torch.get_default_dtype() == torch.float32


def test_any_device_is_meta_and_seems_to_be_the_cpu():
    def factory():
        weight = nn.Parameter(torch.rand(300, device="cuda").to("cuda:1").cuda())
        if not weight.is_meta and weight.device.type == "cpu":
            nn.init.constant_(weight, 3.0)
        return nn.ParameterList([weight, torch.ones(2, device="cpu"), torch.tensor([1.0, 2.0], device="meta")])

    module, recipe = record(factory)
    assert all(parameter.is_meta for parameter in module)
    assert (recipe.full("0", seed=0) == 3.0).all()
    assert recipe.full("2", seed=0).tolist() == [1.0, 2.0]


def test_random_state_is_left_alone(caplog):
    state = torch.get_rng_state()
    made(Gpt2)
    assert torch.equal(torch.get_rng_state(), state) and not caplog.records
    with caplog.at_level(logging.WARNING):
        record(lambda: torch.manual_seed(3) and nn.Linear(2, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert caplog.messages == ["the factory seeds torch, which has no effect: the run's seed decides"]


def test_uninitialised_memory_is_zero():
    assert (made(lambda: nn.ParameterList([torch.empty(50)]))["0"] == 0).all()


def test_an_unknown_fqn_is_refused():
    with pytest.raises(InitialisationError) as caught:
        record(lambda: nn.Linear(2, 2))[1].full("wieght", seed=0)
    assert str(caught.value) == 'the factory makes no "wieght"; did you mean "weight"?'


def test_recipes_of_different_factories_have_different_fingerprints():
    def constant(value):
        module = nn.Linear(2, 2)
        module.register_buffer("constant", torch.tensor([value]))
        return module

    recipes = [record(f)[1] for f in (lambda: nn.Linear(2, 2), lambda: constant(1.0), lambda: constant(2.0))]
    assert len({recipe.fingerprint() for recipe in recipes}) == 3


def test_recipe_lists_its_tensors():
    recipe = record(Buffers)[1]
    assert isinstance(recipe, Recipe) and "plain" in recipe and "nothing" not in recipe
    assert recipe.attributes == {"plain"}
    spec = recipe.spec("tail")
    assert (spec.size, spec.stride, spec.offset, spec.dtype) == ((3,), (1,), 7, torch.int64)
