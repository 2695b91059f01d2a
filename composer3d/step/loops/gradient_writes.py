"""Writes of a loop into gradients before the optimizer's step, and into shards of parameters after it, counted.

A gradient that one rank scales is another one than on the others, and of shards nobody else has the value. What some
rank has an empty shard of is not counted: a write there may leave it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from composer3d.step.sharded_tensors.assigned_values import forget_aliases, num_alias_writes
from composer3d.step.sharded_tensors.written_values import sum_of_words
from composer3d.torch_compat import held_tensor

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["GradientWrites", "ShardWrites", "sums_of"]


class GradientWrites:
    """Counts writes into gradients, and gradients that others are assigned for. Memory: references. Collectives: none.

    Writes through `.data` are not counted.

    Attributes:
        own: Parameters, by `id`, that other ranks do not have, which are not counted: experts of a list.

    Args:
        named: Returns the parameters that all ranks have, with their FQNs.
        compares: False where no other rank is there, so that nothing is counted.
    """

    def __init__(self, named: Callable[[], Iterable[tuple[str, nn.Parameter]]], *, compares: bool = True) -> None:
        self._named, self._compares = named, compares
        self.own: frozenset[int] = frozenset()
        self._parameters: Sequence[nn.Parameter] = ()
        self._gradients: list[Tensor | None] = []
        self._counts: list[Tensor] = []
        self._versions: list[int] = []
        self._found: dict[int, int] = {}  # by place among the parameters
        self._told: dict[int, int] = {}
        self._names: dict[int, int] = {}  # by the same the parameter's `id`

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradients as the engine's own from here on."""
        if not self._compares:
            return
        own = self.own
        self._parameters = [each for each in parameters if id(each) not in own] if own else parameters
        self._gradients = [parameter.grad for parameter in self._parameters]
        found = [gradient for gradient in self._gradients if gradient is not None]
        # `to_local` would make a node of a graph.
        self._counts = [each for gradient in found for each in (gradient, held_tensor(gradient))]
        self._versions = [each._version for each in self._counts]

    def end(self) -> None:
        """Count what was written since `begin`, before the engine writes again."""
        versions = [each._version for each in self._counts]
        now = [parameter.grad for parameter in self._parameters]
        if versions != self._versions or any([one is not two for one, two in zip(now, self._gradients, strict=True)]):
            self._add(now, versions)
        self._parameters, self._gradients, self._counts, self._versions = (), [], [], []

    def _add(self, now: Sequence[Tensor | None], versions: Sequence[int]) -> None:
        changes = iter([one != two for one, two in zip(versions, self._versions, strict=True)])
        for place, (gradient, before) in enumerate(zip(now, self._gradients, strict=True)):
            is_written = before is not None and any([next(changes), next(changes)])
            if (is_written or gradient is not before) and _is_on_all_ranks(self._parameters[place]):
                self._found[place] = self._found.get(place, 0) + 1
                self._names[place] = id(self._parameters[place])

    def stepped(self) -> None:
        """Begin the next step: what was counted is compared when it opens."""
        self.end()
        self._told, self._found = self._found, {}

    def number(self) -> int:
        """Return a number that is alike where ranks have written alike; 0 where nothing is written."""
        return hash(tuple(sorted(self._told.items()))) if self._told else 0

    def described(self) -> dict[str, int]:
        """Return the writes by parameter."""
        counts = {self._names[place]: count for place, count in self._told.items()}
        return {
            f'writes into the gradient of "{fqn}" after its last backward': counts.get(id(parameter), 0)
            for fqn, parameter in self._named()
        }


class ShardWrites:
    """Counts the parameters into whose shards a loop writes between steps. Memory: references. Collectives: none.

    Writes through `.data` move no version but that of what a loop was given for it, which is counted. Where values are
    looked at, each shard is summed up twice, after a step and before the next one: an operator that all ranks have run
    may change some shards and leave others as they are, as a clamp does, and any other change is a rank's own.
    """

    def __init__(self) -> None:
        self._parameters: Mapping[str, nn.Parameter] = {}
        self.forget()

    def forget(self) -> None:
        """Take what is written before the next step as not the loop's: a checkpoint that is loaded."""
        forget_aliases(self._parameters.values())
        self._parameters = {}
        self._counts: list[Tensor] = []
        self._versions: list[int] = []
        self._sums: dict[str, int] = {}

    def stepped(self, parameters: Mapping[str, nn.Parameter], *, looks: bool) -> None:
        """Take the values of sharded parameters, by FQN, as results of the optimizer.

        Args:
            parameters: By FQN.
            looks: Whether values are looked at before the next step.
        """
        self._counts = [each for parameter in parameters.values() for each in (parameter, held_tensor(parameter))]
        self._parameters, self._versions = parameters, [each._version for each in self._counts]
        forget_aliases(parameters.values())
        self._sums = sums_of(parameters) if looks else {}

    def number(self) -> int:
        """Return a number that is alike where ranks have written alike; 0 where nothing is written."""
        versions = [each._version for each in self._counts]
        is_written = versions != self._versions or any(map(num_alias_writes, self._parameters.values()))
        if not is_written and (not self._sums or self._sums == sums_of(self._parameters)):
            return 0
        return hash(tuple(self._written().values()))

    def described(self) -> dict[str, int]:
        """Return the parameters that were written into."""
        return {f'writes between steps into the shards of "{fqn}"': number for fqn, number in self._written().items()}

    def _written(self) -> dict[str, int]:
        changes = iter([each._version != before for each, before in zip(self._counts, self._versions, strict=True)])
        now = sums_of(self._parameters) if self._sums else {}
        found: dict[str, int] = {}
        for fqn, parameter in self._parameters.items():
            is_written = any([next(changes), next(changes)])
            number = num_alias_writes(parameter) or int(now.get(fqn) != self._sums.get(fqn))
            found[fqn] = (1 if is_written else number) if _is_on_all_ranks(parameter) else 0
        return found


def sums_of(parameters: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the sums of the words of every plain local tensor, by FQN. Collectives: none."""
    import torch

    # Of a DTensor `detach` and `to_local` would be dispatched in Python.
    plain = {fqn: held_tensor(parameter).detach() for fqn, parameter in parameters.items()}
    plain = {fqn: tensor for fqn, tensor in plain.items() if type(tensor) is torch.Tensor and tensor.numel()}
    words = [sum_of_words(tensor) for tensor in plain.values()]
    return dict(zip(plain, torch.stack(words).tolist() if words else [], strict=True))


def _is_on_all_ranks(parameter: Tensor) -> bool:
    """Return whether no rank has an empty shard."""
    from torch.distributed.tensor import DTensor, Shard

    if not isinstance(parameter, DTensor):
        return True
    for dim, placement in enumerate(parameter.placements):
        ranks = parameter.device_mesh.size(dim)
        if isinstance(placement, Shard) and parameter.shape[placement.dim] <= (ranks - 1) * -(
            -parameter.shape[placement.dim] // ranks
        ):
            return False
    return True
