"""Values on fake tensors, of places that were chosen; and leaving the modes and devices that a caller has set."""

from __future__ import annotations

import pytest
import torch

from composer3d import torch_compat
from composer3d.torch_compat.ambient_modes import outside_modes
from composer3d.torch_compat.fakes import value_errors
from composer3d.torch_compat.fakes.chosen_values import ChosenValues, values_of


def test_places_are_chosen_as_often_as_each_other():
    with torch_compat.fake_tensors():
        chosen = torch.randn(6, 4).topk(2, -1).indices
        assert chosen.tolist() == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3]]
        assert torch.bincount(chosen.view(-1)).tolist() == [3, 3, 3, 3]
        assert chosen.cpu().unique().tolist() == [0, 1, 2, 3]
        assert [x.tolist() for x in torch.where(chosen == 3)] == [[1, 3, 5], [1, 1, 1]]
        assert torch.randn(6, 4)[(chosen == 3).any(-1)].shape == (3, 4)
        assert (chosen == 3).any() and not (chosen == 4).any()
        assert torch.randn(4, 3).argmax(0).tolist() == [0, 1, 2]
        assert torch.randn(2, 3).sort(0, descending=True).indices.tolist() == [[0, 0, 0], [1, 1, 1]]
        assert torch.randn(2, 3).argmax().tolist() == 0
        assert torch.randn(3, 2).max(1).indices.tolist() == [0, 1, 0]
        order = chosen.view(-1).argsort(stable=True)
        assert chosen.view(-1)[order].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_values_are_on_the_cpu_and_shared_by_views():
    memory = torch_compat.ResultMemory()
    with torch_compat.fake_tensors(memory):
        assert isinstance(memory.chosen, ChosenValues) and not memory.chosen.are_any
        assert values_of(torch.arange(3)) is None  # nothing was chosen yet
        far = torch.randn(2, 4, device="cuda").topk(2, -1).indices
        assert far.device.type == "cuda" and values_of(far).device.type == "cpu"
        chosen = torch.randn(2, 4).topk(2, -1).indices
        assert memory.chosen.are_any and not memory.chosen.have_decided
        chosen.view(-1)[0] = 3
        assert values_of(chosen).tolist() == [[3, 1], [2, 3]]
        assert values_of(torch.empty_like(chosen)) is None and values_of(torch.randn(2)) is None
        assert int(chosen.sum()) == 9 and memory.chosen.have_decided


def test_modes_and_the_default_device_are_left_and_come_back():
    with torch.device("meta"), torch_compat.fake_tensors():
        with outside_modes():
            assert torch.ones(2).sum().item() == 2.0
        assert torch.ones(2).device.type == "meta"
    assert torch.ones(2).device.type == "cpu"


def test_values_that_are_overwritten_with_unknown_ones_are_forgotten():
    with torch_compat.fake_tensors():
        chosen, unknown = torch.randn(6, 4).topk(2, -1).indices, torch.randn(6).gt(0).long()
        first, copied = chosen[:, 0], chosen.clone()
        assert first.sum().item() == 6
        first.copy_(unknown)
        with pytest.raises(value_errors()):
            chosen.unique()
        with pytest.raises(value_errors()):
            first.unique()
        copied[0] = 3
        assert copied.unique().tolist() == [0, 1, 2, 3] and copied[0].tolist() == [3, 3]
