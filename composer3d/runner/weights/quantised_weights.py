"""Export of the weights of a run that trained for a quantised model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.errors import CheckpointError
from composer3d.interfaces import Exports

if TYPE_CHECKING:
    from composer3d.interfaces import ExportForm

__all__ = ["find_form"]


def find_form(path: Path) -> tuple[ExportForm, Callable[[], Mapping[str, Any]] | None]:
    """Return what a plugin of the run that a checkpoint belongs to makes of its tensors, and of a `config.json`.

    Args:
        path: The folder `step-N` of a checkpoint.

    Raises:
        CheckpointError: No plugin of the run states the form, or the run's manifest is missing.
        ManifestError: It does not fit any more.
    """
    from composer3d.runner.weights.merged_weights import prepared

    exports = prepared(path).context.stash(Exports)
    if exports.form is None:
        raise CheckpointError(f"{path}: no plugin of its run trained for quantised weights; leave --quantise out")
    return exports.form, exports.config
