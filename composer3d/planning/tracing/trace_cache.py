"""Traces kept on disk, so that what a plan changes of hardware, prices or questions needs no trace.

A trace depends on code, the model's, the loss's, that of plugins and of torch, and on all that this code reads: of the
objects that were built, and of globals. Its key is a digest of all of that, of the manifest, and of what was made of
it; a trace whose key differs in one byte is not found. Where something cannot be read by value, or a step may read
files, nothing is kept and nothing found. Entries are JSON without code, and each is checked against its own digest and
the types of a trace before it is used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.planning.tracing.built_state import BuiltState
from composer3d.planning.tracing.code_state import (
    folder_state,
    installed_state,
    is_own,
    library_environment,
    own_modules,
    package_folders,
    plugin_packages,
    state_of,
)
from composer3d.planning.tracing.kept_entries import VARIABLE, Entries
from composer3d.planning.tracing.traced import RankTrace
from composer3d.processes import own_attribute

if TYPE_CHECKING:
    from composer3d.planning.tracing.fake_composition import Job

__all__ = ["remembered", "trace_key"]

_FORMAT = 3
logger = logging.getLogger(__name__)


def trace_key(job: Job, chosen: Mapping[int, int], *, extrapolate: bool) -> str | None:
    """Return the digest of all that traces depend on; None, with the reason in the log, where that cannot be read.

    Args:
        job: What is traced.
        chosen: Ranks, each with the number that it stands for.
        extrapolate: As for `Tracer`.
    """
    import torch

    from composer3d.interfaces import DataDependent

    assert job.preparation is not None, "prepared for a plan"
    context, model = job.preparation.context, job.model
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    callables = (job.loss_fn, job.count_fn, *(plugin.instance for plugin in job.manifest.plugins))
    classes = {type(module) for module in model.modules()}
    try:
        built = _built(job)
    except Exception as error:  # objects of any library are read
        logger.info("traces are not kept: %s", error or type(error).__name__)
        return None
    found = {
        "format": _FORMAT,
        "python": sys.version,
        "torch": torch.__version__,
        "defaults": [str(torch.get_default_dtype()), str(torch.get_default_device())],
        "kernels": _kernels(),
        "manifest": job.manifest.document.tables,
        "device": context.run_device.type,
        "layout": dict(context.layout.degrees),
        "world_size": job.world_size,
        "chosen": sorted(chosen.items()),
        "extrapolate": extrapolate,
        "microbatches": [job.num_microbatches, job.microbatch],
        "grad_clip": job.grad_clip,
        "has_targets": job.has_targets,
        "routing_skew": context.stash(DataDependent).routing_skew,
        "installed": installed_state(),
        "environment": library_environment(but=VARIABLE),
        "built": built,
        "ties": context.ties,
        "tensors": [(name, *_form(tensor), tensor.requires_grad) for name, tensor in tensors],
        "code": sorted(_code(classes | {type(each) for each in callables}, callables)),
    }
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def _built(job: Job) -> str:
    """Return the digest of a batch, and of the objects whose code a step runs; a manifest decides installed plugins."""
    import torch
    from torch.nn.modules import module

    state = BuiltState()
    optimizer = job.manifest.tables["optimizer"].use
    hooks = [list(value.values()) for name, value in vars(module).items() if name.startswith("_global") and value]
    for library in (torch, torch.nn.functional, torch.Tensor):
        state.add_replaced(library)
    for value in (job.model, job.loss_fn, job.count_fn, _loaded(optimizer), job.example, job.target, hooks):
        state.add(value)
    for plugin in job.manifest.plugins:
        if is_own(type(plugin.instance).__module__):
            state.add(plugin.instance)
    if next(own_modules(package_folders(plugin_packages())), None) is not None:
        state.add_operators()
    return state.digest()


def _kernels() -> list[Any]:
    """Return what a process has chosen of torch's kernels, as a user's file may."""
    import torch
    from torch.backends import cuda

    attention = [cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()]
    repeatable = [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()]
    return [torch.get_float32_matmul_precision(), *attention, cuda.cudnn_sdp_enabled(), *repeatable]


def _loaded(reference: Any) -> Any:
    """Return what a reference of the manifest names in a module that is loaded."""
    module, _, names = str(reference).partition(":")
    found: Any = sys.modules.get(module) if names else None
    for name in names.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found


def _form(tensor: Any) -> tuple[list[int], str]:
    return list(tensor.shape), str(tensor.dtype)


def _code(classes: Iterable[type], callables: Iterable[Any]) -> Iterator[str]:
    """Yield what code runs: packages of composer3d and of plugins, modules of classes, and what the user has loaded."""
    names = {"composer3d", *(cls.__module__ for cls in classes)}
    names |= {name for name in (getattr(each, "__module__", None) for each in callables) if name}
    folders = package_folders(names)
    yield from (f"{folder_state(folder, suffix='.py')}" for folder in folders)
    # Of packages that were digested as wholes it does not matter what was imported so far.
    for name in names:
        file = own_attribute(sys.modules.get(name), "__file__")
        if isinstance(file, str):
            yield state_of(Path(file))
    for name, path in own_modules(folders):
        with suppress(OSError):
            yield f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}"


def remembered(key: Callable[[], str | None], trace: Callable[[], list[RankTrace]]) -> list[RankTrace]:
    """Return the traces of a key, from disk where they are, else made and kept there.

    Args:
        key: Gives it, where there is a folder for entries; None where traces cannot be kept.
        trace: Makes the traces.
    """
    entries: Entries[list[RankTrace]] = Entries(list[RankTrace])
    if not entries.are_kept:
        return trace()
    name = key()
    if name is None:
        return trace()
    found = entries.read(name)
    if found is None:
        found = trace()
        entries.write(name, found)
    return found
