"""Megatron-LM's indexed data sets and their blends, as Megatron-LM and GPT-NeoX name them."""

from __future__ import annotations

from collections.abc import Sequence

from composer3d.importing.translation import Translation

__all__ = ["held_out", "indexed", "weights_and_prefixes"]

_ORDER = "documents in the order of the file, another order of samples"


def weights_and_prefixes(items: Sequence[str]) -> tuple[list[float] | None, list[str]]:
    """Return the weights, where there are any, and the prefixes of `--data-path`: W P W P ..., or prefixes alone."""
    try:
        weights = [float(item) for item in items[::2]]
    except ValueError:
        return None, list(items)
    return (weights, list(items[1::2])) if len(items) > 1 and len(items) % 2 == 0 else (None, list(items))


def indexed(
    t: Translation, key: str, prefixes: Sequence[str], weights: Sequence[float] | None, *, of_weights: str | None = None
) -> None:
    """Carry the data sets of a key: one prefix, or a blend.

    Args:
        t: Of the file.
        key: Of the prefixes.
        prefixes: At least one.
        weights: One for each; None takes all samples of each once.
        of_weights: The key of the weights, where they have their own.
    """
    keys = (key, of_weights) if of_weights else (key,)
    unknown = [prefix for prefix in prefixes if "$" in prefix]
    if unknown:
        for each in keys:
            t.judge(each, "missing", f"{unknown[0]} is not known: say it with --arg, or name data with --data")
        return
    if len(prefixes) == 1:
        t.put("data.use", prefixes[0], key)
    elif weights is None:
        t.put("data.blend", [{"use": prefix} for prefix in prefixes], key)
    else:
        # A set of weight 0 gives no sample.
        pairs = [(prefix, weight) for prefix, weight in zip(prefixes, weights, strict=True) if weight]
        t.put("data.blend", [{"use": prefix, "weight": weight} for prefix, weight in pairs], *keys)
    for each in keys:
        t.judge(each, "carried", _ORDER, to="data.use" if len(prefixes) == 1 else "data.blend")


def held_out(t: Translation, key: str, default: str) -> None:
    """Hold out what is validated and tested on, by the parts of training, validation and test."""
    stated = t.get(key)
    text = default if stated is None else ",".join(map(str, stated)) if isinstance(stated, list) else str(stated)
    try:
        parts = [float(part) for part in text.replace("/", ",").split(",") if part.strip()]
    except ValueError:
        t.wrong(key, "must be parts of training, validation and test, as 969,30,1")
        return
    total = sum(parts)
    if not total or parts[0] <= 0:
        t.judge(key, "missing", "no part of the data is trained on")
        return
    fraction = round(1 - parts[0] / total, 9)
    reason = f"1 - {parts[0]:g}/{total:g}" + ("" if key in t else f", {t.table.title}'s default")
    t.put("data.evaluation_fraction", fraction, key, reason=reason)
    t.judge(
        key,
        "derived",
        f"{reason}: what it validates and tests on is held out; documents are divided there, sequences here",
        to="data.evaluation_fraction",
    )
