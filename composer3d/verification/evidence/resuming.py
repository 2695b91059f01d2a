"""A run that is saved, and a fresh one that loads and continues it, compared to the last bit.

Right after the load the two are compared in all that a checkpoint has, and after one more step again. What differs at
once was restored wrongly; what differs only after the step depends on something that no checkpoint has.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import all_gather_json
from composer3d.errors import ComposerError
from composer3d.step import local
from composer3d.verification.comparison import fit, told_apart
from composer3d.verification.evidence.kept_state import changed, kept_beside
from composer3d.verification.evidence.random_draws import recording
from composer3d.verification.one_device import of_dtype
from composer3d.verification.subject import Arithmetic, Subject

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d import Composition
    from composer3d.verification.subject import Averages, Schedule

__all__ = ["OTHER_FORM", "Gone", "Looped", "Restored", "go_on", "resume"]

OTHER_FORM = "is a tensor"  # begins what is said of one that has another shape or dtype
# Of the length of an update, where a second resumed run is another one too: sums in another order, through an optimizer
# that divides by small gradients; and by units of the dtype.
_BOUND, _UNITS = 1e-2, 64.0
_SPARE = 2.0  # times what a checkpoint takes, so that nobody else's files find the disk full
_GROUPS, _STATES, _PART = "optimizer/groups/", "optimizer/", "model/"


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Comparison of a loaded run with the saved one, on one rank.

    Args:
        refused: Why it could not be saved; empty where it was.
        failed: Why it could not be loaded, or did not get through its step; empty where it did.
        loaded: By name, how an entry differs right after the load.
        stepped: The same after one more step, where nothing was before it.
        draws: Call sites at which that step draws other random numbers.
        unsaved: State of the model and the loss that no checkpoint has, and that differed when the step began.
        in_backward: Whether the optimizer of the run that was loaded stepped in the backward, beside an ordinary step.
        inexact: How far the updates are apart where two resumed runs are too, as a share; 0 where all is equal.
    """

    refused: str = ""
    failed: str = ""
    loaded: Mapping[str, str] = field(default_factory=dict)
    stepped: Mapping[str, str] = field(default_factory=dict)
    draws: tuple[str, ...] = ()
    unsaved: tuple[str, ...] = ()
    inexact: float = 0.0
    in_backward: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Looped:
    """Objects of a loop beside its composition.

    Args:
        optimizer: Of the composition.
        averages: Moving averages; None where the loop keeps none.
        schedule: Learning rates; None where they stay.
    """

    optimizer: torch.optim.Optimizer
    averages: Averages | None
    schedule: Schedule | None

    @classmethod
    def attached(
        cls, subject: Subject, run: Composition, optimizer: torch.optim.Optimizer, averages: Averages | None
    ) -> Looped:
        """Attach what the loop saves besides."""
        schedule = None if subject.make_schedule is None else subject.make_schedule(run, optimizer)
        if averages is not None:
            run.attach("ema", averages)
        if schedule is not None:
            run.attach("lr_schedule", schedule)
        return cls(optimizer=optimizer, averages=averages, schedule=schedule)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Snapshot:
    """This rank's tensors on the CPU by key, all else by path, and what no checkpoint has."""

    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    unsaved: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Gone:
    """A run that went on after it was saved.

    Args:
        path: Its checkpoint.
        step: The one after the save.
        refused: As in `Restored`.
        saved: What it had then.
        stepped: What it had a step later.
        draws: By call site, what that step drew.
    """

    path: Path
    step: int
    refused: str = ""
    saved: _Snapshot | None = None
    stepped: _Snapshot | None = None
    draws: Mapping[str, list[str]] = field(default_factory=dict)


def go_on(subject: Subject, which: Arithmetic, run: Composition, loop: Looped, *, step: int, folder: Path) -> Gone:
    """Save, and take one more step.

    Args:
        subject: What is proven.
        which: Float64, or the run's own dtypes.
        run: After its proven steps.
        loop: Optimizer, averages and schedule of the run.
        step: Number of the step after the save.
        folder: Of this proof, for the checkpoint.

    Memory: two copies of this rank's parameters and optimizer state. Collectives: those of a save and a step.
    """
    path = folder / f"saved-{which}"
    if loop.schedule is not None:
        loop.schedule.apply(step - 1)
    try:
        short = _short(run, loop.optimizer, folder)
        if short:
            return Gone(path=path, step=step, refused=short)
        run.save(path)
        saved = _snapshot(subject, run, loop)  # with the buffers that saving has averaged
    except ComposerError as error:
        return Gone(path=path, step=step, refused=str(error))
    draws = _step(subject, which, run, loop, step)
    return Gone(path=path, step=step, saved=saved, stepped=_snapshot(subject, run, loop), draws=draws)


def resume(subject: Subject, which: Arithmetic, gone: Gone) -> Restored:
    """Compose again, load, step, and compare. Collectives: those of a load and a step, and one of a few numbers.

    The new run steps in the backward where the subject's does.
    """
    in_backward = subject.make_stepper is not None
    if gone.saved is None or gone.stepped is None:
        return Restored(refused=gone.refused)
    try:
        loaded, stepped, draws = _resumed(subject, which, gone, is_warm=False)
    except ComposerError as error:
        return Restored(failed=f"{type(error).__name__}: {error}")
    wrong = _apart(loaded, gone.saved)
    if any(all_gather_json(bool(wrong))):
        return Restored(loaded=wrong)
    later = _apart(stepped, gone.stepped)
    if not any(all_gather_json(bool(later))):
        return Restored(in_backward=in_backward)
    # The first step of a process may add up in another order than a later one, and some kernels in any.
    _, again, _ = _resumed(subject, which, gone, is_warm=True)
    is_same = not _apart(again, stepped)
    found = all_gather_json([is_same, _share(stepped, gone.stepped, gone.saved), _units(gone.saved)])
    share = max(one[1] for one in found)
    if not all(one[0] for one in found) and share <= max(_BOUND, _UNITS * max(one[2] for one in found)):
        return Restored(inexact=share, in_backward=in_backward)
    return Restored(
        stepped=later,
        in_backward=in_backward,
        draws=tuple(site for site in {**gone.draws, **draws} if gone.draws.get(site) != draws.get(site)),
        unsaved=tuple(changed(gone.saved.unsaved, loaded.unsaved)),
    )


def _resumed(
    subject: Subject, which: Arithmetic, gone: Gone, *, is_warm: bool
) -> tuple[_Snapshot, _Snapshot, Mapping[str, list[str]]]:
    """Return what a fresh run has after its load, and a step later, and what that step draws.

    Args:
        subject: What is proven.
        which: Float64, or the run's own dtypes.
        gone: The run that was saved.
        is_warm: Take a step before the load.
    """
    with subject.composed(which, subject.manifest_for(which), draws=True) as run:
        optimizer = (subject.make_stepper or subject.make_optimizer)(run)
        averages = None if subject.make_averages is None else subject.make_averages(run)
        loop = Looped.attached(subject, run, optimizer, averages)
        if is_warm:
            _step(subject, which, run, loop, gone.step)
        run.load(gone.path)
        loaded = _snapshot(subject, run, loop)
        draws = _step(subject, which, run, loop, gone.step)
        return loaded, _snapshot(subject, run, loop), draws


def _step(subject: Subject, which: Arithmetic, run: Composition, loop: Looped, number: int) -> dict[str, list[str]]:
    """Take a step on the batch of the one before it, and return what it draws, by call site."""
    context = run.context
    given = subject.batch(number - 1, context.data_parallel_rank, context.data_parallel_degree)
    batch = of_dtype(given, which)
    if loop.schedule is not None:
        loop.schedule.apply(number)
    with run.step(number) as state, recording(run) as drawn:
        run.forward_backward(*batch.args, target=batch.target, **batch.kwargs)
        run.clip_grad_norm_(subject.grad_clip)
        loop.optimizer.step()
        if loop.averages is not None and not state.vetoes:
            loop.averages.update(number)
        loop.optimizer.zero_grad()
    return {site: draws.forward for site, draws in drawn.sites.items()}


# ---- what there is ---------------------------------------------------------------------------------------------------


def _snapshot(subject: Subject, run: Composition, loop: Looped) -> _Snapshot:
    tensors, state = run._persistence.snapshot(loop.optimizer)
    return _Snapshot(tensors=tensors, values=dict(_leaves(state)), unsaved=kept_beside(run, subject.loss_fn))


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _leaves(item, f"{path}/{name}" if path else str(name))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}/{index}")
    else:
        yield path, value


def _short(run: Composition, optimizer: torch.optim.Optimizer, folder: Path) -> str:
    """Return that the disk is too small for a checkpoint; empty where it is not. Collectives: two small gathers."""
    import torch

    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [*(parameter for _, parameter in run.named_parameters()), *states]
    size = sum(local(tensor.detach()).nbytes for tensor in held if isinstance(tensor, torch.Tensor))
    total = sum(all_gather_json(size))
    free = min(all_gather_json(shutil.disk_usage(folder).free))
    if free >= _SPARE * total:
        return ""
    return f"a checkpoint takes {total / 2**30:.1f} GiB, and {folder.parent} has {free / 2**30:.1f} GiB left"


# ---- what differs ----------------------------------------------------------------------------------------------------


def _apart(found: _Snapshot, right: _Snapshot) -> dict[str, str]:
    """Return how entries differ, by a user's name for them."""
    # Where one rank steps a parameter for all that hold it, a load gives all of them the optimizer's state.
    of_others = {
        key
        for found_ones, right_ones in ((found.values, right.values), (found.tensors, right.tensors))
        for key in found_ones.keys() - right_ones.keys()
        if key.startswith(_STATES) and _parent(key) not in set(map(_parent, right_ones))
    }
    paths = [path for path in {**right.values, **found.values} if path != "next_step" and path not in of_others]
    wrong = {
        _called(path): f"is {found.values.get(path)}, not {right.values.get(path)}"
        for path in paths
        if not _equal(found.values.get(path), right.values.get(path))
    }
    wrong |= {
        _called(key): _how(key, found.tensors.get(key), tensor, right)
        for key, tensor in right.tensors.items()
        if key not in found.tensors or not _same(found.tensors[key], tensor)
    }
    more = found.tensors.keys() - right.tensors.keys() - of_others
    return wrong | {_called(key): "was not there before" for key in sorted(more)}


def _parent(key: str) -> str:
    return key.rpartition("/")[0]


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other) or (isinstance(one, float) and isinstance(other, float) and one != one and other != other)


def _same(one: Tensor, other: Tensor) -> bool:
    import torch

    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def _called(key: str) -> str:
    """Return what a user would call an entry of a checkpoint."""
    if key.startswith(_PART):
        return key.removeprefix(_PART)
    if key.startswith(_GROUPS) and key.count("/") == 4:
        _, _, group, _, name = key.split("/")
        return f"{name} of the optimizer's group {group}"
    name = key.removeprefix(_STATES)
    if key.startswith(_STATES) and "/" in name:
        fqn, _, state = name.rpartition("/")
        return f"{state} of {fqn}"
    return key.removeprefix("states/")


def _how(key: str, found: Tensor | None, right: Tensor, saved: _Snapshot) -> str:
    if found is None:
        return "is gone"
    if found.shape != right.shape or found.dtype != right.dtype:
        return f"{OTHER_FORM} of {list(found.shape)} in {str(found.dtype).removeprefix('torch.')}"
    if not found.any():
        return "is zero"
    kind = key.rpartition("/")[2] if key.startswith(_STATES) else ""
    for other, tensor in saved.tensors.items():
        alike = other.rpartition("/")[2] == kind if kind else other.startswith(_PART)
        if other != key and alike and _same(found, tensor):
            return f"is {_called(other)}" if not kind else f"is that of {_called(other).removeprefix(f'{kind} of ')}"
    multiple = fit(found, right) if found.is_floating_point() else None
    if multiple is not None and multiple.residual <= 1e-6 and multiple.factor:
        return f"is {told_apart(multiple.factor)} times what it was"
    distance = float((found.double() - right.double()).abs().max())
    largest = float(right.double().abs().max())
    return f"is off by {distance / largest if largest else math.inf:.3g} of its largest element"


def _share(found: _Snapshot, right: _Snapshot, before: _Snapshot) -> float:
    """Return how far the parameters are apart after the step, relative to the norm of their update in it."""
    apart = gone = 0.0
    for key, tensor in right.tensors.items():
        if key.startswith(_PART) and tensor.is_floating_point() and key in found.tensors:
            apart += float((found.tensors[key].double() - tensor.double()).square().sum())
            gone += float((before.tensors[key].double() - tensor.double()).square().sum())
    return math.sqrt(apart / gone) if gone else math.inf if apart else 0.0


def _units(saved: _Snapshot) -> float:
    import torch

    dtypes = {tensor.dtype for key, tensor in saved.tensors.items() if key.startswith(_PART)}
    return max((torch.finfo(dtype).eps for dtype in dtypes if dtype.is_floating_point), default=0.0)
