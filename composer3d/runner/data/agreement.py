"""That all ranks read the same data, wherever it lies on their machines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from composer3d.agreement import agree, leaves

if TYPE_CHECKING:
    from composer3d import RunContext

__all__ = ["agree_on_data"]

# Sources whose `use` is a path, which may be another one on each machine.
_PLACES = ("text", "tokens")


def agree_on_data(context: RunContext, record: Mapping[str, Any]) -> None:
    """Compare what the ranks found where `[data] use` points to: digests and counts.

    Args:
        context: Of the run.
        record: Of this rank's source.

    Raises:
        StepError: Ranks differ; names them, and what differs.

    Collectives: one all-gather of a number.
    """
    compared = {key: value for key, value in record.items() if key != "use" or record["kind"] not in _PLACES}
    agree(
        leaves(compared, "data"),
        layout=context.layout,
        what=("reads other data", "read other data"),
        advice="give all ranks the same files",
    )
