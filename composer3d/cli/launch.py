"""`composer3d launch`: the job of a run on a cluster, written or submitted."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from composer3d.cli.options import Subparsers, add_json, add_manifest, path, positive
from composer3d.cli.output import complain, print_problems, say, say_json
from composer3d.errors import ComposerError

__all__ = ["add", "execute"]


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "launch",
        help="write the job that starts a run on several machines",
        description="Check and plan a manifest for a cluster, and print the job that starts it: torchrun on every "
        "machine, told before the end so that it saves, started again where it stopped. --submit hands it over.",
    )
    add_manifest(parser)
    parser.add_argument("--on", choices=("slurm", "kubernetes", "ray", "ssh"), required=True, help="the system")
    parser.add_argument(
        "--nodes", metavar="N|MIN:MAX", help="machines, or as many of a range as there are; default: run.nodes"
    )
    parser.add_argument("--gpus-per-node", type=positive, required=True, metavar="G", help="ranks of a machine")
    parser.add_argument("--name", help="of the job; default: the manifest's")
    parser.add_argument("--image", metavar="I", help="container image, for Kubernetes, or Slurm with pyxis")
    parser.add_argument("--partition", metavar="P", help="of Slurm")
    parser.add_argument("--time", metavar="D-HH:MM:SS", help="limit of a Slurm job")
    parser.add_argument("--hosts", type=path, metavar="FILE", help="addresses of the machines, one a line, for ssh")
    parser.add_argument("--kind", choices=("jobset", "trainjob"), default="jobset", help="of Kubernetes' objects")
    parser.add_argument("--volume", metavar="CLAIM", default="composer3d", help="that Kubernetes' pods write to")
    parser.add_argument("--submit", action="store_true", help="write NAME.sh, .yaml or .py and hand it to the cluster")
    parser.add_argument("--dockerfile", action=_Dockerfile, nargs=0, help="print a Dockerfile for the image, and leave")
    add_json(parser)
    parser.set_defaults(execute=execute)


def execute(arguments: argparse.Namespace) -> int:
    """Print or submit the job; 2 where it would not start and is to be submitted."""
    from composer3d import launch

    job = launch(
        arguments.manifest,
        on=arguments.on,
        nodes=arguments.nodes,
        gpus_per_node=arguments.gpus_per_node,
        overrides=arguments.overrides,
        name=arguments.name,
        image=arguments.image,
        partition=arguments.partition,
        time=arguments.time,
        hosts=() if arguments.hosts is None else _hosts(arguments.hosts),
        kind=arguments.kind,
        volume=arguments.volume,
    )
    print_problems(job.problems)
    if arguments.submit:
        say(job.submit())
        return 0
    if not job.ok:
        complain("the job is written, but would not start: --submit refuses it")
    if arguments.json:
        say_json(job.to_json())
    else:
        say(job.text.rstrip())
    return 0


class _Dockerfile(argparse.Action):
    """Needs no manifest, as `--help` does."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from composer3d.jobs import dockerfile

        say(dockerfile().rstrip())
        parser.exit()


def _hosts(file: Path) -> list[str]:
    """Return the addresses of a host file, without comments and what mpirun adds to them (`slots=8`)."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ComposerError(f"--hosts {file}: cannot be read: {error}") from error
    from composer3d.jobs import machine_of

    stated = ((number, line.partition("#")[0].split()) for number, line in enumerate(lines, 1))
    hosts = [(number, words[0]) for number, words in stated if words]
    seen: dict[str, int] = {}
    for number, host in hosts:
        if (first := seen.setdefault(machine_of(host), number)) != number:
            raise ComposerError(f'--hosts {file}:{number}: "{host}" is the machine of line {first}; name each once')
    return [host for _, host in hosts]
