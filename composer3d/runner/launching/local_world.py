"""The local world of a run: one group of ranks, or several that come and go."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from composer3d.errors import Problem
from composer3d.mesh import Layout, Role
from composer3d.replicas import ReplicaPolicy
from composer3d.runner.launching.group_launcher import launch_groups
from composer3d.runner.launching.launcher import LaunchResult, launch_local
from composer3d.runner.launching.node_place import NodePlace

if TYPE_CHECKING:
    from composer3d.composition import Preparation
    from composer3d.manifest import Manifest

__all__ = ["group_problems", "groups_of", "launch_world"]


def groups_of(preparation: Preparation | None) -> dict[str, Any] | None:
    """Return how many groups of ranks there are to be, with their policy, as JSON values; None where there is one."""
    policy = None if preparation is None else preparation.hooks.replicas(preparation.context)
    if preparation is None or policy is None:
        return None
    return {"num_groups": preparation.context.layout.num_groups, "policy": policy.to_json()}


def group_problems(manifest: Manifest, layout: Layout | None) -> list[Problem]:
    """Refuse groups of ranks where a launcher has started one world, which would end with each of its ranks.

    Args:
        manifest: Of the run.
        layout: Of its world.
    """
    for name in () if layout is None else layout.names(Role.REPLICA):
        if layout is not None and layout.degrees[name] > 1:
            message = (
                f"{name} = {layout.degrees[name]}: a launcher has started this process as a rank of one world, which "
                "ends as a whole where one of its ranks does"
            )
            hint = (
                "composer3d run without a launcher starts the groups of one machine, and with --nodes N --node-rank K "
                "--endpoint HOST:PORT those of several"
            )
            return [manifest.document.problem(("mesh", name), message, hint=hint)]
    return []


def launch_world(
    function: Callable[..., Any],
    args: Sequence[Any],
    *,
    num_ranks: int,
    device: Literal["cpu", "cuda"],
    output: Path,
    options: Mapping[str, Any],
    place: NodePlace | None = None,
) -> LaunchResult:
    """Run a function on all ranks of this machine, in one world or in several groups; see `launch_local`.

    Args:
        function: What each rank runs.
        args: Its arguments.
        num_ranks: Of all groups.
        device: Where the ranks compute.
        output: The run's folder.
        options: `max_restarts`, `grace_s`, world sizes of restarts, `groups` as `groups_of` gives them, and the
            `fingerprint` of several machines.
        place: Of this machine among several.
    """
    shared: dict[str, Any] = {"device": device, "output": output}
    shared |= {name: options[name] for name in ("max_restarts", "grace_s")}
    groups = options["groups"]
    if groups is None:
        return launch_local(function, args, num_ranks=num_ranks, exclusive=True, sizes=options["sizes"], **shared)
    num_groups = groups["num_groups"]
    policy = ReplicaPolicy(**groups["policy"])
    shared |= {"place": place, "fingerprint": options["fingerprint"]}
    return launch_groups(
        function, args, policy=policy, num_groups=num_groups, num_ranks=num_ranks // num_groups, **shared
    )
