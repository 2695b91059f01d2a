"""`suggest` as a call: the best layouts for a manifest's model on a cluster, as patches to the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking import Inspection, collected_rarely, device_of, inspect, open_manifest
from composer3d.errors import ComposerError, ManifestError

if TYPE_CHECKING:
    from torch import nn

    from composer3d.manifest import Manifest
    from composer3d.planning.formulas.decoder_dims import ModelShape
    from composer3d.planning.formulas.layout_numbers import Setup
    from composer3d.planning.hardware.cluster import Hardware
    from composer3d.planning.suggesting.search import Found
    from composer3d.planning.suggesting.suggest import Accepted, Planned, Suggestion

__all__ = ["SuggestResult", "suggest_for"]

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
        shape: Of the model.
        manifest: The given one.
        memory_bytes: Of a device.
    """

    suggestions: tuple[Suggestion, ...]
    patches: tuple[tuple[str, ...], ...]
    searched: Found
    refused: tuple[str, ...]
    given: str
    shape: ModelShape
    manifest: Manifest
    memory_bytes: float

    @property
    def ok(self) -> bool:
        """Whether a layout fits."""
        return bool(self.suggestions)

    def to_json(self) -> dict[str, Any]:
        """Return what `composer3d suggest --json` prints."""
        found = self.searched
        return {
            "parameters": self.shape.num_parameters,
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
                        "known": "traced" if suggestion.candidate.is_planned else "modelled",
                    },
                    "time": _time(suggestion),
                }
                for suggestion, changes in zip(self.suggestions, self.patches, strict=True)
            ],
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))

    def write(self, folder: Path) -> None:
        """Write each layout as a manifest that extends the given one.

        Args:
            folder: Made where it is not there; gets `suggestion-N.toml`.

        Raises:
            ComposerError: It cannot be written.
        """
        from composer3d.planning.suggesting.patch_file import patch_text

        base = Path(self.manifest.document.file)
        known = str(base.resolve()) if base.suffix == ".toml" else self.manifest.document.file
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for number, changes in enumerate(self.patches, 1):
                (folder / f"suggestion-{number}.toml").write_text(patch_text(known, changes), encoding="utf-8")
        except OSError as error:
            raise ComposerError(f"{folder}: cannot be written: {error.strerror}") from error


@collected_rarely()
def suggest_for(
    manifest: str | Path,
    *,
    world_size: int,
    hardware: str = "h100",
    memory_bytes: int | None = None,
    keep: Sequence[str] = (),
    overrides: Sequence[str] = (),
) -> SuggestResult:
    """Search the layouts that plugins offer by formulas, and let `check` and `plan` confirm what is proposed.

    Args:
        manifest: Path, or the name of a shipped manifest.
        world_size: Ranks of the run.
        hardware: A shipped cluster's name, or its file.
        memory_bytes: Of a device; default: what the cluster's has.
        keep: Pinned choices: `tp=8`, `tp<=8`, `recompute=full`; a key alone keeps the manifest's.
        overrides: `table.key=value`, as given to `--set`.

    Raises:
        ComposerError: The manifest is wrong in more than its layout, the model no decoder, or a pin means nothing.
    """
    from composer3d.planning.formulas.manifest_setup import installed_offers, patch
    from composer3d.planning.hardware.cluster import load_hardware
    from composer3d.planning.suggesting.pinned import kept
    from composer3d.planning.suggesting.search import search_choices
    from composer3d.planning.suggesting.suggest import suggest

    found, typed, model = _inspected(source := str(manifest), overrides, world_size)
    cluster = load_hardware(hardware).with_nodes(typed.mesh.gpus_per_node)
    shape, own, offers = _shape(typed, model), _own(typed, found), installed_offers(typed)
    memory = memory_bytes or cluster.device.memory_bytes

    def changes_to(setup: Setup) -> tuple[str, ...]:
        return patch(typed, own, setup, offers)

    runs = found.ok(strict=False) and own.world_size == world_size
    mine = _planned(source, overrides, world_size, (), cluster) if runs else None
    suggestions, searched, refused = suggest(
        shape,
        own,
        cluster,
        world_size=world_size,
        memory_bytes=memory,
        keep=kept(list(keep), own),
        check=lambda setup: _checked(source, overrides, world_size, changes_to(setup), setup),
        plan=lambda setup: _planned(source, overrides, world_size, changes_to(setup), cluster),
        own_bytes=mine.total if mine else None,
        choices=search_choices(offers),
    )
    return SuggestResult(
        suggestions=suggestions,
        patches=tuple(changes_to(suggestion.candidate.setup) for suggestion in suggestions),
        searched=searched,
        refused=refused,
        given=_own_verdict(found, own, world_size, shape, cluster, memory, mine),
        shape=shape,
        manifest=typed,
        memory_bytes=memory,
    )


def _inspected(source: str, overrides: Sequence[str], world_size: int) -> tuple[Inspection, Manifest, nn.Module]:
    inspected = open_manifest(source, overrides)
    if inspected.problems:
        raise ManifestError(inspected.problems)
    found = inspect(inspected, world_size=world_size, rank=0, device=device_of(inspected.manifest))
    if found.preparation is None:  # nothing is known of the model: its reference or a plugin's option is wrong
        raise ManifestError(found.ordered())
    return found, inspected.manifest, found.preparation.model


def _shape(manifest: Manifest, model: nn.Module) -> ModelShape:
    from composer3d.composition import find_blocks
    from composer3d.planning.formulas.model_shape import shape_of

    blocks = manifest.model.blocks or find_blocks(model)
    if blocks is None:
        raise ComposerError(
            "the model has no single list of equal blocks, and suggest knows decoders only; name the repeated blocks, "
            'for example [model] blocks = "layers.*"'
        )
    return shape_of(model, blocks)


def _own(manifest: Manifest, found: Inspection) -> Setup:
    """Return the manifest in numbers; degrees that do not fit the world stay as they are stated."""
    from composer3d.planning.formulas.manifest_setup import setup_of

    degrees = {axis: degree for axis, degree in manifest.degrees.items() if degree is not None and degree > 0}
    if found.layout is not None:
        degrees = dict(found.layout.degrees)
    return setup_of(manifest, degrees)


def _checked(source: str, overrides: Sequence[str], world_size: int, changes: Sequence[str], setup: Setup) -> Accepted:
    """Ask `check` for a layout, in this process."""
    from composer3d.planning.suggesting.suggest import Accepted

    try:
        inspected = open_manifest(source, [*overrides, *changes])
    except ManifestError as error:
        return Accepted(refusal=str(error))
    found = inspect(inspected, world_size=world_size, rank=0, device=device_of(inspected.manifest))
    if not found.ok(strict=False) or found.preparation is None:
        return Accepted(refusal="; ".join(map(str, found.ordered())))
    orders = found.preparation.actions(setup.num_microbatches) if setup.pp > 1 else None
    return Accepted(refusal=None, orders=orders)


def _planned(
    source: str, overrides: Sequence[str], world_size: int, changes: Sequence[str], hardware: Hardware
) -> Planned | None:
    """Plan a layout, in this process; None where it cannot be planned."""
    import torch

    from composer3d.planning.manifest_plan import plan_of
    from composer3d.planning.suggesting.suggest import Planned

    inspected = open_manifest(source, [*overrides, *changes])
    found = inspect(inspected, world_size=world_size, rank=0, device=torch.device("cpu"))
    if not found.ok(strict=False):
        return None
    try:
        # The cluster gives reserve and context; without it there is no time, which the search has its own model of.
        ranks = plan_of(inspected, found, hardware=None).ranks
    except ComposerError:
        return None
    from composer3d.planning.costs.allocator import allocate

    fullest = max((allocate(rank.trace, hardware.device) for rank in ranks), key=lambda allocation: allocation.total)
    return Planned(peak=fullest.allocated, total=fullest.total)


def _own_verdict(
    found: Inspection,
    own: Setup,
    world_size: int,
    shape: ModelShape,
    hardware: Hardware,
    memory: float,
    planned: Planned | None,
) -> str:
    """Return what is to be said of the given manifest."""
    from composer3d.planning.suggesting.search import evaluate

    errors = [problem for problem in found.ordered() if problem.severity == "error"]
    if errors:
        return f"the given manifest cannot run: {errors[0]}"
    if own.world_size != world_size:
        return f"the given manifest is for {own.world_size} ranks"
    mine = evaluate(shape, own, hardware)
    if planned is not None:
        mine = replace(mine, reserved_bytes=planned.total)
    verdict = mine.verdict(memory)
    return (
        f"the given manifest {verdict}: {mine.reserved_bytes / GIB:.1f} of {memory / GIB:.1f} GiB, "
        f"{mine.step_s:.3g} s a step"
    )


def _lines(result: SuggestResult) -> Iterator[str]:
    """Yield the result as text, a line each."""
    yield result.given
    if not result.suggestions:
        yield _nothing_fits(result.searched, result.memory_bytes)
        return
    for number, (suggestion, changes) in enumerate(zip(result.suggestions, result.patches, strict=True), 1):
        candidate = suggestion.candidate
        tokens = candidate.setup.global_batch * candidate.setup.seq_len / candidate.step_s
        each = tokens / candidate.setup.world_size
        yield f"\n{number}. {_layout(candidate.setup)}"
        yield f"   {candidate.step_s:.3g} s a step, {each:,.0f} tokens/s a device{_utilisation(candidate)}"
        for reason in suggestion.reasons:
            yield f"   {reason}"
        yield "   " + (" ".join(f"--set '{change}'" for change in changes) or "(the manifest as it is)")
    found = result.searched
    yield (
        f"\n{found.num_tried} layouts searched, {found.num_fitting} fit by formulas; those above were planned; times "
        "are modelled, within about 25 %"
    )


def _nothing_fits(found: Found, memory: float) -> str:
    least = found.smallest
    if least is None:
        return "no layout keeps what is pinned: the batch, the heads or the layers do not divide so"
    if found.num_fitting:
        return "every layout that fits by formulas is refused by check, or does not fit by the plan; --json says why"
    return (
        f"no layout fits {memory / GIB:.1f} GiB; the least memory that was found is "
        f"{least.reserved_bytes / GIB:.1f} GiB: {_layout(least.setup)}"
    )


def _utilisation(candidate: Any) -> str:
    time = candidate.time
    return "" if time is None or time.mfu is None else f", MFU {time.mfu.value:.1%} ({time.convention})"


def _layout(setup: Setup) -> str:
    parts = [f"{axis}={getattr(setup, axis)}" for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp")]
    told = [part for part in parts if not part.endswith("=1")] or ["one rank"]
    if setup.pp > 1:
        told.append(setup.schedule + (f" x {setup.stages_per_rank}" if setup.stages_per_rank > 1 else ""))
    told.append(f"zero {setup.zero}" if setup.zero else "copies")
    told += [f"microbatch {setup.microbatch}", f"recompute {setup.recompute}", setup.precision.dtype]
    return ", ".join(told + (["offload"] if setup.offload else []))


def _time(suggestion: Suggestion) -> dict[str, Any]:
    time = suggestion.candidate.time
    if time is None:
        return {"step_s": {"value": suggestion.candidate.step_s, "known": "modelled"}}
    named = ("step_s", "compute_s", "exposed_s", "bubble_s", "tokens_per_s_per_device")
    figures = {name: getattr(time, name).to_json() for name in named}
    mfu = {} if time.mfu is None else {"mfu": {**time.mfu.to_json(), "convention": time.convention}}
    return figures | mfu
