"""This machine among several that start groups of ranks: its number, where they meet, and what they must have alike."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from composer3d.errors import ArgumentError, PlaceError, Problem, RendezvousError
from composer3d.manifest import Document, Manifest
from composer3d.mesh import Layout, Role
from composer3d.processes import find_launch, installed_version
from composer3d.replicas import TOKEN, Refusal, host_and_port

__all__ = [
    "NodeMeeting",
    "NodePlace",
    "fingerprint_difference",
    "fingerprint_of",
    "host_name",
    "node_place",
    "node_problems",
    "same_number",
    "token_of",
]

_SHORTEST = 16  # characters of a token
_COMPARED = ("composer3d", "torch")


@dataclass(frozen=True, kw_only=True)
class NodePlace:
    """Place of this machine among those of a run.

    Args:
        count: Number of machines.
        rank: Number of this one, from 0; machine 0 knows who takes part, at first.
        endpoint: `HOST:PORT` where machine 0 listens; with those of the machines after it, separated by commas, where
            they take over if it is lost.
    """

    count: int
    rank: int
    endpoint: str

    @property
    def endpoints(self) -> tuple[str, ...]:
        """Addresses of the machines that may serve, by their numbers."""
        return tuple(self.endpoint.split(","))

    @property
    def may_move(self) -> bool:
        """Whether another machine takes over where the one that serves is lost."""
        return len(self.endpoints) > 1

    def groups(self, num_groups: int) -> range:
        """Return the groups of this machine: as many consecutive ones as every machine has.

        >>> NodePlace(count=2, rank=1, endpoint="node0:29400").groups(4)
        range(2, 4)
        """
        each = num_groups // self.count
        return range(self.rank * each, (self.rank + 1) * each)


@dataclass(frozen=True, kw_only=True)
class NodeMeeting:
    """The values that machines of a run must have alike.

    Args:
        count: Number of machines.
        fingerprint: Versions and manifest of machine 0.
        mark: Name of a file in the run's folder, which the others must find there; a folder, that of the terms, where
            several may serve.
        own: Number of this machine.
        endpoints: Addresses of the machines that may serve, by their numbers.
    """

    count: int
    fingerprint: Mapping[str, str]
    mark: str
    own: int = 0
    endpoints: tuple[str, ...] = ()

    def objection(self, message: Mapping[str, Any]) -> Refusal | None:
        """Return in what a machine that greets differs from what this run's are; None where it does not.

        Args:
            message: Its greeting.
        """
        rank = int(message["node"])
        if message["nodes"] != self.count:
            stated = str(message["nodes"])[:10]
            return Refusal(f"it was started with --nodes {stated}, and node {self.own} with --nodes {self.count}")
        if not 0 <= rank < self.count:
            return Refusal(f"{self.count} machines are numbered from 0 to {self.count - 1}")
        reason = fingerprint_difference(self.fingerprint, message["fingerprint"], own_rank=self.own)
        if reason is None:
            listed = [str(address)[:300] for address in message["endpoints"][: self.count]]
            reason = _list_difference(self.endpoints, listed, own_rank=self.own)
        if reason is None and rank == self.own:
            return same_number(f"node {rank} ({host_name()})", str(message["name"])[:200], rank)
        return None if reason is None else Refusal(reason)


def node_place(
    nodes: int | None, node_rank: int | None, endpoint: str | None, environment: Mapping[str, str] = os.environ
) -> NodePlace | None:
    """Return the place of this machine as options state it; None where it is the only one.

    Args:
        nodes: As for `run`.
        node_rank: As for `run`.
        endpoint: As for `run`.
        environment: Of this process.

    Raises:
        ArgumentError: Some of them are missing, are out of range, or a launcher has started this process as a rank.
    """
    stated = {"nodes": nodes, "node_rank": node_rank, "endpoint": endpoint}
    missing = [name for name, value in stated.items() if value is None]
    if len(missing) == len(stated):
        return None
    if missing:
        (name, value), *_ = [(name, value) for name, value in stated.items() if value is not None]
        raise ArgumentError(
            name,
            f"{' and '.join(f'{{{other}}}' for other in missing)} {'is' if len(missing) == 1 else 'are'} missing: "
            "groups of ranks on several machines are started with {nodes} N, {node_rank} K and {endpoint} HOST:PORT on "
            "each, K from 0 to N - 1",
            value=value,
        )
    assert nodes is not None and node_rank is not None and endpoint is not None
    # srun and mpirun start a process a machine as torchrun's users do: of these, RANK and WORLD_SIZE are no matter.
    plain = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID") if name in environment}
    launch = find_launch(plain)
    if launch is not None:
        raise ArgumentError(
            "nodes",
            f"{launch.launcher} has started this process as rank {launch.rank} of {launch.world_size}; start "
            "composer3d run once a machine, without torchrun",
            value=nodes,
        )
    if not 0 <= node_rank < nodes:
        raise ArgumentError("node_rank", f"{nodes} machines are numbered from 0 to {nodes - 1}", value=node_rank)
    _refuse_endpoints(endpoint.split(","), nodes)
    return NodePlace(count=nodes, rank=node_rank, endpoint=endpoint) if nodes > 1 else None


def _refuse_endpoints(endpoints: Sequence[str], nodes: int) -> None:
    """Refuse addresses that are none, that are of more machines than there are, or of one of them twice.

    Raises:
        ArgumentError: Names the address.
    """
    for endpoint in endpoints:
        try:
            host_and_port(endpoint)
        except RendezvousError as error:
            raise ArgumentError("endpoint", str(error)) from None
        if endpoints.count(endpoint) > 1:
            said = f"{endpoint} stands there twice; give the address of each machine once"
            raise ArgumentError("endpoint", said)
    if len(endpoints) > nodes:
        said = f"{len(endpoints)} addresses for {nodes} machines; give those of machines 0, 1, ... in order"
        raise ArgumentError("endpoint", said)


def token_of(environment: Mapping[str, str] = os.environ) -> str:
    """Return the secret by which machines of one run know each other.

    Raises:
        PlaceError: It is not set, or can be guessed.
    """
    token = environment.get(TOKEN, "")
    hint = f"make one, and set it to the same value on all machines: export {TOKEN}=$(openssl rand -hex 16)"
    if not token:
        raise PlaceError(f"{TOKEN} is not set: who knows it may take part in the run; {hint}")
    if len(token) < _SHORTEST or re.fullmatch(r"(.)\1*", token):
        raise PlaceError(f"{TOKEN} can be guessed, and who knows it may take part in the run; {hint}")
    return token


def node_problems(manifest: Manifest, layout: Layout | None, num_nodes: int) -> list[Problem]:
    """Refuse manifests without groups of ranks, and groups that do not divide over the machines.

    Args:
        manifest: Of the run.
        layout: Of its world.
        num_nodes: Number of machines.
    """
    if layout is None:
        return []
    axes = {name: layout.degrees[name] for name in layout.names(Role.REPLICA)}
    if all(degree == 1 for degree in axes.values()):
        message = f"--nodes {num_nodes}: the manifest has no groups of ranks that come and go"
        hint = "start one world on several machines with torchrun, or add such groups"
        return [manifest.document.problem(("mesh",), message, hint=hint, whole_table=True)]
    (name, degree), *_ = [each for each in axes.items() if each[1] > 1]
    if degree % num_nodes == 0:
        return []
    lower = degree // num_nodes * num_nodes
    nearest = (lower, lower + num_nodes) if lower else (num_nodes, 2 * num_nodes)
    message = (
        f"{name} = {degree}: {degree} groups do not divide over {num_nodes} machines, and the ranks of a group meet on "
        "one, in a folder and on loopback"
    )
    hint = f"write {name} = {nearest[0]} or {nearest[1]}"
    return [manifest.document.problem(("mesh", name), message, hint=hint)]


def fingerprint_of(document: Document) -> dict[str, str]:
    """Return what all machines of a run must have alike: versions, and the manifest's content.

    Args:
        document: The manifest with its overrides.
    """
    return {**{name: installed_version(name) for name in _COMPARED}, "manifest": document.digest()}


def fingerprint_difference(own: Mapping[str, Any], other: Mapping[str, Any], *, own_rank: int = 0) -> str | None:
    """Return in what another machine differs from this one, None where it does not.

    Args:
        own: Fingerprint of the machine that serves.
        other: Of the other one.
        own_rank: Number of the machine that serves.
    """
    for name, value in own.items():
        found = str(other.get(name))
        if found != value and name == "manifest":
            return (
                f"it has another manifest than node {own_rank} (digest {found[:12]}, not {value[:12]}); give all "
                "machines the same file and the same --set"
            )
        if found != value:
            return f"it has {name} {found[:40]}, and node {own_rank} has {value}; install the same on all machines"
    return None


def _list_difference(own: Sequence[str], other: Sequence[str], *, own_rank: int) -> str | None:
    """Return in what another machine's list of addresses differs from this one's; None where it serves as well.

    Single addresses that differ do not matter: a machine that was replaced has another one.
    """
    is_in_place = all(address not in own or own.index(address) == place for place, address in enumerate(other))
    if len(own) == len(other) and is_in_place:
        return None
    return (
        f"it was started with --endpoint {','.join(other)}, and node {own_rank} with --endpoint {','.join(own)}; give "
        "all machines the same list, in the order of their numbers"
    )


def same_number(there: str, name: str, rank: int) -> Refusal:
    """Return the refusal of a machine whose number another one has; that one may be about to leave.

    Args:
        there: The other one.
        name: Host name and process of the one that is refused.
        rank: The number.
    """
    reason = f"{there} is there already, and node {rank} ({name}) has the same number"
    return Refusal(f"{reason}: give each machine its own --node-rank", again=True)


def host_name() -> str:
    """Return the name of this machine and this process's number, for messages."""
    return f"{socket.gethostname()}, pid {os.getpid()}"
