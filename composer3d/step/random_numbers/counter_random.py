"""Random numbers as a function of a key, a row and a place in it: any rank computes any rows of a tensor.

Few numbers a row are made by mixing (key, row, place) with tensor operations, all rows in a dozen kernels; many by a
generator that is seeded for each row. Which of the two depends on a row's size alone, so that rows are the same in
whatever tensor they stand.

Shapes: N rows, of which each has K numbers, made of L = K or 2 K words.

Source of the mixing: SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d.mesh.held_shards import Shards

__all__ = ["Rows", "fill", "kept_weights", "row_seed"]

_BITS = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))
# Numbers a row above which seeding a generator costs less than mixing.
_MOST_MIXED = 1024
# Words of weights that are mixed at a time, of 8 bytes each.
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Samples of the global batch, one after the other.

    Args:
        first: The index of the first one.
        count: Their number.
    """

    first: int
    count: int


def row_seed(key: int, row: int) -> int:
    """Return a 63-bit seed of one row."""
    word = (key + (row + 1) * _STEP) & _BITS
    for shift, factor in _ROUNDS:
        word = ((word ^ (word >> shift)) * factor) & _BITS
    return word >> 1


def fill(
    out: Tensor, kind: str, parameters: tuple[float, ...], *, key: int, rows: Rows, shard: Shards | None = None
) -> Tensor:
    """Fill a tensor in place, whose dim 0 holds the rows in order, and return it.

    Args:
        out: Its dim 0 is a multiple of the number of rows; every row owns as many of its entries.
        kind: A method of tensors that fills them: `uniform_`, `normal_`, `random_`, `bernoulli_` and their like.
        parameters: Its arguments.
        key: Of the draw.
        rows: Which.
        shard: `out` is the shard of a tensor that holds the rows.

    Memory: 16 bytes a number where a row has at most 1024, else a copy where `out` is not contiguous; of a shard for
    the whole tensor.
    """
    import torch

    with torch.no_grad():
        shape = tuple(out.shape) if shard is None else shard.whole(tuple(out.shape))
        is_direct = out.is_contiguous() and (shard is None or not shard.applies(tuple(out.shape)))
        whole = out if is_direct else torch.empty(shape, dtype=out.dtype, device=out.device)
        flat_NK = whole.view(rows.count, -1)
        if flat_NK.shape[1] <= _MOST_MIXED and kind in _MIXED:
            flat_NK.copy_(_MIXED[kind](_words(flat_NK, kind, key, rows), flat_NK.dtype, *parameters))
        else:
            generator = torch.Generator(device=out.device)
            for place in range(rows.count):
                generator.manual_seed(row_seed(key, rows.first + place))
                getattr(flat_NK[place], kind)(*parameters, generator=generator)
        if not is_direct:
            out.copy_(whole if shard is None else shard.local_of(whole, tuple(out.shape)))
    return out


def kept_weights(places: Sequence[Tensor], shape: Sequence[int], keep: float, *, key: int, rows: Rows) -> Tensor:
    """Return which weights of attention a dropout keeps, bool of one size a dim; every weight has a number of its own.

    Numbers of a matrix depend on its row and column alone, whatever their number: ranks draw those of their heads and
    queries, and keys that are padding change none. A weight takes half a word.

    Args:
        places: Of each dim [samples, heads, queries, keys], of any number of dims of heads, where this tensor's entries
            lie in the whole one, int64; keys are the first ones.
        shape: Of the whole tensor; its first dim is a multiple of the number of rows.
        keep: Probability.
        key: Of the draw.
        rows: Which.

    Memory: 1 byte a weight of this tensor, and some blocks of 8 MiB.
    """
    import torch

    device, size, num_columns = places[0].device, shape[0] // rows.count, len(places[-1])
    matrices = places[0] % size
    for place, whole in zip(places[1:-2], shape[1:-2], strict=True):
        matrices = matrices[..., None] * whole + place
    seeds = (places[0] // size + rows.first + 1).mul_(_signed(_STEP)).add_(_signed(key))
    seeds = _mixed(seeds).view(-1, *[1] * (matrices.ndim - 1))
    seeds = _mixed(seeds + (matrices + 1).mul_(_signed(_STEP)))
    seeds_R = _mixed(seeds[..., None] + (places[-2] + 1).mul_(_signed(_STEP))).view(-1)
    steps = torch.arange(1, (num_columns + 1) // 2 + 1, device=device).mul_(_signed(_STEP))
    below = min(round(keep * (1 << 32)), (1 << 32) - 1) - (1 << 31)
    out = torch.empty([len(place) for place in places], dtype=torch.bool, device=device)
    flat_RT, at_once = out.view(-1, num_columns), max(1, _BLOCK // max(1, len(steps)))
    for start in range(0, len(seeds_R), at_once):
        words = _mixed(seeds_R[start : start + at_once, None] + steps)
        flat_RT[start : start + at_once] = words.view(torch.int32)[:, :num_columns] < below
    return out


def _signed(word: int) -> int:
    word &= _BITS
    return word - (1 << 64) if word >> 63 else word


def _mixed(words: Tensor) -> Tensor:
    """Mix 64-bit words in place; integers wrap, and shifts of negative ones are made logical."""
    for shift, factor in _ROUNDS:
        words.bitwise_xor_((words >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(_signed(factor))
    return words


def _words(flat_NK: Tensor, kind: str, key: int, rows: Rows) -> Tensor:
    """Return random words_NL, of each row as many as its distribution takes."""
    import torch

    number, device = flat_NK.shape[1] * (2 if kind == "normal_" else 1), flat_NK.device
    seeds_N = torch.arange(rows.first + 1, rows.first + rows.count + 1, device=device)
    seeds_N = _mixed(seeds_N.mul_(_signed(_STEP)).add_(_signed(key)))
    places_L = torch.arange(1, number + 1, device=device).mul_(_signed(_STEP))
    return _mixed(seeds_N[:, None] + places_L)


def _unit(words_NL: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers in [0, 1) with as many digits as a dtype has."""
    import torch

    digits = 1 - round(math.log2(torch.finfo(dtype).eps))
    return (words_NL >> (64 - digits)).bitwise_and_((1 << digits) - 1).to(dtype).mul_(2.0**-digits)


def _uniform(words_NK: Tensor, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Tensor:
    return _unit(words_NK, dtype).mul_(high - low).add_(low)


def _normal(words_NL: Tensor, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
    import torch

    radius_NK, angle_NK = _unit(words_NL, torch.float64).chunk(2, dim=1)
    return (-2.0 * torch.log1p(-radius_NK)).sqrt_().mul_((2.0 * math.pi * angle_NK).cos_()).mul_(std).add_(mean)


def _integers(words_NK: Tensor, dtype: torch.dtype, low: int, high: int) -> Tensor:
    import torch

    return (_unit(words_NK, torch.float64) * (high - low)).floor_().to(torch.int64).add_(low)


def _bernoulli(words_NK: Tensor, dtype: torch.dtype, p: float) -> Tensor:
    import torch

    return _unit(words_NK, torch.float64) < p


_MIXED: dict[str, Any] = {"uniform_": _uniform, "normal_": _normal, "random_": _integers, "bernoulli_": _bernoulli}
