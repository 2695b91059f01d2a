"""Construction of a manifest's model in a process of its own, before one that starts ranks constructs it."""

from __future__ import annotations

from collections.abc import Sequence

from composer3d.checking.check import open_manifest
from composer3d.checking.foreign_problems import apart, names_foreign_code
from composer3d.checking.rules import find_factory

__all__ = ["build_apart"]


def build_apart(source: str, overrides: Sequence[str]) -> None:
    """Build a manifest's model in a child that is watched, before a process that cannot be a child builds it.

    Args:
        source: The manifest; nothing is built where it names no code of others.
        overrides: As given to `--set`.

    Raises:
        ManifestError: As in `apart`.
    """

    def build() -> None:
        from composer3d.runner import with_tokenizer

        inspected = open_manifest(source, overrides)
        factory = None if inspected.problems else find_factory(with_tokenizer(inspected.manifest))[0]
        if factory is not None:
            factory()

    if names_foreign_code(source, overrides):
        apart(build, [source], overrides)
