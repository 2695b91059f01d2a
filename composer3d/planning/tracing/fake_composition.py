"""Composition of a manifest as one rank of a fake process group, on fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from composer3d import Composition, map_tensors, torch_compat
from composer3d.composition import (
    Preparation,
    apply_transforms,
    build_mesh,
    described,
    fingerprint,
    freeze,
    give_memory,
    prepare,
)
from composer3d.errors import ManifestError, StepError
from composer3d.observation import beside
from composer3d.planning.tracing.equal_blocks import BlockTruncation
from composer3d.step import Criterion, Decided, Guard, Totals
from composer3d.torch_compat.compilers import nothing_compiles
from composer3d.torch_compat.fakes import rules_at_hand, value_errors
from composer3d.transform import Phase

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.context import RunContext
    from composer3d.interfaces import Example, LossFunction
    from composer3d.manifest import Manifest

__all__ = [
    "Averages",
    "Job",
    "composed",
    "is_compiled",
    "is_fused",
    "make_lasting",
    "planned",
    "prepared",
    "prime_optimizer",
    "run_step",
]


class Averages(Protocol):
    """Moving averages of the parameters, as a loop keeps them."""

    def update(self, step: int) -> None:
        """Update the averages by the parameters after a step."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return them by FQN, under `averages`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """Input of a trace: a manifest with its model, batch, loss and optimizer.

    Args:
        manifest: Typed and checked.
        model: On meta, whole or with fewer blocks; it is copied.
        loss_fn: As for `compose`.
        make_optimizer: Returns the optimizer of a composition.
        example: `(args, kwargs)` of a micro-batch of any size, on meta: shapes and dtypes of the model's arguments,
            x_B....
        inputs: Returns further keyword arguments of the model, given the targets.
        target: Targets of as many samples, on meta; None for integers of the first input's shape.
        has_targets: False if the loss takes no targets.
        count_fn: As for `compose`.
        grad_clip: As in `[train]`.
        world_size: Ranks of the run.
        num_microbatches: Micro-batches per step and data-parallel rank.
        microbatch: Samples per micro-batch.
        preparation: Of this manifest and model, if the caller has made it already, for any purpose but `run`.
        make_averages: Returns what a loop keeps of a composition's parameters and updates in every step; None where it
            keeps nothing.
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
    make_averages: Callable[[Composition], Averages] | None = None

    def averages(self, run: Composition) -> Averages | None:
        """Return the averages that the loop keeps."""
        return None if self.make_averages is None else self.make_averages(run)

    def batch(self, num_microbatches: int) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        """Return positional and named inputs and targets of one rank's step, as fake tensors in a fake mode."""
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
    truncation: BlockTruncation | None = None,
    memory: torch_compat.ResultMemory | None = None,
) -> Iterator[Composition]:
    """Compose as one rank; inside, every operator returns fake tensors.

    Args:
        job: Manifest, model and batch to compose.
        preparation: From `prepared`; it is set to the rank inside, and restored afterwards.
        rank: Global rank to compose as.
        truncation: Truncates this rank's stages to a few blocks.
        memory: Cache of operator results from earlier ranks.
    """
    from composer3d.processes import fake_world

    with fake_world(job.world_size, rank), nothing_compiles(), rules_at_hand(), _aimed(preparation, rank) as aimed:
        build_mesh(aimed)
        apply_transforms(aimed, after_split=partial((truncation or BlockTruncation(None)).apply, preparation=aimed))
        with torch_compat.fake_tensors(memory):
            give_memory(aimed)
            plan = fingerprint(described(aimed))
            run = Composition(
                freeze(aimed, Criterion(job.loss_fn, job.count_fn), lambda: None, plan, make_guard=_Alone)
            )
            with contextlib.closing(run):
                yield run


def prepared(job: Job) -> Preparation:
    """Join manifest and model, once for all ranks: the preparation does not depend on the rank.

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


def is_compiled(preparation: Preparation) -> bool:
    """Return whether a transform compiles modules."""
    return any(transform.phase is Phase.COMPILE for transform, _ in preparation.selected)


def is_fused(preparation: Preparation) -> bool:
    """Return whether modules are compiled by a compiler that fuses; a plugin says where its backend only runs them."""
    asked = preparation.hooks.asked("composer3d_layout")
    traits = [function(degrees=preparation.context.degrees) for _, function in asked]
    return is_compiled(preparation) and not any(each is not None and each.is_compiled is False for each in traits)


@contextlib.contextmanager
def planned(context: RunContext) -> Iterator[None]:
    """Plan inside: fake ranks compute nowhere, and the CPU stands for any device; `run_device` stays the run's."""
    import torch

    before = context.purpose, context.device
    context.purpose, context.device = "plan", torch.device("cpu")
    try:
        yield
    finally:
        context.purpose, context.device = before


@contextlib.contextmanager
def _aimed(preparation: Preparation, rank: int) -> Iterator[Preparation]:
    """Set a preparation to another rank, on a copy of the model; what composing adds is removed afterwards.

    Whatever it was made for, plugins see the purpose `plan`.
    """
    with preparation.context.as_rank(rank), planned(preparation.context):
        model = torch_compat.copy_modules(preparation.model, torch_compat.recomputed_tensors(preparation.model))
        for original, twin in zip(preparation.model.parameters(), model.parameters(), strict=True):
            torch_compat.with_attributes_of(original, twin)
            torch_compat.set_gradient_hooks(twin, *torch_compat.gradient_hooks(original))
        attachments, selected = preparation.attachments.of_copy(model), [*preparation.selected]
        yield replace(preparation, model=model, attachments=attachments, selected=selected)


def prime_optimizer(run: Composition, optimizer: torch.optim.Optimizer) -> None:
    """Initialise the optimizer's state, as after the first step; weights are not changed."""
    import torch

    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    with run._engine.bypassed():
        optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def make_lasting(run: Composition, args: Sequence[Any], inputs: Mapping[str, Any], target: Any) -> None:
    """Allocate what a run's first step allocates for good: the weights of the batch digest.

    Args:
        run: The composition.
        args: Of the whole batch of a step, however many of its micro-batches are traced.
        inputs: Of the same batch.
        target: Of the same batch.
    """
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
    averages: Averages | None = None,
) -> None:
    """Run an optimizer step as the runner does.

    Args:
        run: The composition.
        optimizer: Of the composition.
        args: Of the batch of the step.
        target: Of the same batch.
        inputs: Of the same batch.
        grad_clip: As in `[train]`.
        number: Of the step.
        averages: Of the composition's parameters, which the loop updates; None where it keeps none.

    Raises:
        StepError: Values decide what an operator returns, and nothing is known of them.
    """
    with _naming_what_values_decide(), run.step(number):
        loss = float(run.forward_backward(*args, target=target, **inputs))
        float(run.clip_grad_norm_(grad_clip))
        del loss
        optimizer.step()
        if averages is not None:
            averages.update(number)
        optimizer.zero_grad()


@contextlib.contextmanager
def _naming_what_values_decide() -> Iterator[None]:
    """Raise an error with the operator and the line of the user's code."""
    try:
        yield
    except value_errors() as error:
        raise StepError(
            f"the step cannot be planned: values decide what {error.func} returns{beside(error)}, and a plan has "  # type: ignore[attr-defined]
            "none; let shapes decide it, or loop over all that values may choose"
        ) from error


class _Alone(Guard):
    """Step guard in a fake process group: issues its all-reduce, and uses this rank's own counts."""

    def agree(
        self,
        *,
        step: int,
        call: int | None,
        counts: Sequence[int],
        digest: int = 0,
        own: bool = False,
        decided: Decided | None = None,
        copy: int = 0,
    ) -> Totals:
        self._exchanged.reduce_unread([0] * (3 + 5 * len(self._ranks) * self._compares))
        return Totals(count=1, num_microbatches=len(counts), equal=True)

    def any(self, votes: Sequence[bool]) -> list[bool]:
        self._exchanged.reduce_unread([0] * len(votes), takes_maximum=True)
        return [False] * len(votes)
