"""Passes of a verification: one device, then the ranks, then the same ranks in a fake process group."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.mesh import Layout
from composer3d.verification.comparison import EXACT, Limits, tolerances
from composer3d.verification.composed import RankSteps, run_composed
from composer3d.verification.evidence.as_written import AS_WRITTEN, Written, as_written
from composer3d.verification.evidence.drawn_steps import Drawing, apart, draw_alone
from composer3d.verification.evidence.expected_collectives import Counted, count_step, trace_step
from composer3d.verification.evidence.gains import Gain
from composer3d.verification.evidence.microbatch_weights import Weights, bias_rank, weighing_rank
from composer3d.verification.evidence.mixed_samples import NOT_MIXED, Mixing, mixing
from composer3d.verification.evidence.module_outputs import Outputs
from composer3d.verification.evidence.probes import first_outputs
from composer3d.verification.evidence.random_draws import Drawn, recording
from composer3d.verification.evidence.reached_parameters import Uneven, noting_reached, uneven
from composer3d.verification.one_device import of_dtype
from composer3d.verification.reference import make_reference
from composer3d.verification.reference_steps import Reference
from composer3d.verification.rounding import larger
from composer3d.verification.subject import Arithmetic, Subject, without_plugins

if TYPE_CHECKING:
    import torch

    from composer3d import Composition

__all__ = ["Launch", "RankReport", "ReferenceReport", "Session"]

log = logging.getLogger(__name__)

# Called with a function, its arguments and a number of ranks; returns what every rank returned.
Launch = Callable[[Callable[..., Any], Sequence[Any], int], list[Any]]


@dataclass(frozen=True, kw_only=True)
class ReferenceReport:
    """Report of the reference to the parent process; tensors stay in files.

    Args:
        losses: By arithmetic, of every step.
        grad_norms: By arithmetic, of every step.
        tolerances: By arithmetic and what is compared.
        counts: Valid tokens of the first step's micro-batches.
        draws: Random draws of one device in one step.
        outputs: Of modules and the loss on the micro-batches of every data-parallel rank in the first step.
        unrepeatable: Difference of a second run of the first step on one device; 0 where that is rounding.
        mixing: Whether the model or the loss mixes samples of a micro-batch.
        written: Comparison of the factory as written with the composed model.
        kept: Buffers that forwards change.
        gains: Gains of one device's gradients in the run's dtypes over its own in float64.
        unit: The spacing of the narrowest of those dtypes at 1.
        ties: Choices among scores that are equal up to rounding in the first step, by the module that makes them.
        untrained: Parameters to train that no gradient reaches.
    """

    losses: Mapping[str, list[float]]
    grad_norms: Mapping[str, list[float]]
    tolerances: Mapping[str, Limits]
    counts: list[int]
    draws: Drawn
    outputs: Sequence[Outputs]
    unrepeatable: float = 0.0
    mixing: Mixing = NOT_MIXED
    written: Written = AS_WRITTEN
    kept: tuple[str, ...] = ()
    gains: Mapping[str, Gain] = field(default_factory=dict)
    unit: float = 0.0
    ties: Mapping[str, int] = field(default_factory=dict)
    untrained: tuple[str, ...] = ()


@dataclass(kw_only=True)
class RankReport:
    """Report of one rank.

    Args:
        steps: Its steps, by arithmetic.
        draws: What it drew in one step.
        drawing: The first step with random numbers, beside one device's.
        happened: Collectives of one step.
        traced: Those of the same rank in a fake process group; None where that could not be run.
        untraceable: Known reason why not; empty otherwise.
        trace_error: Exception of the trace, where the reason is not known.
        keep_unsharded: Whether the schedule keeps parameters unsharded.
    """

    steps: dict[str, RankSteps] = field(default_factory=dict)
    draws: Drawn = field(default_factory=Drawn)
    drawing: Drawing = field(default_factory=Drawing)
    happened: Counted | None = None
    traced: Counted | None = None
    untraceable: str = ""
    trace_error: str = ""
    keep_unsharded: bool = False


@dataclass(frozen=True, kw_only=True, eq=False)
class Session:
    """One verification in progress.

    Args:
        make_subject: Makes the subject, in a rank; importable by name where ranks are spawned.
        layout: Axes and degrees of the composition.
        folder: For the references' files.
        num_steps: Optimizer steps to compare.
        passes: The arithmetics to compare in.
        launch: Runs a function on a number of ranks, and returns their results.
    """

    make_subject: Callable[[], Subject]
    layout: Layout
    folder: Path
    num_steps: int
    passes: tuple[Arithmetic, ...]
    launch: Launch

    def reference(self) -> ReferenceReport:
        """Run one device."""
        degree = _batch_degree(self.layout)
        args = (self.make_subject, self.folder, degree, self.num_steps, self.passes)
        report: ReferenceReport = self.launch(reference_rank, args, 1)[0]
        return report

    def composed(self, reference: ReferenceReport) -> list[RankReport]:
        """Run all ranks.

        Raises:
            Uneven: Ranks failed, and some parameters were not reached on all of them.
        """
        args = (self.make_subject, self.folder, self.passes, reference.tolerances)
        try:
            return self.launch(composed_rank, args, self.layout.world_size)
        except Exception as error:
            found = uneven(self.folder, self.layout)
            if found:
                raise Uneven(found) from error
            raise

    def explain_loss(self, loss: float, candidates: Sequence[str], factor: int) -> tuple[str, ...]:
        """Return the biases that, added `factor` times, give the loss of the run's first step; () where none do."""
        args = (self.make_subject, _batch_degree(self.layout), loss, tuple(candidates), factor)
        found: tuple[str, ...] = self.launch(bias_rank, args, 1)[0] if candidates else ()
        return found

    def weigh(self, wrong: Sequence[str]) -> Weights | None:
        """Explain wrong gradients of the first step by their micro-batches; None where none were kept."""
        if not (self.folder / "wrong.pt").exists():
            return None
        weights: Weights | None = self.launch(
            weighing_rank, (self.make_subject, self.folder, _batch_degree(self.layout), tuple(wrong)), 1
        )[0]
        return weights


def _batch_degree(layout: Layout) -> int:
    from composer3d.mesh import Role

    return layout.degree(Role.BATCH)


def reference_rank(
    make_subject: Callable[[], Subject], folder: Path, degree: int, num_steps: int, passes: Sequence[Arithmetic]
) -> ReferenceReport:
    """Run the reference in every arithmetic and write it to files; on a world of one rank."""
    import torch

    from composer3d.processes import join_world, keep_freed_memory

    keep_freed_memory()
    subject = make_subject()
    join_world(subject.device)
    references: dict[str, Reference] = {}
    limits: dict[str, Limits] = {}
    unit = 0.0
    for which in passes:
        reference = references[which] = make_reference(subject, which, degree=degree, num_steps=num_steps)
        torch.save(reference, folder / f"reference-{which}.pt")
        limits[which] = limits_of(references, which)
        unit = unit if which == "float64" else torch.finfo(_narrowest(reference)).eps
    ties: dict[str, int] = {}
    draws = _draw_alone(subject, degree)
    if draws.sites:
        draw_alone(subject, folder, degree=degree)
    return ReferenceReport(
        losses={which: [step.loss for step in ref.steps] for which, ref in references.items()},
        grad_norms={which: [step.grad_norm for step in ref.steps] for which, ref in references.items()},
        tolerances=limits,
        counts=references[passes[0]].steps[0].counts,
        draws=draws,
        outputs=first_outputs(subject, degree=degree, ties=ties),
        ties=ties,
        unrepeatable=max(reference.unrepeatable for reference in references.values()),
        mixing=mixing(subject, degree=degree),
        written=as_written(subject, degree=degree),
        kept=references[passes[0]].kept,
        untrained=references[passes[0]].untrained,
        gains=references["own"].gains if "own" in references else {},
        unit=unit,
    )


def limits_of(references: Mapping[str, Reference], which: Arithmetic) -> Limits:
    """Return the tolerances of one arithmetic, of those in which references were run so far.

    Where the run's own dtypes are float64, and no plugin rounds, they are those of float64: one device measures no
    error, and sums of several ranks are in another order, as gradients of a weight that stages share.
    """
    import torch

    own, exact = references[which].rounding, references.get("float64")
    if which == "float64":
        return tolerances(own, None)
    narrowest = _narrowest(references[which])
    is_rounded = any(error > EXACT for error in own.get("gradients", {}).values())
    if narrowest != torch.float64 or is_rounded or exact is None:
        return tolerances(own, narrowest)
    return tolerances(larger(exact.rounding, own), None)


def _narrowest(reference: Reference) -> torch.dtype:
    import torch

    dtypes = {tensor.dtype for tensor in reference.initial.values() if tensor.is_floating_point()}
    # The reference reduces nothing over ranks, so the measured error lacks this rounding.
    dtypes |= set() if reference.reduce_dtype is None else {reference.reduce_dtype}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)


def _draw_alone(subject: Subject, degree: int) -> Drawn:
    """Record what one device draws in its second step, in micro-batches of the run's size."""
    found = Drawn()
    with subject.composed("float64", without_plugins(subject.manifest), draws=True) as run:
        for number in range(2):
            with run.step(number), recording(run) as drawn:
                batch = of_dtype(subject.batch(number, 0, degree), "float64")
                run.forward_backward(*batch.args, target=batch.target, **batch.kwargs)
            found = drawn.beside(found)
    return found


def composed_rank(
    make_subject: Callable[[], Subject],
    folder: Path,
    passes: Sequence[Arithmetic],
    limits: Mapping[str, Limits],
) -> RankReport:
    """Run every pass on one rank of the composition."""
    import torch
    import torch.distributed as dist

    from composer3d.processes import join_world, keep_freed_memory

    keep_freed_memory()
    # Gathering a tensor that is sharded twice along one dim is slow, and torch warns of it on every rank.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    subject = make_subject()
    join_world(subject.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    report = RankReport()
    for which in passes:
        reference = torch.load(folder / f"reference-{which}.pt", weights_only=False, map_location="cpu")
        keep = folder / "wrong.pt" if which == "float64" else None
        # In the last of them, which is the run's own where that is looked at: all its plugins are there.
        resumes = which == passes[-1]
        report.steps[which] = run_composed(
            subject, which, reference, tolerances=limits[which], folder=folder, keep=keep, resumes=resumes
        )
    report.draws, report.drawing, report.keep_unsharded = _draw(subject, folder)
    report.happened, messages = count_step(subject)
    _leave()
    try:
        report.traced = trace_step(subject, world_size=world_size, rank=rank, messages=messages)
    except Exception as error:
        log.debug("rank %d cannot be traced", rank, exc_info=True)
        report.untraceable = _known_reason(error)
        if not report.untraceable:
            report.trace_error = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return report


def _known_reason(error: BaseException) -> str:
    """Return the known reason why torch cannot run in a fake process group; empty for any other error."""
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    # Its reducer is C++, and is entered from backward too.
    if any(name.endswith("torch/nn/parallel/distributed.py") for name in frames) or "c10d/comm.cpp" in str(error):
        return "torch's DistributedDataParallel reads what other ranks send, and nobody sends"
    return ""


def _draw(subject: Subject, folder: Path) -> tuple[Drawn, Drawing, bool]:
    """Record what this rank draws in its second step; the first, which is compared, may run more micro-batches.

    Layers may be dropped at random here, and others on other ranks.
    """
    manifest = subject.manifest_for("float64")
    with subject.composed("float64", manifest, draws=True) as run, noting_reached(run, folder):
        optimizer = subject.make_optimizer(run)
        with recording(run) as before:
            drawing = _draw_step(subject, run, optimizer, 0, lambda: apart(run, folder))
        with recording(run) as found:
            _draw_step(subject, run, optimizer, 1, Drawing)
        split = run.context.split
    return found.beside(before), drawing, split is not None and split.keep_unsharded


def _draw_step(subject: Subject, run: Composition, optimizer: Any, number: int, look: Callable[[], Drawing]) -> Drawing:
    context = run.context
    batch = of_dtype(subject.batch(number, context.data_parallel_rank, context.data_parallel_degree), "float64")
    with run.step(number):
        run.forward_backward(*batch.args, target=batch.target, **batch.kwargs)
        run.clip_grad_norm_(math.inf)
        found = look()
        optimizer.step()
        optimizer.zero_grad()
    return found


def _leave() -> None:
    """Destroy the process group, after a barrier of all ranks."""
    import torch.distributed as dist

    from composer3d import torch_compat

    store = torch_compat.default_store()
    dist.barrier()
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store.set(f"composer3d/verification/{rank}", "done")
    # A rank that leaves while another is still in the barrier would look like one that failed.
    store.wait([f"composer3d/verification/{other}" for other in range(world_size)])
    dist.destroy_process_group()
