"""Shell of jobs that start groups of ranks on several machines: their secret, and who is started again."""

from __future__ import annotations

from composer3d.jobs.request import JobRequest, quoted

__all__ = ["DECIDE", "SECRET", "machine_command"]

# Written where all machines find it and its owner alone reads it: a command line, and a job's record, are read by all.
SECRET = """\
secret="$logs/.secret-$job"
(umask 077 && od -An -N16 -tx1 /dev/urandom | tr -d ' \\n' >"$secret")
over="$logs/.over-$job"
trap 'rm -f "$logs/".*-"$job" "$logs/".*-"$job"-*' EXIT"""

# composer3d run ends with 0, 2 (the manifest or the command line) or 3 (the run has failed, or the machine is refused)
# where to start it again would change nothing; all else is a loss: of its processes, of the machine, or of machine 0.
DECIDE = """\
is_lost() { case $1 in 0 | 2 | 3) return 1 ;; esac; }
again() { # start machine $1, and again wherever it is lost, until the run is over
  local code=0 tries=0
  while [ ! -e "$over" ]; do
    code=0
    machine "$1" || code=$?
    is_lost "$code" && [ ! -e "$over" ] || break
    tries=$((tries + 1))
    echo "machine $1 (${hosts[$1]}) is lost (exit code $code), and started again" >&2
    sleep $((tries > 5 ? 10 : 2))
  done
  return "$code"
}
attend() { # machine 0, a process of this shell: a signal ends a wait, and not the ranks; then the run is over
  code=0
  wait "$1" || code=$?
  while kill -0 "$1" 2>/dev/null; do
    code=0
    wait "$1" || code=$?
  done
  touch "$over"
}"""


def machine_command(request: JobRequest, *, endpoint: str) -> str:
    """Return the arguments of `python3` on machine `$1`, as a shell reads them.

    Args:
        request: What is to be started.
        endpoint: Of machine 0, in the shell's words.
    """
    return f'{quoted(request.machine())} --node-rank "$1" --endpoint {endpoint}'
