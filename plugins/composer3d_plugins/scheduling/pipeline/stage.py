"""Stages of a model that was written without them: each runs the parent's own forward.

Blocks of other stages are not in the module tree: where the parent looks for them it finds objects that hand the hidden
state on, the last one before this stage's first block hands on what was received. Behind the stage's last block the
parent's forward is left. Parameters that the stage does not need are zeros without memory, or lie in modules that are
not in the tree either; so every name that is left is the name in the whole model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import StepError, TransformError
from composer3d_plugins.scheduling.pipeline.trace import Observation

__all__ = ["Runner", "build_stage", "runner_of"]

# Where modules of a stage keep what their added classes need.
_RUNNER, _LEFT, _BLOCK, _CHILDREN = (f"_composer3d_{name}" for name in ("runner", "left", "block", "children"))


class _Done(BaseException):  # noqa: N818 - not an error: no handler of the model's may take it for one
    """Leaves the parent's forward with the hidden state of a stage's last block."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


class _Received(torch.autograd.Function):
    """Copy what was received, so that a block may change it in place; its gradient can be sent as it is."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


class Runner:
    """What one stage is doing.

    Args:
        observation: Of the whole model.
        start: Index of the first block.
        end: Index after the last block.
    """

    def __init__(self, observation: Observation, start: int, end: int) -> None:
        self.observation, self.start, self.end = observation, start, end
        self.received: Tensor | None = None
        self.call: Callable[..., Any] | None = None
        # torch takes the gradients of inputs and of weights apart by walking from the stage's input, so it must have a
        # gradient; and it cannot where a parameter is used in several places. The first stage has no such halves.
        self.has_halves = start == 0 or observation.uses_once(start, end)
        self._position = 0

    @property
    def is_last(self) -> bool:
        """Whether nothing comes after this stage."""
        return self.end == len(self.observation.blocks)

    def forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], received: Any) -> Any:
        """Run the parent's forward on a batch and return this stage's hidden state, or the model's output.

        Raises:
            StepError: The blocks were not called as they were when the model was observed.
        """
        if received is not None and torch.is_grad_enabled():
            self.has_halves = self.has_halves and received.requires_grad
        self.received, self._position = None if received is None else _Received.apply(received), 0
        try:
            output = _inner_call(model)(*args, **kwargs)
        finally:
            self.received = None
        if self._position != self.end:
            name = self.observation.blocks[self._position]
            raise StepError(f'the forward of this batch did not call "{name}", as it did when the model was split')
        return output

    def passing(self, index: int, value: Tensor) -> Any:
        """Stand in for a block before this stage's: hand on the hidden state, the last one what was received."""
        self._arrive(index)
        hidden = self.received if index == self.start - 1 else value
        form = self.observation.returns[index]
        return type(form)((hidden, *form[1:])) if isinstance(form, list | tuple) else hidden

    def _arrive(self, index: int) -> None:
        if index != self._position:
            raise StepError(
                f'the forward of this batch called "{self.observation.blocks[index]}" in another place than when the '
                "model was split; a pipeline needs every block called once, in order"
            )
        self._position += 1

    def left(self, index: int, output: Any) -> Any:
        """Note that a block of this stage has run; after the last one leave the parent's forward."""
        self._arrive(index)
        if index == self.end - 1 and not self.is_last:
            hidden = output[0] if isinstance(output, list | tuple) else output
            raise _Done(hidden.contiguous())
        return output


def runner_of(module: nn.Module) -> Runner:
    """Return the runner of a stage's module."""
    runner: Runner = vars(module)[_RUNNER]
    return runner


# ---- classes that modules of a stage are given -----------------------------------------------------------------------


class _Root:
    """The stage's module: calls go through its runner; hooks and FSDP2 see the model's own arguments."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = vars(self)[_RUNNER].call
        if call is None:
            raise StepError("a stage of a pipeline runs in run.forward_backward(...) and run.evaluate(...) only")
        return call(*args, **kwargs)

    def inner_call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module as if it were no stage."""
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the parent's forward up to the stage's last block."""
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        except _Done as done:
            return done.hidden


def _inner_call(model: Any) -> Callable[..., Any]:
    return model.inner_call


class _Between:
    """A module between root and blocks: its own hooks still see a forward that ends."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)[_LEFT] = False
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if vars(self)[_LEFT]:
            raise _Done(output)
        return output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Turn leaving into returning."""
        try:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        except _Done as done:
            vars(self)[_LEFT] = True
            return done.hidden


class _Owned:
    """A block of this stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner, index = vars(self)[_BLOCK]
        return runner.left(index, super().__call__(*args, **kwargs))  # type: ignore[misc]


class _Absent:
    """A block of another stage, as the parent finds it: attributes are those of the block, calls hand on."""

    def __init__(self, runner: Runner, index: int, block: nn.Module) -> None:
        self._runner, self._index, self._block = runner, index, block

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._runner.passing(self._index, hidden)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for what a module has and this has not
            raise AttributeError(name)
        return getattr(self._block, name)


class _Container:
    """A ModuleList, Sequential or ModuleDict some of whose children are not in the module tree."""

    def _children(self) -> dict[str, Any]:
        own: dict[str, Any] = self._modules  # type: ignore[attr-defined]
        return {name: own[name] if absent is None else absent for name, absent in vars(self)[_CHILDREN].items()}

    def __len__(self) -> int:
        return len(vars(self)[_CHILDREN])


class _Listed(_Container):
    def __iter__(self) -> Iterator[Any]:
        return iter(self._children().values())

    def __getitem__(self, index: Any) -> Any:
        return list(self._children().values())[index]


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


def _become(module: nn.Module, mixin: type, slot: str, value: Any) -> None:
    """Give a module a class of its own that adds `mixin`; its name and its parameters' names stay."""
    cls = type(module)
    module.__class__ = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
    vars(module)[slot] = value


# ---- building --------------------------------------------------------------------------------------------------------


def build_stage(
    model: nn.Module,
    observation: Observation,
    *,
    start: int,
    end: int,
    device: torch.device,
    clones: Sequence[str] = (),
) -> nn.Module:
    """Return the stage with the blocks from `start` to before `end`.

    The structure is copied, tensors are not: what the stage needs is the model's own parameters and buffers. `model`
    stays as it is.

    Args:
        model: Whole; on meta, or with weights.
        observation: Of this model.
        start: Index of the first block.
        end: Index after the last block.
        device: Of the zeros that stand for absent parameters.
        clones: First FQNs of parameters that another stage on this rank holds already; these are copied.

    Raises:
        TransformError: The stage needs a parameter that lies in a block of another stage.
    """
    runner = Runner(observation, start, end)
    needed, absent = observation.needed(start, end), observation.absent_buffers(start, end)
    memo: dict[int, Any] = {
        # What a module of another stage counts there, it writes into a tensor of its own here.
        id(b): torch.zeros(b.shape, dtype=b.dtype, device=device) if fqn in absent else b
        for fqn, b in model.named_buffers()
    }
    held = {observation.firsts[fqn] for fqn in needed}
    for fqn, parameter in model.named_parameters():
        if fqn not in held:
            memo[id(parameter)] = nn.Parameter(_zeros(parameter, device), requires_grad=False)
        elif fqn in clones:
            memo[id(parameter)] = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        else:
            memo[id(parameter)] = parameter
    for index, fqn in enumerate(observation.blocks):
        if not start <= index < end:
            block = observation.skeleton.get_submodule(fqn)
            memo[id(model.get_submodule(fqn))] = _Absent(runner, index, block)
    stage = copy.deepcopy(model, memo)
    _take_out_blocks(stage, observation)
    for index in range(start, end):
        _become(stage.get_submodule(observation.blocks[index]), _Owned, _BLOCK, (runner, index))
    _take_out_tensors(stage, "", needed, absent, device)
    for fqn in sorted({name for block in observation.blocks for name in _ancestors(block)}):
        if not isinstance(stage.get_submodule(fqn), nn.ModuleList | nn.ModuleDict):
            _become(stage.get_submodule(fqn), _Between, _LEFT, False)
    _become(stage, _Root, _RUNNER, runner)
    _refuse_out_of_reach(stage, needed)
    return stage


def _ancestors(fqn: str) -> list[str]:
    """Return the FQNs of the modules around one, but for the root."""
    names = fqn.split(".")
    return [".".join(names[:length]) for length in range(1, len(names))]


def _take_out_blocks(stage: nn.Module, observation: Observation) -> None:
    for fqn in observation.blocks:
        prefix, _, name = fqn.rpartition(".")
        parent = _descend(stage, prefix)
        if isinstance(parent._modules[name], _Absent):
            _take_out(parent, name)


def _descend(stage: nn.Module, fqn: str) -> Any:
    """Return a submodule; torch's own lookup does not get past children that are no modules."""
    module: Any = stage
    for name in fqn.split(".") if fqn else ():
        module = module._modules[name]
    return module


def _take_out(parent: nn.Module, name: str) -> None:
    """Move a child out of the module tree, to where the parent still finds it."""
    child = parent._modules[name]
    if isinstance(parent, nn.ModuleList | nn.ModuleDict | nn.Sequential):
        if not isinstance(parent, _Container):
            mixin = _Named if isinstance(parent, nn.ModuleDict) else _Listed
            _become(parent, mixin, _CHILDREN, dict.fromkeys(parent._modules))
        vars(parent)[_CHILDREN][name] = child
    else:
        vars(parent)[name] = child
    del parent._modules[name]


def _take_out_tensors(
    module: nn.Module, prefix: str, needed: frozenset[str], absent: frozenset[str], device: torch.device
) -> None:
    """Replace parameters and buffers that are not needed by zeros; modules that are left without any leave the tree."""
    for name, child in list(module._modules.items()):
        if child is not None:
            is_absent = _is_absent(child, f"{prefix}{name}.", needed, absent)
            _take_out_tensors(child, f"{prefix}{name}.", needed, absent, device)
            if is_absent:
                _take_out(module, name)
    for name, parameter in list(module._parameters.items()):
        if parameter is not None and f"{prefix}{name}" not in needed:
            del module._parameters[name]
            vars(module)[name] = _zeros(parameter, device)
    for name in [name for name in module._buffers if f"{prefix}{name}" in absent]:
        vars(module)[name] = module._buffers.pop(name)


def _is_absent(module: nn.Module, prefix: str, needed: frozenset[str], absent: frozenset[str]) -> bool:
    """Tell whether a module holds parameters that are not needed, and nothing else but buffers that are not either."""
    names = [f"{prefix}{name}" for name, _ in module.named_parameters(remove_duplicate=False)]
    others = any(f"{prefix}{name}" not in absent for name, _ in module.named_buffers()) or any(
        isinstance(value, Tensor) for inner in module.modules() for value in vars(inner).values()
    )
    is_block = any(isinstance(inner, _Owned | _Container) for inner in module.modules())
    return bool(names) and not others and not is_block and needed.isdisjoint(names)


def _zeros(parameter: Tensor, device: torch.device) -> Tensor:
    """Return zeros of a parameter's shape that take no memory."""
    return torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)


def _refuse_out_of_reach(stage: nn.Module, needed: frozenset[str]) -> None:
    missing = needed - {fqn for fqn, _ in stage.named_parameters(remove_duplicate=False)}
    if missing:
        raise TransformError(f'a stage needs the parameter "{min(missing)}", which lies in a block of another stage')
