"""The matrix of all installed plugins: every two options of any of them together, beside one device.

Rows are made from the plugins that are installed, third-party ones included, by `composer3d.testing.combine`: any two
options stand together in one row that `composer3d check` lets pass. What it refuses is found out on the way and is kept
in plugin_matrix_refusals.json, each with the choices that are to blame and a row of plugins/README.md; `--plan` stops
there. Then every row is proven as `composer3d verify` does, on up to 8 ranks; anything but proven is a defect.

benchmarks/results/plugin_matrix.json is written after every cell, and a run that was stopped goes on where it was: rows
that are proven stay so until `--again`. A row that fails is kept in plugin_matrix_failed.json, which the tests run.

Several processes may share the rows (`--known --part 1/2`, `--known --part 2/2`): each writes into the same result.
`matrix.py` runs it.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import json
import math
import os
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import combinations
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
# Kernels are made once and run a few times: without optimising, g++ takes a quarter of the time for them.
os.environ.setdefault("TORCHINDUCTOR_DEBUG_COMPILE", "1")

import composer3d_plugins
from harness import conditions, note, say, with_marked
from plugin_matrix_cells import PENDING, axes, check, judge, lift_pending, num_ranks, options, owners, say_row
from plugin_matrix_permitted import PERMITTED

from composer3d.testing import Refused, Row, combine

HERE = Path(__file__).resolve().parent
RESULT = HERE / "results" / "plugin_matrix.json"
PENDING_RESULT = HERE / "results" / "plugin_matrix_pending.json"
REFUSALS = HERE / "plugin_matrix_refusals.json"
FAILED = HERE / "plugin_matrix_failed.json"
README = HERE / "README.md"


def known_refusals() -> list[Refused]:
    """Return the refusals that were found before, of options that there still are."""
    return [
        Refused(choices=frozenset(entry["choices"].items()), reason=entry["reason"])
        for entry in _refusals()
        if _is_here(entry["choices"])
    ]


def _refusals() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(REFUSALS.read_text()) if REFUSALS.exists() else []
    return found


def _is_here(choices: Mapping[str, str]) -> bool:
    """Return whether there are such options."""
    here = options()
    return all(value in here.get(key, ()) for key, value in choices.items())


def rows_of(*, learn: bool) -> list[dict[str, str]]:
    """Return the rows of what is installed here; with `learn`, none that `check` refuses."""
    made = combine(
        options(),
        check=check if learn else lambda row: (),
        owners=owners(),
        axes=axes(),
        known=known_refusals(),
        begin=_rows_on_record(),
        note=note if learn else lambda text: None,
        learned=_write_refusals,
    )
    return list(made.rows)


def _rows_on_record() -> list[dict[str, str]]:
    """Return the rows of the result, what is settled first: they stay as they are as long as they can be."""
    cells = [cell for path in (RESULT, *_lifted()) if path.exists() for cell in json.loads(path.read_text())["cells"]]
    order = {"proven": 0, "failed": 1}
    cells.sort(key=lambda cell: order.get(cell["outcome"], 2))
    return [whole(cell["row"]) for cell in cells if not cell["row"].keys() - options().keys()]


def _lifted() -> tuple[Path, ...]:
    """Return the file of the rows with options that are pending, where those are made; no file otherwise."""
    return () if PENDING else (PENDING_RESULT,)


def _write_refusals(refused: Sequence[Refused]) -> None:
    """Write refusals, beside those of options that are pending."""
    entries = [{"reason": refusal.reason, "choices": dict(sorted(refusal.choices))} for refusal in refused]
    entries += [entry for entry in _refusals() if not _is_here(entry["choices"])]
    entries.sort(key=json.dumps)
    REFUSALS.write_text(json.dumps(entries, indent=1) + "\n")


def neutral_left_out(row: Row) -> dict[str, str]:
    """Return a row without what is off, default or neutral: short, and the same when options or axes are added."""
    here = options()
    return {key: value for key, value in row.items() if value not in ("default", here[key][0])}


def whole(short: Mapping[str, str]) -> dict[str, str]:
    """Undo `neutral_left_out`."""
    here = options()
    return {
        key: short.get(key, "default" if short.get(key.rpartition(".")[0]) == "on" else values[0])
        for key, values in here.items()
    }


def run(
    rows: Sequence[Row],
    *,
    again: bool,
    limit: int | None,
    stated: dict[str, Any],
    part: tuple[int, int] = (1, 1),
    chosen: str = "",
    failed: bool = False,
) -> dict[str, Any]:
    """Judge rows that were not proven before, writing down each; return the whole result, and how many were wrong.

    What holds most new pairs for its time comes first, so that a run that is stopped has more of them behind it.

    Args:
        rows: All of the matrix.
        again: Proven ones too.
        limit: Judge at most so many.
        stated: Conditions of the measurement.
        part: (k, n): of the rows to judge every n-th from the k-th on; other processes may judge the others.
        chosen: Only rows in which this stands.
        failed: Instead of the rows those that once failed, proven or not.
    """
    settled = () if again else ("proven", "refused")
    cells = _written(rows, stated)["cells"]
    left = [cell for cell in cells if cell["outcome"] not in settled]
    todo = [entry["row"] for entry in (once_failed() if failed else left) if chosen in say_row(whole(entry["row"]))]
    held = {pair for cell in cells if cell["outcome"] in settled for pair in pairs_of(cell["row"])}
    ordered = [row for row, _ in most_pairs_first(todo, held=held, cost=_cost)]
    todo, wrong = ordered[part[0] - 1 :: part[1]][:limit], 0
    for number, short in enumerate(todo, 1):
        started = time.monotonic()
        verdict = judge(whole(short))
        # The first line is the reason; what follows, such as a traceback, names folders of this machine: it is told.
        reason, _, _ = verdict.detail.partition("\n")
        found = {"outcome": verdict.outcome, "detail": reason, "wall_s": round(time.monotonic() - started, 1)}
        _written(rows, stated, {"row": short, **found})
        note(f"{number} of {len(todo)}: {verdict.outcome} in {found['wall_s']} s: {say_row(short)}")
        if verdict.outcome == "failed":
            wrong += 1
            note(verdict.detail[:2000])
    return {**_written(rows, stated), "wrong": wrong}


def pairs_of(row: Mapping[str, str]) -> set[tuple[tuple[str, str], ...]]:
    """Return every two choices of a row, written short or not."""
    return set(combinations(sorted(whole(row).items()), 2))


def most_pairs_first(
    rows: Sequence[Mapping[str, str]], *, held: Set[Any] = frozenset(), cost: Callable[[Mapping[str, str]], float]
) -> Iterator[tuple[Mapping[str, str], int]]:
    """Yield rows in the order of the pairs that no earlier row holds, for their cost, each with the number held then.

    Args:
        rows: To be ordered.
        held: Pairs that are held already.
        cost: Of a row.
    """
    left = [(-math.inf, number) for number in range(len(rows))]
    known = set(held)
    while left:
        # The gain of a row only falls: the first that stays first is the best.
        _, number = heapq.heappop(left)
        pairs = pairs_of(rows[number]) - known
        gain = -len(pairs) / cost(rows[number])
        if left and (gain, number) > left[0]:
            heapq.heappush(left, (gain, number))
            continue
        known |= pairs
        yield rows[number], len(known)


def _cost(row: Mapping[str, str]) -> float:
    """Return about how long a row takes, as a multiple of one rank without a compiler."""
    return (1 + num_ranks(row)) * (8 if "scheduling.compile" in row else 1)


def _written(rows: Sequence[Row], stated: dict[str, Any], cell: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Write down a cell, beside what other processes have written, and return the whole result."""
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path, mark = (PENDING_RESULT, "pending") if _lifted() else (RESULT, "plugins")
        before = json.loads(path.read_text()) if path.exists() else {"cells": [], "conditions": stated}
        old = before["cells"]
        if cell is None:
            stated = before["conditions"]
        else:
            old.append(cell)
            _keep(cell)
        known = {json.dumps(entry["row"], sort_keys=True): entry for entry in old}
        others = json.loads(RESULT.read_text())["cells"] if _lifted() else []
        whole_ones = [other["row"] for other in others if other["outcome"] == "proven"]
        shorts = [short for short in map(neutral_left_out, rows) if short not in whole_ones]
        left = {"outcome": "left", "detail": "", "wall_s": 0.0}
        entries = [known.get(json.dumps(short, sort_keys=True), {"row": short, **left}) for short in shorts]
        result = _result(entries, stated if cell is None else {**stated, "load_1min_after": _load()})
        path.write_text(json.dumps(result, indent=1) + "\n")
        README.write_text(with_marked(README.read_text(encoding="utf-8"), mark, summary(result)), encoding="utf-8")
    return result


def _load() -> float:
    return round(os.getloadavg()[0], 2)


def once_failed() -> list[dict[str, Any]]:
    """Return rows that failed at some time, with the seconds that they took last; none of options that are gone."""
    return [entry for entry in _kept() if _is_here(entry["row"])]


def _kept() -> list[dict[str, Any]]:
    kept: list[dict[str, Any]] = json.loads(FAILED.read_text()) if FAILED.exists() else []
    return kept


def _keep(cell: Mapping[str, Any]) -> None:
    """Keep a row that failed, and the time of one that is kept."""
    kept = _kept()
    there = [entry for entry in kept if entry["row"] == cell["row"]]
    if not there and cell["outcome"] == "failed":
        there.append({"row": dict(cell["row"])})
        kept += there
    for entry in there:
        entry["wall_s"] = cell["wall_s"]
    FAILED.write_text(json.dumps(kept, indent=1) + "\n")


def _result(cells: Sequence[Mapping[str, Any]], stated: dict[str, Any]) -> dict[str, Any]:
    here = options()
    return {
        "summary": {
            outcome: sum(cell["outcome"] == outcome for cell in cells)
            for outcome in ("proven", "refused", "failed", "left")
        },
        "whole": not _lifted(),
        "options": sum(len(values) for values in here.values()),
        "refusals": len(known_refusals()),
        "permitted": [permitted.row for permitted in PERMITTED],
        "conditions": stated,
        "cells": list(cells),
    }


def _part(text: str) -> tuple[int, int]:
    number, total = map(int, text.split("/"))
    if not 1 <= number <= total:
        raise argparse.ArgumentTypeError(f"{text} is not one of {total} parts: 1/{total} is the first")
    return number, total


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare what a command line says of this matrix."""
    parser.add_argument("--plan", action="store_true", help="make the rows, find what is refused, and stop")
    parser.add_argument("--known", action="store_true", help="take what is refused from the file, and look for no more")
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="one of N processes: every N-th row")
    parser.add_argument("--cells", type=int, metavar="N", help="at most so many cells, then stop")
    parser.add_argument("--only", metavar="TEXT", default="", help="rows that have it, as in 'schedule=\"1F1B\"'")
    parser.add_argument("--pending", action="store_true", help="the rows that options which are pending add")
    parser.add_argument("--again", action="store_true", help="run proven rows too")
    parser.add_argument("--failed", action="store_true", help="run what once failed instead")


def prove(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make the rows and run those that a command line asks for, writing down each; return what `--json` prints."""
    from composer3d.processes.forking import prewarm

    if arguments.pending:
        lift_pending()
    prewarm()
    # Or every rank imports what plugins are made of.
    prewarm(module.name for module in pkgutil.walk_packages(composer3d_plugins.__path__, "composer3d_plugins."))
    stated = conditions()
    rows = rows_of(learn=not arguments.known)
    note(f"{len(rows)} rows")
    if arguments.plan:
        return _written(rows, stated)
    return run(
        rows,
        again=arguments.again,
        limit=arguments.cells,
        stated=stated,
        part=arguments.part,
        chosen=arguments.only,
        failed=arguments.failed,
    )


def summary(found: Mapping[str, Any]) -> str:
    """Return what benchmarks/README.md says of a result."""
    counts, stated = found["summary"], found["conditions"]
    held = "cells that hold every two of" if found["whole"] else "cells more that hold what is pending among"
    return (
        f"Of {len(found['cells'])} {held} {found['options']} options of plugins "
        f"{counts['proven']} are proven, {counts['refused']} refused, {counts['failed']} failed, "
        f"{counts['left']} were not run; no cell holds what `check` refuses ({found['refusals']} combinations).\n"
        f"Last written on {stated['date']}: {stated['machine']}; Python {stated['python']}, torch {stated['torch']}.\n"
    )


def show(found: Mapping[str, Any]) -> None:
    """Print a line a cell that is not proven, and the counts."""
    for cell in found["cells"]:
        if cell["outcome"] in ("refused", "failed"):
            say(f"{cell['outcome']}: {say_row(cell['row'])}: {cell['detail']}")
    say(", ".join(f"{number} {outcome}" for outcome, number in found["summary"].items()))
