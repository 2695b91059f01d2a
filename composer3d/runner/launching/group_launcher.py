"""The world of several groups of ranks, on one machine or on several: each group is started again where it is lost.

One process knows who takes part in a step; for each group it forks one that starts the group's ranks as `launch_local`
does. A group of which a rank is lost is started again while the others go on. Where none is left, all are started again
from the last checkpoint, as often as is allowed. Nothing listens but a socket in a folder that this user alone can
enter, and the ranks' backends on loopback.

Of several machines the first one does that for all, and listens on the one address of its endpoint; the others have a
connection to it and start their share of the groups. Where one is lost, its groups are, and it may come again. Ranks
then listen for those of other groups on the address by which they reach that endpoint. Where several machines may serve
and the one that does is lost, the next one takes over (`successor`).
"""

from __future__ import annotations

import logging
import shutil
import socket
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from composer3d.errors import NodeZeroError, NumberTakenError
from composer3d.processes import temporary_folder
from composer3d.replicas import ReplicaPolicy, listen
from composer3d.runner.launching.group_coordinator import Coordinator
from composer3d.runner.launching.joined_node import JoinedNode
from composer3d.runner.launching.launcher import LaunchResult
from composer3d.runner.launching.local_groups import GroupWork, LocalGroups
from composer3d.runner.launching.lock import RunLock
from composer3d.runner.launching.node_place import NodeMeeting, NodePlace, host_name, token_of
from composer3d.runner.launching.seat import Seat
from composer3d.runner.launching.served_run import listens
from composer3d.runner.launching.successor import Successor
from composer3d.runner.launching.terms import MARK, Term, Terms

__all__ = ["launch_groups"]


log = logging.getLogger(__name__)


class _Run(NamedTuple):
    """A run as its machines start it."""

    work: GroupWork
    policy: ReplicaPolicy
    place: NodePlace | None
    token: str
    num_groups: int
    max_restarts: int
    fingerprint: Mapping[str, str]

    @property
    def groups(self) -> range:
        """Groups of this machine."""
        return range(self.num_groups) if self.place is None else self.place.groups(self.num_groups)

    @property
    def backlog(self) -> int:
        """Connections that may wait."""
        return self.num_groups * (self.work.num_ranks + 1)


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
        world: dict[str, Any] = {"num_ranks": num_ranks, "device": device, "grace_s": grace_s}
        work = GroupWork(function=function, args=tuple(args), output=output, private=private, lock=None, **world)
        run = _Run(work, policy, place, token, num_groups, max_restarts, fingerprint)
        if place is not None and (place.rank > 0 or _is_begun(place, output)):
            try:
                return _joined(run, place, stack)
            except NodeZeroError as error:
                if place.rank > 0 or isinstance(error, NumberTakenError):
                    raise
                log.warning("%s: nobody serves the run that was there; it is begun again from its checkpoint", output)
        return _coordinated(run, stack)


def _coordinated(run: _Run, stack: ExitStack) -> LaunchResult:
    """Run all groups of the only machine, or of the first one, that knows who takes part."""
    work, place = run.work, run.place
    lock = stack.enter_context(RunLock(work.output, attempts=work.private))
    meeting = None if place is None else stack.enter_context(_meeting(place, run.fingerprint, work.output))
    (work.output / "error.json").unlink(missing_ok=True)
    address = str(work.private / "quorum") if place is None else place.endpoints[0]
    seat = None
    if place is not None and place.may_move and meeting is not None:
        term = Term(number=1, node=0, name=host_name(), members={0: uuid.uuid4().hex}, address=address)
        seat = Seat(Terms(work.output / meeting.mark), term)
        seat.terms.claim(term)
    coordinator = _coordinator(run, _listener(address, backlog=run.backlog), meeting=meeting, seat=seat)
    try:
        every = address if place is None else place.endpoint
        local = _local(run, address=every, close=coordinator.close_in_child)
        local.serve(lock=lock, close=coordinator.close_in_child)
        return _recorded(coordinator.run(local), run, seat)
    finally:
        coordinator.close()


def _coordinator(run: _Run, listener: socket.socket, **options: Any) -> Coordinator:
    return Coordinator(
        listener,
        run.policy,
        token=run.token,
        num_groups=run.num_groups,
        num_ranks=run.work.num_ranks,
        private=run.work.private,
        max_restarts=run.max_restarts,
        grace_s=run.work.grace_s,
        **options,
    )


def _recorded(result: LaunchResult, run: _Run, seat: Seat | None) -> LaunchResult:
    """Write how the run ended, and remove its terms; both are another machine's, where that one serves."""
    if result.report is not None and result.report.is_recorded:
        result.report.write_error_json(run.work.output)
    if seat is not None and seat.terms.after(seat.term.number) is None:
        shutil.rmtree(seat.terms.folder, ignore_errors=True)
    return result


def _joined(run: _Run, place: NodePlace, stack: ExitStack) -> LaunchResult:
    """Run the groups of a machine that is not the first, or not any more; it may take over."""
    work = run.work
    successor = Successor(place, run.policy, work.output) if place.may_move else None
    node = JoinedNode(
        place,
        policy=run.policy,
        token=run.token,
        fingerprint=run.fingerprint,
        output=work.output,
        private=work.private,
        grace_s=work.grace_s,
        successor=successor,
        succeed=lambda successor, seat, local: _succeeded(run, place, stack, successor, seat, local),
        join_s=run.policy.takeover_s if place.rank == 0 else None,
    )
    return node.run(_local(run, address=place.endpoint, close=node.close_all))


def _succeeded(
    run: _Run, place: NodePlace, stack: ExitStack, successor: Successor, seat: Seat, local: LocalGroups
) -> LaunchResult:
    """Serve in place of a lost machine, in the term that this one has claimed."""
    lock = stack.enter_context(RunLock(run.work.output, attempts=run.work.private, takes_over=True))
    world: dict[str, Any] = {"count": place.count, "fingerprint": run.fingerprint, "endpoints": place.endpoints}
    meeting = NodeMeeting(mark=successor.mark, own=place.rank, **world)
    assert successor.socket is not None, "it is in the list"
    successor.socket.listen(run.backlog)
    coordinator = _coordinator(run, successor.socket, meeting=meeting, seat=seat, known=successor.known)
    try:
        local.serve(lock=lock, close=coordinator.close_in_child)
        return _recorded(coordinator.go_on(local), run, seat)
    finally:
        coordinator.close()


def _is_begun(place: NodePlace, output: Path) -> bool:
    """Return whether another machine may serve the run already: its folder says so, or somebody listens there."""
    if not place.may_move:
        return False
    return any(folder.is_dir() for folder in output.glob(f"{MARK}*")) or any(map(listens, place.endpoints[1:]))


def _local(run: _Run, *, address: str, close: Callable[[], None]) -> LocalGroups:
    """Return the groups of this machine; their files have a name that tells nobody the token."""
    options: dict[str, Any] = {"address": address, "token": run.token, "name": uuid.uuid4().hex, "close": close}
    return LocalGroups(run.work, groups=run.groups, **options)


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
    """Write a file, or a folder for terms, into the run's folder: it tells other machines that theirs is the same."""
    for stale in output.glob(f"{MARK}*"):  # of a run that was killed
        if stale.is_dir():
            shutil.rmtree(stale, ignore_errors=True)
        else:
            stale.unlink(missing_ok=True)
    mark = output / f"{MARK}{uuid.uuid4().hex}"
    if place.may_move:
        mark.mkdir()
    else:
        mark.touch()
    try:
        yield NodeMeeting(count=place.count, fingerprint=fingerprint, mark=mark.name, endpoints=place.endpoints)
    finally:
        if not place.may_move:  # terms are removed where the run has ended, and not where it may go on elsewhere
            mark.unlink(missing_ok=True)
