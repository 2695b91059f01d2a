"""Notices of a cloud that it will take a machine away: a file or an address that is looked at while the run trains."""

from __future__ import annotations

import logging
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import Field, model_validator

from composer3d.errors import KeyFault
from composer3d.manifest import Secret, redacted, table
from composer3d.runner.launching.signals import Preemption

__all__ = ["Notice", "NoticeTable", "watching"]

_TIMEOUT_S = 5.0  # of one answer
_MOST_BYTES = 4096

log = logging.getLogger(__name__)


@table
class NoticeTable:
    """Source of a cloud's notice that it will take this machine away.

    Args:
        at: A file, which is a notice once it exists, or an address that begins with http:// or https://, which is one
            once it answers with 200.
        contains: Text that the file or the answer must hold: of clouds whose address always answers.
        headers: Of the request, such as `{ Metadata-Flavor = "Google" }`; secrets, from a variable or a file too.
        every_s: Seconds between two looks.
    """

    at: str = Field(min_length=1)
    contains: str = ""
    headers: dict[str, Secret] = Field(default_factory=dict)
    every_s: float = Field(default=5.0, gt=0, le=3600)

    @property
    def is_address(self) -> bool:
        """Whether it is one that is asked over the network."""
        return self.at.startswith(("http://", "https://"))

    @model_validator(mode="after")
    def _is_a_place(self) -> NoticeTable:
        if "://" in self.at and not self.is_address:
            raise KeyFault(
                "at", f'at = "{self.at}" is neither a file nor an address that begins with http:// or https://'
            )
        if self.headers and not self.is_address:
            raise KeyFault("headers", "headers are of an address, and at names a file; remove them")
        return self


@contextmanager
def watching(stated: str | NoticeTable | None, preemption: Preemption, *, folder: Path) -> Iterator[None]:
    """Ask a run to stop once there is a notice.

    Args:
        stated: `[run] notice`; None looks for nothing.
        preemption: Of the run.
        folder: Of the manifest, for the files of secrets.

    Raises:
        PluginError: A header's secret is not to be had.
    """
    if stated is None:
        yield
        return
    table = NoticeTable(at=stated) if isinstance(stated, str) else stated
    notice = Notice(table, preemption.request, folder=folder)
    try:
        yield
    finally:
        notice.close()


class Notice:
    """Looks for a notice in a thread, and calls a function once it is there.

    Amazon's instance metadata answers 404 until then; Google's and Azure's always answer, and `contains` is the word
    that makes the answer a notice.

    Args:
        table: Where to look.
        noticed: Called once, in the thread.
        folder: Of the manifest.

    Memory: a thread. Collectives: none.
    """

    def __init__(self, table: NoticeTable, noticed: Callable[[], None], *, folder: Path) -> None:
        self._table, self._noticed = table, noticed
        self._headers = {name: secret.reveal(folder) for name, secret in table.headers.items()}
        self._stop = threading.Event()
        self._has_failed = False
        self._thread = threading.Thread(target=self._watch, name="composer3d-notice", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more; an answer that is waited for is left to itself."""
        self._stop.set()
        self._thread.join(timeout=1.0)

    def _watch(self) -> None:
        while not self._is_there():
            if self._stop.wait(self._table.every_s):
                return
        if os.environ.get("LOCAL_RANK", "0") == "0":
            log.warning("%s: this machine will be taken away; the run saves and stops", redacted(self._table.at))
        self._noticed()

    def _is_there(self) -> bool:
        table = self._table
        if not table.is_address:
            try:
                with Path(table.at).open("rb") as file:
                    return table.contains.encode() in file.read(_MOST_BYTES)
            except OSError:
                return False
        try:
            request = urllib.request.Request(table.at, headers=self._headers)
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return answer.status == 200 and table.contains.encode() in answer.read(_MOST_BYTES)
        except urllib.error.HTTPError:
            return False  # it answers: there is none yet
        except (OSError, ValueError) as error:
            if not self._has_failed:
                text = redacted(f"{table.at} does not answer: {error}")
                log.warning("run.notice: %s; it is asked every %g s", text, table.every_s)
            self._has_failed = True
            return False
