"""Choice of slow tests, as tests/slow.toml has it beside the marks in the tests themselves."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["COLLECTED", "Collected", "is_chosen", "read_choice"]

import pytest

TESTS = Path(__file__).resolve().parent.parent
Cases = Mapping[str, Any]


def read_choice(path: Path = TESTS / "slow.toml") -> Mapping[str, Cases]:
    """Return the slow cases by file and test."""
    return tomllib.loads(path.read_text(encoding="utf-8"))


def is_chosen(choice: Mapping[str, Cases], nodeid: str) -> bool:
    """Return whether a case is slow by choice.

    Args:
        choice: Of `read_choice`.
        nodeid: Of the case, from the root of the repository.
    """
    file, test, case = split(nodeid)
    cases = choice.get(file, {}).get(test, [])
    if isinstance(cases, dict):
        return case not in cases["all_but"]
    return cases == "all" or case in cases


def split(nodeid: str) -> tuple[str, str, str]:
    """Return the file, below tests/, the test and the case, empty where it has none."""
    file, _, rest = nodeid.partition("::")
    test, _, case = rest.partition("[")
    return file.removeprefix("tests/"), test, case.removesuffix("]")


class Collected:
    """Tests of a session before any are left out: the cases of each, and whether one of them is fast.

    Args:
        items: Every test that was collected.
    """

    def __init__(self, items: Iterable[pytest.Item]) -> None:
        self.cases: dict[tuple[str, str], set[str]] = {}
        self.fast: set[tuple[str, str]] = set()
        for item in items:
            file, test, case = split(item.nodeid)
            self.cases.setdefault((file, test), set()).add(case)
            if not item.get_closest_marker("slow"):
                self.fast.add((file, test))

    @property
    def files(self) -> set[str]:
        """Return the files of which tests were collected."""
        return {file for file, _ in self.cases}


COLLECTED = pytest.StashKey[Collected]()
