"""`compose()`: a manifest applied to a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

# What saves and loads is imported before a run: its first checkpoint may be hours away, and forked ranks share it.
from composer3d.checkpoint import loading, saving  # noqa: F401
from composer3d.composition.assembling import assemble
from composer3d.composition.composition import Composition
from composer3d.interfaces import Example, LossFunction
from composer3d.processes.process_group import set_timeouts
from composer3d.step.losses.criterion import Criterion

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.context import Purpose
    from composer3d.manifest import Manifest
    from composer3d.step.losses.loss_graph import Reduction

__all__ = ["compose"]


def compose(
    model: nn.Module | Callable[[], nn.Module],
    manifest: str | Path | Manifest,
    *,
    loss_fn: LossFunction | None = None,
    loss_reduction: Reduction | None = None,
    count_fn: Callable[[Any], int] | None = None,
    weights: Literal["check", "rank0"] = "check",
    tables: Mapping[str, type] | None = None,
    device: str | torch.device | None = None,
    purpose: Purpose = "run",
    example: Example | Callable[[], Example | None] | None = None,
    guard: bool = True,
    timeout_s: float | None = None,
) -> Composition:
    """Apply a manifest to a model.

    The process group is initialised if there is none (from torchrun's environment, else a world of one), and destroyed
    by `close` in that case.

    Args:
        model: A factory, which is run once on meta so that no rank ever holds the whole model and every layout starts
            from the same weights; or a module that exists.
        manifest: A path, the name of a shipped manifest, or a manifest that was read before.
        loss_fn: `(output, target)` to a `Loss`, `(sum, count)`, a scalar sum, or a scalar mean (which is refused where
            micro-batches have different counts). None takes the output's `loss`, as Hugging Face models give it.
        loss_reduction: `sum` or `mean`, the reduction of a scalar loss whose last operation is neither.
        count_fn: The number of valid tokens of a target; default: targets that are not -100.
        weights: For a module that exists: `check` refuses ranks whose weights differ, `rank0` broadcasts the first's.
        tables: Further tables the manifest may have, for example `composer3d.runner.TABLES`; they are validated and not
            used. Without it a table that only a run uses is refused.
        device: Default: the accelerator if there is one, else the CPU.
        purpose: `run`, `check`, `plan` or `verify`; outside `run` no plugin opens files, ports or sockets.
        example: `(args, kwargs)` of a forward, for plugins that trace the model (pipelines, plans that are derived);
            only shapes and dtypes matter. Or a function that makes it, if one asks. Default: token numbers are tried.
        guard: Compare step, plan and batch of all ranks as steps begin, and explain lost ones. False only counts.
        timeout_s: Seconds after which a rank fails whose other ranks do not come: to join the world, to compose, or to
            a collective, of the world and of every axis. Default: ten minutes to join, and torch's.

    Raises:
        ManifestError: With every mistake of the manifest.
        TransformError: A transform did not do what it had declared.
        RendezvousError: Ranks did not come in time; says which.
        InitialisationError: Ranks start from different weights.
    """
    assembled = assemble(
        model,
        manifest,
        criterion=Criterion(loss_fn, count_fn, loss_reduction),
        weights=weights,
        tables=tables,
        device=device,
        purpose=purpose,
        example=example,
        guarded=guard,
        timeout_s=timeout_s,
    )
    if timeout_s is not None:
        set_timeouts(assembled.context.views.untimed_groups(), timeout_s)
    return Composition(assembled)
