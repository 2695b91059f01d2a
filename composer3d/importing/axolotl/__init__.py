"""axolotl's YAML: the Trainer's rules under axolotl's names, and those of its own keys."""

from __future__ import annotations

from dataclasses import replace

from composer3d.importing.axolotl.chat_data import instructions
from composer3d.importing.axolotl.finetuning import adapters, layout, losses, low_precision, watched
from composer3d.importing.leaves import SourceTree
from composer3d.importing.trainer import RULES as TRAINER

__all__ = ["RULES", "normalised"]

RULES = {
    "axolotl_layout": layout,
    "axolotl_adapters": adapters,
    "axolotl_precision": low_precision,
    "axolotl_instructions": instructions,
    "axolotl_losses": losses,
    "axolotl_watched": watched,
    **TRAINER,
}
_NAMES = {
    "micro_batch_size": "per_device_train_batch_size",
    "num_epochs": "num_train_epochs",
    "optimizer": "optim",
    "lr_scheduler": "lr_scheduler_type",
    "base_model": "model_name_or_path",
    "eval_batch_size": "per_device_eval_batch_size",
    "bfloat16": "bf16",
    "float16": "fp16",
}


def normalised(tree: SourceTree) -> SourceTree:
    """Return the tree with the Trainer's names of what axolotl passes to it; reports have axolotl's."""
    leaves = dict.fromkeys(tree.leaves)
    for key, leaf in tree.leaves.items():
        name = _NAMES.get(leaf.path[0], leaf.path[0])
        if leaf.path[0] != name and name in tree.leaves:  # both spellings stand there
            name = leaf.path[0]
        leaves[key] = replace(leaf, path=(name, *leaf.path[1:]), written=leaf.shown)
    found = [leaf for leaf in leaves.values() if leaf is not None]
    return replace(tree, leaves={leaf.key: leaf for leaf in found})
