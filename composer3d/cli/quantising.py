"""What becomes of the weights of a run that trained for a quantised model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from composer3d.errors import CheckpointError

if TYPE_CHECKING:
    from composer3d.context import ExportForm

__all__ = ["find_form"]


def find_form(path: Path, description: Path | None) -> ExportForm:
    """Return what a plugin of the run that a checkpoint belongs to makes of its tensors.

    Args:
        path: The checkpoint.
        description: Of a Hugging Face model, if it is one.

    Raises:
        CheckpointError: No plugin of the run says, or the run's manifest is gone.
        ManifestError: It does not fit any more.
    """
    from composer3d.cli.merging import prepared

    if description is not None:
        raise CheckpointError(
            f"{path}: a Hugging Face model is exported as it was trained, and from_pretrained quantises it with the "
            "quantization_config that it is given; leave --quantise out"
        )
    form = prepared(path).context.export_form
    if form is None:
        raise CheckpointError(f"{path}: no plugin of its run trained for quantised weights; leave --quantise out")
    return form
