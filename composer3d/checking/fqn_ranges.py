"""FQNs on one line, numbered ones together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["compress"]

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def compress(fqns: Iterable[str]) -> str:
    """Return FQNs on one line, numbered ones together.

    >>> compress(["layers.0.wq", "layers.1.wq", "layers.2.wq", "head", ""])
    'layers.[0-2].wq, head, (root)'
    """
    groups: dict[str, list[tuple[int, ...]]] = {}
    for fqn in fqns:
        groups.setdefault(_NUMBER.sub("*", fqn), []).append(tuple(map(int, _NUMBER.findall(fqn))))
    return ", ".join(
        _fill(form, numbers) or "(root)" for form, group in groups.items() for numbers in _rectangles(group)
    )


def _rectangles(numbers: Sequence[tuple[int, ...]]) -> list[tuple[str, ...]]:
    """Cover tuples of numbers exactly by products of sets, each set written as its ranges."""
    if not numbers[0]:
        return [()]
    rests: dict[int, list[tuple[int, ...]]] = {}
    for first, *rest in numbers:
        rests.setdefault(first, []).append(tuple(rest))
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for first, tails in rests.items():
        alike.setdefault(tuple(sorted(set(tails))), []).append(first)
    return [(_ranges(firsts), *inner) for tails, firsts in alike.items() for inner in _rectangles(tails)]


def _ranges(numbers: Iterable[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return shown if shown.isdigit() else f"[{shown}]"


def _fill(form: str, numbers: Iterable[str]) -> str:
    for number in numbers:
        form = form.replace("*", number, 1)
    return form
