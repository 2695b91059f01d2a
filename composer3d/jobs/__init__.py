"""Jobs that start a run on several machines: written for Slurm, Kubernetes, Ray or ssh, and submitted."""

from __future__ import annotations

from composer3d.jobs.dockerfile import dockerfile
from composer3d.jobs.job import Job, launch
from composer3d.jobs.ssh_script import machine_of

__all__ = ["Job", "dockerfile", "launch", "machine_of"]
