"""Questions to other ranks through the store: a thread of theirs answers while they wait in a collective."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

__all__ = ["RankQuestions"]

_PAUSE_S = 0.02
_MESSAGE_S = 3.0


class RankQuestions:
    """Counters, questions and answers of all ranks.

    Args:
        store: Key-value store of all ranks.
        prefix: Of this composition's keys.
        rank: Global rank whose questions and answers these are.

    Attributes:
        state: Returns what this rank answers, as JSON values; called from another thread.
        message: The text with which another rank has ended the run, once a thread has read it.
    """

    def __init__(self, *, store: Any, prefix: str, rank: int) -> None:
        self._store, self._prefix, self._rank = store, prefix, rank
        self._heard = 0
        self.state: Callable[[], Any] = lambda: None
        self.message: str | None = None

    def count(self, key: str, number: int = 0) -> int:
        """Add to a counter of all ranks, and return its sum so far."""
        return int(self._store.add(f"{self._prefix}/count/{key}", number))

    def forget(self, keys: Sequence[str]) -> None:
        """Delete counters."""
        for key in keys:
            self._store.delete_key(f"{self._prefix}/count/{key}")

    def ask(self, ranks: Sequence[int], wait_s: float) -> dict[int, Any]:
        """Return the states of other ranks, of those that answer in time."""
        number = self._store.add(f"{self._prefix}/questions", 1)
        self._store.set(f"{self._prefix}/question/{number}", json.dumps(list(ranks)))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + wait_s
        while len(answers) < len(ranks) and time.monotonic() < deadline:
            for rank in ranks:
                key = f"{self._prefix}/answer/{number}/{rank}"
                if rank not in answers and self._store.check([key]):
                    answers[rank] = json.loads(self._store.get(key))
            time.sleep(_PAUSE_S)
        return answers

    def answer(self) -> None:
        """Answer the questions that were asked since the last call."""
        while self._store.check([f"{self._prefix}/question/{self._heard + 1}"]):
            self._heard += 1
            if self._rank in json.loads(self._store.get(f"{self._prefix}/question/{self._heard}")):
                self._store.set(f"{self._prefix}/answer/{self._heard}/{self._rank}", json.dumps(self.state()))

    def publish(self, text: str, ranks: Sequence[int]) -> str:
        """Return the text with which all ranks end: this one, or that of a rank that published before.

        Returns when the threads of other ranks have read it, as far as they live: the store may end with this rank.
        """
        if self._store.add(f"{self._prefix}/alarm", 1) > 1:
            self.read()
            return self.message or text
        self.tell(text, ranks)
        return text

    def tell(self, text: str, ranks: Sequence[int]) -> None:
        """Set the text with which all ranks end, after this one has raised the alarm, and wait as `publish` does."""
        self._store.set(f"{self._prefix}/message", text)
        # A rank may have no thread left, or be gone.
        with contextlib.suppress(RuntimeError):
            self._store.wait([f"{self._prefix}/read/{rank}" for rank in ranks], timedelta(seconds=_MESSAGE_S))

    def read(self) -> None:
        """Wait for the text with which all ranks end, and leave word that it was read."""
        key, deadline = f"{self._prefix}/message", time.monotonic() + _MESSAGE_S
        while self.message is None and time.monotonic() < deadline:
            if self._store.check([key]):
                self.message = self._store.get(key).decode()
                self._store.set(f"{self._prefix}/read/{self._rank}", "")
            else:
                time.sleep(_PAUSE_S)
