"""Pieces of text of which a shell script's values are, and the words that they make."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Piece", "blank", "split_pieces"]

_FLAGS_AT_ONCE = re.compile(r"\s*--.* ", re.DOTALL)
_FLAGS = re.compile(r"\s+--", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Text of a value.

    Args:
        text: Of the script, without quotes.
        line: Where it stands.
        is_split: Whether blanks in it divide words.
    """

    text: str
    line: int
    is_split: bool = False


def blank(line: int) -> Piece:
    """Return what divides two words."""
    return Piece(text=" ", line=line, is_split=True)


def split_pieces(pieces: Iterable[Piece], *, is_exact: bool = False) -> list[tuple[str, int]]:
    """Return the words of a value, each with its line.

    Args:
        pieces: Of the value.
        is_exact: As the shell passes them. Otherwise flags behind blanks divide words even in quotes, as where another
            shell reads the text again, and quotes around a word are none of it.
    """
    words: list[tuple[str, int]] = []
    current, line, is_begun = "", 1, False
    for piece in pieces:
        is_whole = is_exact or not (_FLAGS if is_begun else _FLAGS_AT_ONCE).match(piece.text)
        if not piece.is_split and is_whole:
            line = line if is_begun else piece.line
            current, is_begun = current + piece.text, True
            continue
        place = piece.line
        for run in re.split(r"(\s+)", piece.text):
            if run.isspace():
                if is_begun:
                    words.append((current, line))
                current, is_begun = "", False
                place += run.count("\n")
            elif run:
                line = line if is_begun else place
                current, is_begun = current + run, True
    if is_begun:
        words.append((current, line))
    return [(word if is_exact else word.strip("'\""), place) for word, place in words if word]
