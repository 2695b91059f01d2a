"""Tracing job of a manifest: its model on meta, and the shapes of its batches."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer3d.planning.tracing.fake_composition import Job

if TYPE_CHECKING:
    from composer3d.composition import Preparation
    from composer3d.interfaces import Example
    from composer3d.manifest import Manifest
    from composer3d.mesh import Layout
    from composer3d.runner import ModelFactory

__all__ = ["job_of"]


def job_of(
    manifest: Manifest,
    factory: ModelFactory,
    layout: Layout,
    example: Example,
    *,
    target: Any = None,
    has_targets: bool = True,
    preparation: Preparation | None = None,
) -> Job:
    """Return the tracing job of a manifest with the runner's tables.

    The global batch is that of the largest step.

    Args:
        manifest: Typed and checked.
        factory: Builds its model and loss.
        layout: Axes and degrees.
        example: `(args, kwargs)` of a forward, on meta: their shapes and dtypes.
        target: The targets, likewise on meta.
        has_targets: False if the loss takes no targets.
        preparation: Of the manifest and its model on the CPU, if there is one: preparing takes seconds.
    """
    import torch
    from torch import nn

    from composer3d.initialisation import record
    from composer3d.mesh import Role
    from composer3d.runner import BatchSize, make_optimizer

    tables = manifest.tables
    if preparation is not None:
        model = preparation.model
        factory.learn(model)
    else:
        built = factory.build()
        model = built if isinstance(built, nn.Module) else record(built)[0]
    model = model.to(torch.device("meta"))
    microbatch = tables["train"].microbatch or 1
    degree = layout.degree(Role.BATCH)
    return Job(
        manifest=manifest,
        model=model,
        loss_fn=factory.loss_fn,
        make_optimizer=lambda run: make_optimizer(run, manifest),
        example=example,
        inputs=factory.inputs,
        count_fn=factory.loss.count,
        grad_clip=tables["train"].grad_clip,
        world_size=layout.world_size,
        num_microbatches=max(1, BatchSize(tables["train"], degree=degree).largest // (microbatch * degree)),
        microbatch=microbatch,
        preparation=preparation,
        target=target,
        has_targets=has_targets,
    )
