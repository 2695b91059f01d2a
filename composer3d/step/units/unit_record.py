"""Units that a rank did not call, and parameters that it did not use, in a step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from composer3d import torch_compat
from composer3d.interfaces import DataDependent
from composer3d.mesh import Role
from composer3d.step import gradients
from composer3d.step.sharded_tensors.assigned_values import record_gathered
from composer3d.step.sharded_tensors.late_graphs import LateGraphs
from composer3d.step.sharded_tensors.passed_parameters import refuse_passed
from composer3d.step.sharded_tensors.whole_constants import forget_constants
from composer3d.step.units.unit_order import END, UnitOrder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import Tensor, nn

    from composer3d.context import RunContext
    from composer3d.observation.flight_recorder import Flight
    from composer3d.step.guard import Guard

__all__ = ["UnitRecord"]

_NOTHING = contextlib.nullcontext()
_PART = 1 << 24  # collectives of a part, at most
_TIMEOUT_S = 1800.0  # where the backend does not report it


class UnitRecord:
    """Record of what units of data parallelism send in a step, alike on all ranks.

    Parameters that a rank has not used, as those of an expert that none of its rows went to, take part in reductions
    with zeros. What no rank has used is left without a gradient, as on one device: an optimizer leaves it alone, its
    decay too. Ranks find out in the sums that end a backward that some parameters were not used on some rank; that
    they gather and reduce the same units in the same order is agreed before, see `UnitOrder`.

    Args:
        context: Complete.
        guard: Has the ranks of this stage.
        flight: Sends requests to other ranks; None without any.
        left: Called after a forward that the loop ran itself from within the model.

    Attributes:
        takes_gradients: Whether a backward that runs now is one whose gradients are used, or are meant to be this
            rank's.
    """

    def __init__(self, context: RunContext, guard: Guard, flight: Flight | None, *, left: Callable[[], None]) -> None:
        self._context, self._guard, self._flight = context, guard, flight
        self._units = [torch_compat.watch_units(part.module) for part in context.parts]
        for units in self._units:
            units.left, units.passed, units.written = left, refuse_passed, record_gathered
        self._order: UnitOrder | None = None
        self._is_partial = self._is_open = self._agrees = self.takes_gradients = False
        self._num_unused = 0
        self._penalised: set[int] = set()  # by `id`
        self._reached: list[Tensor] = []
        self._late = LateGraphs(self._units, lambda: self.takes_gradients)

    def over(self, kind: Literal["step", "evaluation"], number: int) -> contextlib.AbstractContextManager[None]:
        """Begin a step, or an evaluation outside of one, and end it."""
        return _NOTHING if self._is_open else _Over(self, kind, number)

    def begin(self, kind: str, number: int) -> None:
        """Begin a step, or an evaluation outside of one."""
        self._is_open = True
        if self._order is None and self._flight is not None and len(self._guard.stage_ranks) > 1:
            self._order = self._make_order(self._flight)
        self._is_partial = False
        self._penalised.clear()
        self._context.stash(DataDependent).used.clear()
        for units in self._units:
            units.begin()
        if self._order is not None:
            self._order.begin(number, kind)

    def end(self, kind: str, *, has_failed: bool) -> None:
        """End it."""
        try:
            if kind == "evaluation" and self._order is not None and not has_failed:
                self._order.passes(END)
        finally:
            self._is_open = False
            forget_constants()
            if self._order is not None:
                self._order.close()

    def _make_order(self, flight: Flight) -> UnitOrder:
        import torch.distributed as dist

        context = self._context
        timeout = torch_compat.group_timeout(dist.group.WORLD, context.device)
        order = UnitOrder(
            questions=flight.questions,
            layout=context.layout,
            rank=context.rank,
            ranks=self._guard.stage_ranks,
            describe=self._describe,
            timeout_s=timeout.total_seconds() if timeout is not None else _TIMEOUT_S,
        )
        for index, units in enumerate(self._units):
            units.before = functools.partial(_passes, order, index * _PART)
        return order

    def trained(self) -> contextlib.AbstractContextManager[None]:
        """Run backwards whose gradients are used; those that a loop runs otherwise reduce nothing that they leave."""
        return _Trained(self)

    def begin_training(self) -> bool:
        """Begin backwards whose gradients are used; return what `end_training` takes."""
        outer, self.takes_gradients = self.takes_gradients, True
        for units in self._units:
            units.is_trained = True
        return outer

    def end_training(self, outer: bool, *, has_failed: bool) -> None:
        """End them."""
        try:
            if not has_failed:
                is_left = any([parameter.grad is not None for parameter in self._reached])
                for units in self._units:
                    units.complete(is_left=is_left)
        except BaseException:
            has_failed = True
            raise
        finally:
            for units in self._units if has_failed else ():
                torch_compat.reset_units(units)
            self.takes_gradients = outer
            self._reached.clear()
            for units in self._units:
                units.is_trained = False

    def close(self) -> None:
        """Look at no backward of the loop's any longer."""
        self._late.shut()

    @contextlib.contextmanager
    def taking_gradients(self) -> Iterator[None]:
        """Let backwards inside return the gradients of parameters."""
        outer, self.takes_gradients = self.takes_gradients, True
        try:
            yield
        finally:
            self.takes_gradients = outer

    def numbers(self) -> list[float]:
        """Return what ranks add up after a step's last backward, when all have called the same units."""
        if self._order is not None:
            self._order.passes(END)
        self._num_unused = sum(units.num_unused() for units in self._units) + len(self._idle())
        return [float(self._num_unused)]

    def settle(self, sums: Sequence[float]) -> None:
        """Take what `numbers` of all ranks add up to."""
        # Sums of fake tensors read as one, and their ranks are alike.
        self._is_partial = bool(sums[0]) and (self._num_unused > 0 or torch_compat.active_fake_mode() is None)

    def _describe(self, item: int) -> str:
        if item == END:
            return "has called all of its modules"
        return self._units[item // _PART].describe(item % _PART)

    def use(self, parameters: Iterable[Tensor]) -> None:
        """Keep the gradients of parameters that a backward reaches past all units: those of a penalty.

        Args:
            parameters: Sharded ones, or, after a forward, what it has gathered of them, which no unit may reduce.
        """
        found = list(parameters)
        self._penalised.update(map(id, found))
        sharded = {id(parameter) for units in self._units if found for parameter, _ in units.trained()}
        self._reached += [parameter for parameter in found if id(parameter) not in sharded]

    def drop_unused(self) -> None:
        """Take away the gradients of parameters that no rank has used in this step.

        Collectives: where there are unused ones on some rank, one all-reduce an axis of one byte a parameter.
        """
        if not self._is_partial or self._agrees:
            return
        idle, of_experts = self._idle(), gradients.apart(self._context)
        groups: dict[tuple[str, ...], list[tuple[nn.Parameter, bool]]] = {}
        for units in self._units:
            for parameter, is_used in units.trained():
                axes = of_experts.get(id(parameter), ())
                is_kept = (is_used and id(parameter) not in idle) or id(parameter) in self._penalised
                groups.setdefault(axes, []).append((parameter, is_kept))
        for axes, pairs in groups.items():
            found = self._used_anywhere([used for _, used in pairs], experts=axes)
            for (parameter, _), is_used in zip(pairs, found, strict=True):
                if not is_used:
                    parameter.grad = None

    def _idle(self) -> set[int]:
        """Return by `id` the parameters of modules that were run without any row of the batch."""
        used = self._context.stash(DataDependent).used
        return {id(p) for module, is_used in used.items() if not is_used for p in module.parameters()}

    def agree_in_backward(self) -> None:
        """Find out which parameters no rank has used before each unit is reduced, instead of after the backward.

        Collectives: one all-reduce a unit and axis, of one byte a parameter.
        """
        self._agrees = True
        for units in self._units:
            units.agree = self._used_anywhere

    def is_idle(self, parameter: nn.Parameter) -> bool:
        """Whether a gradient that was just reduced is zeros on this rank, and others may not have used it either."""
        return any(parameter in units.idle for units in self._units)

    def is_unused(self, parameter: nn.Parameter) -> bool:
        """Whether no rank has used a parameter whose gradient was just reduced, where ranks agree in the backward."""
        return any(parameter in units.unused for units in self._units)

    def _used_anywhere(self, used: Sequence[bool], experts: Sequence[str] = ()) -> list[bool]:
        import torch
        import torch.distributed as dist

        if not used:
            return []
        context = self._context
        flags = torch.tensor(used, dtype=torch.uint8, device=context.device)
        dims = gradients.averaged_dims(context.layout.names(Role.BATCH, Role.SEQUENCE), experts, context)
        dims += [(axis, context.mesh.get_group(axis)) for axis in context.layout.names(Role.TENSOR)]
        for axis, group in dims:
            if group.size() > 1:
                with context.span("all_reduce", group="unused", axis=axis, bytes=flags.nbytes):
                    dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=group)
        # Fake tensors have no values, and their ranks are alike.
        return [bool(flag) for flag in flags.tolist()] if torch_compat.active_fake_mode() is None else list(used)


class _Over:
    """A step or an evaluation; a class, because a generator costs five times as much, several times in every step."""

    def __init__(self, record: UnitRecord, kind: str, number: int) -> None:
        self._record, self._kind, self._number = record, kind, number

    def __enter__(self) -> None:
        try:
            self._record.begin(self._kind, self._number)
        except BaseException:
            self._record.end(self._kind, has_failed=True)
            raise

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._record.end(self._kind, has_failed=kind is not None)


class _Trained:
    """Backwards whose gradients are used; see `_Over`."""

    def __init__(self, record: UnitRecord) -> None:
        self._record = record

    def __enter__(self) -> None:
        self._outer = self._record.begin_training()

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        self._record.end_training(self._outer, has_failed=kind is not None)


def _passes(order: UnitOrder, first: int, item: int) -> None:
    order.passes(first + item)
