"""Arguments of transformers' Trainer: the rules of keys that decide together."""

from __future__ import annotations

from dataclasses import replace

from composer3d.importing.instruction_data import fine_tuned, named_data
from composer3d.importing.leaves import SourceTree, TreeBuilder
from composer3d.importing.relaxed_json import read_json
from composer3d.importing.trainer.hyperparameters import batch, optimizer, smoothing
from composer3d.importing.trainer.learning_rates import schedule
from composer3d.importing.trainer.options import precision, saving, sharded, switches

__all__ = ["RULES", "normalised"]

RULES = {
    "sharded": sharded,
    "batch": batch,
    "optimizer": optimizer,
    "schedule": schedule,
    "smoothing": smoothing,
    "precision": precision,
    "switches": switches,
    "saving": saving,
    "fine_tuned": fine_tuned,
    "instruction_data": named_data,
}

# Tables, which a command line has as JSON. Source: transformers, training_args.py (_VALID_DICT_FIELDS).
_TABLES = ("accelerator_config", "fsdp_config", "gradient_checkpointing_kwargs", "lr_scheduler_kwargs")


def normalised(tree: SourceTree) -> SourceTree:
    """Return the tree with tables that are written as a text of JSON read, as the Trainer reads them.

    Raises:
        UnreadableSource: Such a text is no JSON.
    """
    builder = TreeBuilder(file=tree.file)
    for leaf in tree.leaves.values():
        if leaf.key in _TABLES and isinstance(leaf.value, str) and leaf.value.lstrip().startswith("{"):
            inner = read_json("\n" * (leaf.line - 1) + leaf.value, tree.file)
            for found in inner.leaves.values():
                builder.add((leaf.key, *found.path), found.value, leaf.line, leaf.column)
        else:
            builder.leaves[leaf.key] = leaf
    return replace(tree, leaves=builder.leaves, problems=(*tree.problems, *builder.problems))
