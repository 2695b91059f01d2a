"""Rows of several chats: the longest first, each into the fullest row that has room for it."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Rows", "packed", "unpacked"]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Chats of every row, one row after the other.

    Args:
        chats: Numbers of chats.
        ends: Where each row ends in them.
    """

    chats: NDArray[np.int64]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def of(self, row: int) -> NDArray[np.int64]:
        """Return the chats of a row."""
        return self.chats[self.ends[row - 1] if row else 0 : self.ends[row]]


def unpacked(chats: NDArray[np.int64]) -> Rows:
    """Return a row for each chat."""
    return Rows(chats=chats, ends=np.arange(1, len(chats) + 1, dtype=np.int64))


def packed(chats: NDArray[np.int64], lengths: NDArray[np.int64], *, width: int) -> Rows:
    """Return rows of at most so many tokens: best fit, longest first, which leaves few places empty.

    Which chats share a row is a function of their lengths alone.
    Source: Hantian Ding et al., Fewer Truncations Improve Language Modeling, arXiv:2404.10830, 2024.

    Args:
        chats: Their numbers.
        lengths: Tokens of each, at most `width`.
        width: Tokens of a row.
    """
    rows: list[list[int]] = []
    rooms: list[int] = []  # distinct, ascending: tokens that are left in some row
    rows_of: dict[int, list[int]] = {}
    for place in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[place])
        found = bisect_left(rooms, length)
        if found == len(rooms):
            row, room = len(rows), width
            rows.append([])
        else:
            room = rooms[found]
            row = rows_of[room].pop()
            if not rows_of[room]:
                del rows_of[room], rooms[found]
        rows[row].append(int(chats[place]))
        if room > length:
            if room - length not in rows_of:
                rows_of[room - length] = []
                rooms.insert(bisect_left(rooms, room - length), room - length)
            rows_of[room - length].append(row)
    flat = [chat for row in rows for chat in row]
    return Rows(chats=np.array(flat, dtype=np.int64), ends=np.cumsum([len(row) for row in rows], dtype=np.int64))
