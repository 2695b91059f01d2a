"""Terms of a run on several machines: who serves, and which machines go on with it, one file each in the run's folder.

A machine that goes on without another one, which may live on the other side of a broken connection, first makes the
file of the next term. The file system lets one do so (`O_EXCL`); who finds it made has lost, unless it is one of those
that the maker counts on. So of two sides of which each takes the other for lost, one goes on. The folder has a name of
its own in every run, and is removed at its end: a machine that was stopped meanwhile finds that too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["MARK", "Term", "Terms", "newest_term"]

MARK = ".nodes-"  # with which the name of their folder begins, in the run's folder

_WRITTEN_S = 2.0  # until the content of a file that is there is seen


@dataclass(frozen=True, kw_only=True)
class Term:
    """A machine that serves, and those that it counts on.

    Args:
        number: Of the term, from 1.
        node: Number of the machine that serves.
        name: Its host name and process.
        members: By their numbers, the machines that take part, as they call themselves; with the one that serves.
        address: Where it serves, as `HOST:PORT`; empty where its maker died before it wrote.
    """

    number: int
    node: int
    name: str
    members: Mapping[int, str]
    address: str = ""

    def __str__(self) -> str:
        return f"node {self.node} ({self.name}) serves the run since term {self.number}"


class Terms:
    """The terms of one run.

    Args:
        folder: Of their files, on a disk that all machines share.

    Memory: none. Collectives: none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def claim(self, term: Term) -> bool:
        """Make the file of a term; return whether this machine has made it.

        Raises:
            FileNotFoundError: The run has ended, and its folder of terms is gone.
        """
        try:
            descriptor = os.open(self._file(term.number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return False
        with os.fdopen(descriptor, "w") as file:
            file.write(json.dumps(asdict(term)) + "\n")
            file.flush()
            os.fsync(descriptor)
        return True

    def after(self, number: int) -> Term | None:
        """Return the newest term, if it is later than one that is known.

        Args:
            number: Of the known one.
        """
        found = None
        while self._file(number + 1).exists():
            number += 1
            found = self._read(number)
        return found

    @property
    def are_over(self) -> bool:
        """Whether the run has ended."""
        return not self.folder.exists()

    def _file(self, number: int) -> Path:
        return self.folder / f"term-{number}"

    def _read(self, number: int) -> Term:
        """Read a file, whose maker may be writing it; one that died then counts on nobody."""
        deadline = time.monotonic() + _WRITTEN_S
        while True:
            try:
                content = json.loads(self._file(number).read_text())
                members = {int(node): str(name) for node, name in content["members"].items()}
                node, name, address = int(content["node"]), str(content["name"]), str(content["address"])
                return Term(number=number, node=node, name=name, members=members, address=address)
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                if time.monotonic() > deadline:
                    return Term(number=number, node=-1, name="unknown", members={})
                time.sleep(0.02)


def newest_term(output: Path) -> Term | None:
    """Return the newest term of a run that is in a folder, or was killed there; None where there is none.

    Args:
        output: The run's folder.
    """
    found = [Terms(folder).after(0) for folder in output.glob(f"{MARK}*") if folder.is_dir()]
    return max((term for term in found if term is not None), key=lambda term: term.number, default=None)
