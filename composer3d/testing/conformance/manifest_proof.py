"""Proof of a manifest on forked ranks beside one device, as `composer3d verify` proves it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from composer3d.mesh import Role
from composer3d.testing.ranks import run_ranks

if TYPE_CHECKING:
    from composer3d.verification import Verdict

__all__ = ["prove_manifest"]

_NO_WORKERS = ("data.workers=0",)


def prove_manifest(
    path: Path,
    *,
    num_steps: int = 2,
    passes: tuple[Literal["float64", "own"], ...] = ("float64", "own"),
    timeout_s: float = 300.0,
) -> Verdict:
    """Compare a run's manifest with one device on as many forked ranks as its degrees multiply to.

    Args:
        path: A manifest that `check` accepts; the folder is written to.
        num_steps: Optimizer steps.
        passes: The arithmetics to compare in.
        timeout_s: Seconds for the ranks together.

    Raises:
        RankError: A rank failed.
        ComposerError: The manifest cannot be composed.
    """
    from composer3d.composition import layout_of
    from composer3d.hooks import Hooks
    from composer3d.verification import prove, read_manifest, subject_of

    manifest = read_manifest(str(path), _NO_WORKERS)
    layout = layout_of(manifest, Hooks(manifest.plugins), world_size=None)
    train = manifest.tables["train"]
    size = train.microbatch or 1
    degree = layout.degree(Role.BATCH)
    return prove(
        functools.partial(subject_of, str(path), _NO_WORKERS, None, "cpu", scratch=path.parent),
        layout=layout,
        launch=functools.partial(_launch, timeout_s),
        num_steps=num_steps,
        microbatches=max((train.global_batch or size * degree) // degree // size, 1),
        grad_clip=train.grad_clip,
        passes=passes,
    )


def _launch(timeout_s: float, function: Callable[..., Any], args: Sequence[Any], num_ranks: int) -> list[Any]:
    return run_ranks(function, num_ranks, *args, timeout_s=timeout_s)
