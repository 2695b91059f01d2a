"""Script for Slurm's sbatch: one torchrun a node or a task a rank, told before the limit, queued again after saving."""

from __future__ import annotations

import shlex

from composer3d.jobs.request import JobRequest, quoted

__all__ = ["ADDRESS", "directives", "slurm_script"]

ADDRESS = """\
address=$(scontrol show node "$head" | sed -n 's/.*NodeAddr=\\([^ ]*\\).*/\\1/p')
port=$((20000 + SLURM_JOB_ID % 10000))"""

# Slurm tells the script alone (B:), which passes it to the ranks: a signal to all of the job would find torchrun, which
# ends its ranks, and ranks that import still. USR1, since scancel's TERM must not queue the job again. The meeting
# point is the first node's address as Slurm knows it, and nothing else: every node would fall back to itself.
_SCRIPT = """\
#!/bin/bash
{comment}{directives}
set -euo pipefail

stopped= steps=
stop() {{ # the time limit or a preemption is near: the ranks save and end, and the job is queued again
  stopped=1
  touch "$logs/stopping-$SLURM_JOB_ID-$restarts"
  [ -z "$steps" ] || scancel --signal=TERM "$SLURM_JOB_ID"
}}
logs={logs}
restarts=${{SLURM_RESTART_COUNT:-0}}
mkdir -p "$logs"
trap stop USR1

{environment}head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
{address}

# what ends with another code after SIGTERM, as torchrun does with 1, must not end the nodes that save still
node='trap : TERM; "$@" || {{ code=$?; [ -e "$0" ] || exit "$code"; }}'
srun --kill-on-bad-exit=1 --output="$logs/slurm-$SLURM_JOB_ID-$restarts-%t.log" \\
  bash -c "$node" "$logs/stopping-$SLURM_JOB_ID-$restarts" \\
  {program} &
steps=$!
code=0
wait "$steps" || code=$?
while kill -0 "$steps" 2>/dev/null; do # the signal ended the wait, not the ranks
  code=0
  wait "$steps" || code=$?
done
if [ -n "$stopped" ]; then
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
[ "$code" = 0 ] || tail -n 20 "$logs/slurm-$SLURM_JOB_ID-$restarts-"*.log >&2
exit "$code"
"""


def slurm_script(request: JobRequest) -> str:
    """Return the script that `sbatch` takes.

    Of a range of nodes Slurm grants any number, and torchrun starts on as many as there are. Nodes that fail, and jobs
    that are preempted, are queued again by Slurm (`--requeue`) and go on from the newest checkpoint.
    `--signal=B:USR1@S` tells the script S seconds before the time limit (sbatch(1)), which ends the ranks with SIGTERM;
    they save within `run.grace_s`.

    Args:
        request: What is to be started.
    """
    return _SCRIPT.format(
        comment=request.comment(),
        directives=directives(request, num_tasks=1 if _has_torchrun(request) else request.gpus_per_node),
        address=ADDRESS,
        environment="".join(f"export {name}={value}\n" for name, value in request.environment.items()),
        logs=quoted([f"{request.output}/logs"]),
        program=_program(request),
    )


def _has_torchrun(request: JobRequest) -> bool:
    """Return whether torchrun starts the ranks: where they are started again, or nodes come and go.

    Else srun does, and each rank imports torch after no other process that has.
    """
    return request.is_elastic or request.max_restarts > 0


def _program(request: JobRequest) -> str:
    """Return the command of a task."""
    if not _has_torchrun(request):
        return f"python3 {quoted(request.run_arguments())}"
    rendezvous = ("--rdzv-backend=c10d", '--rdzv-id="$SLURM_JOB_ID-$restarts"', '--rdzv-endpoint="$address:$port"')
    granted = '"$SLURM_JOB_NUM_NODES"' if request.is_elastic else None
    shell = request.torchrun(*rendezvous, nodes=granted)
    words = [word if word in (*rendezvous, f"--nnodes={granted}") else shlex.quote(word) for word in shell]
    return "python3 -m torch.distributed.run " + " ".join(words)


def directives(request: JobRequest, *options: str, num_tasks: int = 1) -> str:
    """Return the lines by which the script asks for machines.

    Args:
        request: What is to be started.
        options: Of sbatch, besides.
        num_tasks: Of a machine.
    """
    values = {
        "job-name": request.name,
        "nodes": f"{request.least}-{request.nodes}" if request.is_elastic else request.nodes,
        "ntasks-per-node": num_tasks,
        "gpus-per-node": request.gpus_per_node if request.uses_gpus else None,
        "partition": request.partition,
        "time": request.time,
        "signal": f"B:USR1@{request.stop_s}",
        "output": f"{request.name}-%j.out",
        "open-mode": "append",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in values.items() if value is not None]
    if request.image is not None:
        lines.append(f"#SBATCH --container-image={shlex.quote(request.image)}")
    return "\n".join([*lines, *(f"#SBATCH {option}" for option in (*options, "--requeue")), ""])
