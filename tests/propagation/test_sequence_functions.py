"""Functions of shards beside whole tensors, and functions that read along a dim, are what they are of everything."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.sequence_threads import run_sharded
from torch import nn

from composer3d import propagation, torch_compat
from composer3d.verification.arithmetic import in_double_precision

LENGTH, DIM = 8, 4

FUNCTIONS = {
    "gather of a table": lambda g: g.new_ones(2, LENGTH, DIM).cumsum(1).cumsum(2).gather(2, g.argmax(-1, keepdim=True)),
    "gather of a longer table": lambda g: torch.arange(48.0).view(2, 12, 2).flip(1).gather(2, g[..., :2].argsort(-1)),
    "gather of a flattened table": lambda g: (
        F.one_hot(g.flatten(0, 1).argmax(-1), DIM).cumsum(0).gather(1, g.flatten(0, 1).argmax(-1)[:, None]).view(2, -1)
    ),
    "take along": lambda g: torch.take_along_dim(torch.arange(64.0).view(2, 8, 4), g.argmax(-1, keepdim=True), 2),
    "scatter of a part": lambda g: g.scatter(2, torch.zeros(2, 1, 1, dtype=torch.int64), 5.0),
    "scatter of a table": lambda g: g.scatter(2, torch.arange(16).view(2, 8, 1) % 4, g.new_ones(2, 8, 1).cumsum(1)),
    "scatter into a table": lambda g: torch.zeros(2, 8, 4).scatter_add(
        2, g.argsort(-1), torch.arange(64.0).view(2, 8, 4)
    ),
    "index of both": lambda g: torch.arange(64.0).view(16, 4)[torch.arange(16), g.flatten(0, 1).argmax(-1)].view(2, -1),
    "searchsorted": lambda g: torch.searchsorted(g.sigmoid().sum(-1).cumsum(1), g[..., 0].exp().contiguous()),
    "searchsorted of a row each": lambda g: torch.searchsorted(
        torch.arange(64.0).view(2, 8, 4), 9 * g[..., :2].exp().contiguous()
    ),
    "isin": lambda g: torch.isin(g.argmax(-1), g.argmin(-1)),
    "take": lambda g: g.take((g.argmax(-1, keepdim=True) * 7) % 64),
    "msort": lambda g: g.flatten(0, 1).msort().view(2, 8, 4),
    "special softmax": lambda g: torch.special.softmax(g, 1),
    "pinv": lambda g: torch.linalg.pinv(g).mT,
    "select_scatter": lambda g: g.select_scatter(g[:, 0] * 2, 1, 3),
    "slice_scatter": lambda g: g.slice_scatter(g[:, 2:4] * 2, 1, 0, 2),
    "fill_diagonal": lambda g: g[0].clone().fill_diagonal_(3.0)[None].expand(2, -1, -1),
    "hsplit": lambda g: torch.cat([part.flip(1) for part in g.hsplit(2)], 1),
}


class Model(nn.Module):
    """Multiplies activations by what a function makes of them."""

    def __init__(self, function):
        super().__init__()
        self.embedding, self.function = nn.Embedding(11, DIM), function

    def forward(self, tokens):
        g_BSD = self.embedding(tokens)
        found = self.function(g_BSD).to(g_BSD.dtype)
        return g_BSD * (found.mean(-1, keepdim=True) if found.ndim == 3 else found[..., None])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_shards_is_that_of_everything(name):
    torch.manual_seed(0)
    model = Model(FUNCTIONS[name]).double()
    tokens = torch.randint(0, 11, (2, LENGTH))
    weights = torch.randn(2, LENGTH, DIM, dtype=torch.float64)
    expected = (model(tokens) * weights).sum()
    expected.backward()
    wanted, model.embedding.weight.grad = model.embedding.weight.grad, None
    found, _ = run_sharded(model, tokens, lambda output, index: (output * weights[:, index]).sum())
    found.backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(model.embedding.weight.grad, wanted, rtol=1e-12, atol=1e-12)


class Doubled(nn.Module):
    """Two rows of each position for experts, of which as many as there are positions are concatenated."""

    def __init__(self):
        super().__init__()
        self.table, self.experts = nn.Embedding(LENGTH, DIM), Experts()

    def forward(self, tokens):
        rows_RD = self.table(tokens).flatten(0, 1)[torch.arange(2 * LENGTH) // 2]
        return self.experts(rows_RD).view(1, LENGTH, 2, DIM).sum(2)


class Experts(nn.Module):
    rows = 0

    def forward(self, x_RD):
        first_RD = torch.cat([x_RD[:3], x_RD[3:LENGTH] * 2])
        with torch_compat.without_torch_functions():
            Experts.rows = first_RD.shape[0]
        return torch.cat([first_RD, x_RD[LENGTH:]])


def test_rowwise_modules_that_are_given_all_positions_shard_none_inside():
    tokens, model = torch.arange(LENGTH)[None], Doubled().double()
    expected = model(tokens).sum()
    found, _ = run_sharded(model, tokens, lambda out, index: out.sum() * len(index) / out.shape[1], ["experts"])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    assert Experts.rows == LENGTH


def test_a_dry_run_of_shards_reads_named_dtypes_as_the_verification_around_it():
    marks = propagation.Marks(2, frozenset({propagation.SEQUENCE}))
    x = torch.empty(4, DIM, dtype=torch.float64, device="meta")
    share, whole = marks.mark(x, propagation.Placed(dim=0, parts=(LENGTH,))), torch.empty_like(x)
    with in_double_precision(), propagation.Propagation(2, "router"):
        assert [share.float().dtype, whole.float().dtype] == [torch.float64, torch.float64]
