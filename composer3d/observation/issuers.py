"""Issuers of recorded collectives: the plugin, or the line of a loop or model, whose call stands in their stacks."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

__all__ = ["Issuer", "Named", "issuer_of", "sources_of"]

CORE = "composer3d"
_CORE = f"{Path(__file__).parent.parent}/"
_TORCH = "/torch/"
# What issues collectives by itself, of modules and gradients that somebody gave it: the work of an axis' owner.
_ON_ITS_OWN = tuple(
    f"{_TORCH}{part}"
    for part in (
        "autograd/",
        "distributed/fsdp/",
        "distributed/pipelining/",
        "distributed/tensor/",
        "nn/",
        "_dynamo/",
        "_functorch/",
        "_inductor/",
    )
)
# Of the core, what issues them for its callers.
_FOR_OTHERS = tuple(
    f"{_CORE}{part}"
    for part in (
        "observation/",
        "processes/json_exchange.py",
        "step/control_numbers.py",
        "torch_compat/",
        "verification/arithmetic.py",
    )
)
# What a collective is called as.
_COLLECTIVES = (f"{_TORCH}distributed/distributed_c10d.py", f"{_TORCH}distributed/_functional_collectives.py")
# Calls hooks and step actions, and nothing else.
_CALLS_HOOKS = f"{_CORE}hooks/blame.py"


class Named(Protocol):
    """A plugin of a run, with the name of its table."""

    @property
    def name(self) -> str:
        """The name."""

    @property
    def instance(self) -> Any:
        """The plugin itself."""


class Issuer(NamedTuple):
    """Issuer of a collective.

    Args:
        name: Of the plugin, or composer3d; empty for the owner of the axis, and for a loop or a model.
        caller: File, line and function of the plugin, the loop or the model.
    """

    name: str
    caller: str = ""


def sources_of(plugins: Iterable[Named]) -> dict[str, str]:
    """Return plugins' names by their source: a file, or of a package its folder, with a slash at its end.

    Args:
        plugins: Of the run.
    """
    found: dict[str, str] = {}
    for plugin in plugins:
        file = getattr(sys.modules.get(type(plugin.instance).__module__), "__file__", None)
        if file is not None:
            path = Path(file)
            source = f"{path.parent}/" if path.name == "__init__.py" else str(path)
            found[source] = f"{found[source]} or {plugin.name}" if source in found else plugin.name
    return found


def issuer_of(frames: Sequence[Mapping[str, Any]], sources: Mapping[str, str]) -> Issuer | None:
    """Return who issued a collective; None where its stack does not tell.

    What torch and composer3d pass on is their callers'. What FSDP2, DTensor or a backward issues is of the axis' owner,
    whoever called the module. Modules beside a plugin's own are known as its where its hook or step action calls them.

    Args:
        frames: Its stack as torch's flight recorders hold it, the innermost call first.
        sources: As of `sources_of`.
    """
    inner, name = "", ""
    for frame in frames[_called(frames) :]:
        file = str(frame["filename"])
        if any(part in file for part in _ON_ITS_OWN):
            return Issuer("", inner)
        if _TORCH in file or file.startswith(_FOR_OTHERS) or _is_pythons(file):
            continue
        if file.startswith(_CORE):
            return Issuer(name if file == _CALLS_HOOKS else "", inner) if inner else Issuer(CORE)
        name, is_first = _plugin_at(file, sources), not inner
        inner = inner or f"{Path(file).name}:{frame['line']} in {frame['name']}"
        if name and is_first:
            return Issuer(name, inner)
    return Issuer("", inner) if inner else None


def _called(frames: Sequence[Mapping[str, Any]]) -> int:
    """Return the place of the outermost call of the collective: modes of torch functions call it again."""
    files = [str(frame["filename"]) for frame in frames]
    again = (
        at + 1
        for at, (frame, outer) in enumerate(zip(frames, files[1:], strict=False))
        if frame["name"] == "handle_torch_function" and outer.endswith(_COLLECTIVES)
    )
    return max(again, default=0)


def _plugin_at(file: str, sources: Mapping[str, str]) -> str:
    """Return the name of the plugin that a file belongs to; empty where it is none's."""
    found = [source for source in sources if file == source or (source.endswith("/") and file.startswith(source))]
    return sources[max(found, key=len)] if found else ""


def _is_pythons(file: str) -> bool:
    return file.startswith("<") or (file.startswith(sysconfig.get_path("stdlib")) and "-packages" not in file)
