from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from composer3d_plugins.sharding.tensor_parallel.fused_projections import runs_of

from composer3d.propagation import shards
from composer3d.propagation.decision_cache import Memory
from composer3d.propagation.function_mode import Propagation
from composer3d.propagation.functions.view_shapes import Placed, Unplaceable, inside, regroup
from composer3d.propagation.shards import PropagationError, spec_of

B, S, H, E = 2, 3, 4, 6
DEGREE = 2


def share(whole, placed, rank):
    """ShardSpec a rank's share out of a whole tensor, part by part."""
    pieces = whole.split(placed.parts, placed.dim)
    return torch.cat([piece.chunk(DEGREE, placed.dim)[rank] for piece in pieces], placed.dim)


def shares(whole, parts=None, dim=-1, marks=None):
    """Return every rank's marked share."""
    placed = Placed(dim=dim % whole.ndim, parts=parts or (whole.shape[dim],))
    marks = marks or shards.Marks(DEGREE)
    return [marks.mark(share(whole, placed, rank), placed) for rank in range(DEGREE)]


def assert_alike(function, *wholes, parts=None, dim=-1, marks=None, memories=(None, None)):
    """Run a function on global tensors, and on every rank's shards: each result is the shard of the global one."""
    expected = function(*wholes)
    ranks = list(zip(*(shares(whole, parts, dim, marks) for whole in wholes), strict=True))
    for rank, mine in enumerate(ranks):
        following = Propagation(DEGREE, "test", memory=memories[rank])
        following._meeting._rank = rank
        with following:
            found = function(*mine)
        spec = spec_of(found)
        assert spec is not None and spec.shadow.shape == expected.shape
        torch.testing.assert_close(found, share(expected, spec.placed, rank), rtol=0, atol=1e-12)


def attention(x):
    q, k, v = x.split(x.shape[-1] // 3, dim=-1)
    q, k, v = (t.view(t.size(0), t.size(1), H, t.shape[-1] // H).transpose(1, 2) for t in (q, k, v))
    scores = (q @ k.transpose(-2, -1) / E**0.5).softmax(-1)
    return (scores @ v).transpose(1, 2).contiguous().view(x.shape[0], x.shape[1], -1)


def folded(x):
    return x.view(B, S, H, -1).transpose(1, 2).reshape(B * H, S, -1).view(B, H, S, E).mul(2.0)


def timm(x):
    q, k, v = x.reshape(B, S, 3, H, E).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, S, H * E)


def written(x):
    x = x * 1.0
    x[:, 1:] = 2.0
    return x


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


THIRDS = (H * E,) * 3
FOLLOWED = {
    "sizes": (lambda x: x.view(B, S, H, E).transpose(1, 2), None, (B, S, H * E)),
    "open size": (lambda x: x.view(B, S, H, -1), None, (B, S, H * E)),
    "open heads": (lambda x: x.view(B, S, -1, E), None, (B, S, H * E)),
    "unflatten": (lambda x: x.unflatten(-1, (H, E)).flatten(2), None, (B, S, H * E)),
    "flat": (lambda x: x.reshape(-1, H * E).view(B, S, H, E), None, (B, S, H * E)),
    "batched heads": (folded, None, (B, S, H * E)),
    "attention": (attention, THIRDS, (B, S, 3 * H * E)),
    "parts as a dim": (timm, THIRDS, (B, S, 3 * H * E)),
    "unequal parts": (lambda x: x[..., 8:12] * x[..., 12:], (8, 4, 4), (B, S, 16)),
    "narrow": (lambda x: x.narrow(-1, 8, 4), (8, 4, 4), (B, S, 16)),
    "glu": (F.glu, (8, 8), (B, S, 16)),
    "gate": (lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], (8, 8), (B, S, 16)),
    "repeated": (lambda x: x.view(B, S, 2, E).repeat_interleave(2, 2).view(B, S, -1), None, (B, S, 2 * E)),
    "tiled": (lambda x: x.repeat(1, 1, 2), None, (B, S, 8)),
    "expanded": (lambda x: x.view(B, S, 2, 1, E).expand(-1, -1, -1, 3, -1).reshape(B, S, 6, E), None, (B, S, 2 * E)),
    "joined": (lambda x: torch.cat([x, x.relu()], -1), None, (B, S, 8)),
    "einsum": (lambda x: torch.einsum("bshe,bthe->bhst", *[x.view(B, S, H, E)] * 2), None, (B, S, H * E)),
    "scaled": (lambda x: x * torch.arange(8.0, dtype=x.dtype), None, (B, S, 8)),
    "scaled parts": (lambda x: torch.arange(8.0, dtype=x.dtype) - x, (4, 2, 2), (B, S, 8)),
    "biased heads": (
        lambda x: x.view(B, S, H, E).transpose(1, 2) + torch.arange(1.0 * H, dtype=x.dtype).view(H, 1, 1),
        None,
        (B, S, H * E),
    ),
    "joined with whole": (
        lambda x: torch.cat([x.view(B, S, H, E), torch.arange(1.0 * H, dtype=x.dtype).expand(B, S, 2, H).mT], -1),
        None,
        (B, S, H * E),
    ),
    "grouped keys that are whole": (
        lambda x: F.scaled_dot_product_attention(
            x.view(B, S, H, E).transpose(1, 2), *[random(B, 2, S, E), random(B, 2, S, E)], enable_gqa=True
        ),
        None,
        (B, S, H * E),
    ),
    "like another": (lambda x: random(B, S, 1).type_as(x).expand_as(x) * x, None, (B, S, 8)),
    "written": (lambda x: written(x), None, (B, S, 8)),
    "channels convolved": (
        lambda x: F.conv1d(x.mT, random(8, 1, 3), random(8), padding=1, groups=8).mT,
        None,
        (B, S, 8),
    ),
    "parts convolved": (lambda x: F.conv1d(x.mT, random(8, 1, 2), groups=8).mT, (4, 4), (B, S, 8)),
    "new": (lambda x: x + x.new_ones(x.shape[0], x.shape[1], 1), None, (B, S, 8)),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_shares_of_results_are_results_of_shares(name):
    function, parts, shape = FOLLOWED[name]
    assert_alike(function, random(*shape), parts=parts)


class Counting(Memory):
    """Counts what is decided, and what is remembered."""

    def __init__(self):
        super().__init__()
        self.asked = self.known = 0

    def get(self, key):
        found = super().get(key)
        self.asked, self.known = self.asked + 1, self.known + (found is not None)
        return found


# What changes tensors in place, or computes with whole ones inside of lists, is decided each time.
DECIDED = {"joined with whole", "written", "tiled", "glu", "like another", "channels convolved", "parts convolved"}


@pytest.mark.parametrize("name", FOLLOWED)
def test_what_is_remembered_is_right_on_other_numbers_and_sizes(name):
    function, parts, shape = FOLLOWED[name]
    marks, memories = shards.Marks(DEGREE), [Counting() for _ in range(DEGREE)]
    x = random(*shape)
    for whole in (x, x + 1.0):
        before = [(memory.asked, memory.known) for memory in memories]
        assert_alike(function, whole, parts=parts, marks=marks, memories=memories)
    for memory, (asked, known) in zip(memories, before, strict=True):
        assert (memory.known - known == memory.asked - asked > 0) == (name not in DECIDED)
    if name in ("attention", "gate", "unequal parts", "open size"):
        size = (2 * B, S + 2) if name != "open size" else (B, S)
        for whole in (random(*size, shape[-1]), x):
            assert_alike(function, whole, parts=parts, marks=marks, memories=memories)


REFUSED = {
    "softmax": (lambda x: x.softmax(-1), "softmax on sharded features: it goes along the sharded dim"),
    "sum": (lambda x: x.sum(-1), "sum on sharded features: it mixes the features of all ranks"),
    "norm": (lambda x: F.layer_norm(x, (8,)), "layer_norm does not work on sharded features"),
    "weights": (lambda x: x @ torch.ones(8, 8), "matmul does not work on sharded features"),
    "unpaired": (lambda x: torch.einsum("...f,f->...f", x, torch.ones(8)), "einsum does not work on sharded features"),
    "writing into whole": (lambda x: torch.zeros(2, 3, 8).add_(x), "add_ on sharded features: it writes them into"),
    "writing a share": (lambda x: x.__setitem__((..., slice(0, 4)), 0.0), "__setitem__ on sharded features: it writes"),
    "writing by mask": (lambda x: x.__setitem__(x > 0, 0.0), "__setitem__ on sharded features: it writes"),
    "key-value heads": (
        lambda x: F.scaled_dot_product_attention(
            x.repeat_interleave(3, -1).mT[:, :, None], *[torch.ones(2, 3, 5, 3)] * 2, enable_gqa=True
        ),
        "scaled_dot_product_attention on sharded features: 3 heads that are not sharded meet 24 that are",
    ),
    "normalize": (
        lambda x: F.normalize(x.transpose(1, 2)),
        "normalize on sharded features: it goes along the sharded dim",
    ),
    "batch norm": (
        lambda x: F.batch_norm(x, None, None, training=True),
        "batch_norm on sharded features: it goes along",
    ),
    "strides": (lambda x: x.as_strided((2, 4), (8, 1)), "as_strided on sharded features: it goes along"),
    "element": (lambda x: x[..., 0], "__getitem__ on sharded features: it picks elements along the sharded dim"),
    "halves": (lambda x: x[..., :4], "__getitem__ on sharded features: 0:4 of 8 is no whole part"),
    "glu": (F.glu, "glu on sharded features: its halves are no parts"),
    "heads": (lambda x: x.view(2, 3, 1, 8).view(2, 3, 8, 1).view(2, 3, 2, 4).unbind(2), "unbind on sharded features"),
    "flip": (lambda x: x.flip(-1), "flip on sharded features: it goes along the sharded dim"),
    "convolution": (lambda x: F.conv1d(x.transpose(1, 2), torch.ones(8, 8, 1)), "conv1d on sharded features"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_ranks_is_refused(name):
    function, message = REFUSED[name]
    first, _ = shares(random(2, 3, 8).float())
    with pytest.raises(PropagationError) as caught, Propagation(DEGREE, "test"):
        function(first)
    assert str(caught.value).startswith(f'"test": {message}')


def test_code_sees_whole_sizes_inside_and_its_own_outside():
    first, _ = shares(random(2, 3, 8))
    with Propagation(DEGREE, "test"):
        assert first.shape == first.size() == (2, 3, 8) and first.numel() == 48 and first.size(-1) == 8
    assert first.shape == (2, 3, 4)


def test_heads_that_do_not_divide():
    with pytest.raises(Unplaceable, match=r"3 \(of \[2, 5, 3, 8\]\) does not divide by tp = 2"):
        regroup([2, 5, 24], Placed(dim=2, parts=(24,)), [2, 5, 3, 8], degree=2)


def test_a_slice_through_a_part_is_none():
    placed = Placed(dim=0, parts=(8, 4, 4))
    assert inside(placed, 0, 12, lambda size: size // 2) == (0, 6, (8, 4))
    assert inside(placed, 0, 10, lambda size: size // 2) is None


@pytest.mark.parametrize("parts", [[8, 4, 4], [6], [2, 2, 2, 2]])
def test_packed_rows_are_stored_as_one_run_a_rank(parts):
    rows = torch.arange(sum(parts))
    stored = torch.cat([rows[start : start + length] for start, length in runs_of(parts, 2)])
    placed = Placed(dim=0, parts=tuple(parts))
    for rank, run in enumerate(stored.chunk(2)):
        assert torch.equal(run, share(rows, placed, rank))
