"""Shell of jobs that start groups of ranks on several machines: their secret, and who is started again."""

from __future__ import annotations

from composer3d.jobs.request import JobRequest, quoted

__all__ = ["NUM_SERVERS", "SECRET", "again", "machine_command"]

# Of the machines the first three are listed: each but the last that is lost leaves one that takes over, one that comes
# again is one of them, and the list stays one that can be read.
NUM_SERVERS = 3

# Written where all machines find it and its owner alone reads it: a command line, and a job's record, are read by all.
SECRET = """\
secret="$logs/.secret-$job"
(umask 077 && od -An -N16 -tx1 /dev/urandom | tr -d ' \\n' >"$secret")
over="$logs/.over-$job" there="$logs/.there-$job" losses="$logs/.losses-$job"
trap 'rm -rf "$logs/".*-"$job" "$logs/".*-"$job"-*' EXIT"""

# composer3d run ends with 0 (the run has ended), 2 (the manifest or the command line is wrong) or 3 (it has failed, or
# the machine is refused) where to start it again would change nothing; all else is a loss: of its processes, or of the
# machine, or it has left. Of all that are lost at once the last one finds the folder of those that are there empty.
_AGAIN = """\
is_lost() {{ case $1 in 0 | 2 | 3) return 1 ;; esac; }}
again() {{ # start machine $1, and again wherever it is lost, until the run is over
  local code tries=0
  until [ -e "$over" ]; do
    until touch "$there/$1" 2>/dev/null; do mkdir -p "$there"; done
    code=0
    machine "$1" || code=$?
    rm -f "$there/$1"
    if ! is_lost "$code"; then
      echo "$code" >>"$over"
      rmdir "$there" 2>/dev/null
    elif [ ! -e "$over" ]; then
      if rmdir "$there" 2>/dev/null && echo >>"$losses" && [ "$(wc -l <"$losses")" -gt {max_restarts} ]; then
        echo "machine $1 (${{hosts[$1]}}) is lost (exit code $code), and no other one is left" >&2
        echo "$code" >>"$over"
        break
      fi
      tries=$((tries + 1))
      echo "machine $1 (${{hosts[$1]}}) is lost (exit code $code), and started again" >&2
      sleep $((tries > 5 ? 10 : 2))
    fi
  done
}}
attend() {{ # the machines, processes of this shell; one that comes as the run ends would wait long for nobody
  local end after=0
  while [ -n "$(jobs -rp)" ]; do
    if [ "$after" -gt 0 ] || grep -qx 0 "$over" 2>/dev/null; then
      after=$((after + 1))
      [ $((after % 30)) != 0 ] || tell
    fi
    sleep 2
  done
  code=1
  while read -r end; do [ "$code" = 0 ] || code=$end; done < <(cat "$over")
}}"""


def again(request: JobRequest) -> str:
    """Return the functions that start machines, and wait until the run is over.

    They call `machine K`, which runs machine K and returns its exit code, and `tell`, which sends SIGTERM to all.

    Args:
        request: What is to be started; `max_restarts` is how often all machines may be lost at once.
    """
    return _AGAIN.format(max_restarts=request.max_restarts)


def machine_command(request: JobRequest) -> str:
    """Return the arguments of `python3` on machine `$1`, as a shell reads them; `$endpoints` are the addresses.

    Args:
        request: What is to be started.
    """
    return f'{quoted(request.machine())} --node-rank "$1" --endpoint "$endpoints"'
