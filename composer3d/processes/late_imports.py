"""Packages whose names are imported when they are first used: some modules import torch, which takes a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

__all__ = ["late_imports"]


def late_imports(package: str, modules: Mapping[str, Sequence[str]]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package whose names its modules define.

    Args:
        package: Its dotted name.
        modules: Names by module, which is relative to the package.
    """
    home = {name: module for module, names in modules.items() for name in names}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{home[name]}"), name)

    return find
