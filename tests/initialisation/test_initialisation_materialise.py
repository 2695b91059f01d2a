from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from composer3d.errors import InitialisationError, TransformError
from composer3d.initialisation import fingerprints, first_difference, materialise, record, restore_ties, seed_of, ties

DIM = 6


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, DIM)
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(3))
        self.head = nn.Linear(DIM, 50, bias=False)
        self.head.weight = self.embedding.weight


class Buffers(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tril(torch.ones(8, 8, dtype=torch.bool)), persistent=False)
        self.register_buffer("tail", torch.arange(10)[7:])
        self.register_buffer("spread", torch.ones(1).expand(4))
        self.register_buffer("rope", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.plain = torch.arange(4) * 2


def test_materialise_makes_one_tensor_at_a_time():
    module, recipe = record(Tied)
    seen, alive = [], []

    def load(fqn, tensor):
        assert not any(reference() is not None for reference in alive)
        alive.append(weakref.ref(tensor.untyped_storage()))
        seen.append(fqn)
        return tensor

    assert materialise(module, recipe, seed=2, device="cpu", load=load) == ()
    assert module.head.weight is module.embedding.weight
    assert seen == [name for name, _ in module.named_parameters()]
    for name, parameter in module.named_parameters():
        assert isinstance(parameter, nn.Parameter) and torch.equal(parameter, recipe.full(name, seed=2))


def test_materialise_gives_buffers_and_attributes_their_values():
    module, recipe = record(Buffers)
    materialise(module, recipe, seed=0, device="cpu")
    eager = Buffers()
    for name, buffer in module.named_buffers():
        assert torch.equal(buffer, getattr(eager, name)), name
    assert torch.equal(module.plain, eager.plain)


def test_materialise_places_what_load_returns():
    module, recipe = record(lambda: nn.Linear(3, 3))
    materialise(module, recipe, seed=0, device="cpu", load=lambda fqn, tensor: torch.full_like(tensor, len(fqn)))
    assert (module.weight == 6).all() and (module.bias == 4).all()


def test_materialise_a_part_under_other_names():
    model, recipe = record(Tied)
    part = model.layers[1]
    materialise(part, recipe, seed=0, device="cpu", fqns_of=lambda name: f"layers.1.{name}")
    assert torch.equal(part.weight, recipe.full("layers.1.weight", seed=0))
    assert model.layers[0].weight.is_meta


def test_what_a_transform_added_is_reported_or_kept():
    module, recipe = record(lambda: nn.Linear(3, 3))
    module.adapter = nn.Parameter(torch.empty(2, device="meta"))
    module.register_buffer("ready", torch.arange(3))
    assert materialise(module, recipe, seed=0, device="cpu") == ("adapter",)
    assert module.adapter.isnan().all() and module.ready.tolist() == [0, 1, 2]


def test_materialise_refuses_a_tensor_of_another_shape():
    module, recipe = record(lambda: nn.Linear(3, 3))
    module.weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    with pytest.raises(InitialisationError) as caught:
        materialise(module, recipe, seed=0, device="cpu")
    assert str(caught.value) == "a tensor of shape (3, 3) cannot be placed into one of shape (2, 3)"


def test_ties_are_found_and_restored():
    model = Tied()
    groups = ties(model)
    assert groups == (("embedding.weight", "head.weight"),)
    assert record(Tied)[1].ties == groups
    assert restore_ties(model, groups) == ()
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    assert restore_ties(model, groups) == ("head.weight",)
    assert model.head.weight is model.embedding.weight
    assert restore_ties(model.layers, groups) == ()


def test_buffers_are_tied_too():
    model = nn.ModuleList([nn.Module(), nn.Module()])
    mask = torch.ones(2)
    for module in model:
        module.register_buffer("mask", mask)
    assert ties(model) == (("0.mask", "1.mask"),)
    model[1].mask = mask.clone()
    assert restore_ties(model, [("0.mask", "1.mask")]) == ("1.mask",)
    assert model[1].mask is mask and dict(model.named_buffers(remove_duplicate=False)).keys() == {"0.mask", "1.mask"}


def test_ties_of_different_shapes_are_refused():
    model = Tied()
    groups = ties(model)
    model.head.weight = nn.Parameter(torch.empty(25, DIM))
    with pytest.raises(TransformError) as caught:
        restore_ties(model, groups)
    assert str(caught.value) == (
        '"embedding.weight" and "head.weight" are one tensor, '
        "but are now placed as shape (50, 6) and as shape (25, 6); plan both alike"
    )


def test_seeds_are_the_same_for_ever():
    assert seed_of(0, "layers.0.weight", 1) == 3386682681207095014
    seeds = {seed_of("a", "bc"), seed_of("ab", "c"), seed_of("abc"), seed_of("a", "b", "c"), seed_of()}
    assert len(seeds) == 5 and all(0 <= seed < 2**63 for seed in seeds)


def test_fingerprints_see_every_bit():
    module = nn.Module()
    values = [torch.randn(33), torch.randn(5, 5).bfloat16(), torch.arange(7) > 3, torch.randn(3, dtype=torch.complex64)]
    for index, value in enumerate(values):
        module.register_buffer(f"b{index}", value)
    before = fingerprints(module)
    assert fingerprints(copy.deepcopy(module)) == before and len(set(before.values())) == 4
    for index, value in enumerate(values):
        original = value.clone()
        swapped = value.flatten().flip(0).reshape(value.shape)
        changes = [value.logical_not() if value.dtype == torch.bool else -value, swapped]
        for change in changes:
            value.copy_(change)
            after = fingerprints(module)
            assert [name for name in before if after[name] != before[name]] == [f"b{index}"]
            value.copy_(original)
    assert fingerprints(module) == before


def test_fingerprints_of_large_tensors_depend_on_position():
    module = nn.Module()
    module.register_buffer("b", torch.zeros(5_000_001))
    digests = set()
    for place in (0, 1, 2_097_152, 4_999_999, 5_000_000):
        module.b.zero_()[place] = 1
        digests.add(fingerprints(module)["b"])
    assert len(digests) == 5


def test_first_difference():
    assert first_difference([{"a": 1, "b": 2}] * 3) is None
    assert first_difference([{"a": 1, "b": 2}, {"a": 1, "b": 3}, {"a": 1, "b": 2}]) == ("b", [1])
    assert first_difference([{"a": 1}, {"a": 1, "b": 2}]) == ("b", [1])
    assert first_difference([{"a": 1}, {}, {"a": 2}]) == ("a", [1, 2])
