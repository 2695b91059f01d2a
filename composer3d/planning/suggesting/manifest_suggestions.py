"""`suggest` as a call: the best layouts for a manifest's model on a cluster, as patches to the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking import as_set, collected_rarely, verb
from composer3d.errors import ComposerError
from composer3d.processes import single_threaded

if TYPE_CHECKING:
    from composer3d.manifest import Manifest
    from composer3d.planning.formulas.layout_numbers import Setup
    from composer3d.planning.suggesting.given_manifest import GivenManifest
    from composer3d.planning.suggesting.search import Candidate, Found
    from composer3d.planning.suggesting.suggest import Suggestion

__all__ = ["SuggestResult", "suggest"]

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class SuggestResult:
    """Answer of `suggest`.

    Args:
        suggestions: At most five layouts that `check` accepts and that fit by the plan, the fastest first.
        patches: Of each, what `--set` has to say for the manifest to become it.
        searched: What the search found.
        refused: Why layouts were refused by `check`, or do not fit.
        given: What is to be said of the manifest as it is.
        num_parameters: Of the model.
        manifest: The given one.
        memory_bytes: Of a device.
        context_bytes: Of a device, which its driver and libraries take whatever the layout.
        hardware_name: Of the cluster.
        worlds: Where no layout was found, the nearest numbers of ranks with one.
        overrides: With which the manifest was given.
    """

    suggestions: tuple[Suggestion, ...]
    patches: tuple[tuple[str, ...], ...]
    searched: Found
    refused: tuple[str, ...]
    given: str
    num_parameters: int
    manifest: Manifest
    memory_bytes: float
    context_bytes: float
    hardware_name: str
    worlds: tuple[int, ...] = ()
    overrides: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether a layout fits."""
        return bool(self.suggestions)

    def to_json(self) -> dict[str, Any]:
        """Return what `composer3d suggest --json` prints."""
        found = self.searched
        return {
            "parameters": self.num_parameters,
            "given": self.given,
            "searched": {
                "tried": found.num_tried,
                "fitting": found.num_fitting,
                "refused_by_check": list(self.refused),
            },
            "suggestions": [
                {
                    "layout": _layout(suggestion.candidate.setup),
                    "set": list(changes),
                    "why": list(suggestion.reasons),
                    "memory": {
                        "peak": suggestion.candidate.peak_bytes,
                        "reserved": int(suggestion.candidate.reserved_bytes),
                        "known": "traced",
                    },
                    "time": _time(suggestion.candidate),
                }
                for suggestion, changes in zip(self.suggestions, self.patches, strict=True)
            ],
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def write(self, folder: Path) -> None:
        """Write each layout as a manifest that extends the given one and states what overrides it.

        Args:
            folder: Made where it is not there; gets `suggestion-N.toml`.

        Raises:
            ComposerError: It cannot be written, or there are others, which may have been changed by hand.
        """
        from composer3d.planning.suggesting.patch_file import extended_by, patch_text

        known, moved = extended_by(self.manifest.document, folder)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            texts = {
                folder / f"suggestion-{number}.toml": patch_text(known, [*moved, *changes], overrides=self.overrides)
                for number, changes in enumerate(self.patches, 1)
            }
            for file, text in texts.items():
                if file.exists() and file.read_bytes() != text.encode():
                    raise ComposerError(
                        f"{file} exists, differs and is not overwritten; name another folder with --write"
                    )
            for file, text in texts.items():
                file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ComposerError(f"{folder}: cannot be written: {error.strerror}") from error


@verb()
@collected_rarely()
@single_threaded()
def suggest(
    manifest: str | Path,
    *,
    world_size: int,
    hardware: str = "h100",
    memory_bytes: int | None = None,
    keep: Sequence[str] = (),
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> SuggestResult:
    """Search the layouts that plugins offer by traced costs, and let `check` and `plan` confirm what is proposed.

    A default dtype or device, autocast, `torch.no_grad()` or other modes of the caller play no part, and stay.

    Args:
        manifest: Path, or the name of a shipped manifest.
        world_size: Ranks of the run.
        hardware: A shipped cluster's name, or its file.
        memory_bytes: Of a device; default: what the cluster's has.
        keep: Pinned choices: `tp=8`, `tp<=8`, `recompute=full`; a key alone keeps the manifest's.
        overrides: `table.key=value`, as given to `--set`, or values by key.

    Raises:
        ComposerError: The manifest is wrong in more than its layout, no layout of the model can be traced, a pin means
            nothing, or an argument is none that it takes.
    """
    from composer3d.planning.hardware.hardware_file import load_hardware
    from composer3d.planning.suggesting.given_manifest import GivenManifest
    from composer3d.planning.suggesting.pinned import kept
    from composer3d.planning.suggesting.search import nearest_worlds, search_choices

    overrides = as_set(overrides)
    given = GivenManifest.of(str(manifest), overrides, world_size, load_hardware(hardware))
    memory = memory_bytes or given.hardware.device.memory_bytes
    costs, choices = given.costs, search_choices(given.offers)
    pinned: dict[str, Any] = {"keep": kept(keep, given.own, choices.words, world_size=world_size), "choices": choices}
    suggestions, searched, refused = _searched(given, memory, pinned)
    worlds: Sequence[int] = ()
    if not searched.num_tried:
        worlds = nearest_worlds(costs.num_blocks, given.own, given.hardware, world_size, **pinned)
    if costs.refused and not searched.num_tried:
        raise _untraced(costs.refused[0], given.own.global_batch, world_size, worlds)
    return SuggestResult(
        suggestions=suggestions,
        patches=tuple(given.changes_to(suggestion.candidate.setup) for suggestion in suggestions),
        searched=searched,
        refused=(*costs.refused, *refused),
        given=given.verdict(memory),
        num_parameters=given.num_parameters,
        manifest=given.manifest,
        memory_bytes=memory,
        context_bytes=given.hardware.device.context_bytes,
        hardware_name=given.hardware.name,
        worlds=tuple(worlds),
        overrides=overrides,
    )


def _searched(
    given: GivenManifest, memory_bytes: float, pinned: Mapping[str, Any]
) -> tuple[tuple[Suggestion, ...], Found, tuple[str, ...]]:
    """Return the best layouts, what was searched, and what was refused."""
    from composer3d.planning.suggesting.suggest import suggest as best_layouts

    return best_layouts(
        given.costs,
        given.own,
        given.hardware,
        world_size=given.world_size,
        memory_bytes=memory_bytes,
        plan=given.planned,
        given=None if isinstance(given.as_given, str) else given.as_given,
        **pinned,
    )


def _lines(result: SuggestResult) -> Iterator[str]:
    """Yield the result as text, a line each."""
    yield result.given
    if not result.suggestions:
        yield _nothing_fits(result)
        return
    for number, (suggestion, changes) in enumerate(zip(result.suggestions, result.patches, strict=True), 1):
        candidate = suggestion.candidate
        yield f"\n{number}. {_layout(candidate.setup)}"
        yield f"   {candidate.step_s:.3g} s a step{_rate(candidate)}"
        for reason in suggestion.reasons:
            yield f"   {reason}"
        yield "   " + (" ".join(f"--set '{change}'" for change in changes) or "(the manifest as it is)")
    found = result.searched
    yield (
        f"\n{found.num_tried} layouts searched by traced costs, {found.num_fitting} fit; those above were planned, and "
        "composer3d plan says between which bounds their times lie"
    )


def _untraced(reason: str, global_batch: int, world_size: int, worlds: Sequence[int]) -> ComposerError:
    """Return that nothing was traced: for a reason, or because a world cannot share a batch."""
    if global_batch % world_size == 0:
        return ComposerError(f"no layout of the model can be traced: {reason}")
    told = f"{world_size} ranks cannot share {global_batch} samples a step{_instead(worlds)}"
    return ComposerError(f"{told}, and no layout of the model can be traced: {reason}")


def _instead(worlds: Sequence[int]) -> str:
    """Return which worlds have a layout, in brackets."""
    return f" ({' and '.join(map(str, worlds))} ranks have a layout)" if worlds else ""


def _nothing_fits(result: SuggestResult) -> str:
    found, memory, worlds = result.searched, result.memory_bytes, result.worlds
    least = found.smallest
    if least is None:
        told = "no layout of so many ranks keeps what is pinned: the batch, the heads or the layers do not divide so"
        return told + _instead(worlds)
    if found.num_fitting:
        told = "every layout that the search found is refused by check, or does not fit by the plan"
        first, *others = result.refused or ("",)
        more = f" (--json has {len(others)} more reasons)" if others else ""
        return f"{told}: {first}{more}" if first else told
    return (
        f"no layout fits {memory / GIB:.3g} GiB; the least memory that was found is "
        f"{least.reserved_bytes / GIB:.3g} GiB, of which the device's context has {result.context_bytes / GIB:.3g}, "
        f"whatever the layout: {_layout(least.setup)}"
    )


def _rate(candidate: Candidate) -> str:
    time = candidate.time
    if time is None:
        return ""
    unit = time["unit"]
    rate = f", {time[f'{unit}_per_s_per_device']['value']:,.0f} {unit}/s a device"
    return rate if "mfu" not in time else f"{rate}, MFU {time['mfu']['value']:.1%} ({time['convention']})"


def _layout(setup: Setup) -> str:
    parts = [f"{axis}={getattr(setup, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")]
    words = [part for part in parts if not part.endswith("=1")] or ["one rank"]
    if setup.pp > 1:
        words.append(setup.schedule + (f" x {setup.stages_per_rank}" if setup.stages_per_rank > 1 else ""))
    words.append(f"zero {setup.zero}" if setup.zero else "replicas")
    words += [f"microbatch {setup.microbatch}", f"recompute {setup.recompute}", setup.precision.dtype]
    return ", ".join(words + (["offload"] if setup.offload else []))


def _time(candidate: Candidate) -> dict[str, Any]:
    time = candidate.time
    assert time is not None, "what is proposed was planned"
    named = ("step_s", "compute_s", "exposed_s", "bubble_s", f"{time['unit']}_per_s_per_device")
    mfu = {} if "mfu" not in time else {"mfu": {**time["mfu"], "convention": time["convention"]}}
    return {name: time[name] for name in named} | mfu
