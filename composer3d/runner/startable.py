"""The check of a run before its ranks are started: every problem, and what the launcher is to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking import collected_rarely, device_of, inspect, open_manifest
from composer3d.errors import ComposerError, ManifestError, Problem

if TYPE_CHECKING:
    from composer3d.manifest import Manifest

__all__ = ["Startable", "output_of", "resume_problems", "startable"]


@dataclass(frozen=True, kw_only=True)
class Startable:
    """A manifest that was checked for this machine, and the launcher's settings.

    Args:
        manifest: Path or shipped name.
        overrides: As given to `--set`.
        resume: As given to `--resume`.
        ok: Whether ranks may be started.
        problems: Errors and warnings, in the order of the file.
        num_ranks: Ranks to start.
        device: `cpu` or `cuda`.
        output: The run's folder.
        options: Restarts, seconds of grace, and whether a Hugging Face model is trained.
        unknown: Why the first forward was not tried in full; None where it was.
    """

    manifest: str
    overrides: tuple[str, ...]
    resume: str
    ok: bool
    problems: tuple[Problem, ...]
    num_ranks: int = 0
    device: Any = "cpu"
    output: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    unknown: str | None = None


@collected_rarely()
def startable(
    manifest: str,
    overrides: Sequence[str],
    *,
    resume: str,
    nproc_per_node: int | None,
    num_nodes: int | None,
    strict: bool,
) -> Startable:
    """Check a manifest in a child, and import meanwhile what the ranks will need.

    Args:
        manifest: Path or shipped name.
        overrides: As given to `--set`.
        resume: As given to `--resume`.
        nproc_per_node: As for `run`.
        num_nodes: As stated; None where it is not.
        strict: Refuse warnings too.

    Raises:
        ManifestError: Code that the manifest names hung, or ended its process.
        ComposerError: The check itself failed.
    """
    from composer3d.checking import problem_of
    from composer3d.processes import Child, ForeignCodeError, prewarm
    from composer3d.torch_compat import lazy_modules

    child = Child(lambda: _look(manifest, overrides, resume, nproc_per_node, num_nodes, strict=strict))
    for module in lazy_modules():
        if child.ready():
            break
        prewarm([module])
    try:
        found = child.result()
    except ForeignCodeError as error:
        raise ManifestError([problem_of(error, manifest, overrides)]) from error
    problems = tuple(Problem(**problem) for problem in found.pop("problems"))
    return Startable(manifest=manifest, overrides=tuple(overrides), resume=resume, problems=problems, **found)


@collected_rarely()
def _look(
    source: str,
    overrides: Sequence[str],
    resume: str,
    nproc_per_node: int | None,
    num_nodes: int | None,
    *,
    strict: bool,
) -> dict[str, Any]:
    """Return every problem and the launcher's settings, as JSON values."""
    from composer3d.checking import world_size_problems
    from composer3d.runner.launching.local_ranks import machine_problems, num_local_ranks
    from composer3d.runner.launching.local_world import groups_of
    from composer3d.runner.launching.node_counts import world_sizes
    from composer3d.runner.launching.node_place import fingerprint_of, node_problems

    try:
        inspected = open_manifest(source, overrides)
    except ManifestError as error:
        return {"ok": False, "problems": [problem.to_json() for problem in error.problems]}
    manifest = inspected.manifest
    device = device_of(manifest)
    count = num_nodes or 1
    num_ranks = (nproc_per_node or 0) * count or num_local_ranks(manifest, device, num_nodes=count)
    found = inspect(inspected, world_size=num_ranks, rank=0, device=device, forward=True)
    found.problems += world_size_problems(inspected, world_size=num_ranks, device=device, known=found.problems)
    found.problems += machine_problems(manifest, device, -(-(num_ranks or 1) // count)) + resume_problems(resume)
    if num_nodes is not None:
        found.problems += node_problems(manifest, found.layout, num_nodes)
    options = manifest.tables.get("run")
    return {
        "ok": found.ok(strict=strict),
        "problems": [problem.to_json() for problem in found.ordered()],
        "num_ranks": num_ranks or 0,
        "device": device.type,
        "unknown": found.unknown,
        "output": str(output_of(manifest)),
        "options": {
            "max_restarts": getattr(options, "max_restarts", 0),
            "grace_s": getattr(options, "grace_s", 30.0),
            "groups": groups_of(found.preparation),
            "fingerprint": fingerprint_of(inspected.manifest.document),
            "sizes": [size for size in world_sizes(manifest) if size <= (num_ranks or 0)],
            "is_hugging_face": getattr(manifest.tables.get("model"), "hf", None) is not None,
        },
    }


def output_of(manifest: Manifest) -> Path:
    """Return the run's output folder, also of a manifest whose `[run]` is wrong."""
    from composer3d.runner import output_folder

    return output_folder(manifest) if "run" in manifest.tables else Path(f"runs/{manifest.document.stem}")


def resume_problems(resume: str) -> list[Problem]:
    """Check that a checkpoint which is to be resumed from is there and whole."""
    from composer3d.checkpoint import find_checkpoint

    if resume in ("auto", "never"):
        return []
    try:
        find_checkpoint(Path(resume))
    except ComposerError as error:
        return [Problem(message=str(error), file=f"--resume {resume}")]
    return []
