"""The very composition of a manifest as one rank of a world without others, on tensors without values."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.composition.agreeing import described, fingerprint
from composer3d.composition.applying import apply_transforms, give_memory
from composer3d.composition.assembling import build_mesh, freeze
from composer3d.composition.composition import Composition
from composer3d.composition.preparing import Preparation, prepare
from composer3d.errors import ManifestError
from composer3d.initialisation import Attachments
from composer3d.planning.tracing.equal_blocks import BlockCut
from composer3d.step.criterion import Criterion
from composer3d.step.guard import Guard, Totals
from composer3d.step.loop_state import Decided
from composer3d.step.microbatches import map_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.interfaces import Example, LossFunction
    from composer3d.manifest import Manifest

__all__ = ["Job", "composed", "make_lasting", "prepared", "prime_optimizer", "run_step"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """What is planned: a manifest with its model, batch, loss and optimizer.

    Args:
        manifest: Typed.
        model: On meta, whole or with fewer blocks; it is copied.
        loss_fn: As for `compose`.
        make_optimizer: Called with a composition.
        example: `(args, kwargs)` of a micro-batch of any size, on meta: the form of what the model is called with.
        inputs: What the model is called with besides, given the targets.
        target: Of as many samples, on meta: the form of the targets; None for integers like the first input.
        has_targets: False where there are none.
        count_fn: As for `compose`.
        grad_clip: As in `[train]`.
        world_size: Ranks.
        num_microbatches: Of a step, on every data-parallel rank.
        microbatch: Samples of one.
        preparation: Of this manifest and model, where somebody has it already, for whatever purpose but running.
    """

    manifest: Manifest
    model: nn.Module
    loss_fn: LossFunction | None
    make_optimizer: Callable[[Composition], torch.optim.Optimizer]
    example: Example
    inputs: Callable[[Any], Mapping[str, Any]]
    grad_clip: float
    world_size: int
    num_microbatches: int
    microbatch: int
    preparation: Preparation | None = None
    target: Any = None
    has_targets: bool = True
    count_fn: Callable[[Any], int] | None = None

    def batch(self, num_microbatches: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return positional and named inputs and targets of one rank's step; in a fake mode without values."""
        import torch

        size = num_microbatches * self.microbatch

        def zeros(leaf: torch.Tensor) -> torch.Tensor:
            return torch.zeros((size, *leaf.shape[1:]), dtype=leaf.dtype)

        args, kwargs = map_tensors(zeros, (tuple(self.example[0]), dict(self.example[1])))
        if self.has_targets and self.target is None:
            target = torch.zeros_like(args[0], dtype=torch.int64)
        else:
            target = map_tensors(zeros, self.target)
        return args, {**kwargs, **self.inputs(target)}, target


@contextlib.contextmanager
def composed(
    job: Job,
    preparation: Preparation,
    rank: int,
    *,
    cut: BlockCut | None = None,
    memory: torch_compat.ResultMemory | None = None,
) -> Iterator[Composition]:
    """Compose as one rank; inside, every operator makes tensors without values.

    Args:
        job: What to compose.
        preparation: From `prepared`; it is aimed at the rank, and left as it was.
        rank: The one to be.
        cut: Leaves blocks of this rank's stages out.
        memory: Of what operators returned to the ranks before.
    """
    from composer3d.testing.fake_world import fake_world

    with fake_world(job.world_size, rank), _aimed(preparation, rank) as aimed:
        build_mesh(aimed)
        apply_transforms(aimed, after_split=partial((cut or BlockCut(None)).apply, preparation=aimed))
        with torch_compat.fake_tensors(memory):
            give_memory(aimed)
            plan = fingerprint(described(aimed))
            run = Composition(
                freeze(aimed, Criterion(job.loss_fn, job.count_fn), lambda: None, plan, make_guard=_Alone)
            )
            with contextlib.closing(run):
                yield run


def prepared(job: Job) -> Preparation:
    """Join manifest and model, once for all ranks: what plugins see in a model does not depend on who looks.

    Raises:
        ManifestError: With every mistake of the manifest.
    """
    import torch

    preparation = job.preparation
    if preparation is None:
        preparation = prepare(
            job.model,
            job.manifest,
            world_size=job.world_size,
            rank=0,
            device=torch.device("cpu"),
            purpose="plan",
            example=job.example,
        )
    errors = [problem for problem in preparation.problems if problem.severity == "error"]
    if errors:
        raise ManifestError(errors)
    return preparation


@contextlib.contextmanager
def _aimed(preparation: Preparation, rank: int) -> Iterator[Preparation]:
    """Let the preparation be another rank's, on a copy of the model; what composing adds is taken away after."""
    with preparation.context.as_rank(rank):
        model = copy.deepcopy(preparation.model)
        for original, twin in zip(preparation.model.parameters(), model.parameters(), strict=True):
            torch_compat.with_attributes_of(original, twin)
            torch_compat.set_gradient_hooks(twin, *torch_compat.gradient_hooks(original))
        yield replace(preparation, model=model, attachments=Attachments.of(model))


def prime_optimizer(run: Composition, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer make its state, as it is after the first step; weights are what they were."""
    import torch

    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    with run._engine.bypassed():
        optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def make_lasting(run: Composition, args: Sequence[Any], target: Any, inputs: Mapping[str, Any]) -> None:
    """Make what a run makes in its first step and keeps: the numbers by which ranks compare their batches."""
    run._engine.identity((tuple(args), dict(inputs), target))


def run_step(
    run: Composition,
    optimizer: torch.optim.Optimizer,
    args: Sequence[Any],
    target: Any,
    *,
    inputs: Mapping[str, Any],
    grad_clip: float,
    number: int = 1,
) -> None:
    """Run an optimizer step as the runner does."""
    with run.step(number):
        loss = float(run.forward_backward(*args, target=target, **inputs))
        float(run.clip_grad_norm_(grad_clip))
        del loss
        optimizer.step()
        optimizer.zero_grad()


class _Alone(Guard):
    """The step guard where nobody answers: it sends what it would send, and believes itself."""

    def agree(
        self,
        *,
        step: int,
        call: int | None,
        counts: Sequence[int],
        digest: int = 0,
        own: bool = False,
        decided: Decided | None = None,
    ) -> Totals:
        import torch
        import torch.distributed as dist

        size = len(self._ranks) if self._compares else 0
        tensor = torch.zeros(3 + 5 * size, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, group=self._group)
        return Totals(count=1, num_microbatches=len(counts), equal=True)

    def any(self, votes: Sequence[bool]) -> list[bool]:
        import torch
        import torch.distributed as dist

        tensor = torch.zeros(len(votes), dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self._group)
        return [False] * len(votes)
