"""State of torch's DistributedDataParallel in a loop, and what its errors mean there."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d import RunContext, StepError

if TYPE_CHECKING:
    from torch import nn

__all__ = ["BucketLoop", "loop_of", "second_gradient"]


@dataclass
class BucketLoop:
    """Buckets in a loop that runs its own forwards.

    Attributes:
        is_armed: Whether the reducer waits for a backward.
        is_left: Whether the last backward left gradients of this rank alone.
        is_replaced: Whether another plugin reduces.
        is_wanted: Whether the next forward's gradients are to be reduced.
        is_passed_over: Whether the reducer would wait in vain for parameters that are frozen now.
        trained: Which parameters were trained in the first forward, in which the reducer is made of them.
        late: Parameters that are trained and were not then; no reducer learns of another `requires_grad`.
        penalised: Index of the last backward without a forward, and the gradients that it left with their versions.
    """

    is_armed: bool = False
    is_left: bool = False
    is_replaced: bool = False
    is_wanted: bool = True
    is_passed_over: bool = False
    trained: tuple[bool, ...] = ()
    late: dict[nn.Parameter, None] = field(default_factory=dict)
    penalised: tuple[int, list[tuple[weakref.ref[Any], int]]] = (-1, [])

    def look(self, module: nn.Module, *, finds_unused: bool) -> None:
        """Compare what a forward trains with what the reducer was made of."""
        now = tuple([parameter.requires_grad for parameter in module.parameters()])
        self.trained = self.trained or now
        if now == self.trained:
            return
        pairs = list(zip(module.named_parameters(), self.trained, now, strict=True))
        late = {parameter: fqn for (fqn, parameter), before, is_now in pairs if is_now and not before}
        frozen = [] if finds_unused else [fqn for (fqn, _), before, is_now in pairs if before and not is_now]
        if self.is_replaced and (late or frozen):
            raise StepError(
                f'requires_grad of "{[*late.values(), *frozen][0]}" is another one than in the first forward, in which '
                "torch's DistributedDataParallel learned what it reduces, and another plugin has replaced what it "
                'reduces with; write reducer = "unit" in [sharding.ddp]'
            )
        self.is_passed_over = self.is_passed_over or bool(frozen)
        self.late.update(dict.fromkeys(late))

    def unchanged(self, index: int) -> set[int]:
        """Return by `id` the gradients that a backward before this one, of a penalty, left, and this one did not."""
        before, grads = self.penalised
        return {id(g()) for g, number in grads if index != before and getattr(g(), "_version", None) == number}


def loop_of(key: Any, context: RunContext) -> BucketLoop:
    """Return the state of a plugin's loop, made at the first call."""
    found: BucketLoop = context.state.setdefault((key, "loop"), BucketLoop())
    return found


def second_gradient(names: Callable[[], Sequence[str]]) -> Callable[[str], str | None]:
    """Return the reading of torch's error that a parameter had a second gradient in one backward.

    Args:
        names: Returns the FQNs of the reducer's parameters, in its order.
    """

    def read(text: str) -> str | None:
        if "mark a variable ready only once" not in text:
            return None
        found = re.search(r"Parameter at index (\d+)", text)
        fqns, index = names(), int(found[1]) if found is not None else -1
        which = f'"{fqns[index]}"' if 0 <= index < len(fqns) else "a parameter"
        return (
            f"torch's DistributedDataParallel counts a gradient of {which} twice: a backward inside of the backward "
            "gives it one, where an autograd.Function of the model's own calls backward(), as reversible networks do, "
            'or a checkpoint with use_reentrant = True; in [sharding.ddp] write reducer = "unit", the default'
        )

    return read
