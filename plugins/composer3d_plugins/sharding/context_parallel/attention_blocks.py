"""Blocks of one rank's queries and one rank's keys, and the part of each that is visible.

Blocks follow from positions alone, so that all ranks agree on messages without communicating. A mask with values is
read once per attention: blocks that it hides completely are skipped, and those in which it hides nothing are computed
without it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from composer3d import torch_compat
from composer3d_plugins.sharding.context_parallel.attention_pattern import Kind, Pattern
from composer3d_plugins.sharding.context_parallel.sequence_positions import Positions, Run

__all__ = ["Block", "Hops", "blocks_between", "bias_of", "hops", "seen_blocks"]

_MAX_TILE = {"cpu": 1024}
_MAX_TILE_ELSEWHERE = 4096
# Where a causal kernel computes what it hides, of up to so many keys, and what is added to scores costs little: rows of
# a block whose last keys are its own, and the most scores of one.
_ENDING_ROWS = {"cpu": 64}
_ENDING_RUN = 512
_ENDING_SCORES = 1 << 18


@dataclass(frozen=True)
class Block:
    """A run of queries and a run of keys.

    Args:
        queries: Positions of the queries; of the first of them where `kind` needs no positions.
        keys: Positions of the keys, likewise.
        rows: Where the queries lie in the rank's shard.
        columns: Where the keys lie in the shard that they come in.
        kind: What is visible by the pattern alone.
        is_masked: Whether a mask with values says more.
    """

    queries: Run
    keys: Run
    rows: Run
    columns: Run
    kind: Kind
    is_masked: bool = False


@functools.lru_cache(maxsize=1024)
def blocks_between(
    queries: tuple[Run, ...], keys: tuple[Run, ...], pattern: Pattern, is_masked: bool, device_type: str
) -> tuple[Block, ...]:
    """Return the blocks of the queries that one rank holds and the keys that one rank holds.

    A run of keys that a causal run of queries lies in is divided there, so that only the diagonal is masked, by the
    kernel itself. What needs a mask is divided into tiles, so that the mask of a tile is small and tiles out of reach
    are left out; what needs none is joined into as few blocks as there can be.

    On CPU a short causal run is divided into rows of which each is one block, with all that it sees.
    """
    found: list[Block] = []
    max_tile = _MAX_TILE.get(device_type, _MAX_TILE_ELSEWHERE)
    ending = _ENDING_ROWS.get(device_type, 0) if pattern == Pattern.causal() and not is_masked else 0
    for q_run, rows in (piece for placed in _placed(queries) for piece in _short(*placed, ending)):
        for k_run, columns in _placed(keys):
            for k_piece, piece in _divided(k_run, columns, q_run if pattern.ahead == 0 else None):
                block = Block(q_run, k_piece, rows, piece, pattern.kind(q_run, k_piece), is_masked)
                found += _tiled(block, pattern, max_tile)
    blocks = _joined(found)
    return tuple(_ending(blocks) if ending else blocks)


def _short(run: Run, rows: Run, least: int) -> list[tuple[Run, Run]]:
    """Divide a run of queries into four, of no fewer rows than so many."""
    size = run[1] - run[0]
    if not least or size > _ENDING_RUN:
        return [(run, rows)]
    return _pieces(run, rows, max(least, -(-size // 4)))


def _ending(blocks: list[Block]) -> list[Block]:
    """Join causal blocks with what their queries see right before them."""
    found: list[Block] = []
    for block in blocks:
        before = found[-1] if found and found[-1].kind is Kind.ALL and found[-1].rows == block.rows else None
        columns = block.columns if before is None else (before.columns[0], block.columns[1])
        num_scores = (block.rows[1] - block.rows[0]) * (columns[1] - columns[0])
        is_adjacent = before is not None and before.columns[1] == block.columns[0]
        if block.kind is Kind.CAUSAL and is_adjacent and num_scores <= _ENDING_SCORES:
            found[-1] = replace(block, columns=columns, kind=Kind.ENDING)
        else:
            found.append(block)
    return found


def _placed(runs: Sequence[Run]) -> Iterator[tuple[Run, Run]]:
    at = 0
    for start, end in runs:
        yield (start, end), (at, at + end - start)
        at += end - start


def _divided(run: Run, columns: Run, at: Run | None) -> list[tuple[Run, Run]]:
    """Divide keys at the first and after the last of a run of queries."""
    inner = [] if at is None else sorted({bound for bound in at if run[0] < bound < run[1]})
    bounds = [run[0], *inner, run[1]]
    shift = columns[0] - run[0]
    return [((a, b), (a + shift, b + shift)) for a, b in zip(bounds, bounds[1:], strict=False)]


def _tiled(block: Block, pattern: Pattern, max_tile: int) -> list[Block]:
    if block.kind is Kind.NOTHING:
        return []
    if block.kind is not Kind.PART and not block.is_masked:
        return [block]
    size = min(max(pattern.window or max_tile, 128), max_tile)
    tiles = []
    for q_run, rows in _pieces(block.queries, block.rows, size):
        for k_run, columns in _pieces(block.keys, block.columns, size):
            kind = pattern.kind(q_run, k_run)
            if kind is not Kind.NOTHING:
                tiles.append(Block(q_run, k_run, rows, columns, kind, block.is_masked))
    return tiles


def _pieces(run: Run, place: Run, size: int) -> list[tuple[Run, Run]]:
    starts = range(0, run[1] - run[0], size)
    ends = [min(start + size, run[1] - run[0]) for start in starts]
    return [((run[0] + a, run[0] + b), (place[0] + a, place[0] + b)) for a, b in zip(starts, ends, strict=True)]


def _joined(blocks: list[Block]) -> list[Block]:
    """Join blocks without masks whose rows are the same and columns adjacent, then the other way round."""
    plain = [block for block in blocks if block.kind is Kind.ALL and not block.is_masked]
    others = [block for block in blocks if block.kind is not Kind.ALL or block.is_masked]
    wide: list[Block] = []
    for block in sorted(plain, key=lambda block: (block.rows, block.columns)):
        if wide and wide[-1].rows == block.rows and wide[-1].columns[1] == block.columns[0]:
            wide[-1] = replace(wide[-1], columns=(wide[-1].columns[0], block.columns[1]))
        else:
            wide.append(block)
    high: list[Block] = []
    for block in sorted(wide, key=lambda block: (block.columns, block.rows)):
        if high and high[-1].columns == block.columns and high[-1].rows[1] == block.rows[0]:
            high[-1] = replace(high[-1], rows=(high[-1].rows[0], block.rows[1]))
        else:
            high.append(block)
    return sorted([*high, *others], key=lambda block: (block.rows, block.columns))


@dataclass(frozen=True)
class Hops:
    """Distances that keys and values travel around the ring: ranks onwards, and ranks back."""

    onwards: int
    back: int

    @property
    def total(self) -> int:
        """Messages of keys and values that each rank sends in a forward."""
        return self.onwards + self.back


@functools.lru_cache(maxsize=256)
def hops(rows: Positions, columns: Positions, pattern: Pattern) -> Hops:
    """Return the fewest hops after which every rank has had the keys that its queries see.

    Without a window that is degree - 1 onwards. The same on all ranks, whichever of them needs what.
    """
    degree = rows.degree
    needed = sorted(
        {
            (rank - source) % degree
            for rank in range(degree)
            for source in range(degree)
            if rank != source and _sees(rows.runs[rank], columns.runs[source], pattern)
        }
    )
    if not needed:
        return Hops(0, 0)
    best = Hops(needed[-1], 0)
    for onwards, beyond in zip([0, *needed], needed, strict=False):
        if onwards + degree - beyond < best.total:
            best = Hops(onwards, degree - beyond)
    return best


def _sees(queries: tuple[Run, ...], keys: tuple[Run, ...], pattern: Pattern) -> bool:
    return any(pattern.kind(q_run, k_run) is not Kind.NOTHING for q_run in queries for k_run in keys)


def seen_blocks(blocks: Sequence[Block], mask: torch.Tensor | None, *, has_whole_rows: bool) -> list[Block]:
    """Return the blocks of which a mask leaves anything to see, those that it leaves whole marked as without a mask.

    All blocks are looked at together, and what was found is read once: on CUDA reading waits for the device. Masks
    without values, of fake tensors, are taken to hide something and not everything of each block.
    """
    if mask is None or not blocks or torch_compat.active_fake_mode() is not None or mask.is_meta:
        return list(blocks)
    found = []
    for block in blocks:
        part = _part(mask, block, has_whole_rows=has_whole_rows)
        is_bool = mask.dtype == torch.bool
        found += [part.any() if is_bool else (part > float("-inf")).any(), part.all() if is_bool else (part == 0).all()]
    values = torch.stack(found).tolist()
    return [
        replace(block, is_masked=not hides_nothing)
        for block, shows, hides_nothing in zip(blocks, values[::2], values[1::2], strict=True)
        if shows
    ]


def bias_of(
    block: Block, mask: torch.Tensor | None, pattern: Pattern, like: torch.Tensor, *, has_whole_rows: bool
) -> torch.Tensor | None:
    """Return what is added to the scores of a block, -inf where nothing is visible; None if the kernel needs nothing.

    Args:
        block: Positions of queries and keys that attend in one kernel.
        mask: bool, True where a key is visible, or additive; [B|1, H|1, rows|1, T|1].
        pattern: Visibility by position.
        like: Queries, whose dtype and device the result has.
        has_whole_rows: Whether the mask's rows are those of the whole sequence, or of the rank's shard.

    Returns:
        [B|1, H|1, L, M].
    """
    seen = None
    if block.kind is Kind.ENDING:
        num_rows, num_columns = block.rows[1] - block.rows[0], block.columns[1] - block.columns[0]
        bias_LM = like.new_full((num_rows, num_columns), float("-inf")).triu_(1 + num_columns - num_rows)
        return bias_LM.view(1, 1, num_rows, num_columns)
    if block.kind is Kind.PART or (block.kind is Kind.CAUSAL and block.is_masked):
        q_positions = torch.arange(*block.queries, device=like.device)
        seen = pattern.mask(q_positions, torch.arange(*block.keys, device=like.device))
    part = _part(mask, block, has_whole_rows=has_whole_rows) if mask is not None and block.is_masked else None
    if part is None and seen is None:
        return None
    if part is not None and part.dtype != torch.bool:
        bias = part.to(like.dtype)
        bias = bias if seen is None else bias.masked_fill(~seen, float("-inf"))
    else:
        visible = seen if part is None else part if seen is None else part & seen
        assert visible is not None
        bias = torch.zeros(visible.shape, dtype=like.dtype, device=like.device).masked_fill_(~visible, float("-inf"))
    shape = (block.rows[1] - block.rows[0], block.columns[1] - block.columns[0])
    bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    return bias.expand(*bias.shape[:2], *shape)


def _part(mask: torch.Tensor, block: Block, *, has_whole_rows: bool) -> torch.Tensor:
    """Return a mask's rows and columns of a block, a view."""
    rows = block.queries if has_whole_rows else block.rows
    part = mask if mask.shape[-2] == 1 else mask.narrow(-2, rows[0], rows[1] - rows[0])
    return part if mask.shape[-1] == 1 else part.narrow(-1, block.keys[0], block.keys[1] - block.keys[0])
