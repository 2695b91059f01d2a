"""Checks of a plugin under each heading; every one returns what it found, or raises what does not hold."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.mesh import Role
from composer3d.testing.conformance.conformance_case import Conformance, Written, role_of
from composer3d.testing.conformance.effects import effect_of
from composer3d.testing.conformance.manifest_proof import prove_manifest
from composer3d.testing.conformance.observed_steps import Observed, cpu_times, observe
from composer3d.testing.conformance.paired_payloads import out_of_order, sent_on_equal_batches

if TYPE_CHECKING:
    from composer3d.verification import Verdict

__all__ = ["REFUSED", "NonConformance", "Suite"]

REFUSED = "refused options"  # the verdict under any heading

# Steps before a run is saved: what a plugin keeps for its every second, third or fourth step is there then.
_PROVEN = 5
_OPS = {
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "broadcast": "broadcast",
    "send": "message",
    "recv": "message",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}


class NonConformance(AssertionError):
    """A plugin does not hold what its heading asks for."""

    def __init__(self, verdict: str, detail: str) -> None:
        """Create one.

        Args:
            verdict: Its name, such as `wrong numbers`.
            detail: What was found.
        """
        super().__init__(f"{verdict}: {detail}")
        self.verdict = verdict


class Suite:
    """Checks of one plugin with one table of options; what several of them need is computed once."""

    def __init__(self, case: Conformance, options: Mapping[str, Any], folder: Path) -> None:
        self.case, self.options = case, options
        self.written = Written.of(case, folder)
        self._known: dict[Any, Any] = {}

    def refuse_what_check_refuses(self) -> None:
        """Raise what `check` says against the table, of which no rank is started."""
        from composer3d.testing.conformance.refused_options import refusal

        said = self._once("refusal", lambda: refusal(self.written, self.options))
        if said:
            raise NonConformance(
                REFUSED, f"{said}\nstate options that are accepted, and beside them tables that it needs"
            )

    def numerics(self) -> str:
        """Loss, gradients and updates of the ranks are those of one device."""
        verdict, failures = self._proof()
        if failures["numerics"]:
            raise NonConformance("wrong numbers", _lines([*failures["numerics"], *_likely(verdict)]))
        return f"{self.written.world_size} ranks compute what one device computes, {verdict.num_steps} steps"

    def collectives(self) -> str:
        """Collectives are those of a trace, those that the plugin declares, and in one order on all ranks."""
        _, failures = self._proof()
        if failures["collectives"]:
            raise NonConformance("collectives apart from their trace", _lines(failures["collectives"]))
        mine, other = self._steps(self.options), self._without()
        for number in range(len(mine[0].collectives)):
            for rank, found in enumerate(mine):
                before = other[rank].collectives[number] if other is not None and rank < len(other) else {}
                more = _more(found.collectives[number], before)
                self._judge_collectives(more, has_before=other is not None)
        self._judge_order_of_ranks()
        return _counts(_more(mine[0].collectives[-1], other[0].collectives[-1] if other else {})) or "none of its own"

    def state(self) -> str:
        """Names of parameters stay, and a run that is saved and loaded goes on as the one that was not."""
        verdict, failures = self._proof()
        if failures["state"]:
            raise NonConformance("lost state", _lines([*failures["state"], *_likely(verdict)]))
        other = self._without()
        if other is not None and not set(self._steps(self.options)[0].fqns) >= set(other[0].fqns):
            lost = sorted(set(other[0].fqns) - set(self._steps(self.options)[0].fqns))
            raise NonConformance("renamed parameters", f"{', '.join(lost[:5])} are gone")
        return "saved, loaded and stepped: every value is that of the run that went on"

    def refusals(self) -> str:
        """`check` refuses what cannot be, and nothing that `check` accepts fails later."""
        from composer3d.testing.conformance.refused_options import judge_refusals

        return judge_refusals(self.case, self.written, self.options, NonConformance)

    def order(self) -> str:
        """Neither the order of registration nor the order of names among equals changes a bit."""
        mine, written, name = self._steps(self.options), self.written, self.case.table.partition(".")[2]
        path = written.manifest(self.options)
        variants: dict[str, tuple[Path, dict[str, Any]]] = {
            "registered in the reverse order": (path, {"backwards": True}),
            "as a table whose name sorts first": (written.renamed(f"a0_{name}").manifest(self.options), {}),
            "as a table whose name sorts last": (written.renamed(f"zz_{name}").manifest(self.options), {}),
            "with transforms and actions whose names sort first": (path, {"rename": "0{}".format}),
            "with transforms and actions whose names sort last": (path, {"rename": "~{}".format}),
        }
        for how, (manifest, arguments) in variants.items():
            found = observe(manifest, self.case.plugin, world_size=written.world_size, **arguments)
            apart = _first_difference(mine, found)
            if apart:
                raise NonConformance("depends on order", f"{how}, {apart}")
        return "the same bits registered in the reverse order, and where its names sort first or last"

    def matrix(self) -> str:
        """Beside every other installed plugin it is refused with a reason, or proven."""
        from composer3d.testing.conformance.beside_others import judge_pairs

        return judge_pairs(self.case, self.written, self.options, NonConformance)

    def plan(self) -> str:
        """A plan counts the collectives that real ranks issue."""
        from composer3d import plan

        path = self.written.manifest(self.options)
        rows = plan(path, rank=0).to_json()["ranks"][0]["collectives"]
        planned: dict[tuple[str, str], tuple[int, int]] = {}
        for row in rows:
            key = ({"receive": "recv"}.get(row["op"], row["op"]), row["axis"])
            count, size = planned.get(key, (0, 0))
            planned[key] = (count + row["count"], size + row["bytes"])
        happened = self._steps(self.options)[0].collectives[-1]
        apart = [
            f"{op} over {axis}: planned {planned.get((op, axis), (0, 0))}, happened {happened.get((op, axis), (0, 0))}"
            for op, axis in sorted(planned.keys() | happened.keys())
            if not _is_as_planned(axis, planned.get((op, axis), (0, 0)), happened.get((op, axis), (0, 0)))
        ]
        if apart:
            raise NonConformance("planned otherwise than run", _lines([f"{line} (count, bytes)" for line in apart]))
        return f"{sum(count for count, _ in planned.values())} collectives of a step planned as they happen"

    def overhead(self) -> str:
        """CPU time of a step over one without the plugin."""
        if self._without() is None:
            return "not compared: it owns the axes, so there is no composition without it"
        paths = {"with": self.written.manifest(self.options), "without": self.written.manifest(None)}
        paths["again"] = self.written.manifest(None)
        times = cpu_times(paths, world_size=self.written.world_size)
        ratio, control = times["with"] / times["without"], times["again"] / times["without"]
        found = f"{ratio:.2f} of the CPU time of a step without it (that against itself: {control:.2f})"
        if self.case.max_overhead is not None and ratio > self.case.max_overhead * max(control, 1.0):
            raise NonConformance("too slow", f"{found}, more than {self.case.max_overhead}")
        return found

    def purpose(self) -> str:
        """With another purpose than `run` it opens no file and no socket."""
        opened: list[str] = []
        path = self.written.manifest(self.options)
        for purpose in ("check", "plan", "verify"):
            for found in observe(path, self.case.plugin, world_size=self.written.world_size, purpose=purpose):
                opened += [f"{what} with purpose {purpose}" for what in found.files]
        if opened:
            raise NonConformance("opens files outside of runs", _lines(dict.fromkeys(opened)))
        return "no file or socket is opened to check, plan or verify"

    def effect(self) -> str:
        """It does something: a plugin that does nothing passes every comparison."""
        other = self._without()
        found = effect_of(self._steps(self.options), other, is_owner=other is None)
        if found is None and self.case.effect is not None:
            found = self.case.effect(self._steps(self.options), other)
        if found is None:
            raise NonConformance(
                "does nothing",
                "gradients, updates, collectives, operators, metrics, answers and files are those without it",
            )
        return found

    def _proof(self) -> tuple[Verdict, Mapping[str, tuple[str, ...]]]:
        from composer3d.verification import failures_by_heading

        def prove() -> tuple[Verdict, Mapping[str, tuple[str, ...]]]:
            verdict = prove_manifest(self.written.manifest(self.options), num_steps=_PROVEN)
            if verdict.evidence is None:
                return verdict, {"numerics": verdict.failures, "collectives": (), "state": ()}
            return verdict, failures_by_heading(verdict.evidence)

        return self._once("proof", prove)

    def _steps(self, options: Mapping[str, Any]) -> list[Observed]:
        path = self.written.manifest(options)
        return self._once("with", lambda: observe(path, self.case.plugin, world_size=self.written.world_size))

    def _without(self) -> list[Observed] | None:
        """Return what ranks see without the plugin; None where its axes have no other owner."""
        if self.written.owned and self.written.default is None:
            return None
        path = self.written.manifest(None)
        return self._once("without", lambda: observe(path, self.case.plugin, world_size=self.written.world_size))

    def _once(self, key: str, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _judge_collectives(self, more: Mapping[tuple[str, str], int], *, has_before: bool) -> None:
        stated = self.case.collectives
        if stated is not None and has_before:
            if dict(more) != {key: count for key, count in stated.items() if count}:
                raise NonConformance(
                    "undeclared collectives", f"{_counts(more) or 'none'} beside {_counts(stated) or 'none'} as stated"
                )
            return
        declared = _declared(self.case.plugin)
        for (op, axis), count in more.items():
            if axis != "world" and count > 0 and (declared is None or _OPS.get(op, op) not in declared):
                said = "says nothing of collectives" if declared is None else f'says "{declared}"'
                raise NonConformance(
                    "undeclared collectives", f"{count} {op} over {axis} in a step, and the docstring {said}"
                )

    def _judge_order_of_ranks(self) -> None:
        size = self.written.world_size
        sent = sent_on_equal_batches(self.written.manifest(self.options), self.case.plugin, world_size=size)
        apart = out_of_order(sent)
        if apart:
            raise NonConformance("collectives out of order", apart)


def _is_as_planned(axis: str, planned: tuple[int, int], happened: tuple[int, int]) -> bool:
    """Return whether collectives over an axis are those of its plan, as (count, bytes)."""
    role = role_of(axis)
    if role is Role.EXPERT:  # how many rows an expert has depends on the data
        return planned[0] == happened[0]
    # What is outside of steps is in no trace of one: a plan's notes state it.
    is_outside = role in (Role.INDEPENDENT, Role.REPLICA) and planned == (0, 0)
    return axis == "world" or is_outside or planned == happened


def _declared(plugin: type) -> str | None:
    """Return what the docstring says of collectives, in lower case; None where it says nothing."""
    text = inspect.getdoc(plugin) or ""
    found = re.findall(r"Collectives:(.*?)(?:\n\s*\n|\Z)", text, re.DOTALL)
    return " ".join(" ".join(found).lower().split()) if found else None


def _more(
    found: Mapping[tuple[str, str], tuple[int, int]], before: Mapping[tuple[str, str], tuple[int, int]]
) -> dict[tuple[str, str], int]:
    counts = {key: found.get(key, (0, 0))[0] - before.get(key, (0, 0))[0] for key in sorted({*found, *before})}
    return {key: count for key, count in counts.items() if count}


def _counts(counts: Mapping[tuple[str, str], int]) -> str:
    return ", ".join(f"{count:+d} {op} over {axis}" for (op, axis), count in counts.items())


def _first_difference(mine: list[Observed], other: list[Observed]) -> str:
    for rank, (one, two) in enumerate(zip(mine, other, strict=True)):
        for step, (first, second) in enumerate(zip(one.gradients, two.gradients, strict=True)):
            wrong = [fqn for fqn in first if first[fqn] != second.get(fqn)]
            if wrong:
                return f"{len(wrong)} gradients are others on rank {rank} in step {step}, as {wrong[0]}"
        wrong = [fqn for fqn in one.parameters if one.parameters[fqn] != two.parameters.get(fqn)]
        if wrong:
            return f"{len(wrong)} parameters are others on rank {rank} after {len(one.gradients)} steps, as {wrong[0]}"
        if one.collectives != two.collectives:
            return f"collectives are others on rank {rank}"
    return ""


def _likely(verdict: Verdict) -> list[str]:
    return [f"likely: {line}" for line in verdict.diagnosis]


def _lines(lines: Any) -> str:
    return "\n".join(lines)
