"""Values that a file leaves to its trainer as "auto", from the arguments of transformers' Trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer3d.importing.translation import Translation

__all__ = ["DEFAULTS", "argument", "resolve"]

# transformers.TrainingArguments, version 5.
DEFAULTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "max_grad_norm": 1.0,
    "learning_rate": 5e-5,
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "warmup_steps": 0,
    "warmup_ratio": 0.0,
    "lr_scheduler_type": "linear",
    "lr_scheduler_kwargs": None,
    "optim": "adamw_torch",
    "seed": 42,
    "fp16": False,
    "bf16": False,
    "logging_steps": 500,
    "save_steps": 500,
}


def argument(arguments: Mapping[str, Any], name: str) -> Any:
    """Return a training argument, or its default."""
    value = arguments.get(name)
    return DEFAULTS.get(name) if value is None else value


def resolve(translation: Translation, key: str, name: str | None = None, *, value: Any = None) -> Any:
    """Return the value of a key; of "auto" what the Trainer puts there.

    Without training arguments an "auto" is refused, and None is returned.

    Args:
        translation: Of the file.
        key: Of the source.
        name: The argument; None where `value` is computed from several.
        value: What the Trainer computes; only with its arguments.
    """
    stated = translation.get(key)
    if stated != "auto":
        return stated
    arguments = translation.options.arguments
    if arguments is None:
        word = f"--{name}" if name else "the Trainer's arguments"
        translation.judge(key, "refused", f'"auto" is filled in by the trainer from {word}: give --training-args FILE')
        return None
    return argument(arguments, name) if name else value
