"""Comparison of the ranks' data: all must read the same samples, from any path."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import all_gather_json
from composer3d.composition import agree, leaves
from composer3d.errors import DataError

if TYPE_CHECKING:
    from composer3d import RunContext

__all__ = ["agree_on_data", "compare_streams"]

# Sources whose `use` is a path, which may be another one on each machine.
_PLACES = ("text", "tokens")


def agree_on_data(context: RunContext, record: Mapping[str, Any]) -> None:
    """Compare the data that ranks found at `[data] use`: digests and counts.

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


def compare_streams(context: RunContext) -> Callable[[int, Sequence[int]], None]:
    """Return what compares the items that all ranks took of a stream for one step.

    Every rank reads the whole stream and keeps its part. One whose stream is in another order, shorter, or split by
    rank already, would train on other samples than the others leave out, and the loss would look like any other.

    Collectives: an exchange of a number a call; one of a number for each item where ranks differ.
    """

    def compare(first: int, seen: Sequence[int]) -> None:
        numbers = all_gather_json(zlib.crc32(repr(list(seen)).encode()))
        if len(set(numbers)) == 1:
            return
        items = all_gather_json(list(seen))
        usual = items[numbers.index(Counter(numbers).most_common(1)[0][0])]
        odd = [rank for rank, item in enumerate(items) if item != usual]
        place = next(place for place, item in enumerate(usual) if items[odd[0]][place] != item)
        agreeing = items.index(usual)
        raise DataError(
            f'[data] order = "stream": item {first + place} of {context.layout.who(odd[0])} is another one than that '
            f"of rank {agreeing}{_others(odd)}; every rank takes the whole stream and keeps its part, so it must give "
            "the same items in the same order on all of them: seed what it draws, do not split it by rank, and end "
            "its passes at the same item"
        )

    return compare


def _others(odd: Sequence[int]) -> str:
    more = ", ".join(map(str, odd[1:5]))
    return f" (so is that of rank {more}{' and others' if len(odd) > 5 else ''})" if more else ""
