"""State that a model depends on its parameters, carried over to the parameters that a composition trains."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d.errors import TransformError
from composer3d.initialisation.linearity import Kind, kind_of, said_of
from composer3d.initialisation.placement import place
from composer3d.initialisation.reachable import reachable_tensors
from composer3d.initialisation.sharing import views_of_parameters
from composer3d.initialisation.ties import named_tensors
from composer3d.torch_compat import (
    active_fake_mode,
    gradient_hooks,
    is_wrapper_subclass,
    mark_unsharded,
    recomputed_tensors,
    set_gradient_hooks,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["Attachments", "GradientHooks"]

Hook = Callable[["Tensor"], Any]
Reorder = Callable[[str, "Tensor"], "Tensor"]
_AT_THE_STEP = (
    "write it as a step action at StepPoint.GRADIENTS_REDUCED, which sees gradients once they are added up over ranks"
)


@dataclass(kw_only=True, eq=False)
class GradientHooks:
    """The gradient hooks of one parameter, to run once a step on its reduced gradient.

    Args:
        fqn: Of the parameter.
        parameter: The one that is trained.
        hooks: By number; the model's own dict, so that the handles of `register_hook` remove from it.
        from_stored: Brings a full tensor of a name from the order in which it is stored into the model's.
        to_stored: The other way.
    """

    fqn: str
    parameter: Tensor
    hooks: Mapping[int, Hook]
    from_stored: Reorder
    to_stored: Reorder

    def run(self) -> None:
        """Pass the full gradient through the hooks, and keep this rank's shard of what they return.

        Memory: the full gradient, several times. Collectives: what gathers the gradient of a DTensor.
        """
        import torch
        from torch.distributed.tensor import DTensor

        grad = self.parameter.grad
        if grad is None or not self.hooks:
            return
        full = self.from_stored(self.fqn, grad.full_tensor() if isinstance(grad, DTensor) else grad.clone())
        with torch.no_grad():
            for hook in list(self.hooks.values()):
                returned = hook(full)
                full = full if returned is None else returned
            place(grad, self.to_stored(self.fqn, full))


@dataclass(kw_only=True, eq=False)
class _Attached:
    """One parameter or buffer as the model had it.

    Args:
        fqn: Its first name.
        shape: Of the full tensor.
        dtype: Of the elements.
        cls: Subclass of Tensor or Parameter that it was.
        attributes: Python attributes that the model set on it, by name.
        before: Hooks that run on its gradient before it is accumulated.
        after: Hooks that run after a gradient is accumulated.
        original: Returns the tensor while it lives.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    cls: type
    attributes: dict[str, Any]
    before: MutableMapping[int, Hook]
    after: MutableMapping[int, Hook]
    original: Callable[[], Tensor | None]


@dataclass(kw_only=True, eq=False)
class Attachments:
    """Hooks, attributes and views of a model's parameters and buffers, recorded before any transform.

    Attributes:
        by_name: Every parameter and buffer, under each of its names.
        views: (Access path, FQN) of tensors that are views of a trainable parameter.
        held: Lists, closures or objects hold parameters themselves.
        hooks: After `carry_over`: hooks that a step runs.
    """

    by_name: dict[str, _Attached]
    views: tuple[tuple[str, str], ...] = ()
    held: bool = False
    hooks: list[GradientHooks] = field(default_factory=list)

    @classmethod
    def of(cls, model: nn.Module) -> Attachments:
        """Record what is attached to the parameters and buffers of a model."""
        registered = dict(named_tensors(model))
        by_name, known = _by_name(registered)
        reached = list(reachable_tensors(model))
        anew = recomputed_tensors(model)  # no view any more in the first forward
        others = {r.path: r.tensor for r in reached if id(r.tensor) not in known and id(r.tensor) not in anew}
        return cls(
            by_name=by_name,
            views=tuple(views_of_parameters(registered, others)),
            held=any(id(r.tensor) in known for r in reached),
        )

    def of_copy(self, model: nn.Module) -> Attachments:
        """Record the same of a deep copy, which holds parameters and views of them only where the model does."""
        if self.held or self.views:
            return Attachments.of(model)
        return Attachments(by_name=_by_name(dict(named_tensors(model)))[0])

    @property
    def depend_on_layout(self) -> bool:
        """Check whether attachments can be kept, which depends on the parameters that the layout trains."""
        from torch import Tensor, nn

        return (
            self.held
            or bool(self.views)
            or any(
                attached.before
                or attached.after
                or nn.Parameter in attached.cls.__mro__[1:]
                or any(isinstance(value, Tensor) for value in attached.attributes.values())
                for attached in self.by_name.values()
            )
        )

    def carry_over(
        self, modules: Iterable[nn.Module], *, alone: bool, from_stored: Reorder, to_stored: Reorder
    ) -> None:
        """Move attachments from the original tensors to those of the composed modules.

        Attributes are given to every layout's parameters, and to what FSDP2 gathers of them. A subclass stays one where
        a parameter is a plain tensor. Gradient hooks stay where they are on a single process with plain parameters;
        anywhere else only linear ones are exact, and run once a step on the reduced gradient.

        Args:
            modules: This rank's parts, with values.
            alone: There is one process.
            from_stored: As in `GradientHooks`.
            to_stored: As in `GradientHooks`.

        Raises:
            TransformError: Something cannot be carried over exactly; the message begins with the FQN.
        """
        marked: dict[int, dict[str, Any]] = {}
        done: dict[int, Tensor] = {}
        for module in modules:
            for name, final in named_tensors(module):
                attached = self.by_name.get(name)
                if attached is None or id(final) in done:
                    continue
                done[id(final)] = final
                original = attached.original()
                if original is not None and _stays(attached, final):
                    done[id(original)] = original
                if original is not final:
                    _carry_class(attached, final)
                    marked[id(final)] = _carry_attributes(attached, final)
                    if id(original) not in done:
                        self._refuse_views(attached)
                if _carry_hooks(attached, final, alone=alone):
                    self.hooks.append(
                        GradientHooks(
                            fqn=name,
                            parameter=final,
                            hooks=attached.before,
                            from_stored=from_stored,
                            to_stored=to_stored,
                        )
                    )
            _refuse_stale(module, self._replaced(done))
            mark_unsharded(module, lambda parameter: marked.get(id(parameter), {}))

    def _replaced(self, trained: Mapping[int, Tensor]) -> dict[int, str]:
        """Return the FQNs of the originals that are alive and are not trained here, by identity."""
        originals = ((attached.original(), attached.fqn) for attached in self.by_name.values())
        return {id(tensor): fqn for tensor, fqn in originals if tensor is not None and id(tensor) not in trained}

    def inexact(self, *, has_stages: bool, device: torch.device) -> Iterator[str]:
        """Yield attachments that no layout of several ranks can compute exactly, before any transform.

        A factory's hooks that compute with tensors of the factory have none of their values yet, and are judged later.

        Args:
            has_stages: The model is divided among the ranks of a pipeline.
            device: Of the run's gradients.
        """
        for attached in dict.fromkeys(self.by_name.values()):
            yield from _inexact_hooks(attached, device, skip_failing=True)
        for path, fqn in self.views if has_stages else ():
            yield _of_view(path, fqn)

    def _refuse_views(self, attached: _Attached) -> None:
        for path, fqn in self.views:
            if self.by_name[fqn] is attached:
                raise TransformError(_of_view(path, fqn))

    def run_hooks(self) -> None:
        """Run the gradient hooks of this rank's parameters, in the order of the model."""
        for hooks in self.hooks:
            hooks.run()


def _stays(attached: _Attached, final: Tensor) -> bool:
    """Return whether a run would keep the original: a plain tensor gets memory, and a fake one is another object."""
    is_plain = not is_wrapper_subclass(type(final)) and tuple(final.shape) == attached.shape
    return is_plain and active_fake_mode() is not None


def _carry_hooks(attached: _Attached, final: Tensor, *, alone: bool) -> bool:
    """Leave gradient hooks where that is exact, else take them off; return whether a step has to run them."""
    if not attached.before and not attached.after:
        return False
    is_whole = not is_wrapper_subclass(type(final)) and tuple(final.shape) == attached.shape
    if alone and is_whole:
        if attached.original() is not final:
            set_gradient_hooks(final, attached.before, attached.after)
        return False
    if tuple(final.shape) != attached.shape:
        raise TransformError(
            f'"{attached.fqn}" has a gradient hook, and a plugin stores the parameter as {tuple(final.shape)} instead '
            f"of {attached.shape}; {_AT_THE_STEP}"
        )
    for message in _inexact_hooks(attached, final.device):
        raise TransformError(message)
    set_gradient_hooks(final, None, None)
    return bool(attached.before)


def _by_name(registered: Mapping[str, Tensor]) -> tuple[dict[str, _Attached], dict[int, _Attached]]:
    """Return what is attached to tensors, by every name and by identity."""
    by_name: dict[str, _Attached] = {}
    known: dict[int, _Attached] = {}
    for fqn, tensor in registered.items():
        if not is_wrapper_subclass(type(tensor)):
            by_name[fqn] = known.setdefault(id(tensor), _attached(fqn, tensor))
    return by_name, known


def _attached(fqn: str, tensor: Tensor) -> _Attached:
    before, after = gradient_hooks(tensor)
    # A meta tensor needs no memory, and one with a weak reference cannot be materialised.
    original: Callable[[], Tensor | None] = (lambda: tensor) if tensor.is_meta else weakref.ref(tensor)
    return _Attached(
        fqn=fqn,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        cls=type(tensor),
        attributes=dict(vars(tensor)),
        before={} if before is None else before,
        after={} if after is None else after,
        original=original,
    )


def _of_view(path: str, fqn: str) -> str:
    return (
        f'"{path}" is a view of the parameter "{fqn}", which this layout replaces by its shards: no gradient and no '
        "update would reach it; make the view in forward, or in a property"
    )


def _inexact_hooks(attached: _Attached, device: torch.device, *, skip_failing: bool = False) -> Iterator[str]:
    """Yield a line for each hook that gives something else than on one device once gradients are in several parts."""
    for hook in attached.after.values():
        yield (
            f'"{attached.fqn}" has a hook that runs after its gradient is accumulated ({said_of(hook)}): with several '
            f"ranks or shards the gradient is not complete by then; {_AT_THE_STEP}"
        )
    for hook in attached.before.values():
        kind = kind_of(hook, attached.shape, attached.dtype, device=device)
        if kind is not Kind.LINEAR and not (skip_failing and kind is Kind.FAILING):
            yield (
                f'"{attached.fqn}" has a gradient hook that {kind.value} ({said_of(hook)}): what it makes of the '
                "gradients of micro-batches, ranks or shards does not add up to what it makes of the whole; "
                f"{_AT_THE_STEP}"
            )


def _carry_class(attached: _Attached, final: Tensor) -> None:
    """Let a plain tensor be of the original's class, or refuse a subclass of nn.Parameter that would be lost."""
    from torch import nn

    if type(final) is attached.cls or nn.Parameter not in attached.cls.__mro__[1:]:
        return
    if is_wrapper_subclass(type(final)):
        raise TransformError(
            f'"{attached.fqn}" is a {attached.cls.__qualname__}, a subclass of nn.Parameter, and this layout replaces '
            "it by a sharded one, which cannot be of that class; mark parameters by an attribute, which is carried over"
        )
    final.__class__ = attached.cls


def _carry_attributes(attached: _Attached, final: Tensor) -> dict[str, Any]:
    """Set the attributes that a tensor lacks, and return them."""
    import torch

    given: dict[str, Any] = {}
    for name, value in attached.attributes.items():
        if hasattr(final, name):
            continue
        if isinstance(value, torch.Tensor) and value.dim() and is_wrapper_subclass(type(final)):
            raise TransformError(
                f'"{attached.fqn}" has an attribute "{name}" that is a tensor of shape {tuple(value.shape)}, and this '
                "layout trains shards of the parameter; register the tensor as a buffer of the module"
            )
        setattr(final, name, value)
        given[name] = value
    return given


def _refuse_stale(module: nn.Module, replaced: Mapping[int, str]) -> None:
    """Refuse what still holds a parameter that shards have replaced."""
    for reached in reachable_tensors(module) if replaced else ():
        fqn = replaced.get(id(reached.tensor))
        if fqn is not None:
            raise TransformError(
                f'"{reached.path}" holds the parameter "{fqn}" itself, which this layout replaces: computing with it '
                "would use old values and lose gradients; read it from its module in every forward"
            )
