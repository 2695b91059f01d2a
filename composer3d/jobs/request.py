"""A job as it is asked for: which manifest, on how many machines, with what of the cluster's."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from composer3d.errors import ComposerError

__all__ = ["JobRequest"]

_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,45}[a-z0-9])?")  # of a host, since Kubernetes makes host names of it
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?")
# Minutes, minutes:seconds, hours:minutes:seconds, or days before hours (sbatch(1)).
_TIME = r"\d+(:[0-5]?\d){0,2}|\d+-([01]?\d|2[0-3])(:[0-5]?\d){0,2}"


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """Request for a job.

    Args:
        manifest: Path, or the name of a shipped manifest.
        nodes: Machines, at most.
        least_nodes: Machines without which the run does not begin; fewer than `nodes` where they may leave and come.
        gpus_per_node: Ranks of a machine, one a GPU; of a run on CPU its ranks.
        uses_gpus: Whether GPUs are asked for.
        output: The run's folder.
        grace_s: Seconds that ranks have to save after SIGTERM.
        max_restarts: How often torchrun starts the ranks again.
        overrides: `table.key=value`, as given to `--set`.
        name: Of the job.
        image: Container image.
        volume: Claim of the volume that Kubernetes' pods write to.
        partition: Of Slurm.
        time: Limit as Slurm writes it, `1-12:00:00`.
        hosts: Addresses of the machines, for ssh.
        has_groups: Whether the ranks are in groups that come and go, which `composer3d run` starts on each machine.
        remarks: Lines that the job's file shows at its top: what was checked and planned.
    """

    manifest: str
    nodes: int
    gpus_per_node: int
    uses_gpus: bool
    output: str
    grace_s: float
    max_restarts: int
    name: str
    least_nodes: int | None = None
    overrides: tuple[str, ...] = ()
    image: str | None = None
    volume: str = "composer3d"
    partition: str | None = None
    time: str | None = None
    hosts: tuple[str, ...] = ()
    has_groups: bool = False
    remarks: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        for option, value, pattern in (("partition", self.partition, r"[\w,.-]+"), ("time", self.time, _TIME)):
            if value is not None and not re.fullmatch(pattern, value):
                raise ComposerError(f'--{option} "{value}" is none of Slurm\'s')
        if not _CLAIM.fullmatch(self.volume):
            raise ComposerError(
                f'--volume "{self.volume}": the name of a claim is at most 63 of the letters a to z, digits, - and ., '
                "and begins and ends with a letter or a digit"
            )
        if not _NAME.fullmatch(self.name):
            raise ComposerError(
                f'--name "{self.name}": a job\'s name is at most 47 of the letters a to z, digits and -, and ends in a '
                "letter or a digit"
            )

    @property
    def least(self) -> int:
        """Return the least number of machines."""
        return self.nodes if self.least_nodes is None else self.least_nodes

    @property
    def is_elastic(self) -> bool:
        """Return whether there may be fewer machines than `nodes`."""
        return self.least < self.nodes

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """Return the numbers of ranks that there may be, ascending."""
        return tuple(count * self.gpus_per_node for count in range(self.least, self.nodes + 1))

    @property
    def environment(self) -> dict[str, str]:
        """Return variables for torchrun, which groups of ranks are started without."""
        if self.has_groups:
            return {}
        found = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(int(self.grace_s) + 30)}
        # Where its agents share a store, a node that comes late waits for ever (torch 2.13).
        return found | ({"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.is_elastic else {})

    @property
    def source(self) -> str:
        """Return the manifest as every machine finds it: a path in full, or a shipped name."""
        path = Path(self.manifest)
        return str(path.absolute()) if path.exists() else self.manifest

    @property
    def stop_s(self) -> int:
        """Return the seconds between the first notice and the kill: to save, and a minute to leave."""
        return int(self.grace_s) + 60

    def run_arguments(self, manifest: str | None = None) -> list[str]:
        """Return what comes after torchrun's own arguments.

        Args:
            manifest: Where the ranks find it; default: `source`.
        """
        settings = [word for override in self.overrides for word in ("--set", override)]
        return ["-m", "composer3d", "run", manifest or self.source, *settings]

    def torchrun(self, *rendezvous: str, manifest: str | None = None, nodes: str | None = None) -> list[str]:
        """Return the command line of one machine's torchrun.

        Args:
            rendezvous: Its arguments that name the meeting point.
            manifest: As for `run_arguments`.
            nodes: As the system knows how many machines there are; default: those of the request.
        """
        return [
            f"--nnodes={nodes or (f'{self.least}:{self.nodes}' if self.is_elastic else self.nodes)}",
            f"--nproc-per-node={self.gpus_per_node}",
            *rendezvous,
            f"--max-restarts={self.max_restarts}",
            *self.run_arguments(manifest),
        ]

    def machine(self, manifest: str | None = None) -> list[str]:
        """Return what comes after the interpreter's name on a machine that starts its share of the groups.

        What each system knows in its own way follows: `--node-rank` and `--endpoint`.

        Args:
            manifest: As for `run_arguments`.
        """
        sizes = ["--nproc-per-node", str(self.gpus_per_node), "--nodes", str(self.nodes)]
        return [*self.run_arguments(manifest), *sizes]

    def comment(self) -> str:
        """Return the remarks as lines of a comment, for files whose comments begin with #."""
        lines = [line for remark in self.remarks for line in remark.splitlines()]
        return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def quoted(words: list[str]) -> str:
    """Return words as a shell reads them."""
    return " ".join(shlex.quote(word) for word in words)
