"""A plan on one screen."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from io import StringIO
from typing import Any

from composer3d.planning.costs.allocator import memory_figures
from composer3d.planning.plan import Plan, RankPlan
from composer3d.planning.reports.plan_json import collective_rows, flops_of

__all__ = ["amount", "band", "memory_parts", "rendered", "show_plan", "shown_parts", "size", "time_lines"]

_MOST_ROWS = 12
_BAR = 60
# Of communication in the text: kinds that take at least this part of a step, and how many of them at most.
_LEAST_SHARE, _MOST_KINDS = 0.002, 6
# Of a bar, in this order: name, letter, color; of averages only where a run keeps them.
_MEMORY_PARTS = (
    ("parameters", "P", "#4e79a7"),
    ("optimizer", "O", "#59a14f"),
    ("averages", "E", "#edc948"),
    ("gradients", "G", "#f28e2b"),
    ("activations", "A", "#e15759"),
    ("transient", "T", "#b07aa1"),
    ("reserve", "r", "#bab0ac"),
)


def amount(number: float) -> str:
    """Return a number of three digits or more as people write it.

    >>> amount(54321.6), amount(818000.0), amount(3.14159), amount(0.000123)
    ('54,300', '818,000', '3.14', '0.000123')
    """
    if not math.isfinite(number) or abs(number) < 1000:
        return f"{number:.3g}"
    digits = max(0, math.floor(math.log10(abs(number))) - 2)
    return f"{round(number / 10**digits) * 10**digits:,}"


def size(number: float) -> str:
    """Return bytes for people.

    >>> size(512), size(3 << 20), size(81 << 30)
    ('512 B', '3.00 MiB', '81.0 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(number) < 1024 or unit == "TiB":
            return (
                f"{number:.0f} B" if unit == "B" else f"{number:.3g} {unit}" if number >= 10 else f"{number:.2f} {unit}"
            )
        number /= 1024
    raise AssertionError("the last unit takes everything")


def band(rank: RankPlan, name: str) -> str:
    """Return between which bounds a figure of a rank's memory lies, such as `70.1 GiB to 78.0 GiB`; empty if exact.

    Args:
        rank: Of the plan.
        name: As in `--json`.
    """
    figure = memory_figures(rank.trace, rank.allocation)[name]
    return "" if figure.low == figure.high else f"{size(figure.low)} to {size(figure.high)}"


def memory_parts(rank: RankPlan) -> dict[str, int]:
    """Return what a device holds at a rank's peak, by what it is for; the parts add up to `total`.

    Of gradients and activations that is what is there then: units whose gradients come later have none yet.
    """
    memory, allocation = rank.trace.memory, rank.allocation
    return {
        "parameters": memory.parameters + memory.buffers,
        "optimizer": memory.optimizer,
        "averages": memory.averages,
        "gradients": memory.gradients_at_peak,
        "activations": memory.activations_at_peak,
        "transient": memory.transient,
        "reserve": allocation.total - memory.peak,
    }


def shown_parts(plan: Plan) -> list[tuple[str, str, str]]:
    """Return the parts of a bar of memory: name, letter, color."""
    has_averages = any(rank.trace.memory.averages for rank in plan.ranks)
    return [part for part in _MEMORY_PARTS if part[0] != "averages" or has_averages]


def show_plan(plan: Plan, *, width: int | None = None) -> str:
    """Return the plan as text: verdict, memory of each rank, collectives of the fullest, pipeline, notes.

    Args:
        plan: From `plan_of`.
        width: Columns; default: the terminal's.
    """
    from rich.console import Group

    return rendered(Group(*_parts(plan)), width=width)


def rendered(content: Any, *, width: int | None = None) -> str:
    """Return what rich prints, in colours where standard output is a terminal, to which nothing is written.

    Args:
        content: That rich prints.
        width: Columns; default: the terminal's.
    """
    from rich.console import Console

    file, colours = StringIO(), True if sys.stdout.isatty() else None  # None: FORCE_COLOR may ask for them
    console = Console(file=file, width=width, force_terminal=colours, highlight=False, emoji=False, force_jupyter=False)
    console.print(content)
    return file.getvalue().rstrip()


def _parts(plan: Plan) -> list[Any]:
    from rich.text import Text

    ranks, microbatches = plan.layout.world_size, plan.num_microbatches
    head = (
        f"{plan.layout} = {ranks} rank{'s' * (ranks > 1)}, {microbatches} micro-batch{'es' * (microbatches > 1)} a step"
    )
    lines = [head]
    if plan.verdict is not None and plan.memory_bytes is not None:
        fullest = max(plan.ranks, key=lambda rank: rank.allocation.total)
        whole = memory_figures(fullest.trace, fullest.allocation)["total"]
        needs = f"rank {fullest.trace.rank} needs {size(whole.value)} of {size(plan.memory_bytes)}"
        left = plan.memory_bytes - whole.value
        needs += f" ({size(whole.low)} to {size(whole.high)})"
        needs += f", {size(left)} are left" if left > 0 else f", {size(-left)} too much"
        lines.append(f"{plan.verdict} [modelled]: {needs}")
    parts: list[Any] = [Text("\n".join(lines)), _memory_table(plan), *_moments(plan), _collective_table(plan.ranks[0])]
    if plan.pipeline is not None:
        parts.append(Text(_pipeline_line(plan)))
    if plan.time is not None:
        parts.append(Text("\n".join(time_lines(plan.time))))
    parts.append(Text("\n".join([*plan.advice, *(f"note: {note}" for note in plan.notes)])))
    return parts


def _memory_table(plan: Plan) -> Any:
    from rich.table import Table
    from rich.text import Text

    known = "params, optim [exact], grads, activ, transient, peak [traced], device [modelled]"
    title = Text(f"memory of a rank at its peak: {known}")
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    table.add_column("rank", no_wrap=True)
    for name in ("ranks", "params", "optim", "grads", "activ", "transient", "peak", "device"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in plan.ranks:
        parts, trace = memory_parts(rank), rank.trace
        figures = [size(parts[name]) for name, *_ in _MEMORY_PARTS[:-1] if name != "averages"]
        table.add_row(
            str(trace.rank), str(trace.stands_for), *figures, size(trace.memory.peak), size(rank.allocation.total)
        )
    return table


def _bar(parts: dict[str, int], shown: Sequence[tuple[str, str, str]], whole: int) -> Any:
    from rich.text import Text

    bar = Text()
    for name, letter, color in shown:
        bar.append(letter * round(_BAR * parts[name] / whole), style=color)
    return bar.append(" " * max(0, _BAR - len(bar)) + "|")


def _moments(plan: Plan) -> list[Any]:
    from rich.text import Text

    largest, shown = max(rank.allocation.total for rank in plan.ranks), shown_parts(plan)
    lines: list[Any] = []
    for rank in plan.ranks:
        memory, bar = rank.trace.memory, Text(f"rank {rank.trace.rank:<5} |")
        lines.append(bar.append_text(_bar(memory_parts(rank), shown, max(largest, plan.memory_bytes or 0))))
    letters = ", ".join(f"{letter} {name}" for name, letter, _ in shown)
    room = "" if plan.memory_bytes is None else f"; the whole line is {size(plan.memory_bytes)}"
    lines.append(Text(f"{letters}{room}"))
    for rank in plan.ranks:
        memory = rank.trace.memory
        places = ",".join(f"{axis}={index}" for axis, index in rank.trace.coordinates.items() if index)
        name = f"rank {rank.trace.rank}" + (f" ({places})" if places else "")
        module = f" at {memory.module}" if memory.module else ""
        flops = flops_of(rank.trace.segments)
        lines.append(Text(f"{name}: peak in {memory.moment}{module} [traced]; {flops:.3g} FLOPs a step [exact]"))
        lines.append(Text(f"  peak {band(rank, 'peak')} [traced], device {band(rank, 'total')} [modelled]"))
        lines.append(Text(f"  gradients after the last backward {size(memory.gradients)} [exact]"))
        if memory.averages:
            lines.append(Text(f"  moving averages {size(memory.averages)} [exact]"))
        if memory.host:
            lines.append(Text(f"  in host memory {size(memory.host)} at most [traced]"))
    return lines


def _collective_table(rank: RankPlan) -> Any:
    from rich.table import Table
    from rich.text import Text

    title = Text(f"collectives of rank {rank.trace.rank} in a step [exact]")
    table = Table(box=None, pad_edge=False, title=title, title_justify="left")
    for name in ("collective", "axis", "ranks", "of", "count", "bytes", "on the wire"):
        table.add_column(name, justify="left" if name in ("collective", "axis", "of") else "right")
    rows = collective_rows(rank.trace)
    for row in rows[:_MOST_ROWS]:
        table.add_row(*_cells(row))
    if len(rows) > _MOST_ROWS:
        table.add_row(f"and {len(rows) - _MOST_ROWS} more kinds, in --json", *[""] * 6)
    return table


def _cells(row: dict[str, Any]) -> Sequence[str]:
    whose = row["plugin"] or "core"
    sizes = size(row["bytes"]), size(row["wire_bytes"])
    return row["op"], row["axis"] or "", str(row["num_ranks"]), whose, str(row["count"]), *sizes


def time_lines(time: Mapping[str, Any]) -> list[str]:
    """Return what the time model says, with how each figure is known and between which bounds it lies.

    Args:
        time: Of a plan.
    """

    def told(figure: Mapping[str, Any], unit: str = "", sign: str = "") -> str:
        low, high = figure["low"], figure["high"]
        between = f"{sign}{amount(low)} to {sign}{amount(high)}"
        return f"{sign}{amount(figure['value'])}{unit} ({between}) [{figure['known']}]"

    unit = time["unit"]
    lines = [
        f"on {time['hardware']}: a step of {time[unit]:,} {unit} takes {told(time['step_s'], ' s')}: "
        f"computing {told(time['compute_s'])}, communication that nothing hides {told(time['exposed_s'])}, "
        f"bubble {told(time['bubble_s'])}",
        f"{told(time[f'{unit}_per_s'])} {unit}/s, {told(time[f'{unit}_per_s_per_device'])} a device; "
        f"MFU {told(time['mfu'])} ({time['convention']}), HFU {told(time['hfu'])}, of {time['peak_flops']:.3g} FLOP/s",
    ]
    if (causal := time.get("mfu_causal")) is not None:
        lines[-1] += f"; MFU {amount(causal['value'])} with attention by half, as Megatron-Bridge counts"
    lines += _slow_communication(time)
    if offloading := time.get("offloading"):
        told_rows = (
            f"{row['what']} {amount(row['seconds'])} s for {size(row['bytes'])} ({row['over']})" for row in offloading
        )
        lines.append(f"offloading of the slowest rank [modelled]: {'; '.join(told_rows)}")
    if (what_if := time.get("what_if")) is not None:
        before = what_if["step_s"]
        lines.append(
            f"on {what_if['hardware']} as it is: {told(before, ' s')}; this is {what_if['times']:.3g} times that"
        )
    lines.append(_sensitivity(time["sensitivity"]))
    if (run := time.get("training")) is not None:

        def whole(run: Mapping[str, Any]) -> str:
            cost = "" if run["cost"] is None else f", cost {told(run['cost'], sign=run['currency'])}"
            energy = run["energy_mwh"]
            power = "" if energy is None else f", at most {amount(energy['high'])} MWh at the devices' rated power"
            return f"{told(run['days'])} days, {told(run['device_hours'])} device hours{cost}{power}"

        lines.append(f"the run: {run['num_steps']:,} steps, {whole(run)}")
        if (interrupted := run.get("with_failures")) is not None:
            lines.append(f"with failures, at the goodput below: {whole(interrupted)}")
    if (failures := time.get("failures")) is not None:
        lines.append(
            f"a failure every {amount(failures['failure_s'] / 3600)} h: save {size(failures['checkpoint_bytes'])} in "
            f"{amount(failures['save_s'])} s every {failures['interval_steps']:,} steps "
            f"({amount(failures['interval_s'] / 60)} min); goodput {_percent(failures['goodput'])}"
        )
    return [*lines, *(f"note: {note}" for note in time["notes"])]


def _percent(figure: Mapping[str, Any]) -> str:
    return f"{figure['value']:.1%} ({figure['low']:.1%} to {figure['high']:.1%}) [{figure['known']}]"


def _slow_communication(time: Mapping[str, Any]) -> list[str]:
    """Return a line with the longest kinds of communication, and what each passes beside."""
    step_s, rows = time["step_s"]["value"], time["communication"]
    told = []
    for row in [row for row in rows if row["seconds"] >= _LEAST_SHARE * step_s][:_MOST_KINDS]:
        waits = row["blocking_s"] / row["seconds"]
        beside = (
            "ranks wait for it" if waits > 0.99 else "beside compute" if waits < 0.01 else f"{waits:.0%} waited for"
        )
        told.append(
            f"{row['op']} over {row['axis'] or 'no axis'} on {row['link']} {amount(row['seconds'])} s ({beside})"
        )
    return [f"communication of the slowest rank [modelled]: {'; '.join(told)}"] if told else []


def _sensitivity(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return how many times as long a step takes with slower parts, the parts that matter most first."""
    half = [row for row in rows if row["factor"] < 1]
    double = [row for row in rows if row["factor"] > 1]

    def told(rows: Sequence[Mapping[str, Any]]) -> str:
        return ", ".join(f"{row['part']} {row['times']:.3g}x" for row in sorted(rows, key=lambda row: -row["times"]))

    return f"a step with half the speed of one part takes [modelled]: {told(half)}; with twice the wait: {told(double)}"


def _pipeline_line(plan: Plan) -> str:
    found = plan.bubble
    assert plan.pipeline is not None and found is not None
    flights = ", ".join(f"{count:g}" for count in plan.pipeline.schedule.in_flight)
    by, known = ("by time", "modelled") if found.is_timed else ("by FLOPs", "traced")
    return (
        f"pipeline {plan.schedule or ''}: bubble {found.share:.1%} of its forwards and backwards, "
        f"{found.relative:.1%} of their computing [modelled, {by}]; micro-batches in flight {flights} [exact]; "
        f"costliest stage {found.imbalance:+.1%} over the mean [{known}]"
    )
