"""Stages of a model that was written without them: each runs the parent's own forward.

Blocks of other stages are replaced by objects outside the module tree that return their input; the last one before this
stage's first block returns the received hidden state. After the stage's last block the parent's forward is left.
Parameters that the stage does not need are absent tensors without memory, or belong to modules that are not in the tree
either, so that every remaining FQN is that of the whole model.

Shape suffixes: B micro-batch, S sequence, D hidden dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from composer3d import StepError
from composer3d_plugins.scheduling.pipeline.absent import end_reading, refuse_absent
from composer3d_plugins.scheduling.pipeline.block_trace import Observation
from composer3d_plugins.scheduling.pipeline.model_copy import copy_model
from composer3d_plugins.scheduling.pipeline.surgery import (
    Done,
    Given,
    Kept,
    Received,
    as_received,
    become,
    become_root,
    descend,
    inner_call,
    refuse_out_of_reach,
    refuse_without_graph,
    take_out,
    take_out_tensors,
    tensors_of_stage,
)
from composer3d_plugins.scheduling.pipeline.tensor_origins import leaves_of

__all__ = ["Runner", "build_stage"]

_BLOCK = "_composer3d_block"


class Runner:
    """State of one stage's forward.

    Args:
        observation: Of the whole model.
        start: Index of the first block.
        end: Index after the last block.
    """

    def __init__(self, observation: Observation, start: int, end: int) -> None:
        self.observation, self.start, self.end = observation, start, end
        self.num_received = min(start, 1)
        self.received: Tensor | None = None
        self.call: Callable[..., Any] | None = None
        self.given: Given = as_received
        # torch takes the gradients of inputs and of weights apart by walking from the stage's input, so it must have a
        # gradient; and it cannot where a parameter is used in several places. The first stage has no such halves.
        self.has_halves = start == 0 or observation.uses_once(start, end)
        self.is_inside = self.is_running = self._has_graph = False
        self.written: str | None = None
        self.absent: list[tuple[Any, str]] = []
        self.casts: tuple[torch.dtype, torch.dtype] | None = None
        self.readers: AbstractContextManager[Any] | None = None
        self._position = 0

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage."""
        return self.end == len(self.observation.blocks)

    @property
    def sent_by(self) -> Sequence[str]:
        """Name of the block that returns what is sent."""
        return [self.observation.blocks[self.end - 1]]

    @property
    def next_name(self) -> str:
        """Name of the block with which the next stage begins."""
        return self.observation.blocks[self.end]

    def attach(self, stage: nn.Module) -> None:
        """Count the calls of the stage's blocks; again after blocks were replaced."""
        for index in range(self.start, self.end):
            block = stage.get_submodule(self.observation.blocks[index])
            if not isinstance(block, _Owned):
                become(block, _Owned, _BLOCK, (self, index))

    def forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], received: tuple[Tensor, ...]
    ) -> Any:
        """Run the parent's forward on a batch and return this stage's x_BSD, or the model's output.

        Raises:
            StepError: The blocks were not called as they were when the model was observed.
        """
        if torch.is_grad_enabled():
            self.has_halves = self.has_halves and all(tensor.requires_grad for tensor in received)
        self.written, self.is_running, self._has_graph = None, True, torch.is_grad_enabled()
        self.received, self._position = Received.apply(received[0]) if received else None, 0
        try:
            output = inner_call(model)(*args, **kwargs)
        finally:
            end_reading(self)
            self.received, self.is_inside, self.is_running = None, False, False
        if self._position != self.end:
            name = self.observation.blocks[self._position]
            raise StepError(f'the forward of this batch did not call "{name}", as it did when the model was split')
        if self.is_last:
            refuse_absent(leaves_of(output), stage=self)
        return output

    def passing(self, index: int, value: Tensor) -> Any:
        """Stand in for an earlier stage's block: return `value` as it is, the last of them the received x_BSD."""
        self._arrive(index)
        hidden = self._given(index) if index == self.start - 1 else value
        if index == self.start - 1 and hidden is not None and hidden.requires_grad:
            self._refuse_without_graph(index)
        form = self.observation.returns[index]
        return type(form)((hidden, *form[1:])) if isinstance(form, list | tuple) else hidden

    def _given(self, index: int) -> Tensor | None:
        if self.received is None:
            return None
        return self.given(self.observation.blocks[index], 0, 0, self.received)

    def entered(self, index: int) -> None:
        """Note that a block of this stage begins to run."""
        self._refuse_other_place(index)
        self.is_inside = True

    def _arrive(self, index: int) -> None:
        self._refuse_other_place(index)
        self._position += 1

    def _refuse_other_place(self, index: int) -> None:
        if index != self._position:
            raise StepError(
                f'the forward of this batch called "{self.observation.blocks[index]}" in another place than when the '
                "model was split; a pipeline needs every block called once, in order"
            )

    def _refuse_without_graph(self, index: int) -> None:
        if self._has_graph and not torch.is_grad_enabled():
            refuse_without_graph(self.observation.blocks[index])

    def left(self, index: int, output: Any, *, has_trained: bool) -> Any:
        """Record that a block of this stage has run; after the last one leave the parent's forward.

        Args:
            index: Of the block.
            output: What it returned.
            has_trained: Whether any of its parameters is trained.
        """
        self._arrive(index)
        if index == self.end - 1 and not self.is_last:
            hidden = output[0] if isinstance(output, list | tuple) else output
            refuse_absent([hidden], stage=self)
            if not hidden.requires_grad and has_trained:
                self._refuse_without_graph(index)
            raise Done(hidden.contiguous())
        return output


# ---- classes that modules of a stage are given -----------------------------------------------------------------------


class _Owned(Kept):
    """A block of this stage."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        runner, index = vars(self)[_BLOCK]
        if not runner.is_running:  # the model's own checkpoint computes it again in a backward
            return super().__call__(*args, **kwargs)  # type: ignore[misc]
        runner.entered(index)
        try:
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        finally:
            runner.is_inside = False
        has_trained = any(parameter.requires_grad for parameter in self.parameters())  # type: ignore[attr-defined]
        return runner.left(index, output, has_trained=has_trained)


class _Absent:
    """A block of another stage, as the parent finds it: attributes are those of the block, calls return their input."""

    def __init__(self, runner: Runner, index: int, block: nn.Module) -> None:
        self._runner, self._index, self._block = runner, index, block

    def __call__(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._runner.passing(self._index, hidden)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for what a module has and this has not
            raise AttributeError(name)
        return getattr(self._block, name)


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

    The structure is copied, tensors are not: the stage holds the model's own parameters and buffers. `model` is not
    changed.

    Args:
        model: The whole model; on meta, or with weights.
        observation: Of this model.
        start: Index of the first block.
        end: Index after the last block.
        device: Of what stands for absent parameters.
        clones: First FQNs of parameters that another stage on this rank holds already; these are copied.

    Raises:
        TransformError: The stage needs a parameter that lies in a block of another stage.
    """
    runner = Runner(observation, start, end)
    needed, absent = observation.needed(start, end), observation.absent_buffers(start, end)
    absent_blocks = {
        model.get_submodule(fqn): _Absent(runner, index, observation.skeleton.get_submodule(fqn))
        for index, fqn in enumerate(observation.blocks)
        if not start <= index < end
    }

    def tensors(without: Collection[nn.Module]) -> dict[int, Any]:
        memo = tensors_of_stage(
            model,
            observation.firsts,
            needed=needed,
            absent_buffers=absent,
            clones=clones,
            device=device,
            runner=runner,
            without=without,
        )
        return memo | {id(block): other for block, other in absent_blocks.items()}

    memo = tensors(without=absent_blocks)
    unseen = {id(parameter) for block in absent_blocks for parameter in block.parameters()} - memo.keys()
    stage = copy_model(model, memo)
    if not unseen.isdisjoint(memo):  # something else than a module, a list say, holds one of an absent block
        stage = copy_model(model, tensors(without=()))
    _take_out_blocks(stage, observation)
    runner.attach(stage)
    take_out_tensors(stage, "", needed, absent, device=device, runner=runner)
    become_root(stage, runner, around=observation.blocks)
    refuse_out_of_reach(stage, needed)
    return stage


def _take_out_blocks(stage: nn.Module, observation: Observation) -> None:
    for fqn in observation.blocks:
        prefix, _, name = fqn.rpartition(".")
        parent = descend(stage, prefix)
        if isinstance(parent._modules[name], _Absent):
            take_out(parent, name)
