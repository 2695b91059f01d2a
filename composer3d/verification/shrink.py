"""Reduction of a manifest to one machine, in the same layout: every axis above 1 stays above 1."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.errors import ArgumentError
from composer3d.mesh import Layout, Role

if TYPE_CHECKING:
    from composer3d import Manifest

__all__ = ["Shrunk", "reduce_degrees", "reduce_sizes", "shrink"]


_VOCABULARY = 512
# A vocabulary above the first is reduced to a little above the second, in steps of the third and of all degrees, so
# that it divides, or does not, as before: the products with its rows would take most of the time.
_MANY_TOKENS, _FEW_TOKENS, _STEP = 4096, 1024, 128
# Keys of Hugging Face's configurations that are sizes; of the other whole numbers many are not.
_CONFIGURED = frozenset(
    "d_ff d_kv d_model ffn_dim head_dim hidden_size intermediate_size moe_intermediate_size n_embd n_head n_inner "
    "num_attention_heads num_heads num_key_value_heads vocab_size".split()
)


@dataclass(frozen=True, kw_only=True)
class Shrunk:
    """Reduction of a manifest.

    Args:
        overrides: `table.key=value`, as given to `--set`.
        reduced: Reduced quantities, one line each.
    """

    overrides: tuple[str, ...]
    reduced: tuple[str, ...]


def reduce_degrees(layout: Layout, max_ranks: int) -> dict[str, int]:
    """Return degrees whose product is at most `max_ranks`; each that is above 1 stays above 1.

    The largest degree is reduced first, to its largest divisor, and a prime one to 2.

    Args:
        layout: Axes and degrees of the manifest.
        max_ranks: Most ranks that the machine runs.

    Raises:
        ArgumentError: Even 2 ranks on every axis exceed `max_ranks`.

    >>> from composer3d.mesh import AXES, resolve
    >>> stated = dict.fromkeys((axis.name for axis in AXES), 1) | {"pp": 4, "dp_shard": 16, "tp": 8}
    >>> reduce_degrees(resolve(stated, axes=AXES, world_size=None, default=None), 8)
    {'pp': 2, 'dp_shard': 2, 'tp': 2}
    """
    dense = {axis.name: layout.degrees[axis.name] for axis in layout.dense_axes}
    degrees = {name: degree for name, degree in dense.items() if degree > 1}
    smallest = 2 ** len(degrees)
    if smallest > max_ranks:
        names = ", ".join(degrees)
        raise ArgumentError(
            "max_ranks",
            f"{names} {'are all' if len(degrees) > 1 else 'is'} above 1, so the smallest world of this shape has "
            f"{smallest} ranks; allow as many, or set one of the axes to 1 by {{overrides}}, and verify several times",
            value=max_ranks,
        )
    size = layout.world_size
    while size > max_ranks:
        name = max(degrees, key=lambda axis: degrees[axis])
        divisors = [d for d in range(2, degrees[name] // 2 + 1) if degrees[name] % d == 0]
        smaller = divisors[-1] if divisors else 2
        size = size // degrees[name] * smaller
        degrees[name] = smaller
    return degrees


def shrink(manifest: Manifest, layout: Layout, *, max_ranks: int, max_dim: int | None) -> Shrunk:
    """Return the overrides that make a manifest fit a machine.

    Args:
        manifest: With the runner's tables.
        layout: Its axes and degrees.
        max_ranks: Most ranks that the machine runs.
        max_dim: Model sizes above it are halved until they are not; None leaves them.
    """
    overrides: list[str] = []
    reduced: list[str] = []
    degrees = reduce_degrees(layout, max_ranks)
    for name, degree in degrees.items():
        # Stated even where it stays: an open degree would take the ranks of the run.
        overrides.append(f"mesh.{name}={degree}")
        if degree != layout.degrees[name]:
            reduced.append(f"{name}: {layout.degrees[name]} -> {degree} ranks")
    for axis in layout.names(Role.EXPERT):
        carved = replace(layout, degrees={**layout.degrees, **degrees}).beside_experts
        degree = layout.degrees[axis]
        if degree > 1 and carved % degree:
            overrides.append(f"mesh.{axis}={carved}")
            reduced.append(f"{axis}: {degree} -> {carved} ranks")
    if reduced:
        _shrink_batch(manifest, layout, degrees, overrides, reduced)
    sizes = reduce_vocabulary(manifest, degrees) if max_dim is None else reduce_sizes(manifest, max_dim, degrees)
    if sizes:
        for key, (old, new) in sizes.items():
            overrides.append(f"{key}={new}")
            reduced.append(f"{key}: {old} -> {new}")
        table = manifest.tables["model"]
        resized = any(override.startswith("model.") for override in overrides)
        if table.hf is not None and table.weights != "init" and resized:
            overrides.append("model.weights=init")  # those of the folder have other sizes
            reduced.append("model.weights: new ones of these sizes")
    return Shrunk(overrides=tuple(overrides), reduced=tuple(reduced))


def _shrink_batch(
    manifest: Manifest, layout: Layout, degrees: Mapping[str, int], overrides: list[str], reduced: list[str]
) -> None:
    """Keep the batch per rank, except for more micro-batches than fill a pipeline of the new depth."""
    train = manifest.train
    if train.batch_key is None:
        return
    size = train.microbatch or 1
    whole, before = train.batch_over(layout.degree(Role.BATCH)), train.num_microbatches(layout.degree(Role.BATCH))
    ranks = 1
    for name in layout.names(Role.BATCH):
        ranks *= degrees.get(name, 1)
    stages = max([degrees.get(name, 1) for name in layout.names(Role.STAGE)], default=1)
    number = max(1, min(before, max(2, 4 * stages if stages > 1 else 2)))
    if train.accumulate is not None:
        overrides.append(f"train.accumulate={number}")
        if number != train.accumulate:
            reduced.append(f"train.accumulate: {train.accumulate} -> {number} micro-batches")
        return
    overrides.append(f"train.global_batch={number * size * ranks}")
    if getattr(train, "batch_ramp", None) is not None:
        overrides.append("train.batch_ramp=false")
    reduced.append(f"train.global_batch: {whole} -> {number * size * ranks} sequences")


def reduce_sizes(manifest: Manifest, max_dim: int, degrees: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return (old, new) of every size that is halved, by its key in the manifest.

    Sizes are the factory's whole-number arguments above `max_dim`, but for counts of layers. Numbers of heads are
    halved too while a head would be narrower than 8, and stay a multiple of the tensor degree. Sequences become as
    short.

    Args:
        manifest: With the runner's tables.
        max_dim: The largest size allowed.
        degrees: Reduced degrees, by axis.
    """
    table, data = manifest.tables["model"], manifest.tables["data"]
    result: dict[str, tuple[int, int]] = {}
    seq_len = _halved(data.seq_len, max_dim)
    if seq_len != data.seq_len:
        result["data.seq_len"] = (data.seq_len, seq_len)
    stated = _whole(table.args)
    defaults = _configured(manifest) if table.hf is not None else _defaults(table.reference, manifest.document.folder)
    sizes: dict[str, int] = {**defaults, **stated}
    narrow = {
        name: _halved(value, max_dim) for name, value in sizes.items() if "layer" not in name and "vocab" not in name
    }
    shrunk = max([sizes[name] // narrow[name] for name in narrow], default=1)
    tensor = degrees.get("tp", 1)
    width = next((narrow[name] for name in ("dim", "hidden_size", "d_model", "n_embd") if name in narrow), None)
    heads = [name for name in narrow if "head" in name and name in narrow]
    factor = 1
    most = max([sizes[name] for name in heads if "dim" not in name], default=0)
    while width and most // factor > tensor and width // max(1, most // factor) < 8 and factor < shrunk:
        if most // factor % 2:  # a number of heads that cannot be halved stays, or it would not divide the width
            break
        factor *= 2
    for name in heads:
        if "dim" not in name:
            narrow[name] = max(min(sizes[name], tensor), sizes[name] // factor)
    if data.kind == "synthetic":
        # Tokens are made up, so there may be fewer; tokens of text are what they are. Unstated, they are few already.
        if (data.vocab_size or 0) > _VOCABULARY:
            result["data.vocab_size"] = (data.vocab_size, _VOCABULARY)
        narrow |= {name: _VOCABULARY for name, value in sizes.items() if "vocab" in name and value > _VOCABULARY}
    return result | {
        f"model.args.{name}": (sizes[name], new)
        for name, new in narrow.items()
        if new != sizes[name] and (table.hf is not None or name in stated or name not in ("max_seq_len", "vocab_size"))
    }


def _whole(arguments: Mapping[str, Any]) -> dict[str, int]:
    return {name: value for name, value in arguments.items() if isinstance(value, int) and not isinstance(value, bool)}


def _defaults(reference: str, folder: Path) -> dict[str, int]:
    """Return the factory's own numbers."""
    from composer3d.manifest import resolve_reference

    function: Any = resolve_reference(reference, folder)
    parameters = inspect.signature(function).parameters.items()
    return _whole({name: parameter.default for name, parameter in parameters})


def _configured(manifest: Manifest, *, everything: bool = False) -> dict[str, int]:
    """Return the widths, heads and vocabulary of a Hugging Face model's configuration, or all its whole numbers."""
    from composer3d.huggingface import CONFIG, find_folder

    path = find_folder(str(manifest.tables["model"].hf), beside=manifest.document.folder) / CONFIG
    configured = _whole(json.loads(path.read_text(encoding="utf-8")))
    return {name: value for name, value in configured.items() if everything or name in _CONFIGURED}


def reduce_vocabulary(manifest: Manifest, degrees: Mapping[str, int]) -> dict[str, tuple[int, int]]:
    """Return (old, new) of a large vocabulary by its keys in the manifest, where tokens are made up.

    Args:
        manifest: With the runner's tables.
        degrees: Reduced ones, by axis.
    """
    table, data = manifest.tables["model"], manifest.tables["data"]
    if data.kind != "synthetic" or (table.hf is not None and table.weights != "init"):
        return {}
    defaults = (
        _configured(manifest, everything=True) if table.hf else _defaults(table.reference, manifest.document.folder)
    )
    sizes = {**defaults, **_whole(table.args)}
    large = {f"model.args.{name}": value for name, value in sizes.items() if "vocab" in name and value > _MANY_TOKENS}
    if (data.vocab_size or 0) > _MANY_TOKENS:
        large["data.vocab_size"] = data.vocab_size
    step = math.lcm(_STEP, *degrees.values())
    less = (min(large.values(), default=_FEW_TOKENS) - _FEW_TOKENS) // step * step
    # Tokens of a meaning of their own must stay among the others.
    tokens = [value for name, value in sizes.items() if "pad" in name or name.endswith(("_id", "_idx", "_index"))]
    kept = max([*tokens, 0 if "data.vocab_size" in large else data.vocab_size or 0], default=0)
    found = {key: (value, value - less) for key, value in large.items()}
    return found if all(kept <= new for _, new in found.values()) else {}


def _halved(value: int, limit: int) -> int:
    while value > limit and value % 2 == 0:
        value //= 2
    return value
