"""Versions of installed distributions."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version

__all__ = ["installed_version"]


@cache
def installed_version(name: str) -> str:
    """Return a distribution's version; forked ranks find what their parent has read, since a text takes 5 ms to parse.

    >>> installed_version("no-such-distribution")
    'unknown'
    """
    try:
        return version(name)
    except PackageNotFoundError:  # a copy that nobody has installed
        return "unknown"
