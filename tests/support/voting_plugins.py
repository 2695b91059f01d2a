"""Plugins with a collective of their own, which one rank issues and another one does not, or another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Literal

import torch
import torch.distributed as dist

from composer3d import StepAction, StepPoint, hookimpl, plugin
from support.ballots import cast


@plugin(family="profiling")
class Voting:
    """Add up votes of the data-parallel ranks at the end of a step.

    Args:
        fault: absent: the second rank does not vote, in the step after the first. other: it gathers votes.
        helps: Whether the function that votes is another module's.
    """

    fault: Literal["absent", "other"]
    helps: bool = False

    wait: ClassVar[Callable[[], None]] = staticmethod(lambda: None)

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="voting", point=StepPoint.END, run=self._vote)

    def _vote(self, state):
        group, votes = state.context.mesh.get_group("dp_shard"), torch.ones(5)
        if state.step and state.context.rank:
            if self.fault == "other":
                dist.all_gather([torch.ones(5), torch.ones(5)], votes, group=group)
            type(self).wait()
        elif self.helps:
            cast(votes, group)
        else:
            dist.all_reduce(votes, group=group)
