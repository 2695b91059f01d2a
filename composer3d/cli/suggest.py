"""`composer3d suggest`: the best layouts for a model on a cluster, as patches to a manifest."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking.check import Inspection, collected_rarely, device_of, inspect, open_manifest
from composer3d.cli.options import Subparsers, add_json, add_manifest, positive, size
from composer3d.cli.output import print_problems, say, say_json
from composer3d.errors import ComposerError, ManifestError

if TYPE_CHECKING:
    from torch import nn

    from composer3d.manifest import Manifest
    from composer3d.planning.formulas.decoder_dims import ModelShape
    from composer3d.planning.formulas.layout_numbers import Setup
    from composer3d.planning.hardware.cluster import Hardware
    from composer3d.planning.suggesting.search import Found
    from composer3d.planning.suggesting.suggest import Accepted, Planned, Suggestion

__all__ = ["add", "execute"]

GIB = 2**30


def add(subparsers: Subparsers) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "suggest",
        help="find the layouts that suit a model and a cluster best",
        description="Search degrees, ZeRO stages, schedules, micro-batches, recomputation, precision and offloading by "
        "formulas of memory and time, and print up to five manifests that check accepts and that fit by the plan, as "
        "patches to the given one.",
    )
    add_manifest(parser)
    parser.add_argument("--world-size", type=positive, metavar="N", required=True, help="ranks of the run")
    parser.add_argument(
        "--hardware", default="h100", metavar="NAME|FILE", help="a shipped cluster or a TOML file; default: h100"
    )
    parser.add_argument("--memory", type=size, metavar="SIZE", help="of a device; default: what the cluster's has")
    parser.add_argument(
        "--keep",
        action="append",
        default=[],
        metavar="KEY[=VALUE]",
        help='pin a choice: tp=8, "tp<=8", recompute=full; a key alone keeps the manifest\'s; may be repeated',
    )
    parser.add_argument("--write", type=Path, metavar="FOLDER", help="also write each as a manifest that extends this")
    add_json(parser)
    parser.set_defaults(execute=execute)


@collected_rarely()
def execute(arguments: argparse.Namespace) -> int:
    """Search and print; 1 if nothing fits, 2 if the manifest is wrong."""
    from composer3d.planning.formulas.manifest_setup import installed_offers, patch
    from composer3d.planning.hardware.cluster import load_hardware
    from composer3d.planning.suggesting.pinned import kept
    from composer3d.planning.suggesting.search import search_choices
    from composer3d.planning.suggesting.suggest import suggest

    inspected = open_manifest(arguments.manifest, arguments.overrides)
    if inspected.problems:
        print_problems(ManifestError(inspected.problems).problems)
        return 2
    manifest = inspected.manifest
    hardware = load_hardware(arguments.hardware).with_nodes(manifest.mesh.gpus_per_node)
    found = inspect(inspected, world_size=arguments.world_size, rank=0, device=device_of(manifest))
    if found.preparation is None:  # nothing is known of the model: its reference or a plugin's option is wrong
        print_problems(found.ordered())
        return 2
    shape = _shape(manifest, found.preparation.model)
    own = _own(manifest, found)
    memory = arguments.memory or hardware.device.memory_bytes

    offers = installed_offers(manifest)

    def changes_to(setup: Setup) -> tuple[str, ...]:
        return patch(manifest, own, setup, offers)

    def check(setup: Setup) -> Accepted:
        return _checked(arguments, changes_to(setup), setup)

    def plan(setup: Setup) -> Planned | None:
        return _planned(arguments, changes_to(setup), hardware)

    errors = any(problem.severity == "error" for problem in found.ordered())
    mine = None if errors or own.world_size != arguments.world_size else _planned(arguments, (), hardware)
    suggestions, searched, refused = suggest(
        shape,
        own,
        hardware,
        world_size=arguments.world_size,
        memory_bytes=memory,
        keep=kept(arguments.keep, own),
        check=check,
        plan=plan,
        own_bytes=None if mine is None else mine.total,
        choices=search_choices(offers),
    )
    patches = [changes_to(suggestion.candidate.setup) for suggestion in suggestions]
    if arguments.write is not None:
        _write(arguments.write, manifest, patches)
    why_not = _own_verdict(found, own, arguments.world_size, shape, hardware, memory, mine)
    if arguments.json:
        say_json(_report(suggestions, patches, searched, refused, why_not, shape))
    else:
        _show(suggestions, patches, searched, why_not, memory)
    return 0 if suggestions else 1


def _shape(manifest: Manifest, model: nn.Module) -> ModelShape:
    from composer3d.patterns import find_blocks
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


def _checked(arguments: argparse.Namespace, changes: Sequence[str], setup: Setup) -> Accepted:
    """Ask `check` for a layout, in this process."""
    from composer3d.planning.suggesting.suggest import Accepted

    try:
        inspected = open_manifest(arguments.manifest, [*arguments.overrides, *changes])
    except ManifestError as error:
        return Accepted(refusal=str(error))
    found = inspect(inspected, world_size=arguments.world_size, rank=0, device=device_of(inspected.manifest))
    if not found.ok(strict=False) or found.preparation is None:
        return Accepted(refusal="; ".join(map(str, found.ordered())))
    orders = found.preparation.actions(setup.num_microbatches) if setup.pp > 1 else None
    return Accepted(refusal=None, orders=orders)


def _planned(arguments: argparse.Namespace, changes: Sequence[str], hardware: Hardware) -> Planned | None:
    """Plan a layout, in this process; None where it cannot be planned."""
    import torch

    from composer3d.cli.plan import plan_of
    from composer3d.planning.suggesting.suggest import Planned

    inspected = open_manifest(arguments.manifest, [*arguments.overrides, *changes])
    found = inspect(inspected, world_size=arguments.world_size, rank=0, device=torch.device("cpu"))
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


def _show(
    suggestions: Sequence[Suggestion], patches: Sequence[tuple[str, ...]], found: Found, why_not: str, memory: float
) -> None:
    say(why_not)
    if not suggestions:
        say(_nothing_fits(found, memory))
        return
    for number, (suggestion, changes) in enumerate(zip(suggestions, patches, strict=True), 1):
        candidate = suggestion.candidate
        tokens = candidate.setup.global_batch * candidate.setup.seq_len / candidate.step_s
        each = tokens / candidate.setup.world_size
        say(f"\n{number}. {_layout(candidate.setup)}")
        say(f"   {candidate.step_s:.3g} s a step, {each:,.0f} tokens/s a device{_utilisation(candidate)}")
        for reason in suggestion.reasons:
            say(f"   {reason}")
        say("   " + (" ".join(f"--set '{change}'" for change in changes) or "(the manifest as it is)"))
    say(
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


def _write(folder: Path, manifest: Manifest, patches: Sequence[tuple[str, ...]]) -> None:
    """Write each patch as a manifest that extends the given one."""
    from composer3d.planning.suggesting.patch_file import patch_text

    base = Path(manifest.document.file)
    known = str(base.resolve()) if base.suffix == ".toml" else manifest.document.file
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, changes in enumerate(patches, 1):
            (folder / f"suggestion-{number}.toml").write_text(patch_text(known, changes), encoding="utf-8")
    except OSError as error:
        raise ComposerError(f"{folder}: cannot be written: {error.strerror}") from error


def _report(
    suggestions: Sequence[Suggestion],
    patches: Sequence[tuple[str, ...]],
    found: Found,
    refused: Sequence[str],
    why_not: str,
    shape: ModelShape,
) -> dict[str, Any]:
    """Return what `--json` prints."""
    return {
        "parameters": shape.num_parameters,
        "given": why_not,
        "searched": {"tried": found.num_tried, "fitting": found.num_fitting, "refused_by_check": list(refused)},
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
            for suggestion, changes in zip(suggestions, patches, strict=True)
        ],
    }


def _time(suggestion: Suggestion) -> dict[str, Any]:
    time = suggestion.candidate.time
    if time is None:
        return {"step_s": {"value": suggestion.candidate.step_s, "known": "modelled"}}
    named = ("step_s", "compute_s", "exposed_s", "bubble_s", "tokens_per_s_per_device")
    figures = {name: getattr(time, name).to_json() for name in named}
    mfu = {} if time.mfu is None else {"mfu": {**time.mfu.to_json(), "convention": time.convention}}
    return figures | mfu
