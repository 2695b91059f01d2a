"""`launch`: a run's job on a cluster, checked and planned, as text, and submitted."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, get_args

from composer3d.errors import ComposerError, ManifestError, Problem
from composer3d.jobs.group_kubernetes import group_kubernetes_objects
from composer3d.jobs.group_ray import group_ray_driver
from composer3d.jobs.group_slurm import group_slurm_script
from composer3d.jobs.group_ssh import group_ssh_script
from composer3d.jobs.kubernetes_yaml import kubernetes_objects
from composer3d.jobs.ray_driver import ray_driver
from composer3d.jobs.request import JobRequest
from composer3d.jobs.slurm_script import slurm_script
from composer3d.jobs.ssh_script import ssh_script
from composer3d.mesh import Layout, Role
from composer3d.runner import node_counts

if TYPE_CHECKING:
    from composer3d.manifest import Manifest

__all__ = ["Job", "launch"]

System: TypeAlias = Literal["slurm", "kubernetes", "ray", "ssh"]
SYSTEMS: tuple[System, ...] = get_args(System)
_SUBMIT: dict[str, tuple[str, ...]] = {
    "slurm": ("sbatch",),
    "kubernetes": ("kubectl", "apply", "-f"),
    "ray": ("ray", "job", "submit", "--working-dir", ".", "--", "python"),
    "ssh": ("bash",),
}
_SECRET = re.compile(r'^  token: "[0-9a-f]{32}"$', re.MULTILINE)  # new in each text
_SUFFIX = {"slurm": ".sh", "kubernetes": ".yaml", "ray": ".py", "ssh": ".sh"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Answer of `launch`.

    Args:
        system: What it is for.
        name: Of the job.
        text: The file: a script, or objects.
        problems: What `check` found at this number of ranks; with an error the job would not start.
        output: The run's folder.
    """

    system: System
    name: str
    text: str
    problems: tuple[Problem, ...]
    output: str

    @property
    def ok(self) -> bool:
        """Whether the run would start."""
        return not _has_errors(self.problems)

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values."""
        problems = [problem.to_json() for problem in self.problems]
        return {"ok": self.ok, "system": self.system, "name": self.name, "job": self.text, "problems": problems}

    def __str__(self) -> str:
        return self.text

    def submit(self, folder: str | Path = ".") -> str:
        """Write the job's file and hand it to the cluster.

        Args:
            folder: Where the file is written and the command runs.

        Returns:
            What the cluster's command printed.

        Raises:
            ManifestError: The run would not start.
            ComposerError: The cluster's command is not there, or failed; or the job's file holds something else, or
                cannot be written.
        """
        if not self.ok:
            raise ManifestError(self.problems)
        file = Path(folder) / (self.name + _SUFFIX[self.system])
        command = _SUBMIT[self.system]
        if shutil.which(command[0]) is None:
            raise ComposerError(f"--submit: there is no {command[0]} on this machine; it would be given {file.name}")
        try:
            _write(file, self.text)
        except OSError as error:
            raise ComposerError(f"{file} cannot be written: {(error.strerror or str(error)).lower()}") from error
        done = subprocess.run([*command, file.name], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            raise ComposerError(f"{' '.join(command)} {file.name}: {(done.stderr or done.stdout).strip()}")
        return done.stdout.strip()


def _write(file: Path, text: str) -> None:
    """Write a job's file, for its owner alone where a secret stands in it; one that is there keeps its secret.

    Raises:
        ComposerError: The file holds something else.
        OSError: It cannot be written.
    """
    if not file.exists():
        file.touch(mode=0o600 if _SECRET.search(text) else 0o666)
        file.write_text(text, encoding="utf-8")
    elif _SECRET.sub("", file.read_text(encoding="utf-8", errors="replace")) != _SECRET.sub("", text):
        raise ComposerError(f"{file} exists, differs and is not overwritten; remove it, or give the job a --name")


def launch(
    manifest: str | Path,
    *,
    on: System,
    nodes: int | str | None = None,
    gpus_per_node: int,
    overrides: Sequence[str] = (),
    name: str | None = None,
    image: str | None = None,
    partition: str | None = None,
    time: str | None = None,
    hosts: Sequence[str] = (),
    kind: Literal["jobset", "trainjob"] = "jobset",
    volume: str = "composer3d",
) -> Job:
    """Write the job that starts a run on several machines, after its check and plan.

    Nothing is submitted. torchrun runs once a machine; the ranks save when the cluster says that it ends, and a job
    that starts again goes on from the newest checkpoint. Groups of ranks that come and go are started by `composer3d
    run` instead, and a machine that is lost is started again while the others train on. The file's first lines state
    what was checked and planned.

    Args:
        manifest: Path, or the name of a shipped manifest.
        on: The system.
        nodes: Machines: a number, or a range "2:4" of which any number may be there; default `run.nodes`.
        gpus_per_node: Ranks of a machine; with `[run] device = "cpu"` no GPUs are asked for.
        overrides: `table.key=value`, as given to `--set`.
        name: Of the job; default: the manifest's.
        image: Container image of Kubernetes' pods, or of Slurm with pyxis; default there: what `dockerfile` builds.
        partition: Of Slurm.
        time: Slurm's limit, `1-12:00:00`.
        hosts: Addresses, for ssh.
        kind: Of Kubernetes' objects.
        volume: Claim of the volume that Kubernetes' pods write to.

    Raises:
        ManifestError: The manifest cannot be read.
        ComposerError: An option is missing, or says what another system takes.

    Memory and collectives: none of its own; the plan is made on fake tensors.
    """
    _refuse_foreign(on, image=image, partition=partition, time=time, hosts=hosts)
    request = _request(
        manifest,
        nodes,
        gpus_per_node,
        overrides,
        name,
        **{"image": image, "volume": volume, "partition": partition, "time": time, "hosts": tuple(hosts)},
    )
    _text(on, request, kind)  # what no system takes is refused before the manifest is looked at
    problems, refused = _problems(request)
    counted = f"{request.least} to {request.nodes}" if request.is_elastic else f"{request.nodes}"
    title = f"composer3d launch {manifest}: {counted} nodes of {gpus_per_node} ranks"
    remarks = (title, *_remarks(request, problems, refused))
    text = _text(on, replace(request, remarks=remarks), kind)
    return Job(system=on, name=request.name, text=text, problems=problems, output=request.output)


def _request(
    manifest: str | Path,
    nodes: int | str | None,
    gpus_per_node: int,
    overrides: Sequence[str],
    name: str | None,
    **cluster: Any,
) -> JobRequest:
    """Return the request, with what the manifest says of its run."""
    from composer3d.checking import open_manifest
    from composer3d.runner import output_folder

    inspected = open_manifest(str(manifest), list(overrides))
    opened = inspected.manifest
    if "run" not in opened.tables:
        raise ManifestError(inspected.problems)
    table = opened.tables["run"]
    least, most = _node_range(table.nodes if nodes is None else nodes)
    has_groups = _has_groups(opened)
    if has_groups and least < most:
        raise ComposerError(
            f"--nodes {least}:{most}: groups of ranks divide over one number of machines, each of which may be lost "
            f"and come again; write --nodes {most}, and in the manifest how many groups a step needs"
        )
    return JobRequest(
        manifest=str(manifest),
        nodes=most,
        least_nodes=least,
        gpus_per_node=gpus_per_node,
        uses_gpus=table.device != "cpu",
        output=str(output_folder(opened)),
        grace_s=table.grace_s,
        max_restarts=table.max_restarts,
        overrides=tuple(overrides),
        name=name or _name_of(manifest),
        has_groups=has_groups,
        **cluster,
    )


def _has_groups(manifest: Manifest) -> bool:
    """Return whether its ranks are in groups that come and go; False where the check finds its degrees wrong."""
    layout = _layout(manifest)
    return layout is not None and any(layout.degrees[name] > 1 for name in layout.names(Role.REPLICA))


def _layout(manifest: Manifest) -> Layout | None:
    from composer3d.composition import layout_of
    from composer3d.hooks import Hooks

    try:
        return layout_of(manifest, Hooks(manifest.plugins), world_size=None)
    except ComposerError:  # the check tells it
        return None


def _node_range(stated: Any) -> tuple[int, int]:
    """Return the least and the most nodes.

    Raises:
        ComposerError: Nobody states them, they are none, or a number between them is left out.
    """
    if stated is None:
        raise ComposerError('--nodes is missing, and the manifest has no run.nodes; write --nodes 4, or "2:4"')
    try:
        counts = node_counts(int(stated) if isinstance(stated, str) and stated.isdigit() else stated)
    except ValueError as error:
        raise ComposerError(f"--nodes: {error}") from error
    if len(counts) != counts[-1] - counts[0] + 1:
        raise ComposerError(
            f"run.nodes = {list(counts)} leaves out numbers between them, of which torchrun starts each that is there; "
            f"write --nodes {counts[-1]}, or a range"
        )
    return counts[0], counts[-1]


def _problems(request: JobRequest) -> tuple[tuple[Problem, ...], list[int]]:
    """Check the manifest, and that groups of ranks divide over the machines.

    Returns:
        The problems, and the world sizes that have errors among them.
    """
    from composer3d import check
    from composer3d.checking import open_manifest
    from composer3d.runner import node_problems

    sizes = request.world_sizes
    every = [check(request.manifest, world_size=size, overrides=request.overrides).problems for size in sizes]
    found = tuple(dict.fromkeys(problem for problems in every for problem in problems))
    refused = [size for size, problems in zip(sizes, every, strict=True) if _has_errors(problems)]
    if not request.has_groups:
        return found, refused
    opened = open_manifest(request.manifest, list(request.overrides)).manifest
    of_groups = tuple(node_problems(opened, _layout(opened), request.nodes))
    return (*found, *of_groups), list(sizes) if _has_errors(of_groups) else refused


def _has_errors(problems: Sequence[Problem]) -> bool:
    return any(problem.severity == "error" for problem in problems)


def _text(on: System, request: JobRequest, kind: Literal["jobset", "trainjob"]) -> str:
    """Return the job's file."""
    if on == "kubernetes":
        return (group_kubernetes_objects if request.has_groups else kubernetes_objects)(request, kind=kind)
    worlds = {"slurm": slurm_script, "ray": ray_driver, "ssh": ssh_script}
    groups = {"slurm": group_slurm_script, "ray": group_ray_driver, "ssh": group_ssh_script}
    return (groups if request.has_groups else worlds)[on](request)


def _remarks(request: JobRequest, problems: Sequence[Problem], refused: Sequence[int]) -> list[str]:
    """Return what was checked and planned, as lines."""
    found = [f"check: {problem}" for problem in problems]
    if _has_errors(problems):
        return [*found, f"this run would not start on {' or '.join(map(str, refused))} ranks"]
    ends = sorted({request.world_sizes[0], request.world_sizes[-1]})
    return [*found, *(_planned(request, size, of_several=len(ends) > 1) for size in ends)]


def _planned(request: JobRequest, size: int, *, of_several: bool) -> str:
    """Return the memory that a plan states for so many ranks."""
    from composer3d import plan

    try:
        ranks = plan(request.manifest, world_size=size, overrides=request.overrides).to_json()["ranks"]
    except ComposerError as error:
        return f"plan: {error}"
    peak = max(rank["memory"]["peak"] for rank in ranks)
    of = f"each of {size} ranks" if of_several else "a rank"
    return f"plan: {of} needs {peak / 2**30:.2f} GiB at its peak"


def _name_of(manifest: str | Path) -> str:
    """Return a job's name for a manifest: its file's, in the letters that every system takes."""
    return re.sub(r"[^a-z0-9]+", "-", Path(manifest).stem.lower()).strip("-")[:47].strip("-") or "run"


def _refuse_foreign(on: System, **options: object) -> None:
    """Refuse options of another system, which would be left out silently."""
    takes = {"slurm": ("image", "partition", "time"), "kubernetes": ("image",), "ray": (), "ssh": ("hosts",)}
    for option, value in options.items():
        if value and option not in takes[on]:
            others = " and ".join(system for system in SYSTEMS if option in takes[system])
            raise ComposerError(f"--{option} is {others}'s; {on} does not take it")
