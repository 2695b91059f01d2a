"""Replay of the step that failed, from a checkpoint, with every module watched."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.errors import ComposerError

if TYPE_CHECKING:
    from composer3d.diagnostics.doctor.run_folder import Evidence
    from composer3d.manifest import Manifest

__all__ = ["replay", "replayed"]


def replayed(evidence: Evidence, *, report: Callable[[str], None]) -> Evidence:
    """Return the evidence with what a replay of the failed step finds that is not finite.

    Args:
        evidence: Of a run whose loss was not finite.
        report: Called with the step before it is run.

    Raises:
        ComposerError: The run did not end by such a loss, or in the replay everything was finite.
    """
    from composer3d.diagnostics.doctor.run_folder import read_anomalies

    error = evidence.error
    if error is None or error["error"] != "StabilityError" or error["step"] is None:
        raise ComposerError(f"{evidence.run}: did not end by a loss that is not finite; there is nothing to replay")
    report(f"running step {error['step'] + 1} again on {evidence.world_size} ranks")
    folder = replay(evidence.run, step=error["step"], world_size=evidence.world_size)
    found = read_anomalies(folder)
    if not found:
        raise ComposerError(f"{evidence.run}: in the replay everything was finite; its random numbers or data differ")
    return replace(evidence, anomalies=found)


def replay(run: Path, *, step: int, world_size: int) -> Path:
    """Run a run's steps up to one that failed again, from the newest checkpoint before it; return the replay's folder.

    The data, the random numbers and the layout are those of the run, so the step computes what it did.

    Args:
        run: The run's folder.
        step: The step that failed, counted from 0.
        world_size: Ranks the run had, all of which are started on this machine.

    Raises:
        ComposerError: The run left nothing that could be run again, or the replay failed otherwise.
        ForkError: This process has run tensor operators, so forked ranks would hang.
    """
    from composer3d.runner import launch_local

    try:
        text = (run / "manifest.toml").read_text(encoding="utf-8")
        described = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ComposerError(
            f"{run}: cannot be run again, it left no manifest.toml or environment.json: {error}"
        ) from error
    output = run / "replay"
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir()
    result = launch_local(
        _again,
        (text, str(_folder_of(described, run)), str(output), _checkpoint_before(run, step), step + 1),
        num_ranks=world_size,
        device=described["device"]["type"],
        output=output,
    )
    report = result.report
    if report is not None and report.error != "StabilityError":
        raise ComposerError(f"the replay failed otherwise than the run: {report.render().rstrip()}")
    return output


def _folder_of(described: dict[str, Any], run: Path) -> Path:
    """Return the folder from which the manifest's paths count: where it was, else where we are."""
    folder = Path(described["manifest"].get("folder", "."))
    return folder if folder.is_dir() else Path.cwd()


def _checkpoint_before(run: Path, step: int) -> str:
    """Return what to start from so that the step is run again: a checkpoint, or `never` for the beginning."""
    from composer3d.checkpoint import complete

    found = {
        int(path.name.removeprefix("step-")): path
        for path in (run / "checkpoints").glob("step-*")
        if path.name.removeprefix("step-").isdigit() and complete(path)
    }
    before = [done for done in found if done <= step]
    return str(found[max(before)].absolute()) if before else "never"


def _again(text: str, folder: str, output: str, resume: str, until: int) -> None:
    from composer3d.runner import train

    train(_manifest(text, Path(folder), output), resume=resume, silent=True, until=until)


def _manifest(text: str, folder: Path, output: str) -> Manifest:
    from composer3d.diagnostics.doctor.run_folder import nonfinite_finders
    from composer3d.manifest import read_text, type_manifest
    from composer3d.runner import TABLES

    # Paths and modules are those beside the manifest that the run was started with. Of what watches and saves, nothing
    # is on but the finder.
    document = replace(read_text(text, "replay", [f"run.output={output}", "run.max_restarts=0"]), folder=folder)
    tables = {
        name: table for name, table in document.tables.items() if name not in ("evaluation", "checkpoint", "profiling")
    }
    for family, name, keys in nonfinite_finders():
        tables[family] = {**tables.get(family, {}), name: dict(keys)}
    return type_manifest(replace(document, tables=tables), tables=TABLES)
