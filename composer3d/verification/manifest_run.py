"""Subject of a manifest: its model, data and optimizer, as a run would make them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.errors import ManifestError
from composer3d.interfaces import Batch
from composer3d.verification.subject import Subject

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d import Composition, Manifest
    from composer3d.runner import LRSchedule
    from composer3d.runner.data import Batch as RunBatch

__all__ = ["read_manifest", "subject_of", "truncate_blocks"]

# Seconds until a collective without all its ranks fails: a user is waiting for the verdict.
_PATIENCE_S = 600.0


def read_manifest(source: str, overrides: Sequence[str]) -> Manifest:
    """Read a manifest with the runner's tables."""
    from composer3d.manifest import load_manifest
    from composer3d.runner import TABLES

    return load_manifest(source, overrides=overrides, tables=TABLES)


def subject_of(source: str, overrides: Sequence[str], max_blocks: int | None, device: str, *, scratch: Path) -> Subject:
    """Make the subject of a manifest, in a rank.

    The learning rate is the optimizer's own, without a schedule, so that a warm-up does not hide the updates; for the
    same reason moving averages are updated in every step. Text is prepared in a folder of this process inside
    `scratch`, so that the run's own folder is not changed. Collectives fail after the run's `timeout_s`, or ten
    minutes.

    Args:
        source: A path, or the name of a shipped manifest.
        overrides: As given to `--set`, and those of the reduction.
        max_blocks: Number of the model's repeated blocks to keep; None keeps all.
        device: Of the ranks.
        scratch: Folder for prepared data. The caller removes it: ranks do not live to the end of their interpreter, and
            a rank that is killed removes nothing.
    """
    from composer3d.processes import default_device
    from composer3d.runner import EMA, ModelFactory, make_optimizer
    from composer3d.runner.data import example_of

    manifest = read_manifest(source, overrides)
    opened, read = _reader(manifest, scratch)
    factory = ModelFactory(manifest, vocab_size=opened.vocab_size)
    built = factory.build()
    tables = manifest.tables
    decay = tables["ema"].decay
    where = default_device() if device != "cpu" else _cpu()

    def build() -> nn.Module | Callable[[], nn.Module]:
        if max_blocks is None:
            return factory.build()
        if not callable(built) or _is_module(built):
            return truncate_blocks(factory(), manifest.model.blocks, max_blocks)
        return lambda: truncate_blocks(factory(), manifest.model.blocks, max_blocks)

    def batch(step: int, rank: int, degree: int) -> Batch:
        found = read(step, rank, degree)
        return Batch(args=found.args, kwargs={**found.kwargs, **factory.inputs(found.targets)}, target=found.targets)

    return Subject(
        manifest=manifest,
        build=build,
        loss_fn=factory.loss_fn,
        count_fn=factory.loss.count,
        make_optimizer=lambda run: make_optimizer(run, manifest, in_backward=False),
        make_stepper=(lambda run: make_optimizer(run, manifest)) if tables["optimizer"].in_backward else None,
        batch=batch,
        grad_clip=tables["train"].grad_clip,
        average_buffers=(lambda run: run.sync_buffers()) if tables["train"].sync_buffers else None,
        device=where,
        make_averages=None if decay is None else lambda run: EMA(run, decay=decay),
        decay=decay or 0.0,
        example=lambda: example_of(
            opened, tables["data"], seed=tables["train"].seed, num_samples=tables["train"].microbatch or 1
        ),
        prepare=lambda run: _prepare(run, tables["run"].timeout_s or _PATIENCE_S),
        make_schedule=lambda run, optimizer: _schedule(manifest, optimizer),
    )


def _prepare(run: Composition, timeout_s: float) -> None:
    """Do what a run does before its first step; buffers are averaged where `[train] sync_buffers` is set."""
    run.averages_buffers = False
    _bound_waiting(run, timeout_s)


def _bound_waiting(run: Composition, timeout_s: float) -> None:
    """Set the timeout of collectives; a traced rank has none."""
    import torch.distributed as dist

    from composer3d.runner import set_timeout

    if dist.get_backend() != "fake":
        set_timeout(run, timeout_s)


def _schedule(manifest: Manifest, optimizer: torch.optim.Optimizer) -> LRSchedule:
    """Return the run's schedule, from the first step on that has a rate: steps at rate 0 move no parameter."""
    from composer3d.runner import BatchSize, LRSchedule, multiplier_of

    table, num_steps, folder = manifest.tables["lr_schedule"], manifest.tables["train"].steps, manifest.document.folder
    sizes = BatchSize(manifest.tables["train"], degree=1)  # samples need a global batch, which `check` makes sure of
    multiplier = multiplier_of(table, num_steps=num_steps, folder=folder, sizes=sizes)
    first = next((step for step in range(num_steps) if multiplier(step) > 0), 0)
    return LRSchedule(optimizer, lambda step: multiplier(step + first))


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def _is_module(value: Any) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _reader(manifest: Manifest, scratch: Path) -> tuple[Any, Callable[[int, int, int], RunBatch]]:
    """Return the data source, and a function that reads its batches."""
    from composer3d.runner import BatchSize, with_tokenizer
    from composer3d.runner.data import Loader, open_source

    data, train = with_tokenizer(manifest).tables["data"], manifest.tables["train"]
    folder = Path(tempfile.mkdtemp(prefix="data-", dir=scratch))
    source = open_source(data, seed=train.seed, folder=manifest.document.folder, cache=folder)

    @cache
    def loader(rank: int, degree: int) -> Loader:
        sizes = BatchSize(train, degree=degree)
        return Loader(
            source,
            data,
            seed=train.seed,
            rank=rank,
            degree=degree,
            batch_size_of=sizes.of,
            position_of=sizes.position_of,
            vocab_size=None,
        )

    def read(step: int, rank: int, degree: int) -> RunBatch:
        return loader(rank, degree).batch(step)

    return source, read


def truncate_blocks(model: nn.Module, pattern: str | None, limit: int) -> nn.Module:
    """Keep the first `limit` of the model's repeated blocks, and return the model.

    Args:
        model: Changed in place.
        pattern: `[model] blocks`; None finds the one list of equal blocks.
        limit: Blocks to keep.

    Raises:
        ManifestError: `pattern` does not name a list of blocks in the model.
    """
    from torch import nn

    from composer3d.composition import find_blocks

    pattern = pattern or find_blocks(model)
    parent = None if pattern is None or not pattern.endswith(".*") else model.get_submodule(pattern[:-2])
    if isinstance(parent, nn.ModuleList | nn.Sequential):
        while len(parent) > limit:
            del parent[len(parent) - 1]
    elif isinstance(parent, nn.ModuleDict):
        for name in list(parent)[limit:]:
            del parent[name]
    else:
        from composer3d.errors import Problem

        message = "max_blocks: the model has no single list of equal blocks; name it with [model] blocks"
        raise ManifestError([Problem(message=message, file="--max-blocks")])
    return model
