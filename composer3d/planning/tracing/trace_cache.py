"""Traces kept on disk, so that what a plan changes of hardware, prices or questions needs no trace.

A trace depends on code: the model's, the loss's, that of plugins and of torch. Its key is a digest of all of that, of
the manifest, and of what was made of it; a trace whose key differs in one byte is not found. The folder belongs to the
user alone, entries are JSON without code, and each is checked against its own digest and the types of a trace before it
is used. `COMPOSER3D_TRACES` names another folder to put it in, or is `off`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.errors import ComposerError
from composer3d.planning.tracing.traced import RankTrace

if TYPE_CHECKING:
    from pydantic import TypeAdapter

    from composer3d.planning.tracing.fake_composition import Job

__all__ = ["remembered", "trace_key"]

logger = logging.getLogger(__name__)

_FORMAT = 1
_VARIABLE, _OFF = "COMPOSER3D_TRACES", "off"
_MOST_ENTRIES = 64
_INSTALLED = frozenset(("site-packages", "dist-packages"))  # folders of packages that do not change while they are used


def trace_key(job: Job, chosen: Mapping[int, int], *, extrapolate: bool) -> str:
    """Return the digest of all that traces depend on.

    Args:
        job: What is traced.
        chosen: Ranks, each with the number that it stands for.
        extrapolate: As for `Tracer`.
    """
    import torch

    from composer3d import torch_compat
    from composer3d.interfaces import DataDependent

    assert job.preparation is not None, "prepared for a plan"
    context, model = job.preparation.context, job.model
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    batch = torch_compat.tree_leaves((job.example, job.target))
    callables = (job.loss_fn, job.count_fn, *(plugin.instance for plugin in job.manifest.plugins))
    classes = {type(module) for module in model.modules()}
    found = {
        "format": _FORMAT,
        "python": sys.version,
        "torch": torch.__version__,
        "default_dtype": str(torch.get_default_dtype()),
        "manifest": job.manifest.document.tables,
        "layout": dict(context.layout.degrees),
        "world_size": job.world_size,
        "chosen": sorted(chosen.items()),
        "extrapolate": extrapolate,
        "microbatches": [job.num_microbatches, job.microbatch],
        "grad_clip": job.grad_clip,
        "has_targets": job.has_targets,
        "routing_skew": context.stash(DataDependent).routing_skew,
        "model": repr(model),
        "ties": context.ties,
        "tensors": [(name, *_form(tensor), tensor.requires_grad) for name, tensor in tensors],
        "batch": [_form(leaf) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in batch],
        "code": sorted(_code(classes | {type(each) for each in callables}, callables)),
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def _form(tensor: Any) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype)


def _code(classes: Iterable[type], callables: Iterable[Any]) -> Iterator[str]:
    """Yield what code runs: packages of composer3d and of plugins, modules of classes, and what the user has loaded."""
    names = {"composer3d", *(cls.__module__ for cls in classes)}
    names |= {name for name in (getattr(each, "__module__", None) for each in callables) if name}
    packages = {sys.modules[name.split(".")[0]] for name in names if name.split(".")[0] in sys.modules}
    folders = [folder for package in packages - {sys.modules["torch"]} for folder in getattr(package, "__path__", ())]
    yield from map(_states_of, folders)
    # Of packages that were digested as wholes it does not matter what was imported so far.
    known = tuple(os.path.join(folder, "") for folder in (*folders, *sysconfig.get_paths().values()))
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name in names:
            yield _state_of(Path(file))
        if file and not file.startswith(known) and _INSTALLED.isdisjoint(Path(file).parts):
            with suppress(OSError):
                yield f"{name} {hashlib.sha256(Path(file).read_bytes()).hexdigest()}"


def _states_of(folder: str) -> str:
    """Return a digest of the names, sizes and times of a package's source files."""
    digest = hashlib.sha256()
    for place, folders, files in os.walk(folder):
        folders.sort()
        for name in sorted(name for name in files if name.endswith(".py")):
            digest.update(_state_of(Path(place, name)).encode())
    return digest.hexdigest()


def _state_of(file: Path) -> str:
    try:
        state = file.stat()
    except OSError:  # inside an archive
        return str(file)
    return f"{file} {state.st_size} {state.st_mtime_ns}"


def remembered(key: Callable[[], str], trace: Callable[[], list[RankTrace]]) -> list[RankTrace]:
    """Return the traces of a key, from disk where they are, else made and kept there.

    Args:
        key: Gives it, where there is a folder for entries.
        trace: Makes the traces.
    """
    folder = _folder()
    if folder is None:
        return trace()
    name = f"{key()}.json"
    found = _read(folder, name)
    if found is None:
        found = trace()
        _write(folder, name, found)
    return found


def _folder() -> Path | None:
    """Return the folder of entries, this user's alone; None where there is none, with the reason in the log."""
    from composer3d.processes import private_folder_in

    parent = os.environ.get(_VARIABLE) or os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if parent == _OFF:
        return None
    try:
        os.makedirs(parent, exist_ok=True)
        return private_folder_in(Path(parent), "composer3d-traces")
    except (ComposerError, OSError) as error:
        logger.info("traces are not kept: %s", error)
        return None


def _adapter() -> TypeAdapter[list[RankTrace]]:
    from pydantic import TypeAdapter

    return TypeAdapter(list[RankTrace])


def _read(folder: Path, name: str) -> list[RankTrace] | None:
    """Return an entry's traces; None where there is none, or one that is not what was written."""
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        digest, _, content = file.read().partition(b"\n")
    if digest != _digest(name, content):
        logger.warning("%s is not what was written there; it is made anew", folder / name)
        return None
    try:
        found = _adapter().validate_json(content, strict=True)
    except ValueError as error:
        logger.warning("%s holds no traces, and is made anew: %s", folder / name, error)
        return None
    with suppress(OSError):
        os.utime(folder / name)  # the oldest are removed
    return found


def _digest(name: str, content: bytes) -> bytes:
    return hashlib.sha256(name.encode() + content).hexdigest().encode()


def _write(folder: Path, name: str, traces: list[RankTrace]) -> None:
    """Keep traces: whole or not at all, and no more entries than `_MOST_ENTRIES`."""
    content = _adapter().dump_json(traces)
    temporary = folder / f".{name}.{os.getpid()}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(_digest(name, content) + b"\n" + content)
        os.replace(temporary, folder / name)
        entries = sorted(folder.glob("*.json"), key=lambda entry: entry.stat().st_mtime_ns, reverse=True)
        for entry in entries[_MOST_ENTRIES:]:
            entry.unlink(missing_ok=True)
    except OSError as error:
        logger.info("traces are not kept: %s", error)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
