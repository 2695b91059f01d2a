"""The world of several groups of ranks, on one machine or on several: each group is started again where it is lost.

One process knows who takes part in a step; for each group it forks one that starts the group's ranks as `launch_local`
does. A group of which a rank is lost is started again while the others go on. Where none is left, all are started again
from the last checkpoint, as often as is allowed. Nothing listens but a socket in a folder that this user alone can
enter, and the ranks' backends on loopback.

Of several machines the first one does that for all, and listens on the one address of its endpoint; the others have a
connection to it and start their share of the groups. Where one is lost, its groups are, and it may come again. Ranks
then listen for those of other groups on the address by which they reach that endpoint.
"""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from composer3d.processes import temporary_folder
from composer3d.replicas import ReplicaPolicy, listen
from composer3d.runner.launching.group_coordinator import Coordinator
from composer3d.runner.launching.joined_node import JoinedNode
from composer3d.runner.launching.launcher import LaunchResult
from composer3d.runner.launching.local_groups import GroupWork, LocalGroups
from composer3d.runner.launching.lock import RunLock
from composer3d.runner.launching.node_place import NodeMeeting, NodePlace, token_of

__all__ = ["launch_groups"]

_MARK = ".nodes-"


def launch_groups(
    function: Callable[..., Any], args: Sequence[Any] = (),
    *, policy: ReplicaPolicy, num_groups: int, num_ranks: int, device: Literal["cpu", "cuda"], output: Path,
    max_restarts: int = 0, grace_s: float = 30.0, place: NodePlace | None = None,
    fingerprint: Mapping[str, str] = MappingProxyType({}),
) -> LaunchResult:  # fmt: skip
    """Run a function on several groups of ranks, and wait until one group has come to the end.

    Args:
        function: What each rank runs; see `launch_local`. On several machines it returns JSON.
        args: Its arguments.
        policy: Of the groups.
        num_groups: Groups to start, on all machines.
        num_ranks: Ranks of each.
        device: Where the ranks compute.
        output: The run's folder, held by a lock of the first machine; all machines share it.
        max_restarts: How often all groups are started again after all were lost.
        grace_s: Seconds the ranks have after a SIGTERM.
        place: Of this machine; None where it is the only one.
        fingerprint: What all machines must have alike.

    Returns:
        How the run ended; `values` are those of one group, on several machines of its first rank.

    Raises:
        ForkError: This process has run tensor operators, so forked ranks would hang.
        LockError: Another run holds the output folder.
        RendezvousError: Nothing can listen at the endpoint.
        ComposerError: The secret of the machines is not set; or the first machine does not answer, or refuses this one.

    Memory: small. Collectives: none.
    """
    from composer3d.processes import prewarm, refuse_unsafe_fork

    token = uuid.uuid4().hex if place is None else token_of()
    if device == "cpu":
        prewarm()
    refuse_unsafe_fork()
    with ExitStack() as stack:
        private = stack.enter_context(temporary_folder("launch"))
        is_first = place is None or place.rank == 0
        lock = stack.enter_context(RunLock(output, attempts=private)) if is_first else None
        world: dict[str, Any] = {"num_ranks": num_ranks, "device": device, "grace_s": grace_s}
        work = GroupWork(function=function, args=tuple(args), output=output, private=private, lock=lock, **world)
        if place is not None and not is_first:
            return _joined(work, place, policy, token=token, num_groups=num_groups, fingerprint=fingerprint)
        meeting = None if place is None else stack.enter_context(_meeting(place, fingerprint, output))
        return _coordinated(work, policy, place, meeting, token=token, num_groups=num_groups, times=max_restarts)


def _coordinated(
    work: GroupWork,
    policy: ReplicaPolicy,
    place: NodePlace | None,
    meeting: NodeMeeting | None,
    *,
    token: str,
    num_groups: int,
    times: int,
) -> LaunchResult:
    """Run all groups of the only machine, or of the first one, that knows who takes part."""
    (work.output / "error.json").unlink(missing_ok=True)
    address = str(work.private / "quorum") if place is None else place.endpoint
    coordinator = Coordinator(
        _listener(address, backlog=num_groups * (work.num_ranks + 1)),
        policy,
        token=token,
        num_groups=num_groups,
        num_ranks=work.num_ranks,
        private=work.private,
        max_restarts=times,
        grace_s=work.grace_s,
        meeting=meeting,
    )
    try:
        groups = range(num_groups) if place is None else place.groups(num_groups)
        result = coordinator.run(_local(work, groups, token, address=address, close=coordinator.close_in_child))
        if result.report is not None:
            result.report.write_error_json(work.output)
        return result
    finally:
        coordinator.close()


def _joined(
    work: GroupWork,
    place: NodePlace,
    policy: ReplicaPolicy,
    *,
    token: str,
    num_groups: int,
    fingerprint: Mapping[str, str],
) -> LaunchResult:
    """Run the groups of a machine that is not the first."""
    node = JoinedNode(
        place,
        policy=policy,
        token=token,
        fingerprint=fingerprint,
        output=work.output,
        private=work.private,
        grace_s=work.grace_s,
    )
    groups = place.groups(num_groups)
    return node.run(_local(work, groups, token, address=place.endpoint, close=node.close))


def _local(
    work: GroupWork, groups: Sequence[int], token: str, *, address: str, close: Callable[[], None]
) -> LocalGroups:
    """Return the groups of this machine; their files have a name that tells nobody the token."""
    return LocalGroups(work, groups=groups, address=address, token=token, name=uuid.uuid4().hex, close=close)


def _listener(address: str, *, backlog: int) -> socket.socket:
    """Return a socket that listens at an endpoint, or in a folder that this user alone can enter."""
    if "/" not in address:
        return listen(address, backlog=backlog)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen(backlog)
    return listener


@contextmanager
def _meeting(place: NodePlace, fingerprint: Mapping[str, str], output: Path) -> Iterator[NodeMeeting]:
    """Write a file into the run's folder that tells other machines that theirs is the same one."""
    for stale in output.glob(f"{_MARK}*"):  # of a run that was killed
        stale.unlink(missing_ok=True)
    mark = output / f"{_MARK}{uuid.uuid4().hex}"
    mark.touch()
    try:
        yield NodeMeeting(count=place.count, fingerprint=fingerprint, mark=mark.name)
    finally:
        mark.unlink(missing_ok=True)
