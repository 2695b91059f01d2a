"""GPT-NeoX's YAML: DeepSpeed's rules, and those of its own keys."""

from __future__ import annotations

from dataclasses import replace

from composer3d.errors import Problem
from composer3d.importing.deepspeed import RULES as DEEPSPEED
from composer3d.importing.documents_inside import documents_inside
from composer3d.importing.leaves import Leaf, SourceTree
from composer3d.importing.neox.arguments import (
    checkpoints,
    clipping,
    dtype,
    indexed_sets,
    layout,
    optimizer,
    precision,
    rates,
    recomputation,
    steps,
    watched,
)

__all__ = ["RULES", "normalised"]

RULES = {
    "neox_layout": layout,
    "neox_dtype": dtype,
    **{name: DEEPSPEED[name] for name in ("zero", "batch", "foreign_precision", "offload")},
    "precision": precision,
    "clipping": clipping,
    "neox_optimizer": optimizer,
    "neox_steps": steps,
    "neox_rates": rates,
    "neox_recomputation": recomputation,
    "neox_checkpoints": checkpoints,
    "indexed_sets": indexed_sets,
    "documents": documents_inside,
    "neox_watched": watched,
    **{name: DEEPSPEED[name] for name in ("watching", "compiled", "elasticity", "other_algorithms")},
    "layout": lambda t: t.judge_block("pipeline", "ignored-there", "pipe_parallel_size says it"),
    "optimizer": lambda t: t.judge_block("optimizer", "missing", "an argument that this optimizer is not given here"),
    "schedule": lambda t: t.judge_block("scheduler", "ignored-there", "lr_decay_style says it"),
}


def normalised(tree: SourceTree) -> SourceTree:
    """Return the tree with underscores in the first part of its keys, as GPT-NeoX reads them."""
    leaves: dict[str, Leaf] = {}
    problems = [*tree.problems]
    for leaf in tree.leaves.values():
        path = (leaf.path[0].replace("-", "_"), *leaf.path[1:])
        found = replace(leaf, path=path, written=leaf.shown)
        if found.key in leaves:
            first = leaves.pop(found.key)
            message = f"{leaf.shown} stands in line {first.line} too, as {first.shown}: GPT-NeoX has one key for both"
            hint = "remove one of them"
            problems.append(Problem(message=message, file=tree.file, line=leaf.line, column=leaf.column, hint=hint))
        leaves[found.key] = found
    return replace(tree, leaves=leaves, problems=tuple(problems))
