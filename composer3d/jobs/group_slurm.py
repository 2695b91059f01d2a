"""Script for Slurm's sbatch that starts groups of ranks, one step a machine: a lost one does not end the others."""

from __future__ import annotations

from composer3d.jobs.group_shell import NUM_SERVERS, SECRET, again, machine_command
from composer3d.jobs.request import JobRequest, quoted
from composer3d.jobs.slurm_script import ADDRESS, directives

__all__ = ["group_slurm_script"]

# A step a machine: of one step over all of them a machine's processes could not be started again. Slurm tells the
# script alone of its end (B:), and it the ranks, which save. Each listed machine has a port of
# its own: nodes may share an address.
_SCRIPT = """\
#!/bin/bash
{comment}{directives}
set -uo pipefail

logs={logs}
restarts=${{SLURM_RESTART_COUNT:-0}}
job=$SLURM_JOB_ID-$restarts
mkdir -p "$logs"
{secret}

tell() {{
  scancel --signal=TERM "$SLURM_JOB_ID"
}}
stopped=
stop() {{ # the time limit or a preemption is near: the ranks save and end, and the job is queued again
  stopped=1
  touch "$over"
  tell
}}
trap stop USR1

index=0
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
endpoints= # of the machine that knows who takes part, and of those that take over where it is lost
for head in "${{hosts[@]:0:{num_servers}}}"; do
  {address}
  endpoints+=${{endpoints:+,}}$address:$((port + index++))
done

export secret
program='
  COMPOSER3D_QUORUM_TOKEN=$(cat "$secret") && export COMPOSER3D_QUORUM_TOKEN || exit
  (trap "" TERM; while kill -0 $$ && touch "$0"; do sleep 5; done) >/dev/null 2>&1 & beats=$!
  trap : TERM # which the ranks get too
  python3 "$@" & run=$!
  wait "$run"; code=$?
  while kill -0 "$run" 2>/dev/null; do wait "$run"; code=$?; done
  kill -KILL "$beats"
  exit "$code"
'
machine() {{ # the groups of machine $1, which is given up where it was silent for {silent_s} s: srun may not notice
  local alive="$logs/.alive-$job-$1" name="machine-$1-$RANDOM" code=0
  touch --date="+{start_s} seconds" "$alive"
  srun --job-name="$name" --nodes=1 --ntasks=1 --nodelist="${{hosts[$1]}}" --overlap --no-kill --kill-on-bad-exit=0 \
    --open-mode=append --output="$logs/slurm-$job-$1.log" bash -c "$program" "$alive" \
    {command} &
  local step=$! silent
  while kill -0 "$step" 2>/dev/null; do
    silent=$(($(date +%s) - $(stat --format=%Y "$alive"))) # below 0 until it has begun
    if [ "$silent" -gt {silent_s} ] || {{ [ "$silent" -lt 0 ] && [ -e "$over" ]; }}; then
      steps=$(squeue --noheader --steps --job="$SLURM_JOB_ID" --format="%i %j")
      scancel --signal=KILL $(sed -n "s/ $name\\$//p" <<<"$steps")
      kill -KILL "$step"
      break
    fi
    sleep 2
  done
  wait "$step" || code=$?
  return "$code"
}}
{again}

for index in "${{!hosts[@]}}"; do
  (trap '' USR1; again "$index") &
done
attend
if [ -n "$stopped" ]; then
  scontrol requeue "$SLURM_JOB_ID"
  exit 0
fi
[ "$code" = 0 ] || tail -n 20 "$logs/slurm-$job-"*.log >&2
exit "$code"
"""

_SILENT_S = 60  # what others see of a file on a shared disk may be half a minute old
_START_S = 900  # until a step is created, and its container's image is there


def group_slurm_script(request: JobRequest) -> str:
    """Return the script that `sbatch` takes.

    A machine that fails does not end the job (`--no-kill`), and is started again while it is part of it; where it
    knew who takes part, another one takes over. Where the node of the script, which is machine 0, fails with it, Slurm
    queues the job again, and it goes on from the newest checkpoint.

    Args:
        request: What is to be started.
    """
    return _SCRIPT.format(
        comment=request.comment(),
        directives=directives(request, "--no-kill"),
        logs=quoted([f"{request.output}/logs"]),
        secret=SECRET,
        address=ADDRESS.replace("\n", "\n  "),
        command=machine_command(request),
        again=again(request),
        num_servers=NUM_SERVERS,
        silent_s=_SILENT_S,
        start_s=_START_S,
    )
