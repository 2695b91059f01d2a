"""Conversion of a model's copy into a stage: classes that its modules are given, tensors taken out."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import StepError, TransformError
from composer3d.torch_compat import forward_hooks, recomputed_tensors, tree_leaves, with_attributes_of
from composer3d_plugins.scheduling.pipeline.absent import Absent, Stage, absent_zeros

__all__ = [
    "Done",
    "Given",
    "Kept",
    "Received",
    "as_received",
    "become",
    "become_root",
    "descend",
    "inner_call",
    "refuse_out_of_reach",
    "refuse_without_graph",
    "runner_of",
    "take_out",
    "take_out_tensors",
    "tensors_of_stage",
]

# Where modules of a stage keep what their added classes need.
_RUNNER, _LEFT, _CHILDREN, _GIVEN = (f"_composer3d_{name}" for name in ("runner", "left", "children", "given"))


# What the code of a stage is given for a value of another one: as of `ReceivedValues.given`, of a stage.
Given = Callable[[str, int, int, Tensor], Tensor]


def as_received(fqn: str, call: int, index: int, value: Tensor) -> Tensor:
    """Return a value as it was received, where no plugin asks for another one."""
    return value


class Done(BaseException):  # noqa: N818 - not an error: no handler of the model's may take it for one
    """Leaves the parent's forward with the stage's output."""

    def __init__(self, output: Any) -> None:
        self.output = output


class Received(torch.autograd.Function):
    """Copy of a received x_BSD, so that a block may change it in place; its gradient is sent as it is."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        """Copy."""
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return grads[0].contiguous()


def runner_of(module: nn.Module) -> Any:
    """Return the runner of a stage's module."""
    return vars(module)[_RUNNER]


class Root:
    """The stage's module: calls go through its runner; hooks and FSDP2 see the model's own arguments."""

    composer3d_calls_forward_hooks = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = vars(self)[_RUNNER].call
        if call is None:
            raise StepError("a stage of a pipeline runs in run.forward_backward(...) and run.evaluate(...) only")
        return call(*args, **kwargs)

    def inner_call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as if it were no stage."""
        vars(self)[_GIVEN] = _dtype_of(args, kwargs)
        with forward_hooks.calling(self):  # type: ignore[arg-type]
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the parent's forward up to the stage's last block; hooks on its output are those of the last stage."""
        module: Any = self
        args, kwargs = forward_hooks.before(module, args, kwargs)
        given, cast = vars(self)[_GIVEN], _dtype_of(args, kwargs)
        runner = vars(self)[_RUNNER]
        runner.casts = None if given is None or cast is None or given is cast else (given, cast)
        if runner.casts is not None:
            _cast_absent(runner, *runner.casts)
        try:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        except Done as done:
            forward_hooks.skip(module)
            return done.output
        return forward_hooks.after(module, args, kwargs, output)


def _dtype_of(args: Any, kwargs: Any) -> torch.dtype | None:
    """Return the dtype of the first argument of floating-point numbers; None without one."""
    leaves = tree_leaves((args, kwargs))
    return next((leaf.dtype for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()), None)


def _cast_absent(runner: Stage, given: torch.dtype, cast: torch.dtype) -> None:
    """Give absent parameters the dtype to which a hook has cast the inputs, as it has the parameters that are here.

    Operators that are given a batch's own numbers and another stage's weights would else refuse two dtypes.
    """
    for module, name in runner.absent:
        known = vars(module)[name]
        if known.dtype is given and known.dim():
            like = torch.zeros((), dtype=cast, device=known.device).expand(known.shape)
            source = known.source if isinstance(known, Absent) else name  # of a plan, which shows none
            made = absent_zeros(like, device=known.device, source=source, stage=runner)
            vars(made).update({key: value for key, value in vars(known).items() if key not in vars(made)})
            vars(module)[name] = made


def inner_call(model: Any) -> Callable[..., Any]:
    """Return a call of a stage's module that bypasses its runner."""
    function: Callable[..., Any] = model.inner_call
    return function


class Between:
    """A module between root and blocks: hooks of data parallelism still see a forward that ends."""

    composer3d_calls_forward_hooks = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)[_LEFT] = False
        with forward_hooks.calling(self):  # type: ignore[arg-type]
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if vars(self)[_LEFT]:
            raise Done(output)
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward; when it is left early, return the stage's output, which is not for hooks of the model."""
        module: Any = self
        args, kwargs = forward_hooks.before(module, args, kwargs)
        try:
            output = super().forward(*args, **kwargs)  # type: ignore[misc]
        except Done as done:
            vars(self)[_LEFT] = True
            forward_hooks.skip(module)
            return done.output
        return forward_hooks.after(module, args, kwargs, output)


class Kept:
    """Base of the modules that a stage runs itself, which stay in the module tree."""


class _Container:
    """A ModuleList, Sequential or ModuleDict some of whose children are not in the module tree."""

    def _children(self) -> dict[str, Any]:
        own: dict[str, Any] = self._modules
        return {name: own[name] if absent is None else absent for name, absent in vars(self)[_CHILDREN].items()}

    def __len__(self) -> int:
        return len(vars(self)[_CHILDREN])

    def __getattr__(self, name: str) -> Any:
        absent = vars(self).get(_CHILDREN, {}).get(name)
        return super().__getattr__(name) if absent is None else absent  # type: ignore[misc]


class _Listed(_Container):
    def __iter__(self) -> Iterator[Any]:
        return iter(self._children().values())

    def __getitem__(self, index: Any) -> Any:
        found = list(self._children().values())[index]
        return _Slice(found) if isinstance(index, slice) else found


class _Slice(list[Any]):
    """Some children of a Sequential: a call runs them in turn, as the Sequential that torch would make of them."""

    def __call__(self, value: Any) -> Any:
        for child in self:
            value = child(value)
        return value


class _Named(_Container):
    def __iter__(self) -> Iterator[str]:
        return iter(self._children())

    def __getitem__(self, key: str) -> Any:
        return self._children()[key]

    def __contains__(self, key: str) -> bool:
        return key in vars(self)[_CHILDREN]

    def keys(self) -> Any:
        """Return the names of all children."""
        return self._children().keys()

    def values(self) -> Any:
        """Return all children, absent ones too."""
        return self._children().values()

    def items(self) -> Any:
        """Return names and children."""
        return self._children().items()


def become(module: nn.Module, mixin: type, slot: str, value: Any) -> None:
    """Set a module's class to a subclass of its own that adds `mixin`; its name and its parameters' names stay.

    Modules of one class share the subclass: what is kept by class, as units of FSDP2 are, is kept once.
    """
    cls, bases = type(module), (mixin, type(module))
    made = (each for each in cls.__subclasses__() if each.__bases__ == bases)
    module.__class__ = next(made, None) or type(cls.__name__, bases, {"__module__": cls.__module__})
    vars(module)[slot] = value


def become_root(stage: nn.Module, runner: Any, *, around: Iterable[str]) -> None:
    """End the forward of a stage's root, and of the modules around those named, where the stage ends.

    Args:
        stage: The model's copy.
        runner: Called instead of the module's own forward.
        around: FQNs of the modules after whose calls a stage can end.
    """
    for fqn in sorted({name for inner in around for name in ancestors(inner)}):
        module = descend(stage, fqn)
        if not isinstance(module, nn.ModuleList | nn.ModuleDict):
            become(module, Between, _LEFT, False)
            forward_hooks.take_hooks(module)
    become(stage, Root, _RUNNER, runner)
    forward_hooks.take_hooks(stage)


def ancestors(fqn: str) -> list[str]:
    """Return the FQNs of the modules around one, but for the root."""
    names = fqn.split(".")
    return [".".join(names[:length]) for length in range(1, len(names))]


def descend(stage: nn.Module, fqn: str) -> Any:
    """Return a submodule, also one that is not in the module tree, where torch's own lookup does not get past."""
    module: Any = stage
    for name in fqn.split(".") if fqn else ():
        children = module._modules
        module = children[name] if children.get(name) is not None else _taken_out(module, name)
    return module


def _taken_out(parent: nn.Module, name: str) -> Any:
    absent = vars(parent)[_CHILDREN] if isinstance(parent, _Container) else vars(parent)
    return absent[name]


def take_out(parent: nn.Module, name: str) -> None:
    """Move a child out of the module tree; attribute lookup on the parent still finds it."""
    child = parent._modules[name]
    if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        if not isinstance(parent, _Container):
            mixin = _Named if isinstance(parent, nn.ModuleDict) else _Listed
            become(parent, mixin, _CHILDREN, dict.fromkeys(parent._modules))
        vars(parent)[_CHILDREN][name] = child
    else:
        vars(parent)[name] = child
    del parent._modules[name]


def take_out_tensors(
    module: nn.Module,
    prefix: str,
    needed: frozenset[str],
    absent: frozenset[str],
    *,
    device: torch.device,
    runner: Stage,
) -> None:
    """Replace parameters that are not needed by absent ones; modules that are left without any leave the tree."""
    for name, child in list(module._modules.items()):
        if child is not None:
            is_absent = _is_absent(child, f"{prefix}{name}.", needed, absent)
            take_out_tensors(child, f"{prefix}{name}.", needed, absent, device=device, runner=runner)
            if is_absent:
                take_out(module, name)
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and f"{prefix}{name}" not in needed:
            del module._parameters[name]
            source = f'the parameter "{prefix}{name}"'
            is_absent = isinstance(parameter, Absent)  # else it is here under another name
            made = parameter if is_absent else absent_zeros(parameter, device=device, source=source, stage=runner)
            vars(module)[name] = made
            runner.absent.append((module, name))
    for name in [name for name in module._buffers if f"{prefix}{name}" in absent]:
        vars(module)[name] = module._buffers.pop(name)


def _is_absent(module: nn.Module, prefix: str, needed: frozenset[str], absent: frozenset[str]) -> bool:
    """Return whether a module holds parameters that are not needed, and at most buffers that are not either."""
    names = [f"{prefix}{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
    if not names or not needed.isdisjoint(names):
        return False
    others = any(f"{prefix}{name}" not in absent for name, _ in module.named_buffers()) or any(
        isinstance(value, Tensor) for inner in module.modules() for value in vars(inner).values()
    )
    is_block = any(isinstance(inner, Kept | _Container) for inner in module.modules())
    return not others and not is_block


def tensors_of_stage(
    model: nn.Module,
    firsts: Mapping[str, str],
    *,
    needed: Collection[str],
    absent_buffers: Collection[str],
    clones: Collection[str],
    device: torch.device,
    runner: Stage,
    without: Collection[nn.Module] = (),
) -> dict[int, Any]:
    """Return the tensors of a stage's copy by `id` of the model's own: the memo of `copy.deepcopy`.

    Args:
        model: Whole.
        firsts: For every name of a parameter its first one.
        needed: Names of the parameters that the stage holds; absent ones stand for the others.
        absent_buffers: Names of the buffers that it does not; what is written into them here goes into absent zeros.
        clones: First FQNs of parameters that another stage on this rank holds already; these are copied.
        device: Of what is absent.
        runner: Of the stage.
        without: Modules whose parameters are left out, but for those that other modules hold too.
    """
    memo: dict[int, Any] = {**recomputed_tensors(model)}
    for fqn, buffer in model.named_buffers():
        source = f'the buffer "{fqn}"'
        memo[id(buffer)] = (
            absent_zeros(buffer, device=device, source=source, stage=runner, is_written=True)
            if fqn in absent_buffers
            else buffer
        )
    held = {firsts[fqn] for fqn in needed}
    inside = [
        (firsts[f"{prefix}.{name}".removeprefix(".")], parameter)
        for prefix, module in model.named_modules(memo=set(without))
        for name, parameter in module.named_parameters(recurse=False)
    ]
    for fqn, parameter in inside:
        if id(parameter) in memo:
            continue
        if fqn not in held:
            absent = absent_zeros(parameter, device=device, source=f'the parameter "{fqn}"', stage=runner)
            memo[id(parameter)] = with_attributes_of(parameter, absent)
        elif fqn in clones:
            clone = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
            memo[id(parameter)] = with_attributes_of(parameter, clone)
        else:
            memo[id(parameter)] = parameter
    return memo


def refuse_without_graph(name: str) -> None:
    """Refuse a call at the edge of a stage through which no gradient would get to the stages before.

    Raises:
        StepError: With the call's name.
    """
    raise StepError(
        f'the forward of this batch calls "{name}" without a graph, and its gradients would be lost between stages, as '
        "in torch.utils.checkpoint with use_reentrant=True; write use_reentrant=False, or leave recomputation to "
        "[scheduling.activation_checkpoint]"
    )


def refuse_out_of_reach(stage: nn.Module, needed: frozenset[str]) -> None:
    """Refuse a stage that needs a parameter of a module that is not in its tree."""
    missing = needed - {fqn for fqn, _ in stage.named_parameters(remove_duplicate=False)}
    if missing:
        raise TransformError(f'a stage needs the parameter "{min(missing)}", which lies in a block of another stage')
