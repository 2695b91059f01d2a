"""Hooks that a loop registers on the composed parameters: called as on one device, with the global batch's gradient.

Data parallelism reduces gradients of gathered copies, which autograd knows, and never accumulates into the shards that
the loop has; where it does, it calls hooks with a rank's part. So hooks are set aside while a backward runs, and run
when its gradients are final: once a backward, from the last parameter to the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.step.gradients import local
from composer3d.step.loops.shared_hooks import SharedHooks
from composer3d.transform import StepAction, StepPoint

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.context import RunContext
    from composer3d.step.scaling import Scaling

__all__ = ["ParameterHooks"]


class ParameterHooks:
    """Gradient hooks of this rank's parameters that were registered after the model was composed.

    Args:
        context: With this rank's parts, none of whose parameters is gathered.
        scaling: Of the step's gradients.
        actions: Of a step: some complete gradients only once they are used, and hooks then wait for these.

    Attributes:
        shared: Hooks that several tensors share.
    """

    def __init__(
        self, context: RunContext, scaling: Scaling, actions: Mapping[StepPoint, Sequence[StepAction]]
    ) -> None:
        self._context, self._scaling = context, scaling
        later = any(actions[point] for point in (StepPoint.GRADIENTS_LOCAL, StepPoint.UNSCALED))
        self._acts_later = later or bool(context.claimants("moved_gradients"))
        self._parameters = {id(p): (fqn, p) for fqn, p in context.named_parameters()}
        self.shared = SharedHooks(context, lambda leaf: id(leaf) in self._parameters)
        # Gathered parameters take the place of others in these; looked at in every backward, without a walk of modules.
        self._places = [module._parameters for part in context.parts for module in part.module.modules()]
        # A model's own hooks, and those of plugins, stay where they are.
        tables = (table for _, parameter in self._parameters.values() for table in _tables(parameter))
        self._known = {number for table in tables for number in table}
        self._hooked: list[nn.Parameter] = []
        self._earlier: dict[int, tuple[Tensor, float]] = {}
        self._changed: set[str] = set()  # parameters whose gradients hooks have changed in the last step

    def number(self) -> tuple[int, ...]:
        """Return numbers that ranks of one stage have in common: their hooks change the same gradients."""
        if not self._changed:
            return ()
        return tuple(place for place, (fqn, _) in enumerate(self._parameters.values()) if fqn in self._changed)

    def described(self) -> dict[str, str]:
        """Return the components of the number, by name."""
        return {
            f'the gradient of "{fqn}" by its hooks in the last step': "changed" if fqn in self._changed else "unchanged"
            for fqn, _ in self._parameters.values()
        }

    @property
    def _is_late(self) -> bool:
        return self._acts_later or self._scaling.scaler is not None

    def held(self, number: int, *, is_last: bool, is_stepped: bool) -> contextlib.AbstractContextManager[None]:
        """Run a backward in which no hook is called; earlier gradients of parameters that have some are set aside.

        Args:
            number: Of the backwards of this step, from 1 on.
            is_last: Gradients are complete after it.
            is_stepped: The optimizer steps in it.

        Raises:
            StepError: No gradient of this backward alone will be there for a hook.
        """
        self._earlier.clear()
        self.shared.begin()
        if number == 1:
            self._changed.clear()
        self._hooked = list(self._find())
        if not self._hooked:
            return contextlib.nullcontext()
        said = f'"{self._parameters[id(self._hooked[0])][0]}" has a gradient hook'
        if is_stepped:
            raise StepError(f"{said}, and in_backward=True leaves it no gradient; leave in_backward out")
        if not is_last or (number > 1 and self._is_late):
            raise StepError(
                f"{said}, which one device calls with the gradient of each backward, and gradients of this step are "
                "complete after its last one; instead of the hook write what it does to parameter.grad before "
                "optimizer.step()"
            )
        return self._set_aside()

    @contextlib.contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Take the hooks, and earlier gradients, away inside."""
        taken = [(table, self._of_loop(table)) for parameter in self._hooked for table in _tables(parameter)]
        self.shared.expect(hook for _, hooks in taken for hook in hooks.values())
        for table, hooks in taken:
            for key in hooks:
                del table[key]
        for parameter in self._hooked:
            if parameter.grad is not None:
                self._earlier[id(parameter)] = parameter.grad, self._scaling.applied
                parameter.grad = None
        try:
            yield
        finally:
            for table, hooks in taken:
                table.update(hooks)

    def settle(self, *, is_used: bool = False) -> None:
        """Call the hooks with the gradients of the backward that has ended, and add the earlier ones.

        Args:
            is_used: The step's gradients are about to be used, rather than a backward has ended.

        Memory: the gradient of one parameter, twice.
        """
        import torch

        if is_used != self._is_late:
            return
        hooked, self._hooked = self._hooked, []
        with_gradients = [self._of_loop(_before(each)) for each in hooked if each.grad is not None]
        self.shared.await_last(hook for hooks in with_gradients for hook in hooks.values())
        for parameter in reversed(hooked):
            before, after = map(self._of_loop, _tables(parameter))
            with torch.no_grad():
                has_gradient, is_changed = parameter.grad is not None, False
                if has_gradient and before:
                    is_changed = _pass(parameter, map(self.shared.called, before.values()))
                if id(parameter) in self._earlier:
                    grad, applied = self._earlier[id(parameter)]
                    if applied != self._scaling.applied:
                        grad.mul_(self._scaling.applied / applied)
                    parameter.grad = grad if parameter.grad is None else grad.add_(parameter.grad)
                given, version = parameter.grad, _version(parameter.grad)
                for hook in after.values() if has_gradient else ():
                    hook(parameter)
                if is_changed or parameter.grad is not given or _version(given) != version:
                    self._changed.add(self._parameters[id(parameter)][0])
        self.shared.end()

    def refuse_gathered(self, tensor: Tensor) -> None:
        """Refuse a hook on a parameter that is gathered, as code of a forward sees it.

        Raises:
            StepError: The tensor is one.
        """
        if id(tensor) in self._parameters or not any(each is tensor for held in self._places for each in held.values()):
            return
        fqn = next((fqn for fqn, parameter in self._context.named_parameters() if parameter is tensor), "")
        raise StepError(_of_gathered(fqn))

    def _find(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that have hooks of the loop's."""
        for _, parameter in self._parameters.values():
            if self._has_hooks(parameter):
                yield parameter
        there = [parameter for held in self._places for parameter in held.values() if parameter is not None]
        if all(id(parameter) in self._parameters for parameter in there):
            return
        for fqn, parameter in self._context.named_parameters():
            if id(parameter) not in self._parameters and self._has_hooks(parameter):
                raise StepError(_of_gathered(fqn))

    def _has_hooks(self, parameter: nn.Parameter) -> bool:
        return any([bool(table) and bool(self._of_loop(table)) for table in torch_compat.gradient_hooks(parameter)])

    def _of_loop(self, table: Mapping[int, Any]) -> dict[int, Any]:
        """Return the hooks of a table that a loop has registered, by number."""
        return {n: hook for n, hook in table.items() if n not in self._known and not _is_ours(hook)} if table else {}


def _of_gathered(fqn: str) -> str:
    return (
        f'a hook was registered on "{fqn}" while a forward had gathered it, and would be called with this '
        "rank's gradient; register hooks before the forward"
    )


def _before(parameter: nn.Parameter) -> MutableMapping[int, Any]:
    return next(_tables(parameter))


def _tables(parameter: nn.Parameter) -> Iterator[MutableMapping[int, Any]]:
    before, after = torch_compat.gradient_hooks(parameter)
    yield {} if before is None else before
    yield {} if after is None else after


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("composer3d")


def _version(grad: Tensor | None) -> int:
    return 0 if grad is None else local(grad)._version


def _pass(parameter: nn.Parameter, hooks: Iterable[Any]) -> bool:
    """Replace a gradient by the hooks' result; tensors that hooks keep are not changed later.

    Returns:
        Whether it is another one.
    """
    from torch.distributed.tensor import DTensor

    grad: Any = parameter.grad
    value: Any = grad
    version = _version(grad)
    for hook in hooks:
        returned = hook(value)
        value = value if returned is None else returned
    parameter.grad = fresh = grad.clone()
    if value is not grad:
        is_local = isinstance(value, DTensor) and value.placements == grad.placements
        fresh.copy_(
            value if is_local or not isinstance(value, DTensor) else value.redistribute(placements=grad.placements)
        )
    return value is not grad or _version(grad) != version
