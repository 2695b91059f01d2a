"""Script that starts groups of ranks on machines over ssh: a lost one does not end the others, and comes again."""

from __future__ import annotations

from composer3d.jobs.group_shell import NUM_SERVERS, SECRET, again, machine_command
from composer3d.jobs.request import JobRequest, quoted
from composer3d.jobs.ssh_script import refuse_hosts

__all__ = ["group_ssh_script"]

# ssh with a terminal (-tt) ends the remote processes when the connection does; it passes no signals, and a connection
# to a machine that is not there any more ends by its own questions. Each machine writes its process into a file.
_SCRIPT = """\
#!/bin/bash
{comment}set -uo pipefail

hosts=({hosts})
job={name}-$(date +%s)-$$-$RANDOM
port=${{PORT:-29400}}
logs={logs}
mkdir -p "$logs"
{secret}

endpoints= # of the machine that knows who takes part, and of those that take over where it is lost
for host in "${{hosts[@]:0:{num_servers}}}"; do
  host=${{host#*@}}
  case $host in *:*) host="[$host]" ;; esac
  endpoints+=${{endpoints:+,}}$host:$port
done

tell() {{ # all machines that are there: any of them may serve
  local index told
  for index in $(ls "$there" 2>/dev/null); do
    printf -v told 'cd %q && kill -TERM $(cat %q)' "$PWD" "$logs/.pid-$job-$index"
    ssh -o BatchMode=yes -o ConnectTimeout=10 "${{hosts[$index]}}" "$told" &
  done
}}
stop() {{ # the ranks save and end
  touch "$over"
  tell
}}
trap stop TERM INT
machine() {{ # the groups of machine $1
  local told command
  printf -v told 'COMPOSER3D_QUORUM_TOKEN=$(cat %q) && export COMPOSER3D_QUORUM_TOKEN && echo $$ >%q && exec' \\
    "$secret" "$logs/.pid-$job-$1"
  printf -v command ' %q' python3 {command}
  ssh -tt -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 "${{hosts[$1]}}" \\
    "cd $(printf %q "$PWD") && $told$command" >>"$logs/ssh-$1.log" 2>&1 </dev/null
}}
{again}

for index in "${{!hosts[@]}}"; do
  (trap '' TERM INT; again "$index") &
done
attend
[ "$code" = 0 ] || tail -n 20 "$logs"/ssh-*.log >&2
exit "$code"
"""


def group_ssh_script(request: JobRequest) -> str:
    """Return a script for machines without a scheduler, all of which see this folder.

    Args:
        request: What is to be started, with the machines' addresses.

    Raises:
        ComposerError: See `refuse_hosts`.
    """
    refuse_hosts(request)
    return _SCRIPT.format(
        comment=request.comment(),
        hosts=quoted(list(request.hosts)),
        name=request.name,
        logs=quoted([f"{request.output}/logs"]),
        secret=SECRET,
        num_servers=NUM_SERVERS,
        command=machine_command(request),
        again=again(request),
    )
