"""Bytes of activations of a rank by cp: planned for long sequences, and counted of tensors on CPU for shorter ones.

One micro-batch of one sequence through a Llama, parameters sharded by fsdp2. Planned are the activations of the rank
that holds most. Counted are the storages that live when the loss is there, besides those that lived before the forward,
by weak references to what operators make: exact, and without the allocator. `ratio` is activations * cp over those of
cp = 1; 1 is what a rank would hold if everything were sharded.

Usage: python benchmarks/context_memory.py [--counted] [--method gather] [--json]
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import conditions, note, say_rows

LENGTHS = (4096, 8192, 16384, 32768, 65536)
COUNTED_LENGTHS = (4096, 8192)
DEGREES = (1, 2, 4, 8)
COUNTED_DEGREES = (1, 2, 4)

MANIFEST = """composer3d = 1
[mesh]
cp = {degree}
dp_shard = 1
[model]
use = "composer3d.models:llama"
args = {{ dim = 256, num_layers = 4, num_heads = 8, num_kv_heads = {kv_heads}, vocab_size = 512, max_seq_len = 65536 }}
[data]
use = "synthetic"
seq_len = {length}
[train]
steps = 1
[sharding.fsdp2]
[sharding.context_parallel]
method = "{method}"
"""


def manifest_of(folder: Path, *, length: int, degree: int, method: str) -> Path:
    """Write a manifest; without context parallelism where one rank has the whole sequence."""
    text = MANIFEST.format(length=length, degree=degree, method=method, kv_heads=8 if method == "ulysses" else 4)
    if degree == 1:
        text = text[: text.index("[sharding.context_parallel]")]
    path = folder / f"{length}_{degree}.toml"
    path.write_text(text)
    return path


def planned(path: Path) -> int:
    """Return the planned bytes of activations of the rank that holds most."""
    import composer3d

    ranks = composer3d.plan(path).to_json()["ranks"]
    return max(int(rank["memory"]["activations"]) for rank in ranks)


def counted(path: Path, degree: int) -> int:
    """Return the bytes of activations that a rank's tensors hold after the forward, of the rank that holds most."""
    from composer3d.testing import run_ranks

    # A loop of one's own has the tables of plugins and axes alone.
    run = tomllib.loads(path.read_text(encoding="utf-8"))
    text = path.read_text(encoding="utf-8")
    start, end = text.index("[model]"), text.index("[sharding.fsdp2]")
    path.write_text(text[:start] + text[end:], encoding="utf-8")
    return max(
        run_ranks(_live_after_forward, degree, path, run["model"]["args"], run["data"]["seq_len"], timeout_s=300.0)
    )


def _live_after_forward(path: Path, args: dict[str, Any], length: int) -> int:
    import torch

    import composer3d
    from composer3d import torch_compat
    from composer3d.models.llama import llama

    sizes: dict[int, Any] = {}

    def observe(operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(torch_compat.is_wrapper_subclass(cls) for cls in types):
            return NotImplemented
        result = operator(*args, **kwargs)
        for leaf in torch_compat.tree_leaves(result):
            # Tensors on meta, which stand for global shapes, say that they have bytes.
            if isinstance(leaf, torch.Tensor) and not leaf.is_meta:
                storage = leaf.untyped_storage()
                sizes[storage.data_ptr()] = torch.multiprocessing.reductions.StorageWeakRef(storage), storage.nbytes()
        return result

    tokens = torch.randint(0, args["vocab_size"], (1, length))
    live: list[int] = []

    def loss_fn(logits: Any, target: Any) -> Any:
        loss = _loss(logits, target)
        live.append(sum(size for reference, size in sizes.values() if not reference.expired()))
        return loss

    # A loop that calls the model itself would be given the whole sequence's logits.
    run = composer3d.compose(lambda: llama(**args), path, loss_fn=loss_fn)
    with run.step(0), torch_compat.dispatch_mode(observe, compiles=False):
        run.forward_backward(tokens, target=tokens)
    run.close()
    return live[0]


def _loss(logits: Any, target: Any) -> Any:
    import torch.nn.functional as F

    return F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="sum")


def rows(*, is_counted: bool, method: str) -> list[dict[str, Any]]:
    """Measure every length at every degree."""
    found = []
    lengths, degrees = (COUNTED_LENGTHS, COUNTED_DEGREES) if is_counted else (LENGTHS, DEGREES)
    with tempfile.TemporaryDirectory() as folder:
        for length in lengths:
            by_degree = {}
            for degree in degrees:
                path = manifest_of(Path(folder), length=length, degree=degree, method=method)
                by_degree[degree] = counted(path, degree) if is_counted else planned(path)
                note(f"{length} positions, cp {degree}: {by_degree[degree]:,} bytes")
            found += [
                {
                    "seq_len": length,
                    "cp": degree,
                    "method": method,
                    "kind": "counted" if is_counted else "planned",
                    "activation_bytes": size,
                    "ratio": round(size * degree / by_degree[1], 4),
                }
                for degree, size in by_degree.items()
            ]
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, print."""
    parser = argparse.ArgumentParser(description="Activations of a rank by the ranks that share a sequence.")
    parser.add_argument("--counted", action="store_true", help="count on CPU instead of planning")
    parser.add_argument("--method", default="gather", help="of attention; default gather")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    measured_under = conditions()
    say_rows(rows(is_counted=options.counted, method=options.method), measured_under, as_json=options.json)


if __name__ == "__main__":
    main()
