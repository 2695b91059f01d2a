"""Cells of the matrix of all installed plugins: a row of options as a manifest, and what becomes of it.

A cell ends proven, as `composer3d verify` proves; refused by `composer3d check` for a reason of `PERMITTED`,
which is part of plugins/README.md; or failed, which is a defect of composer3d or of a plugin.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plugin_matrix_permitted import EXCLUDED, PERMITTED

from composer3d.errors import ComposerError, ManifestError, PluginError, RankError
from composer3d.mesh import AXES, Role
from composer3d.registry import Catalogue, info_of
from composer3d.testing import run_ranks
from composer3d.testing.plugin_options import installed_options, multiplied_axes, owners_of, tables_of

__all__ = [
    "Verdict",
    "axes",
    "check",
    "judge",
    "lift_pending",
    "manifest_of",
    "num_ranks",
    "options",
    "owners",
    "reason_of",
    "say_row",
]

TIMEOUT_S = 900.0
SEQ_LEN = 32  # mxfp8 sums the gradients of weights over blocks of 32 tokens
# What rows have besides plugins and degrees. The first value is the neutral one.
FURTHER: Mapping[str, tuple[str, ...]] = {
    "train.accumulation": ("1", "2", "8"),
    "train.grad_clip": ("default", "0.05"),
    "model.tie_embeddings": ("false", "true"),
    "model.dropout": ("0.0", "0.1"),
}


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a cell.

    Args:
        outcome: proven, refused, or failed.
        detail: The reason of what is not proven.
    """

    outcome: str
    detail: str = ""


# Proven by tests of their own, and in no recorded row yet: a matrix is recorded whole, `--pending` goes on with these.
PENDING = [
    "sharding.context_parallel",
    "mesh.cp",
    "sharding.expert_parallel",
    "mesh.ep",
    "communication.compression",
    "communication.local_sgd",
    "communication.async_tensor_parallel",
    "communication.process_groups",
    "communication.replicas",
    "mesh.replica",
    "mesh.island",
]


def lift_pending() -> None:
    """Let rows have the options that are pending, from now on in this process and before any row is made."""
    PENDING.clear()


@functools.cache  # what is installed stays as it is while a process runs
def options() -> dict[str, tuple[str, ...]]:
    """Return every option of the plugins that are installed here, but for those pending, and what rows have besides."""
    pending = tuple(key for prefix in PENDING for key in (prefix, f"{prefix}."))
    installed = installed_options()
    known = {key: values for key, values in installed.items() if not f"{key}.".startswith(pending)}
    # An axis of a pending plugin may be another's too.
    owned = [axis for axis, keys in owners_of(installed).items() if not known.keys().isdisjoint(keys)]
    return {**known, **{axis: installed[axis] for axis in owned}, **FURTHER}


def owners() -> dict[str, tuple[str, ...]]:
    """Return the plugins that own each axis of the options, but for those pending."""
    known = options()
    return {axis: tuple(key for key in keys if key in known) for axis, keys in owners_of(known).items()}


@functools.cache
def axes() -> tuple[str, ...]:
    """Return the axes whose degrees multiply to the ranks of a row."""
    return multiplied_axes(options())


def num_ranks(row: Mapping[str, str]) -> int:
    """Return the ranks that prove a row: of several groups of ranks those of one."""
    return math.prod(int(row.get(axis, "1")) for axis in axes())


def manifest_of(row: Mapping[str, str]) -> str:
    """Return a row as the text of a manifest; `train.accumulation` is the number of micro-batches of a rank."""
    degrees = {key.removeprefix("mesh."): int(value) for key, value in row.items() if key.startswith("mesh.")}
    readers = math.prod(degrees.get(axis, 1) for axis in _batch_axes())
    # Islands of unequal size read as many samples as they are given parts of a batch.
    if row.get("communication.local_sgd.samples", "off") not in ("off", "default"):
        readers = readers // degrees["island"] * sum(json.loads(row["communication.local_sgd.samples"]))
    clip = row.get("train.grad_clip", "default")
    # Two stages a rank at most.
    layers = 2 * degrees.get("pp", 1)
    accumulation = int(row.get("train.accumulation", "1"))
    dim, more = _whole_blocks(row, degrees.get("tp", 1))
    has_experts = row.get("sharding.expert_parallel") == "on"
    model, experts = ("moe", f", num_experts = 4, expert_dim = {2 * dim}") if has_experts else ("llama", "")
    # Islands first meet within the steps of a run.
    num_steps = 200 if row.get("communication.local_sgd") == "on" else 2
    return "\n".join(
        [
            "composer3d = 1",
            tables_of({key: value for key, value in {**row, **more}.items() if not _is_absent(key, value)}),
            f'model.use = "composer3d.models:{model}"',
            f"model.args = {{ dim = {dim}, num_layers = {layers}, num_heads = 4, num_kv_heads = 4, "
            f"ffn_dim = {2 * dim}, tie_embeddings = {row.get('model.tie_embeddings', 'false')}, "
            f"dropout = {row.get('model.dropout', '0.0')}{experts} }}",
            f'data = {{ use = "synthetic", seq_len = {SEQ_LEN}, vocab_size = {_vocab_size(row, dim)} }}',
            f"train = {{ steps = {num_steps}, microbatch = 1, global_batch = {accumulation * readers}"
            + (f", grad_clip = {clip}" if clip != "default" else "")
            + " }",
            'run.device = "cpu"',
            "",
        ]
    )


def _is_absent(key: str, value: str) -> bool:
    """Return whether an option is an axis that its plugin declares, which is not there without it."""
    return key.startswith("mesh.") and value == "1" and key.removeprefix("mesh.") not in (axis.name for axis in AXES)


@functools.cache
def _batch_axes() -> tuple[str, ...]:
    """Return the axes whose ranks, groups or islands share a global batch, those of third-party plugins too."""
    catalogue = Catalogue.installed()
    found = [*AXES]
    for name in catalogue.names():
        with contextlib.suppress(PluginError):  # without its extra it is in no row
            info = info_of(catalogue.load(name))
            found += info.axes if info is not None else ()
    return tuple(axis.name for axis in found if axis.role in (Role.BATCH, Role.REPLICA, Role.INDEPENDENT))


def _whole_blocks(row: Mapping[str, str], tp: int) -> tuple[int, dict[str, str]]:
    """Return a width of the model whose shares are whole blocks, and options that leave out what has larger ones."""
    if row.get("precision.mxfp8") == "on":
        # A block of 32 is what mxfp8 converts at all; narrower shares it refuses.
        return 32 * tp, {}
    is_stored = row.get("precision.qlora") == "on" and row.get("precision.qlora.quantize") != '"none"'
    if tp == 1 or not is_stored:
        return 32, {}
    if row.get("precision.qlora.scale_block") == "1":
        return 64 * tp, {}
    # Of the blocks of 64, as many share a factor as a row of a small model has: rows that are cut stay as they are.
    rows = "experts" if row.get("sharding.expert_parallel") == "on" else "w2"
    return 64, {"precision.qlora.keep": f'["layers.*.attention.wo", "layers.*.feed_forward.{rows}"]'}


def _vocab_size(row: Mapping[str, str], dim: int) -> int:
    """Return one that gives low_bit_optimizer something to do, which leaves parameters below 4096 elements alone."""
    keeps_small = (
        row.get("precision.low_bit_optimizer") == "on"
        and row.get("precision.low_bit_optimizer.min_numel", "default") == "default"
    )
    return max(dim, 4096 // dim) if keeps_small else dim


def say_row(row: Mapping[str, str]) -> str:
    """Return the choices of a row that are not neutral, in one line."""
    return " ".join(f"{key}={value}" for key, value in row.items() if value not in ("off", "default", "1", "on"))


def check(row: Mapping[str, str]) -> tuple[str, ...]:
    """Return what `composer3d check` says against a row, a reason for each problem: its row, or its text."""
    for excluded in EXCLUDED:
        if excluded.items() <= row.items():
            return ("excluded",)
    return _check(json.dumps(dict(row)))


@functools.lru_cache(maxsize=65536)
def _check(text: str) -> tuple[str, ...]:
    from composer3d.checking.check import device_of, inspect, open_manifest

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cell.toml"
        path.write_text(manifest_of(json.loads(text)))
        try:
            opened = open_manifest(str(path), ())
            found = inspect(opened, world_size=None, rank=0, device=device_of(opened.manifest))
            problems = [problem for problem in found.problems if problem.severity == "error"]
        except ManifestError as error:
            problems = list(error.problems)
    return tuple(dict.fromkeys(reason_of(problem.message) for problem in problems))


def reason_of(message: str) -> str:
    """Return the permitted refusal that a message is, or the message."""
    known = (permitted.row for permitted in PERMITTED if re.search(permitted.message, message))
    return next(known, re.sub(r" \(\S+:\d+\)|\d+", "", message))


def judge(row: Mapping[str, str]) -> Verdict:
    """Check a row, and prove it if it is not refused; one cell."""
    reasons = check(row)
    if reasons:
        permitted = {permitted.row for permitted in PERMITTED} | {"excluded"}
        other = [reason for reason in reasons if reason not in permitted]
        return (
            Verdict(outcome="failed", detail=f"refused: {other[0]}")
            if other
            else Verdict(outcome="refused", detail=reasons[0])
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cell.toml"
        path.write_text(manifest_of(row))
        try:
            return _prove(path)
        except (RankError, ComposerError) as error:
            return Verdict(outcome="failed", detail=str(error))


def _prove(path: Path) -> Verdict:
    from composer3d.composition.preparing import layout_of
    from composer3d.hooks import Hooks
    from composer3d.mesh import Role
    from composer3d.verification import prove, read_manifest, subject_of

    overrides = ("data.workers=0",)
    manifest = read_manifest(str(path), overrides)
    layout = layout_of(manifest, Hooks(manifest.plugins), world_size=None)
    train = manifest.tables["train"]
    verdict = prove(
        functools.partial(subject_of, str(path), overrides, None, "cpu", scratch=path.parent),
        layout=layout,
        launch=_launch,
        num_steps=2,
        microbatches=(train.global_batch or 1) // layout.degree(Role.BATCH),
        grad_clip=train.grad_clip,
    )
    if verdict.ok:
        return Verdict(outcome="proven", detail="; ".join(verdict.notes))
    return Verdict(outcome="failed", detail="\n".join([*verdict.failures, *verdict.diagnosis]))


def _launch(function: Any, args: Sequence[Any], num_ranks: int) -> list[Any]:
    return run_ranks(function, num_ranks, *args, timeout_s=TIMEOUT_S)
