"""Rules that torch keeps of operators for modes and subclasses, at hand where tens of thousands of operators run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

__all__ = ["rules_at_hand"]


class _Entries(dict[str, Any]):
    """Entries of the registry by operator; those that were not asked for yet are the registry's."""

    def __init__(self, registry: Any) -> None:
        super().__init__()
        self._registry = registry

    def __missing__(self, name: str) -> Any:
        entry = self[name] = self._registry.find(name)
        entry.torch_dispatch_rules.find = entry.torch_dispatch_rules._data.get
        return entry


class _Registry:
    """The registry, with a way to its entries that calls no function of Python's."""

    def __init__(self, registry: Any) -> None:
        self._registry = registry
        self.entries = _Entries(registry)
        self.find = self.entries.__getitem__

    def __getattr__(self, name: str) -> Any:
        return getattr(self._registry, name)


@contextlib.contextmanager
def rules_at_hand() -> Iterator[None]:
    """Let torch find in less time, inside, whether an operator has a rule for a mode or a subclass.

    It asks a registry for each operator that it hands to one of them, by two functions of Python's that look into a
    dictionary each, 200,000 times in a plan. The registry is private (torch 2.11-2.15), and is the same inside.
    """
    from torch._library import simple_registry

    module: Any = simple_registry
    before = module.singleton
    if isinstance(before, _Registry):
        yield
        return
    quick = module.singleton = _Registry(before)
    try:
        yield
    finally:
        module.singleton = before
        for entry in quick.entries.values():
            del entry.torch_dispatch_rules.find
