"""All-gathers of FSDP2's units that begin before the forward that needs them, and end unused where shards changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from composer3d.torch_compat.layouts import fsdp_groups, local_of

__all__ = ["EarlyGroup", "confirm_early", "drop_early", "gather_early"]

_Group: Any = object  # FSDP2's, whose module is not imported here


class EarlyGroup(_Group):
    """A group whose all-gather may have begun already.

    FSDP2 takes an all-gather that is under way for the one that is asked for, whatever has happened to the shards since
    (torch 2.11-2.15); no version counter of a shard says so. So it is used only where all ranks have compared their
    shards, and given up otherwise.

    Attributes:
        early: Copies of the shards that travel; None where nothing does.
        is_confirmed: Whether they are those that the next forward needs.
    """

    early: list[Any] | None = None
    is_confirmed = False

    def gather_early(self) -> None:
        """Begin the all-gather of what is not gathered; no module's call, so its order is not compared."""
        if self.is_gathered and not self.is_unsharded and self._all_gather_result is None:
            self.begin_gather()
            self.early, self.is_confirmed = [each.clone() for each in self._shards()], False

    def has_changed(self) -> bool:
        """Return whether this rank's shards are others than those that travel."""
        import torch

        assert self.early is not None, "asked only then"
        return not all(torch.equal(one, other) for one, other in zip(self.early, self._shards(), strict=True))

    def drop_early(self) -> None:
        """Wait for what is under way, and shard it again."""
        if self.early is not None:
            self.early, self.is_confirmed = None, False
            self.wait_for_unshard()
            self._to_sharded()

    def unshard(self, async_op: bool = False) -> None:
        """Gather, whatever is under way unconfirmed."""
        if self.early is not None and not self.is_confirmed:
            self.drop_early()
        super().unshard(async_op)

    def wait_for_unshard(self) -> None:
        """Take what was gathered."""
        self.early, self.is_confirmed = None, False
        super().wait_for_unshard()

    def _shards(self) -> list[Any]:
        return [local_of(parameter.sharded_param.detach()) for parameter in self.fsdp_params]


def gather_early(module: Any) -> None:
    """Begin the all-gather of a unit that is not gathered."""
    for group in _groups([module]):
        group.gather_early()


def confirm_early(modules: Sequence[Any], *, compare: bool, agree: Callable[[Any, list[bool]], list[bool]]) -> None:
    """Let the next forward use what is under way where no rank's shards have changed since; give up the rest.

    Args:
        modules: Units, in the same order on all ranks.
        compare: Whether shards have values that can be compared.
        agree: Given a process group and a value for each of its units, returns for each whether it is true anywhere.
    """
    by_ranks: dict[str, list[Any]] = {}
    for group in _groups(modules):
        if group.early is not None:
            by_ranks.setdefault(group._all_gather_process_group.group_name, []).append(group)
    for groups in by_ranks.values():
        changed = agree(groups[0]._all_gather_process_group, [compare and group.has_changed() for group in groups])
        for group, is_stale in zip(groups, changed, strict=True):
            if is_stale:
                group.drop_early()
            else:
                group.is_confirmed = True


def drop_early(modules: Sequence[Any]) -> None:
    """Wait for what is under way, which nobody needs any more."""
    for group in _groups(modules):
        group.drop_early()


def _groups(modules: Sequence[Any]) -> list[Any]:
    return [group for module in modules for group, _, _ in fsdp_groups(module) if isinstance(group, EarlyGroup)]
