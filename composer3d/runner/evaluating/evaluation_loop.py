"""The loop over the samples that are held out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from composer3d.errors import DataError

if TYPE_CHECKING:
    from composer3d import Composition
    from composer3d.runner.data import Batch
    from composer3d.runner.evaluating.evaluation_metrics import EvaluationMetrics
    from composer3d.runner.model_factory import ModelFactory

__all__ = ["loss_over"]


def loss_over(
    batches: Iterable[Batch],
    *,
    run: Composition,
    factory: ModelFactory,
    figures: EvaluationMetrics,
    microbatch: int,
    is_ending: Callable[[], bool],
) -> float | None:
    """Return the mean loss over batches; None where some rank was asked to stop before the last one.

    An evaluation changes nothing, and may take longer than a run is given to save after a SIGTERM: it is left between
    two batches.

    Args:
        batches: Of the samples held out.
        run: Whose model is evaluated.
        factory: Of the model's inputs.
        figures: Computed beside the loss.
        microbatch: Samples of a micro-batch.
        is_ending: Returns whether this rank was asked to stop.

    Raises:
        DataError: No target is valid.

    Collectives: those of the forwards, and an all-reduce of a number a batch.
    """
    import torch
    import torch.distributed as dist

    total = count = 0.0
    for batch in batches:
        ending = torch.tensor(float(is_ending()))
        dist.all_reduce(ending)
        if float(ending):
            return None
        inputs = {**batch.kwargs, **factory.inputs(batch.targets)}
        with figures.evaluating(len(batch.indices) // microbatch):
            result = run.evaluate(*batch.args, target=batch.targets, **inputs)
        total += float(result.loss) * result.count if result.count else 0.0
        count += result.count
    if not count:
        raise DataError("[evaluation] no target of the samples held out is valid, so there is no loss to tell")
    return total / count
