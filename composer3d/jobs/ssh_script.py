"""Script that starts one torchrun a machine over ssh, and ends all when one ends."""

from __future__ import annotations

import re
import shlex

from composer3d.errors import ComposerError
from composer3d.jobs.request import JobRequest, quoted

__all__ = ["machine_of", "refuse_hosts", "ssh_script"]

_HOST = re.compile(r"(\w[\w.-]*@)?\w[\w.:-]*")  # what begins with - would be an option of ssh

_STATIC = "--rdzv-backend=static --node-rank=$index --master-addr=${hosts[0]#*@} --master-port=$port"
_ELASTIC = "--rdzv-backend=c10d --rdzv-endpoint=${hosts[0]#*@}:$port"

# Of a range of machines the first one holds the store by which the others meet, so that it may not leave.
# The id is of this start alone, so that no other run is told to stop: the space ends it, and [-] keeps the pattern from
# matching the shell that runs pkill.
# ssh with a terminal (-tt) ends the remote torchrun when the connection does; it passes no signals.
_SCRIPT = """\
#!/bin/bash
{comment}set -uo pipefail

hosts=({hosts})
job={name}-$(date +%s)-$$-$RANDOM
port=${{PORT:-29400}}
logs={logs}
mkdir -p "$logs"
torchrun={torchrun}

machines=()
stop() {{ # the ranks save and end
  for host in "${{hosts[@]}}"; do ssh "$host" "pkill -TERM -f '[-]-rdzv-id=$job '" & done
}}
trap stop TERM INT
for index in "${{!hosts[@]}}"; do
  rendezvous="{rendezvous}"
  ssh -tt -o BatchMode=yes "${{hosts[$index]}}" \\
    "cd $(printf %q "$PWD") && {environment} \\
    {python} -m torch.distributed.run $rendezvous --rdzv-id=$job $torchrun" >"$logs/ssh-$index.log" 2>&1 </dev/null &
  machines+=($!)
done
code=0 lost=0
for machine in "${{machines[@]}}"; do
  wait -n || {{ code=$?; lost=$((lost + 1)); [ "$code" -lt 128 ] && [ "$lost" -gt {spare} ] && stop; }}
done
wait
[ "$lost" -gt {spare} ] || code=0
[ "$code" = 0 ] || tail -n 20 "$logs"/ssh-*.log >&2
exit "$code"
"""


def ssh_script(request: JobRequest) -> str:
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
        logs=quoted([f"{request.output}/logs"]),
        torchrun=shlex.quote(quoted(request.torchrun())),
        environment=" ".join(f"{name}={value}" for name, value in request.environment.items()),
        rendezvous=_ELASTIC if request.is_elastic else _STATIC,
        spare=request.nodes - request.least,
        name=request.name,
        python="python3",
    )


def refuse_hosts(request: JobRequest) -> None:
    """Refuse addresses that are not as many as nodes, none, or of one machine.

    Raises:
        ComposerError: Says which.
    """
    if len(request.hosts) != request.nodes:
        raise ComposerError(f"--on ssh: {request.nodes} nodes, and --hosts names {len(request.hosts)}; name one a line")
    for host in request.hosts:
        if not _HOST.fullmatch(host):
            raise ComposerError(f'--hosts: "{host}" is no address of a machine')
    machines = [machine_of(host) for host in request.hosts]
    if twice := [host for host, machine in zip(request.hosts, machines, strict=True) if machines.count(machine) > 1]:
        raise ComposerError(f"--hosts: {' and '.join(twice)} are one machine; name each once")


def machine_of(host: str) -> str:
    """Return the machine of an address: the same for every user, and in any case of letters."""
    return host.rpartition("@")[2].lower()
