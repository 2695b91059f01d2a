"""`run`: check first, then train, as a rank under torchrun and otherwise with a local world of its own."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking import as_set, collected_rarely, device_of, inspect, open_manifest, verb
from composer3d.errors import ArgumentError, ComposerError, ManifestError, Problem
from composer3d.processes import join_launcher, machine_error, refuse_open_group, refuse_side_thread
from composer3d.runner.startable import Startable, output_of, resume_problems, startable

if TYPE_CHECKING:
    from composer3d.manifest import InspectedManifest
    from composer3d.runner.launching.node_place import NodePlace
    from composer3d.runner.reporting.failures import FailureReport
    from composer3d.runner.reporting.outcome import Outcome

__all__ = ["RunResult", "run"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The end of a run.

    Args:
        status: `finished`, `already finished`, `preempted`, or `failed`.
        exit_code: Of the command.
        outcome: Of rank 0; None where no step was made, or a rank failed.
        failure: The rank that failed first; None where none did.
        problems: Warnings of the check.
        output: The run's folder.
    """

    status: str
    exit_code: int
    outcome: Outcome | None
    failure: FailureReport | None
    problems: tuple[Problem, ...]
    output: str

    @property
    def ok(self) -> bool:
        """Whether no rank failed."""
        return self.failure is None

    def to_json(self) -> dict[str, Any]:
        """Return the result as JSON values."""
        return {
            "status": self.status,
            "exit_code": self.exit_code,
            "outcome": None if self.outcome is None else asdict(self.outcome),
            "failure": None if self.failure is None else self.failure.render(Path(self.output)).rstrip(),
            "problems": [problem.to_json() for problem in self.problems],
            "output": self.output,
        }

    def __str__(self) -> str:
        if self.failure is not None:
            return self.failure.render(Path(self.output)).rstrip()
        if self.exit_code == os.EX_TEMPFAIL:
            return (
                "preempted: this machine has left the run, which the others go on with; started again, it takes part "
                "again"
            )
        if self.outcome is None:
            return f"{self.status} before the first step"
        loss = "" if self.outcome.loss is None else f", loss {self.outcome.loss:.4f}"
        return f"{self.status}: {self.outcome.step} steps{loss}; {self.outcome.output}"


@verb()
def run(
    manifest: str | Path,
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    nproc_per_node: int | None = None,
    nodes: int | None = None,
    node_rank: int | None = None,
    endpoint: str | None = None,
    resume: str | Path = "auto",
    strict: bool = False,
    on_problems: Callable[[Sequence[Problem]], None] = lambda problems: None,
    report: Callable[[str], None] = lambda text: None,
) -> RunResult:
    """Train the run of a manifest, as `composer3d run` does.

    Under torchrun, srun, mpirun or another launcher this process is a rank. Otherwise ranks are started on this
    machine, by fork on a CPU and by spawn on CUDA, and this process waits for them, in its main thread. A default dtype
    or device, autocast, `torch.no_grad()` or other modes of the caller play no part, and stay.

    Args:
        manifest: Path, or the name of a shipped manifest.
        overrides: `table.key=value`, as given to `--set`, or values by key.
        nproc_per_node: Ranks to start; default: what the degrees multiply to, and of an open one this machine's GPUs.
        nodes: Machines, of groups of ranks that come and go; each is started with these three arguments.
        node_rank: Number of this one, from 0.
        endpoint: `HOST:PORT` of machine 0, by which the others reach it; after a comma, of the one to take over, ...
        resume: `auto`, `never`, or a checkpoint's path.
        strict: Refuse warnings too.
        on_problems: Called with the check's warnings before ranks start.
        report: Called with lines for the user before the first step; under torchrun on rank 0.

    Raises:
        ManifestError: The manifest has problems, all of which it has.
        LockError: Another run has the folder.
        ForkError: This process has computed with tensors, so forked ranks would hang; a composition of it is open; or
            signals, which end a run, do not reach this thread.
        ComposerError: The machine cannot run it: a full disk, a read-only folder, too few files; or an argument is
            none that it takes.
    """
    from composer3d.runner.launching.node_place import node_place

    refuse_side_thread()
    manifest, overrides, resume = str(manifest), as_set(overrides), str(resume)
    place = node_place(nodes, node_rank, endpoint)
    if nodes is None and join_launcher() is not None:
        if nproc_per_node is not None:
            said = "a launcher has started this process as a rank, and says how many there are"
            raise ArgumentError("nproc_per_node", said, value=nproc_per_node)
        return _join(manifest, overrides, resume, strict=strict, report=report)
    refuse_open_group()
    _refuse_at_once(manifest, overrides, place)
    checked = startable(
        manifest, overrides, resume=resume, nproc_per_node=nproc_per_node, num_nodes=nodes, strict=strict
    )
    if not checked.ok:
        raise ManifestError(checked.problems)
    if checked.problems:
        on_problems(checked.problems)
    _announce(checked, place, report)
    return _start(checked, place)


def _announce(checked: Startable, place: NodePlace | None, report: Callable[[str], None]) -> None:
    """Report what is about to be started."""
    if checked.unknown is not None:
        report(f"the first forward was not tried in full: {checked.unknown}")
    num_ranks = checked.num_ranks // (1 if place is None else place.count)
    of = "" if place is None else f", node {place.rank} of {place.count}"
    report(f"starting {num_ranks} rank{'s' * (num_ranks > 1)} on {checked.device}{of}")


def _refuse_at_once(source: str, overrides: Sequence[str], place: NodePlace | None) -> None:
    """Refuse a machine without its secret, and a folder that another run is in, before the manifest is checked."""
    from composer3d.manifest import read
    from composer3d.runner.launching.lock import refuse_held
    from composer3d.runner.launching.node_place import token_of
    from composer3d.runner.launching.served_run import refuse_served

    if place is not None:
        token_of()
        if place.may_move:  # the folder may be held by a machine that took over from this one
            return
    try:
        document = read(source, overrides)
    except ManifestError:
        return  # what is wrong with it is told with all that is
    stated = document.get(("run", "output"))
    output = Path(stated if isinstance(stated, str) and stated else f"runs/{document.stem}")
    try:
        if place is not None:
            refuse_served(place, output)
        if place is None or place.rank == 0:
            refuse_held(output)
    except ValueError:  # a path that is none
        return


def _start(checked: Startable, place: NodePlace | None) -> RunResult:
    """Start the ranks of this machine and wait for them.

    Args:
        checked: Without errors.
        place: Of this machine among several.

    Raises:
        LockError: Another run has the folder.
        ComposerError: The machine cannot run it: a full disk, a folder that is read-only, too few files.
    """
    from composer3d.runner.launching.local_world import launch_world

    output = Path(checked.output)
    if checked.options.get("is_hugging_face") and checked.device == "cpu":
        from composer3d.huggingface import import_transformers

        import_transformers()  # once, for all ranks that are forked
    try:
        result = launch_world(
            _train if place is None else _train_to_json,
            (checked.manifest, checked.overrides, checked.resume),
            num_ranks=checked.num_ranks,
            device=checked.device,
            output=output,
            options=checked.options,
            place=place,
        )
    except OSError as error:
        machine = machine_error(error, output)
        if machine is None:
            raise
        raise ComposerError(f"run failed: {machine}\ntry: {machine.advice}") from error
    outcome = _outcome_of(result.values.get(0))
    status = "failed" if result.report is not None else result.outcome if outcome is None else outcome.status
    return RunResult(
        status=status,
        exit_code=result.exit_code,
        outcome=outcome,
        failure=result.report,
        problems=checked.problems,
        output=str(output),
    )


def _outcome_of(value: Any) -> Outcome | None:
    """Return the outcome that a rank has returned: itself, or as JSON that another machine has sent."""
    from composer3d.runner.reporting.outcome import Outcome

    outcome: Outcome | None = Outcome(**value) if isinstance(value, dict) else value
    return outcome


def _join(
    manifest: str,
    overrides: Sequence[str],
    resume: str,
    *,
    strict: bool,
    report: Callable[[str], None] = lambda text: None,
) -> RunResult:
    """Be one rank of a launcher's world; a failure is reported once for all of them.

    Args:
        manifest: Path or shipped name.
        overrides: As given to `--set`.
        resume: As given to `--resume`.
        strict: Refuse warnings too.
        report: Called on rank 0 with lines for the user before the first step.

    Raises:
        LockError: Another run has the folder.
    """
    from composer3d.processes import die_with, user_folder
    from composer3d.runner.launching.coming_nodes import begin_world, leave_world
    from composer3d.runner.launching.launcher import rank_main
    from composer3d.runner.launching.lock import RunLock

    die_with(os.getppid())  # the launcher; a rank of it would go on, or wait, without it
    is_exclusive = True
    try:
        with collected_rarely():  # this imports torch
            opened = open_manifest(manifest, overrides).manifest
        gc.freeze()  # what was imported stays: no later collection looks at it
        output = output_of(opened)
        begin_world(opened, report)
    except ManifestError:
        # Every rank finds the same mistake, and they need a place to agree on who tells it.
        output, is_exclusive = user_folder("composer3d"), False
    with ExitStack() as stack:
        if is_exclusive and os.environ["RANK"] == "0":
            stack.enter_context(RunLock(output)).leave_children_out()
        outcome: Outcome = rank_main(_train, manifest, overrides, resume, strict, report, output=output)
        stack.pop_all().close()
        leave_world(outcome)
    status, output = outcome.status, Path(outcome.output)
    return RunResult(status=status, exit_code=0, outcome=outcome, failure=None, problems=(), output=str(output))


def _train(
    source: str,
    overrides: Sequence[str],
    resume: str,
    strict: bool | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Run as one rank.

    Args:
        source: Path of a manifest, or the name of a shipped one.
        overrides: As given to `--set`.
        resume: As given to `--resume`.
        strict: Whether a warning stops the run; None where the manifest was checked before the ranks were started.
        report: Called on rank 0 with lines for the user before the first step.
    """
    from composer3d.runner import train

    inspected = open_manifest(source, overrides)
    if strict is not None:
        _check_joined(inspected, resume, strict=strict, report=report)
    return train(inspected.manifest, resume=resume)


@collected_rarely()
def _check_joined(
    inspected: InspectedManifest, resume: str, *, strict: bool, report: Callable[[str], None] = lambda text: None
) -> None:
    """Check the manifest as one rank of a launcher's world.

    Args:
        inspected: The manifest.
        resume: As given to `--resume`.
        strict: Whether a warning stops the run.
        report: Called on rank 0 with lines for the user.

    Raises:
        ManifestError: It has problems.
    """
    from composer3d.checking import world_size_problems
    from composer3d.runner.launching.local_ranks import machine_problems
    from composer3d.runner.launching.local_world import group_problems

    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    device = device_of(inspected.manifest)
    # Every rank looks, and finds the same; so nobody waits in a group for one that has left.
    found = inspect(inspected, world_size=world_size, rank=rank, device=device, forward=True)
    if rank == 0 and found.unknown is not None:
        report(f"the first forward was not tried in full: {found.unknown}")
    found.problems += machine_problems(inspected.manifest, device, 1) + resume_problems(resume)
    found.problems += group_problems(inspected.manifest, found.layout)
    found.problems += world_size_problems(inspected, world_size=world_size, device=device, known=found.problems)
    if not found.ok(strict=strict):
        raise ManifestError(found.problems)


def _train_to_json(source: str, overrides: Sequence[str], resume: str) -> dict[str, Any]:
    """Run as one rank of a group on one of several machines; see `_train`."""
    return asdict(_train(source, overrides, resume))
