"""Rules over numbers of several tables, or of a table and the model: schedules, stages, positions, output.

Each rule returns problems at the lines of the keys at fault.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import pieces_of
from composer3d.checking.foreign_problems import problem_of_hook
from composer3d.errors import BatchError, ComposerError, ForkError, HookError, ManifestError, Problem
from composer3d.interfaces import Batch
from composer3d.mesh import Role

if TYPE_CHECKING:
    from composer3d.composition import Preparation
    from composer3d.manifest import Manifest

__all__ = [
    "local_checkpoint_problems",
    "microbatch_problems",
    "output_problems",
    "placement_problems",
    "schedule_problems",
]

# Enough for every schedule: what refuses, refuses few.
_MOST_MICROBATCHES, _MOST_SIZES = 2048, 16


def output_problems(manifest: Manifest) -> list[Problem]:
    """Check that output folders can be such: nothing else stands there, and their names can be written.

    They are the run's, and those that plugins of the family `profiling` have as their option `folder`.
    """
    return [*_run_output_problems(manifest), *_plugin_output_problems(manifest)]


def _plugin_output_problems(manifest: Manifest) -> list[Problem]:
    found = []
    for registered in manifest.plugins:
        folder, path = getattr(registered.instance, "folder", None), (registered.info.family, registered.name)
        reason = _objection(Path(folder)) if isinstance(folder, str) and path[0] == "profiling" else None
        if reason is not None:
            message = f'folder = "{folder}" {reason}'
            found.append(manifest.document.problem((*path, "folder"), message, hint="name a folder"))
    return found


def _run_output_problems(manifest: Manifest) -> list[Problem]:
    if "run" not in manifest.tables:
        return []
    stated = manifest.tables["run"].output is not None
    reason = _objection(manifest.output)
    if reason is None:
        return []
    message = f'output = "{manifest.output}" {reason}' if stated else f"the output folder {manifest.output} {reason}"
    return [manifest.document.problem(("run", "output") if stated else ("run",), message, hint="name a folder")]


def _objection(path: Path) -> str | None:
    """Return why a path cannot become a folder; None where nothing speaks against it."""
    for part in (path, *path.parents):
        try:
            part.stat()
        except FileNotFoundError:
            if part.is_symlink():
                return "is a link to nothing" if part == path else f"lies below {part}, which is a link to nothing"
            continue
        except NotADirectoryError:
            continue  # the file that is in the way is one of the next
        except OSError as error:
            return f"cannot be a folder: {(error.strerror or str(error)).lower()}"
        if not part.is_dir():
            return "is not a folder" if part == path else f"lies below {part}, which is not a folder"
        if os.access(part, os.W_OK | os.X_OK):
            return None
        is_read_only = os.statvfs(part).f_flag & os.ST_RDONLY
        why = f"{part} is read-only" if is_read_only else f"this user may not write into {part}"
        return f"cannot be written: {why}"
    return None


def local_checkpoint_problems(manifest: Manifest) -> list[Problem]:
    """Refuse states in the memory of nodes where they could not be kept, or groups have each other's."""
    table: Any = manifest.tables.get("checkpoint")
    if getattr(table, "local_every", None) is None:
        return []
    axes = [axis.name for plugin in manifest.plugins for axis in plugin.info.axes if axis.role is Role.REPLICA]
    several = next((name for name in axes if (manifest.degrees.get(name) or 1) > 1), None)
    if several is not None:
        message = f"local_every beside {several} = {manifest.degrees[several]}: a group that is lost takes the state of"
        hint = "remove local_every; checkpoint.every is for the loss of all groups"
        return [
            manifest.document.problem(("checkpoint", "local_every"), f"{message} another from its memory", hint=hint)
        ]
    folder = table.local_folder
    if folder is not None and not Path(folder).is_dir():
        message = f'local_folder = "{folder}" is no folder of this machine; every node needs it'
        return [manifest.document.problem(("checkpoint", "local_folder"), message)]
    from composer3d.runner import states_folder

    try:
        states_folder(folder, is_made=False)
    except ForkError as error:
        key = "local_every" if folder is None else "local_folder"
        return [manifest.document.problem(("checkpoint", key), str(error))]
    return []


def schedule_problems(manifest: Manifest) -> list[Problem]:
    """Check that warmup, decay and the batch ramp end before the run does, unless a `decay_end` lies beyond it too."""
    train: Any = manifest.tables.get("train")
    table = manifest.tables.get("lr_schedule")
    steps = getattr(train, "steps", None)
    if steps is None or manifest.document.get(("train", "steps")) is None:
        return []
    from composer3d.runner import BatchSize

    found, length, what = [], steps, f"steps = {steps}"
    unit, end = getattr(table, "unit", None) or "steps", getattr(table, "decay_end", None)
    if unit == "samples" and train.accumulate is not None:
        message = 'unit = "samples" beside train.accumulate: learning rates would depend on the number of ranks'
        hint = "write train.global_batch, or count steps"
        found.append(manifest.document.problem(("lr_schedule", "unit"), message, hint=hint))
    elif unit == "samples":
        length = BatchSize(manifest.tables["train"], degree=1).position_of(steps)
        what = f"{length} samples in steps = {steps}"
    most = max(length, end) if isinstance(end, int) else length
    for key in ("warmup", "decay"):
        value = getattr(table, key, None)
        if isinstance(value, int) and value > most:
            message = f"{key} = {value} {unit} is longer than the run, which has {what}"
            hint = f"write a fraction of the run, for example {key} = 0.1, or raise train.steps"
            found.append(manifest.document.problem(("lr_schedule", key), message, hint=hint))
    return found


def microbatch_problems(manifest: Manifest, preparation: Preparation) -> list[Problem]:
    """Check that a batch divides over islands too, and has the micro-batches that the schedule of a pipeline needs."""
    from composer3d.runner import BatchSize

    hooks, context = preparation.hooks, preparation.context
    asked = hooks.implementing("composer3d_actions")
    if "train" not in manifest.tables:
        return []
    pieces = pieces_of(context)
    degree = pieces.total * context.layout.num_groups
    sizes, unit = BatchSize(manifest.tables["train"], degree=degree), (context.manifest.train.microbatch or 1) * degree
    if context.layout.degree(Role.INDEPENDENT) > 1:  # of which the layout alone knows no parts
        try:
            sizes.check(manifest, pieces.name)
        except ManifestError as error:
            return list(error.problems)
    if not asked:
        return []
    for size in islice(sizes.sizes(), _MOST_SIZES):
        if size // unit > _MOST_MICROBATCHES:
            break
        try:
            preparation.actions(size // unit)
        except HookError as error:
            return [problem_of_hook(error, manifest.document)]
        except ComposerError as error:
            key, own = manifest.train.batch_key, (asked[0].info.family, asked[0].name)
            hint = None if key else f"set train.global_batch; the default is microbatch x data-parallel degree, {unit}"
            path = ("train", key) if key else own
            return [manifest.document.problem(path, str(error), hint=hint, whole_table=key is None)]
    return []


def placement_problems(manifest: Manifest, preparation: Preparation) -> list[Problem]:
    """Check that plugins place a batch as the data make it, where all have one length.

    What a plugin needs ranks or values for is not asked here: the run says that.
    """
    hooks, context, data = preparation.hooks, preparation.context, manifest.tables.get("data")
    if data is None or not (hooks.place_batch() and context.example):
        return []
    if data.padding not in ("none", "seq_len"):
        return []
    batch = Batch(args=context.example[0], kwargs=context.example[1])
    key = "use" if data.kind == "user" and data.padding == "none" else "seq_len"
    for _, function in hooks.place_batch():
        try:
            batch = function(context=context, batch=batch) or batch
        except BatchError as error:
            return [manifest.document.problem(("data", key), str(error))]
        except ComposerError:
            break
    return []
