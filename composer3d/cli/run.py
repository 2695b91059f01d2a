"""`composer3d run`: check first, then train; under torchrun as a rank, otherwise with a local world of its own."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking.check import device_of, inspect, open_manifest
from composer3d.cli.options import Subparsers, add_manifest, add_strict, positive
from composer3d.cli.output import coloured, complain, print_problems, say
from composer3d.errors import ComposerError, LockError, ManifestError, Problem
from composer3d.processes.machine_errors import machine_error

if TYPE_CHECKING:
    import torch

    from composer3d.manifest import Manifest
    from composer3d.runner import Outcome

__all__ = ["add", "execute", "num_local_ranks", "output_of"]

WRONG, FAILED = 2, 3
# What a mistyped degree would fork: each rank takes tens of MiB before its first step.
_LEAST_RANKS, _RANKS_PER_CORE = 64, 16


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "run",
        help="train what a manifest describes",
        description="Train what a manifest describes. Starts the ranks of this machine itself, or joins as a rank "
        "under torchrun: torchrun --nproc-per-node 8 -m composer3d run MANIFEST. Goes on from the newest checkpoint.",
    )
    add_manifest(parser)
    parser.add_argument(
        "--resume",
        metavar="auto|never|PATH",
        default="auto",
        help="start from the newest checkpoint of the run if there is one (default), from new weights, or from PATH",
    )
    parser.add_argument(
        "--nproc-per-node",
        type=positive,
        metavar="N",
        help="ranks to start here; default: what the degrees multiply to, and where one is open, this machine's GPUs",
    )
    add_strict(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Join the world that torchrun has started, or start one."""
    from composer3d.runner.launcher import under_torchrun

    return _join(arguments) if under_torchrun() else _start(arguments)


def _join(arguments: argparse.Namespace) -> int:
    """Be one rank; what goes wrong is told once for all of them."""
    from composer3d.processes.forking import die_with
    from composer3d.processes.private_folder import user_folder
    from composer3d.runner.launcher import rank_main
    from composer3d.runner.lock import RunLock

    die_with(os.getppid())  # torchrun; a rank of it would go on, or wait, without it
    is_first, is_exclusive = os.environ["RANK"] == "0", True
    try:
        output = output_of(open_manifest(arguments.manifest, arguments.overrides).manifest)
    except ManifestError:
        # Every rank finds the same mistake, and they need a place to agree on who tells it.
        output, is_exclusive = user_folder("composer3d"), False
    with ExitStack() as stack:
        if is_exclusive and is_first:
            try:
                stack.enter_context(RunLock(output)).leave_children_out()
            except LockError as error:
                complain(str(error))
                return FAILED
        outcome: Outcome = rank_main(
            _train, arguments.manifest, arguments.overrides, arguments.resume, arguments.strict, output=output
        )
    if is_first:
        _tell(outcome)
    return 0


def _start(arguments: argparse.Namespace) -> int:
    """Check in a child, then start the ranks of this machine and wait for them."""
    from composer3d.checking.foreign_problems import problem_of
    from composer3d.processes.child import ChildError, ForeignCodeError
    from composer3d.runner.launcher import launch_local

    try:
        found = _ask(arguments)
    except ForeignCodeError as error:
        print_problems([problem_of(error, arguments.manifest, arguments.overrides)])
        return WRONG
    except ChildError as error:
        complain(str(error))
        return FAILED
    if found["problems"]:
        print_problems([Problem(**problem) for problem in found["problems"]])
    if not found["ok"]:
        return WRONG
    output = Path(found["output"])
    if found["is_hugging_face"] and found["device"] == "cpu":
        from composer3d.huggingface.folder import import_transformers

        import_transformers()  # once, for all ranks that are forked
    num_ranks = found["num_ranks"]
    if found["unknown"] is not None:
        complain(f"the first forward was not tried in full: {found['unknown']}")
    complain(f"starting {num_ranks} rank{'s' * (num_ranks > 1)} on {found['device']}")
    try:
        result = launch_local(
            _train,
            (arguments.manifest, arguments.overrides, arguments.resume),
            num_ranks=num_ranks,
            device=found["device"],
            output=output,
            max_restarts=found["max_restarts"],
            grace_s=found["grace_s"],
            exclusive=True,
        )
    except LockError as error:
        complain(str(error))
        return FAILED
    except OSError as error:
        machine = machine_error(error, output)
        if machine is None:
            raise
        complain(f"run failed: {machine}\ntry: {machine.advice}")
        return FAILED
    if result.report is not None:
        complain(coloured(result.report.render(output).rstrip(), good=False, stream=sys.stderr))
    elif 0 in result.values:
        _tell(result.values[0])
    else:
        say(coloured(f"{result.outcome} before the first step", good=None))
    return result.exit_code


def _tell(outcome: Outcome) -> None:
    """Say how the run ended, where the trainer has not said it."""
    if outcome.status == "finished":
        loss = "" if outcome.loss is None else f", loss {outcome.loss:.4f}"
        say(coloured(f"finished: {outcome.step} steps{loss}; {outcome.output}", good=True))


def _ask(arguments: argparse.Namespace) -> dict[str, Any]:
    """Check the manifest in a child, and import meanwhile what the ranks will need."""
    from composer3d.processes.child import Child
    from composer3d.processes.forking import prewarm
    from composer3d.torch_compat import lazy_modules

    child = Child(lambda: _look(arguments))
    for module in lazy_modules():
        if child.ready():
            break
        prewarm([module])
    return child.result()


def _look(arguments: argparse.Namespace) -> dict[str, Any]:
    """Find every problem, and what the launcher must know; JSON values."""
    try:
        inspected = open_manifest(arguments.manifest, arguments.overrides)
    except ManifestError as error:
        return {"ok": False, "problems": [problem.to_json() for problem in error.problems]}
    manifest = inspected.manifest
    device = device_of(manifest)
    num_ranks = arguments.nproc_per_node or num_local_ranks(manifest, device)
    found = inspect(inspected, world_size=num_ranks, rank=0, device=device, forward=True)
    found.problems += _machine_problems(manifest, device, num_ranks or 1) + _resume_problems(arguments.resume)
    options = manifest.tables.get("run")
    return {
        "ok": found.ok(strict=arguments.strict),
        "problems": [problem.to_json() for problem in found.ordered()],
        "num_ranks": num_ranks,
        "device": device.type,
        "unknown": found.unknown,
        "output": str(output_of(manifest)),
        "max_restarts": getattr(options, "max_restarts", 0),
        "grace_s": getattr(options, "grace_s", 30.0),
        "is_hugging_face": getattr(manifest.tables.get("model"), "hf", None) is not None,
    }


def _train(source: str, overrides: Sequence[str], resume: str, strict: bool | None = None) -> Outcome:
    """Run as one rank.

    Args:
        source: The manifest.
        overrides: As given to `--set`.
        resume: As given to `--resume`.
        strict: Whether a warning stops the run; None where the manifest was checked before the ranks were started.
    """
    from composer3d.runner import train

    inspected = open_manifest(source, overrides)
    if strict is not None:
        world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
        device = device_of(inspected.manifest)
        # Every rank looks, and finds the same; so nobody waits in a group for one that has left.
        found = inspect(inspected, world_size=world_size, rank=rank, device=device, forward=True)
        if rank == 0 and found.unknown is not None:
            complain(f"the first forward was not tried in full: {found.unknown}")
        found.problems += _machine_problems(inspected.manifest, device, 1) + _resume_problems(resume)
        if not found.ok(strict=strict):
            raise ManifestError(found.problems)
    return train(inspected.manifest, resume=resume)


def num_local_ranks(manifest: Manifest, device: torch.device) -> int | None:
    """Return how many ranks this machine is to have, None where the degrees are wrong in themselves.

    The degrees that the manifest states multiply to it. An open one, -1 or the data-parallel plugin's own axis, takes
    what is left of the machine's GPUs, and is 1 on a CPU.

    Args:
        manifest: Typed, as far as it can be.
        device: Where the run computes.
    """
    import torch

    from composer3d.composition.preparing import layout_of
    from composer3d.hooks import Hooks

    if "mesh" not in manifest.tables:
        return None
    try:
        hooks = Hooks(manifest.plugins)
        stated = layout_of(manifest, hooks, world_size=None).world_size
    except ComposerError:  # the inspection tells it
        return None
    if device.type == "cpu":
        return stated
    try:
        available = torch.accelerator.device_count() // stated * stated
        return layout_of(manifest, hooks, world_size=available).world_size if available else stated
    except ManifestError:  # no degree is open
        return stated


def output_of(manifest: Manifest) -> Path:
    """Return the run's output folder, also of a manifest whose `[run]` is wrong."""
    from composer3d.runner import output_folder

    return output_folder(manifest) if "run" in manifest.tables else Path(f"runs/{manifest.document.stem}")


def _machine_problems(manifest: Manifest, device: torch.device, num_ranks: int) -> list[Problem]:
    """Compare what the manifest wants with what this machine has."""
    import torch

    if device.type == "cpu":
        cores = os.cpu_count() or 1
        most = max(_LEAST_RANKS, _RANKS_PER_CORE * cores)
        if num_ranks <= most:
            return []
        message = f"{num_ranks} ranks are more than the {most} that this machine with {cores} cores is given at once"
        hint = "start them on several machines with torchrun, or lower the degrees"
        return [manifest.document.problem(("mesh",), message, hint=hint, whole_table=True)]
    available = torch.accelerator.device_count()
    if available == 0:
        message = f'device = "{device.type}", and this machine has none'
        return [manifest.document.problem(("run", "device"), message)]
    if num_ranks > available:
        message = f"{num_ranks} ranks need as many GPUs, and this machine has {available}"
        hint = "start them on several machines with torchrun, or lower the degrees"
        return [manifest.document.problem(("mesh",), message, hint=hint, whole_table=True)]
    return []


def _resume_problems(resume: str) -> list[Problem]:
    """Check that a checkpoint which is to be resumed from is there and whole."""
    from composer3d.cli.export import find_checkpoint

    if resume in ("auto", "never"):
        return []
    try:
        find_checkpoint(Path(resume))
    except ComposerError as error:
        return [Problem(message=str(error), file=f"--resume {resume}")]
    return []
