"""Key-value store of an epoch, for the addresses by which its ranks connect to each other."""

from __future__ import annotations

__all__ = ["EpochValues"]

_MOST_KEYS = 1 << 14


class EpochValues:
    """The values of one epoch, and who waits for which.

    Memory: some hundred bytes a value, of which there are a few per rank.
    """

    def __init__(self) -> None:
        self._values: dict[str, str] = {}
        self._epoch = -1
        self._wanted: dict[int, str] = {}

    def set(self, epoch: int, key: str, value: str) -> list[int]:
        """Store a value; return who has waited for it.

        Args:
            epoch: The present one.
            key: Of the value.
            value: To be stored.
        """
        if epoch != self._epoch:
            self._values.clear()
            self._epoch = epoch
        if len(self._values) > _MOST_KEYS:
            return []
        self._values[key] = value
        found = [reader for reader, wanted in self._wanted.items() if wanted == key]
        for reader in found:
            self._wanted.pop(reader)
        return found

    def get(self, epoch: int, key: str, *, reader: int) -> str | None:
        """Return a value; None where it was not stored yet, and the reader waits for it."""
        if epoch == self._epoch and key in self._values:
            return self._values[key]
        self._wanted[reader] = key
        return None

    def forget(self) -> list[int]:
        """Drop all values; return who has waited for one."""
        self._values.clear()
        found = list(self._wanted)
        self._wanted.clear()
        return found

    def leave(self, reader: int) -> None:
        """Note that a reader is gone."""
        self._wanted.pop(reader, None)
