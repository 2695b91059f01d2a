"""Gradients of activations as one device has them, for code in a backward that is not linear in them.

Losses are multiplied by what data parallelism averages over, so that a gradient inside of a rank's backward is so many
times one device's. A hook that clamps or normalises it, and a backward of a model's own that rounds it, would act on
another number: they are called with the gradient divided, and what they return is multiplied again.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.mesh import Role
from composer3d.observation.call_sites import beside
from composer3d.step.awaited_gradients import AwaitedGradients
from composer3d.step.input_gradients import InputGradients
from composer3d.step.losses.inside_values import InsideValues
from composer3d.step.microbatches import num_samples, tensors
from composer3d.step.mixed_gradients import MixedGradients, kept_numbers
from composer3d.step.retained_gradients import RetainedGradients
from composer3d.step.suspect_functions import is_ours, is_suspect

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d.context import RunContext
    from composer3d.step.loops.parameter_hooks import ParameterHooks

__all__ = ["ActivationGradients"]

_NUM_FORWARDS = 3  # a model in whose graphs there is no function of its own has none later
_NUM_NODES = 100_000
_QUANTISED = ("torchao", "transformer_engine")  # whose scales are of all that a rank has, by design


class ActivationGradients:
    """Passes one device's gradients to hooks on activations, of modules, and to backwards of a model's own.

    A context: entered for a backward of a loss that data parallelism averages.

    Hooks that code registers from a forward on to its backward are seen where they are registered; of a model's own
    autograd functions those whose backward does what is not linear, by the names in its code, where one of the first
    graphs has such. In the first backwards all of these are watched for what relates samples, too.

    Memory: one gradient of an activation beside another. Collectives: none.

    Args:
        context: Of the run.
        factor: By which gradients of activations are larger than one device's in a backward of the run.
        trained: Leaves whose gradients the optimizer averages, beside the model's; kept up to date.
        hooks: Of parameters.

    Attributes:
        inputs: Of `.grad` of leaves that a loop gives the model.
    """

    def __init__(self, context: RunContext, factor: float, trained: Sequence[Tensor], *, hooks: ParameterHooks) -> None:
        self._context, self._whole, self._factor, self._parameters = context, factor, 1.0, hooks
        is_seen = context.purpose in ("run", "verify")
        is_watched = factor != 1.0 and is_seen
        self._is_seen, self._is_watched, self._num_graphs = is_seen, is_watched, _NUM_FORWARDS * is_watched
        self._has_functions = False
        self._num_legacy = -1
        self._watches: list[Any] = []
        self._recomputed: Any = None
        self._mixed, self._inside = MixedGradients(context), context.stash(InsideValues)
        self._has_stages = context.layout.degree(Role.STAGE) > 1
        self._retained = RetainedGradients(self._inside, has_stages=self._has_stages)
        self._awaited = AwaitedGradients(lambda: bool(self._watches))
        self.inputs = InputGradients(self._inside, lambda: self._factor, trained)
        self._inside.asking = self._asked
        self._outputs: list[_Output] = []
        self._is_followed = False  # the last forward, if it trained
        self._outside: Any = None

    def __enter__(self) -> None:
        """Begin a backward of a loss that data parallelism averages."""
        self.leave_loop()
        self._factor = self._whole
        self._mixed.open()
        self._retained.begin()
        if self._is_seen:  # what a recomputation registers
            self._recomputed = self._watch().__enter__()

    def __exit__(self, kind: object, *error: object) -> None:
        if self._recomputed is not None:
            self._recomputed.__exit__()
            self._recomputed = None
        self._mixed.close()
        if kind is None:
            self._retained.settle(self._whole)
        self._retained.end()
        self._awaited.end()
        self._factor = 1.0

    def end_microbatch(self) -> None:
        """Settle what its backward has retained: the forward of the next one may read it."""
        self._retained.settle(self._whole)

    def watch_inputs(self, inputs: Any) -> None:
        """Let `.grad` of leaves that a loop gives a forward be one device's."""
        if self._is_watched:
            self.inputs.watch(inputs)

    def watch(self, module: nn.Module) -> None:
        """See what a part's forwards register; forwards without gradients are left alone."""
        import torch

        if not self._is_seen:
            return
        for inner in module.modules() if self._is_watched else ():
            torch_compat.backward_hooks.wrap_gradient_hooks(inner, self._of_module)

        def before(owner: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
            if owner is module:
                self.leave_loop()
                self._mixed.num_samples = num_samples((args, kwargs)) or 0
                self._is_followed = torch.is_grad_enabled()
                self._watches.append(self._watch().__enter__() if self._is_followed else contextlib.nullcontext())
                self._awaited.count_forward()
                if self._is_followed and self._is_watched:
                    self._retained.count_forward()
                    self._wrap_legacy_hooks(owner)

        def after(owner: nn.Module, _: Any, output: Any) -> None:
            if owner is module and self._watches:
                self._watches.pop().__exit__()
                if self._is_watched:
                    self._note_outputs(output)  # hooks behind this one may return others in their place
                for value in tensors(output) if self._has_stages else ():
                    self.look(value)

        module.register_forward_pre_hook(torch_compat.uncompiled(before), with_kwargs=True)
        module.register_forward_hook(torch_compat.uncompiled(after), always_call=True, prepend=True)

    def look(self, root: Tensor) -> Tensor:
        """Scale around what is not linear in its gradient: hooks on a forward's output, a model's own functions.

        Args:
            root: A loss, or the output of a stage.

        Returns:
            The same.
        """
        outputs, self._outputs = self._outputs, []
        for output in outputs:  # on which a loop, a loss_fn or a hook may have registered hooks
            for key, hook in list(output.table.items()):
                if not _is_foreign(hook):
                    shared = self._parameters.shared.of_activation(hook)
                    output.table[key] = self._one_device(output.followed(shared))
            if (tensor := output.tensor()) is not None and tensor.retains_grad:
                self._retained.add(tensor, is_output=True)
        if not (self._num_graphs or self._has_functions) or root.grad_fn is None:
            return root
        self._num_graphs = max(0, self._num_graphs - 1)
        pending, seen = [root.grad_fn], {root.grad_fn}
        while pending and len(seen) < _NUM_NODES:
            node: Any = pending.pop()
            function = torch_compat.own_function(node)
            if function is not None and "composer3d" not in node.metadata:
                node.metadata["composer3d"] = "seen"  # a last stage's graph is looked at twice
                self._surround(node, function)
            for operand, _ in node.next_functions:
                if operand is not None and operand not in seen:
                    seen.add(operand)
                    pending.append(operand)
        return root

    def _surround(self, node: Any, function: type) -> None:
        """Scale around a node of a model's own function, and watch what it computes; its hooks run in this order."""
        is_scaled = is_suspect(function)
        if is_scaled:
            self._has_functions = True
            node.register_prehook(lambda given: _times(given, 1.0 / self._factor))
        module = function.__module__
        if self._mixed.is_watching and not (is_ours(module) or module.partition(".")[0] in _QUANTISED):
            kept, what = kept_numbers(node), f"the backward of {function.__name__}"
            node.register_prehook(lambda given: self._mixed.begin(given, kept))
            node.register_hook(lambda found, given: self._mixed.end((found, given), what))
        if is_scaled:
            node.register_hook(lambda found, _: _times(found, self._factor))

    def over_loss(self, output: Any) -> contextlib.AbstractContextManager[Any]:
        """See what a loss function registers, and what hooks of the model have registered on what it returned."""
        if self._is_watched:
            self._note_outputs(output)
        return self._watch() if self._is_followed else contextlib.nullcontext()

    def _note_outputs(self, output: Any) -> None:
        found = [value for value in tensors(output) if value.grad_fn is not None]
        known = {id(each.tensor()) for each in self._outputs}
        self._outputs += [_Output(value, self._inside) for value in found if id(value) not in known]

    def follow_loop(self, output: Any) -> None:
        """See what a loop registers after a forward of its own, until the backward or another forward."""
        if self._is_watched:
            self._note_outputs(output)
        if self._is_followed:
            self._outside = self._watch().__enter__()

    def leave_loop(self) -> None:
        """See nothing until the next forward."""
        if self._outside is not None:
            self._outside.__exit__()
            self._outside = None

    def _watch(self) -> torch_compat.backward_hooks.WatchedRegistrations:
        return torch_compat.backward_hooks.WatchedRegistrations(self._hooked, self._retain, self._of_node)

    def _hooked(self, tensor: Tensor, hook: Any) -> Any:
        if not self._is_watched:
            return hook if tensor.is_leaf else self._parameters.shared.of_activation(hook)
        if _is_foreign(hook):
            return hook
        if tensor.is_leaf:
            self._parameters.refuse_gathered(tensor)
            return hook
        return self._one_device(self._followed(tensor, self._parameters.shared.of_activation(hook)))

    def _retain(self, tensor: Tensor) -> None:
        if tensor.is_leaf:
            return
        if self._is_watched:
            self._retained.add(tensor)
        if self._has_stages:
            self._awaited.add(tensor)

    @contextlib.contextmanager
    def _asked(self) -> Iterator[None]:
        """Run a backward whose gradients code asks for, of a loss that all ranks of a sequence compute alike."""
        self._factor = float(math.prod(self._context.degrees[axis] for axis in self._inside.axes))
        self._retained.begin()
        try:
            yield
            self._retained.settle(self._factor)
        finally:
            self._retained.end()
            self._factor = 1.0

    def _one_device(self, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        @_named(hook)
        def scaled(gradient: Tensor) -> Any:
            if self._factor == 1.0:
                return hook(gradient)
            given = gradient / self._factor
            version = given._version
            self._mixed.begin(given)
            returned = hook(given)
            self._mixed.end((returned, given), f"the hook {_name(hook)}")
            if returned is None and given._version == version:
                return None
            return (given if returned is None else returned) * self._factor

        return scaled

    def _wrap_legacy_hooks(self, root: nn.Module) -> None:
        if (known := torch_compat.backward_hooks.num_legacy_registrations()) == self._num_legacy:
            return
        self._num_legacy = known
        for module in root.modules():
            table = torch_compat.backward_hooks.legacy_gradient_hooks(module)
            for key, hook in list(table.items()):
                if not _is_foreign(hook):
                    shards = self._inside.hooks
                    table[key] = self._of_module(hook if shards is None else shards.of_legacy(hook))

    def _followed(self, tensor: Tensor, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """Return a hook that is called with all positions; code of the model is seen by what shards these first."""
        if self._inside.hooks is None:
            return hook
        output = next((each for each in self._outputs if each.tensor() is tensor), None)
        return self._inside.hooks.of_tensor(tensor, hook) if output is None else output.followed(hook)

    def _of_module(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        if _is_foreign(hook):
            return hook

        @_named(hook)
        def scaled(module: nn.Module, *gradients: Any) -> Any:
            what = f"the backward hook {_name(hook)} of {type(module).__name__}"
            return self._called(functools.partial(hook, module), gradients, what)

        return scaled

    def _of_node(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook on a node of the graph, of which nothing is known but what its gradients are divided by."""
        if not self._is_watched or _is_foreign(hook):
            return hook
        if self._inside.hooks is not None:
            raise StepError(
                f"the hook {_name(hook)} is registered on a node of the graph{beside()}, whose gradients are of this "
                "rank's positions: register it on the tensor instead, as in t.register_hook"
            )

        @_named(hook)
        def scaled(*gradients: Any) -> Any:
            if self._factor != 1.0 and torch_compat.backward_hooks.accumulated_leaf() is not None:
                raise StepError(
                    f"the hook {_name(hook)} is on the node that accumulates the gradient of a leaf, and would be "
                    "called with this rank's; register it on the leaf, as in p.register_hook, before the forward"
                )
            return self._called(hook, gradients, f"the hook {_name(hook)}")

        return scaled

    def _called(self, hook: Callable[..., Any], gradients: Sequence[Any], what: str) -> Any:
        """Return what a hook on tuples of gradients makes of one device's, the first of which it may change."""
        if self._factor == 1.0:
            return hook(*gradients)
        given = tuple(_times(each, 1.0 / self._factor) for each in gradients)
        versions = _versions(given[0])
        self._mixed.begin(given)
        returned = hook(*given)
        if returned is None and _versions(given[0]) != versions:
            returned = given[0]
        self._mixed.end(returned, what)
        return None if returned is None else _times(returned, self._factor)


class _Output:
    """An output of a forward, and its hooks, which it has longer than a loop holds it."""

    def __init__(self, tensor: Tensor, inside: InsideValues) -> None:
        if torch_compat.gradient_hooks(tensor)[0] is None:
            tensor.register_hook(_is_foreign).remove()  # the table is made with the first one
        self.table: MutableMapping[int, Any] = torch_compat.gradient_hooks(tensor)[0]
        self.tensor = weakref.ref(tensor)
        self.followed = (lambda hook: hook) if inside.hooks is None else inside.hooks.of_output(tensor)


def _named(hook: Any) -> Callable[[Any], Any]:
    """Return a decorator that gives a function the hook's name, where it has one, and this module."""

    def named(function: Any) -> Any:
        if hasattr(hook, "__name__"):
            functools.update_wrapper(function, hook, updated=())
        function.__module__ = __name__
        return function

    return named


def _name(hook: Any) -> str:
    if (shared := torch_compat.backward_hooks.shared_hook(hook)) is not None:
        hook = shared.function
    return getattr(hook, "__qualname__", type(hook).__name__).rpartition("<locals>.")[2]


def _is_foreign(hook: Any) -> bool:
    """Return whether a hook is of torch's machinery, a plugin's or wrapped already.

    Operators and functions (`torch.sgn`, `functional.normalize`) are what a model does with its gradient.
    """
    if (shared := torch_compat.backward_hooks.shared_hook(hook)) is not None:
        hook = shared.function
    module = str(getattr(hook, "__module__", None) or type(getattr(hook, "__self__", hook)).__module__)
    return is_ours(module) and not torch_compat.backward_hooks.is_operator_module(module)


def _versions(values: Any) -> list[int]:
    return [-1 if each is None else each._version for each in ((values,) if hasattr(values, "_version") else values)]


def _times(values: Any, factor: float) -> Any:
    import torch

    if factor == 1.0:
        return values
    if isinstance(values, torch.Tensor):
        return values * factor
    return tuple(None if each is None else each * factor for each in values)
