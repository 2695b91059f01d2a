"""A plugin for whole groups of ranks that leave and come back: each is a world of its own, with the same parameters."""

from __future__ import annotations

import io

import torch
import torch.distributed as dist

from composer3d import Batch, StepAction, StepPoint, hookimpl, map_tensors, plugin


@plugin(family="communication")
class Replicas:
    """Average gradients over the groups that take part in a step, and hand the state to one that comes back.

    The samples of a step are divided among those groups, so that the run is that of one group alone, whoever is there.

    Memory: the gradients once more; parameters and optimizer state where a group comes back. Collectives: none of the
    mesh: ranks of the same number in their groups exchange through a store.

    Args:
        store: File of the store.
        group: Index of this one.
        present: Groups that take part, by step.
    """

    store: str
    group: int
    present: list[list[int]]

    @hookimpl
    def composer3d_configure(self, context):
        context.claim("samples", by=self)

    @hookimpl
    def composer3d_place_batch(self, context, batch):
        members = self.present[context.state[self]]

        def piece(tensor):
            return tensor.chunk(len(members))[members.index(self.group)].contiguous()

        args, kwargs, target = map_tensors(piece, [list(batch.args), dict(batch.kwargs), batch.target])
        return Batch(args=tuple(args), kwargs=kwargs, target=target)

    @hookimpl
    def composer3d_step_actions(self, context):
        return [
            StepAction(name="replicas.heal", point=StepPoint.BEGIN, run=self._heal),
            StepAction(name="replicas", point=StepPoint.GRADIENTS_REDUCED, run=self._average),
        ]

    def _heal(self, state):
        state.context.state[self] = state.step
        before = self.present[state.step - 1] if state.step else self.present[0]
        stayed = [group for group in self.present[state.step] if group in before]
        if len(stayed) == len(self.present[state.step]):
            return
        held = [_local(parameter.detach()) for parameter in state.parameters()]
        for parameter in state.parameters():
            held += [_local(value) for value in state.optimizer.state[parameter].values() if torch.is_tensor(value)]
        if self.group == stayed[0]:
            self._put(state, "state", held)
        elif self.group not in stayed:
            for own, other in zip(held, self._get(state, "state", stayed[0]), strict=True):
                own.copy_(other)

    def _average(self, state):
        gradients = [_local(parameter.grad) for parameter in state.parameters()]
        self._put(state, "gradients", [torch.tensor(state.count), *gradients])
        found = [self._get(state, "gradients", group) for group in self.present[state.step]]
        total = sum(count for count, *_ in found)
        for index, own in enumerate(gradients, 1):
            own.copy_(sum(each[0] * each[index] for each in found) / total)

    def _put(self, state, what, tensors):
        content = io.BytesIO()
        torch.save([tensor.clone() for tensor in tensors], content)
        self._store().set(self._key(state, what, self.group), content.getvalue())

    def _get(self, state, what, group):
        return torch.load(io.BytesIO(self._store().get(self._key(state, what, group))))

    def _store(self):
        return dist.FileStore(self.store, -1)

    @staticmethod
    def _key(state, what, group):
        return f"{state.step}/{what}/{group}/{state.context.rank}"


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
