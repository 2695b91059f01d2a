"""Lists that a forward calls by the values of tensors, which are no blocks, and all others, which are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.models import write_manifest
from torch import nn
from torch.nn import functional as F

from composer3d import chosen_by_values
from composer3d.composition.blocks import find_blocks, left_out
from composer3d.composition.preparing import prepare
from composer3d.manifest import load_manifest


def find_line(text):
    """Return the place of the first line of this file that has a text."""
    file = Path(__file__)
    number = next(number for number, line in enumerate(file.read_text().splitlines(), 1) if text in line)
    return f"{file.name}:{number}"


class Layers(nn.Module):
    """A list of equal layers, an activation's threshold, and a router."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.router, self.every, self.layerdrop = nn.Linear(4, 3), 2, 0.1


class AsksShapes(Layers):
    def forward(self, x, mask=None, start=0, use_cache=False):
        for i, layer in enumerate(self.layers):
            if mask is not None and x.shape[0] > 1 and x.numel() > i:
                x = layer(x)
            elif self.training or i % self.every == 0 or start > 0 or not use_cache or x.size(-1) == len(x):
                x = layer(x) + 1
        return x


class AsksOtherThings(Layers):
    """Tests values, and calls each layer whatever they are; or drops by a draw, which no batch decides."""

    def forward(self, x, masks=(), kinds=()):
        for layer, mask, kind in zip(self.layers, masks, kinds, strict=False):
            if mask.all():
                mask = None
            x = layer(x) if mask is None else layer(x * mask)
            if x.isnan().any():
                raise ValueError("nan")
            if torch.rand([]) < self.layerdrop and self.training:
                continue
            if kind == "wide" and isinstance(layer, nn.Linear):
                x = layer(x)
        return x


class AsksMasks(Layers):
    def forward(self, x):
        for i, layer in enumerate(self.layers):
            mask = (x[:, 0] > 0) == bool(i)
            if mask.any():
                x[mask] = layer(x[mask])
        return x


class ReadsIndex(Layers):
    def forward(this, x):
        best = this.router(x).argmax(-1)
        return torch.stack([this.layers[int(best[row])](x[row]) for row in range(x.shape[0])])


class AsksChosen(Layers):
    def forward(self, x):
        chosen = self.router(x).topk(2).indices
        for i, layer in enumerate(self.layers):
            rows, _ = torch.where(chosen == i)
            if rows.numel() == 0:
                continue
            x = x.index_add(0, rows, layer(x[rows]))
        return x


class AsksLengths(Layers):
    def forward(self, x):
        weights = F.softmax(self.router(x), dim=-1)
        for i in range(len(self.layers)):
            rows = (weights[..., i] > 0.3).nonzero().flatten()
            if len(rows):
                layer = self.layers[i]
                x[rows] = layer(x[rows])
        return x


class LoopsOverHits(Layers):
    def forward(self, x):
        mask = F.one_hot(self.router(x).argmax(-1), num_classes=3)
        hits = torch.greater(mask.sum(dim=0), 0).nonzero()
        for hit in hits:
            layer = self.layers[hit]
            x = layer(x)
        return x


class StopsEarly(Layers):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
            if x.abs().max() < 1:
                break
        return x


class Comprehends(Layers):
    def forward(self, x):
        rows = x.argmax(-1)
        return sum(layer(x) for i, layer in enumerate(self.layers) if (rows == i).any())


@pytest.mark.parametrize("cls", [AsksShapes, AsksOtherThings])
def test_lists_that_every_rank_calls_are_blocks(cls):
    assert find_blocks(cls()) == "layers.*"
    assert left_out(cls()) == []


ROUTED = [
    (AsksMasks, "if mask.any():"),
    (ReadsIndex, "return torch.stack([this.layers["),
    (AsksChosen, "if rows.numel() == 0:"),
    (AsksLengths, "if len(rows):"),
    (LoopsOverHits, "for hit in hits:"),
    (StopsEarly, "if x.abs().max() < 1:"),
    (Comprehends, "return sum(layer(x)"),
]


@pytest.mark.parametrize(("cls", "line"), ROUTED)
def test_lists_that_values_choose_from_are_none_and_the_line_is_named(cls, line):
    assert find_blocks(cls()) is None
    (routed,) = left_out(cls())
    assert (routed.fqn, routed.place) == ("layers", find_line(line))


class Inherits(AsksMasks):
    """A class whose forward is its base's."""


class Overrides(AsksMasks):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_the_forward_of_a_base_counts_unless_it_is_overridden():
    assert find_blocks(Inherits()) is None
    assert find_blocks(Overrides()) == "layers.*"


def warnings(cls, text):
    path = write_manifest(f"[sharding.fsdp2]\n{text}")
    prepared = prepare(cls, load_manifest(path), world_size=2, rank=0, device=torch.device("cpu"), purpose="check")
    return [problem for problem in prepared.problems if problem.severity == "warning"]


def test_the_list_that_is_left_out_is_a_warning_unless_blocks_are_stated():
    (warning,) = warnings(AsksMasks, "")
    assert warning.message == (
        f"{find_line('if mask.any():')} calls entries of layers by the values of a tensor, so that a rank may leave "
        "out what another calls: they are not taken for the model's blocks"
    )
    assert warning.hint == '[model] blocks = "layers.*" takes them, where every rank calls all of them'
    assert warnings(AsksMasks, '[model]\nblocks = "layers.*"\n') == []
    assert warnings(AsksShapes, "") == []


class Matrices(nn.Module):
    """Matrices in a list, of which a subclass multiplies rows with some."""

    def __init__(self):
        super().__init__()
        self.held = nn.ParameterList(torch.ones(4, 4) for _ in range(3))
        self.router = nn.Linear(4, 3)


class OfChosenRows(Matrices):
    def forward(self, x):
        best, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number, matrix in enumerate(self.held):
            rows = (best == number).nonzero().squeeze(-1)
            out[rows] = F.linear(x[rows], matrix)
        return out


class ByMask(Matrices):
    def forward(self, x):
        best, out = self.router(x).argmax(-1), torch.zeros_like(x)
        for number in range(3):
            out[best == number] = (x[best == number] @ self.held[number]).relu()
        return out


class OfAllRows(Matrices):
    def forward(self, x):
        weights, rows = self.router(x), (x > 0).nonzero()
        for number, matrix in enumerate(self.held):
            x = torch.mm(x, matrix) * weights[:, number, None]
        return x.sum() + x[rows[0, 0]] @ x[0]


class AddedToChosenRows(Matrices):
    def forward(self, x):
        rows = (x > 0).nonzero()[:, 0]
        for matrix in self.held:
            x = x + x[rows].sum() * matrix.sum()
        return x


@pytest.mark.parametrize(
    ("block", "is_chosen"), [(OfChosenRows, True), (ByMask, True), (OfAllRows, False), (AddedToChosenRows, False)]
)
def test_matrices_that_a_loop_multiplies_with_chosen_rows_are_experts(block, is_chosen):
    model = nn.ModuleDict({"block": block()})
    assert chosen_by_values(model, "block.held") is is_chosen
