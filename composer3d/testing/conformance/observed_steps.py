"""Steps of a composition observed on a rank: gradients, collectives, operators, metrics, answers, files, CPU time."""

from __future__ import annotations

import functools
import hashlib
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from composer3d.testing.ranks import run_ranks
from composer3d.torch_compat import dispatch_mode

if TYPE_CHECKING:
    from composer3d import Composition

__all__ = ["NUM_STEPS", "Loop", "Observed", "cpu_times", "digest", "is_of", "observe"]

NUM_STEPS = 2
_TIMED = 7  # blocks of steps of each composition, taken in turns


@dataclass(frozen=True, kw_only=True)
class Observed:
    """Observations of one rank.

    Args:
        plan: Rows of the plan.
        fqns: Names of parameters.
        gradients: Digest of each rank's gradients as the optimizer sees them, by step and FQN.
        parameters: The same of parameters after the last step.
        collectives: (count, bytes) by (op, axis), of each step.
        operators: Calls by operator in one more step.
        metrics: Names of metrics that are reported.
        answers: Hooks that returned something, by name.
        files: Files of others than Python's that were opened for writing, and addresses of sockets, by plugin code.
    """

    plan: tuple[str, ...]
    fqns: tuple[str, ...]
    gradients: tuple[Mapping[str, str], ...]
    parameters: Mapping[str, str]
    collectives: tuple[Mapping[tuple[str, str], tuple[int, int]], ...]
    operators: Mapping[str, int]
    metrics: tuple[str, ...]
    answers: tuple[str, ...]
    files: tuple[str, ...]


def observe(
    manifest: Path,
    plugin: type,
    *,
    world_size: int,
    rename: Callable[[str], str] | None = None,
    backwards: bool = False,
    purpose: str = "run",
) -> list[Observed]:
    """Compose a manifest on forked ranks, run steps, and return what every rank saw.

    Args:
        manifest: Of a run, or of a loop.
        plugin: Whose hooks are watched.
        world_size: Ranks.
        rename: New names of its transforms and step actions.
        backwards: Register plugins in the reverse order.
        purpose: As for `compose`.

    Raises:
        RankError: A rank failed.
    """
    return run_ranks(_observe, world_size, manifest, plugin, rename, backwards, purpose, timeout_s=300.0)


def cpu_times(manifests: Mapping[str, Path], *, world_size: int) -> dict[str, float]:
    """Return the median CPU time of a step of each composition, in seconds of rank 0's thread; steps taken in turns."""
    return run_ranks(_time, world_size, manifests, timeout_s=300.0)[0]


def _observe(
    manifest: Path, plugin: type, rename: Callable[[str], str] | None, backwards: bool, purpose: str
) -> Observed:
    answers: set[str] = set()
    _watch_hooks(plugin, answers, rename)
    files = _watch_files(plugin)
    with Loop(manifest, backwards=backwards, purpose=purpose) as loop:
        gradients, collectives = [], []
        for number in range(NUM_STEPS):
            found, counted = loop.observed_step(number)
            gradients.append(found)
            collectives.append(counted)
        parameters = {fqn: digest(parameter) for fqn, parameter in loop.run.named_parameters()}
        metrics = tuple(sorted(loop.run.report(NUM_STEPS, {})))
        operators: Counter[str] = Counter()
        with dispatch_mode(functools.partial(_count, operators)):
            loop.step(NUM_STEPS)
        plan = tuple(str(row) for row in loop.run.plan)
    return Observed(
        plan=plan,
        fqns=tuple(parameters),
        gradients=tuple(gradients),
        parameters=parameters,
        collectives=tuple(collectives),
        operators=dict(operators),
        metrics=metrics,
        answers=tuple(sorted(answers)),
        files=tuple(dict.fromkeys(files)),
    )


def _time(manifests: Mapping[str, Path]) -> dict[str, float]:
    loops = {name: Loop(path) for name, path in manifests.items()}
    times: dict[str, list[float]] = {name: [] for name in loops}
    number = 0
    for block in range(_TIMED + 1):
        for name, loop in loops.items():
            began = time.thread_time()
            for step in range(number, number + 3):
                loop.step(step)
            if block:
                times[name].append((time.thread_time() - began) / 3)
        number += 3
    for loop in loops.values():
        loop.run.close()
    return {name: statistics.median(found) for name, found in times.items()}


class Loop:
    """A composition with its optimizer and batches, made as `verify` makes them, in the run's own dtypes.

    Args:
        manifest: Of a run, or of a loop.
        backwards: Register plugins in the reverse order.
        purpose: As for `compose`.
        is_alike: Give all ranks the first one's batches.
    """

    def __init__(
        self, manifest: Path, *, backwards: bool = False, purpose: str = "run", is_alike: bool = False
    ) -> None:
        from composer3d import compose
        from composer3d.verification import read_manifest, subject_of

        scratch = manifest.parent / f"scratch-{torch.distributed.get_rank()}"
        scratch.mkdir(exist_ok=True)
        subject = subject_of(str(manifest), ("data.workers=0",), None, "cpu", scratch=scratch)
        typed = read_manifest(str(manifest), ("data.workers=0",))
        if backwards:
            object.__setattr__(typed, "plugins", tuple(reversed(typed.plugins)))
        self._subject = subject
        torch.manual_seed(0)
        self.run: Composition = compose(
            subject.build(),
            typed,
            loss_fn=subject.loss_fn,
            count_fn=subject.count_fn,
            device="cpu",
            example=subject.example,
            purpose=purpose,  # type: ignore[arg-type]
        )
        self._optimizer = subject.make_optimizer(self.run)
        self._batches: list[Any] = []
        self._is_alike = is_alike

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, *error: Any) -> None:
        self.run.close(error[1])

    def batch(self, number: int) -> Any:
        """Return this rank's batch of a step; a few are read, and used in turns."""
        context = self.run.context
        if not self._batches:
            rank = 0 if self._is_alike else context.data_parallel_rank
            degree = context.data_parallel_degree
            self._batches = [self._subject.batch(step, rank, degree) for step in range(NUM_STEPS)]
        return self._batches[number % NUM_STEPS]

    def step(self, number: int, look: Callable[[], None] = lambda: None) -> None:
        """Run one step; `look` is called before the optimizer's."""
        batch = self.batch(number)
        with self.run.step(number):
            self.run.forward_backward(*batch.args, target=batch.target, **batch.kwargs)
            self.run.clip_grad_norm_(math.inf)
            look()
            self._optimizer.step()
            self._optimizer.zero_grad()

    def observed_step(self, number: int) -> tuple[dict[str, str], dict[tuple[str, str], tuple[int, int]]]:
        """Run one step; return digests of the gradients, and the step's collectives."""
        from composer3d.observation import count_collectives

        digests: dict[str, str] = {}

        def look() -> None:
            for fqn, parameter in self.run.named_parameters():
                digests[fqn] = "none" if parameter.grad is None else digest(parameter.grad)

        with count_collectives(self.run.mesh) as counted:
            self.step(number, look)
        return digests, dict(counted.summary())


def _count(calls: Counter[str], func: Any, types: Any, args: Any, kwargs: Any) -> Any:
    calls[str(func)] += 1
    return func(*args, **kwargs)


def digest(tensor: Any) -> str:
    """Return a digest of this rank's elements, with their dtype and shape."""
    local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    plain = local.detach().cpu().contiguous()
    try:
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    except (RuntimeError, NotImplementedError):  # a subclass of tensors, quantised ones for example
        content = str(plain).encode()
    return f"{tensor.dtype} {tuple(plain.shape)} {hashlib.blake2b(content, digest_size=8).hexdigest()}"


def _watch_hooks(plugin: type, answers: set[str], rename: Callable[[str], str] | None) -> None:
    """Replace the plugin's hooks by ones that note what they return; in a forked rank, whose class is its own."""
    for name in [name for name in dir(plugin) if name.startswith("composer3d_")]:
        setattr(plugin, name, _watched(getattr(plugin, name), name, answers, rename))


def _watched(hook: Any, name: str, answers: set[str], rename: Callable[[str], str] | None) -> Any:
    @functools.wraps(hook)
    def watched(*args: Any, **kwargs: Any) -> Any:
        found = hook(*args, **kwargs)
        if found is not None:
            answers.add(name)
        return found if rename is None else _renamed(found, rename)

    return watched


def _renamed(found: Any, rename: Callable[[str], str]) -> Any:
    from dataclasses import replace

    from composer3d.transform import StepAction, Transform

    if isinstance(found, Transform | StepAction):
        return replace(found, name=rename(found.name))
    if isinstance(found, list | tuple) and not hasattr(found, "_fields"):
        own = {item.name for item in found if isinstance(item, Transform | StepAction)}
        return [_reordered(_renamed(item, rename), own, rename) for item in found]
    return found


def _reordered(item: Any, own: set[str], rename: Callable[[str], str]) -> Any:
    """Return an item whose order among the plugin's own is stated by their new names."""
    from dataclasses import replace

    if not hasattr(item, "before"):
        return item
    after, before = (
        tuple(rename(name) if name in own else name for name in names) for names in (item.after, item.before)
    )
    return replace(item, after=after, before=before)


def _watch_files(plugin: type) -> list[str]:
    """Return a list that grows by every file opened for writing, and every socket, by code of the plugin's package."""
    found: list[str] = []
    own = plugin.__module__

    def hook(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[1], str) and any(mode in args[1] for mode in "wax+")
        if (writes or event in ("socket.bind", "socket.connect")) and _is_called_by(own):
            found.append(f"{event} {args[0] if event == 'open' else args[1]}")

    sys.addaudithook(hook)
    return found


def _is_called_by(module: str) -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if is_of(frame, module):
            return True
        frame = frame.f_back
    return False


def is_of(frame: FrameType, module: str) -> bool:
    """Return whether a frame runs a module's code, or that of a module below it."""
    name = frame.f_globals.get("__name__", "")
    return bool(name == module or name.startswith(f"{module}."))
