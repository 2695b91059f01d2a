"""Custom schedules from a CSV file as torch writes and reads them: a row a rank, a cell an action."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from composer3d import PluginError

__all__ = ["CustomSchedule", "read_schedule"]

Order = list[tuple[int, str, int]]
_ACTION = re.compile(r"(\d+)(F|B|I|W)(\d+)")
_OVERLAPPED = re.compile(r"\((.*)\)OVERLAP_F_B")
_CELL = "<stage>F<micro-batch>, or B, I or W, such as 0F3"


@dataclass(frozen=True, kw_only=True)
class CustomSchedule:
    """A validated schedule file.

    Args:
        name: Of the file, for messages.
        orders: Of every rank along pp, as (stage, kind, micro-batch).
        per_rank: Stages a rank.
        num_microbatches: Micro-batches that it is written for.
    """

    name: str
    orders: Sequence[Order]
    per_rank: int
    num_microbatches: int

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of inputs and of weights are computed separately."""
        return any(kind == "W" for order in self.orders for _, kind, _ in order)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of one rank along pp, in the order of the model."""
        return tuple(sorted({stage for stage, _, _ in self.orders[rank]}))

    def refusal(self, num_microbatches: int) -> str | None:
        """Return why it cannot run so many micro-batches; None where it can."""
        if num_microbatches == self.num_microbatches:
            return None
        return f"is made for {self.num_microbatches} of them"


def read_schedule(path: Path, *, degree: int, name: str) -> CustomSchedule:
    """Read and check a schedule.

    Cells are `2F0`: stage, kind, micro-batch; kinds are forward, backward, or its two halves, the gradients of inputs
    and of weights. Empty cells are idle, and `(0F7;3B2)OVERLAP_F_B` is the two in turn.

    Args:
        path: Of the file.
        degree: Ranks along pp.
        name: As the manifest has it, for messages.

    Raises:
        PluginError: It cannot be read, or run; with its line.
    """
    try:
        if path.exists() and not path.is_file():
            raise PluginError(f'schedule = "{name}" is no file', hint=f"it is looked for at {path}")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise PluginError(f'schedule = "{name}" cannot be read: {why}', hint=f"it is looked for at {path}") from error
    rows = list(csv.reader(text.splitlines()))
    while rows and not any(cell.strip() for cell in rows[-1]):
        rows.pop()
    if len(rows) != degree:
        raise PluginError(f'schedule = "{name}" has {len(rows)} rows, and pp = {degree} wants a row for each rank')
    orders = [_row(row, f"{name}:{number}") for number, row in enumerate(rows, 1)]
    owner = _owners(orders, name)
    sizes = {sum(rank == other for other in owner.values()) for rank in range(degree)}
    if len(sizes) > 1:
        raise PluginError(f'schedule = "{name}" gives ranks {min(sizes)} to {max(sizes)} stages; all have equally many')
    num_microbatches = 1 + max(index for order in orders for _, _, index in order)
    for number, order in enumerate(orders, 1):
        _check_row(order, f"{name}:{number}", num_microbatches)
    _check_waiting(orders, owner, name)
    return CustomSchedule(name=name, orders=orders, per_rank=sizes.pop(), num_microbatches=num_microbatches)


def _row(cells: Sequence[str], where: str) -> Order:
    order: Order = []
    for column, cell in enumerate(cells, 1):
        overlapped = _OVERLAPPED.fullmatch(cell.strip())
        for text in overlapped[1].split(";") if overlapped else [cell]:
            found = _ACTION.fullmatch(text.strip())
            if found:
                order.append((int(found[1]), found[2], int(found[3])))
            elif text.strip():
                raise PluginError(f'{where}: cell {column} is "{cell.strip()}", which is no action', hint=_CELL)
    if not order:
        raise PluginError(f"{where}: this rank does nothing")
    return order


def _owners(orders: Sequence[Order], name: str) -> dict[int, int]:
    """Return the rank of every stage; stages are numbered without gaps, and each is on one rank."""
    owner: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for stage, _, _ in order:
            if owner.setdefault(stage, rank) != rank:
                raise PluginError(f"{name}:{rank + 1}: stage {stage} is on rank {owner[stage]} already")
    missing = next((stage for stage in range(max(owner)) if stage not in owner), None)
    if missing is not None:
        raise PluginError(f'schedule = "{name}" has the stage {max(owner)} and not the stage {missing}')
    return owner


def _check_row(order: Order, where: str, num_microbatches: int) -> None:
    """Check that each stage runs every micro-batch's forward and backward once, and in order."""
    done: set[tuple[int, str, int]] = set()
    for stage, kind, index in order:
        text = f"{stage}{kind}{index}"
        excluded = {"B": "BIW", "I": "BI", "W": "BW", "F": "F"}[kind]
        if before := next((other for other in excluded if (stage, other, index) in done), None):
            raise PluginError(f"{where}: {text} comes after {stage}{before}{index}, and there is nothing left to do")
        needed = {"F": None, "W": "I"}.get(kind, "F")
        if needed is not None and (stage, needed, index) not in done:
            raise PluginError(f"{where}: {text} comes before {stage}{needed}{index}")
        done.add((stage, kind, index))
    for stage in sorted({stage for stage, _, _ in order}):
        for index in range(num_microbatches):
            kinds = {kind for kind in "FBIW" if (stage, kind, index) in done}
            if kinds not in ({"F", "B"}, {"F", "I", "W"}):
                lacking = "F" if "F" not in kinds else "W" if "I" in kinds else "B"
                raise PluginError(f"{where}: {stage}{lacking}{index} is missing")


def _check_waiting(orders: Sequence[Order], owner: dict[int, int], name: str) -> None:
    """Simulate the orders without durations, to find deadlocks."""
    done: set[tuple[int, str, int]] = set()
    last, places = len(owner) - 1, [0] * len(orders)

    def is_ready(stage: int, kind: str, index: int) -> bool:
        if kind == "F":
            return stage == 0 or (stage - 1, "F", index) in done
        return kind == "W" or stage == last or bool({(stage + 1, "B", index), (stage + 1, "I", index)} & done)

    moved = True
    while moved:
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order) and is_ready(*order[places[rank]]):
                done.add(order[places[rank]])
                places[rank] += 1
                moved = True
    for rank, order in enumerate(orders):
        if places[rank] < len(order):
            stage, kind, index = order[places[rank]]
            raise PluginError(f"{name}:{rank + 1}: {stage}{kind}{index} waits for ever for what other ranks do later")
