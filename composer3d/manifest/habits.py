"""Keys of other systems, and the manifest's own for the same thing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from composer3d.errors import PluginError, Problem
from composer3d.registry import Catalogue, info_of

__all__ = ["explained"]

_STEPS = "train.steps counts optimizer steps, and nothing counts epochs"
_BATCH = "train.microbatch is sequences per forward and rank, train.global_batch those of a step over all ranks"
_CLIP = "write train.grad_clip"
_ACCUMULATE = "write train.accumulate: micro-batches a step on each rank; or train.global_batch, sequences of all ranks"
_DTYPES = "dtypes are plugins of the family precision: composer3d plugins lists them"
_ANYWHERE = {
    "lr": "write optimizer.lr",
    "learning_rate": "write optimizer.lr",
    "weight_decay": "write optimizer.weight_decay",
    "betas": "write optimizer.betas",
    "warmup": "write lr_schedule.warmup",
    "warmup_steps": "write lr_schedule.warmup",
    "warmup_ratio": "write lr_schedule.warmup",
    "scheduler": "write lr_schedule.use",
    "lr_scheduler": "write lr_schedule.use",
    "batch_size": _BATCH,
    "train_batch_size": _BATCH,
    "micro_batch_size": "write train.microbatch",
    "micro_batch": "write train.microbatch",
    "per_device_train_batch_size": "write train.microbatch",
    "global_batch_size": "write train.global_batch",
    "accumulate": "write train.accumulate",
    "accumulation_steps": _ACCUMULATE,
    "gradient_accumulation_steps": _ACCUMULATE,
    "epochs": _STEPS,
    "num_epochs": _STEPS,
    "num_train_epochs": _STEPS,
    "max_steps": "write train.steps",
    "num_steps": "write train.steps",
    "steps": "write train.steps",
    "clip_grad": _CLIP,
    "max_grad_norm": _CLIP,
    "gradient_clipping": _CLIP,
    "seed": "write train.seed",
    "output_dir": "write run.output",
    "save_steps": "write checkpoint.every",
    "save_every": "write checkpoint.every",
    "eval_steps": "write evaluation.every",
    "eval_every": "write evaluation.every",
    "log_every": "write run.log_every",
    "logging_steps": "write run.log_every",
    "device": "write run.device",
    "dtype": _DTYPES,
    "bf16": _DTYPES,
    "fp16": _DTYPES,
    "amp": _DTYPES,
    "mixed_precision": _DTYPES,
    "block_size": "write data.seq_len",
    "context_length": "write data.seq_len",
    "max_length": "write data.seq_len",
    "max_seq_len": "write data.seq_len",
    "seq_length": "write data.seq_len",
    "dataset": "write data.use",
}
_IN_TABLE = {
    "mesh": {
        "dp": "write dp_shard (parameters sharded) or dp_replicate (parameters replicated)",
        "data": "write dp_shard or dp_replicate",
        "data_parallel": "write dp_shard or dp_replicate",
        "fsdp": "write dp_shard",
        "mp": "write tp",
        "model": "write tp",
        "tensor": "write tp",
        "pipeline": "write pp",
        "pipeline_parallel": "write pp",
        "sp": "write cp; sequence parallelism beside tensor parallelism is an option of that plugin",
        "context": "write cp",
        "expert": "write ep",
        "world_size": "the degrees multiply to it; an axis that is -1 takes the ranks that are left",
    },
    "optimizer": {"learning_rate": "write lr", "name": "write use", "type": "write use", "beta1": "write betas"},
    "model": {"name": "write use", "path": "write use", "class": "write use", "type": "write use"},
    "data": {"path": "write use", "name": "write use", "file": "write use", "files": "write use"},
    "lr_schedule": {
        "type": "write use",
        "min_lr": "write min_ratio, a fraction of optimizer.lr",
        "warmup_steps": "write warmup",
        "warmup_ratio": "write warmup",
    },
    "checkpoint": {"interval": "write every", "steps": "write every", "dir": "checkpoints lie in run.output"},
    "run": {"name": "write output", "dir": "write output"},
    "optimizer.groups": {
        "params": "write match",
        "name": "write match",
        "names": "write match",
        "pattern": "write match",
    },
}
_VALUES = {("run", "device", "gpu"): 'write "cuda"', ("run", "device", "nvidia"): 'write "cuda"'}


def explained(problem: Problem, *, value: object, tables: Collection[str]) -> Problem:
    """Return a problem of an unknown key or table with a better hint, if the intended name is recognised.

    Args:
        problem: Of a manifest.
        value: Value in the manifest.
        tables: Names of all top-level tables.
    """
    if problem.message.startswith("unknown table "):
        name = (problem.table or "").strip('"')
        hint = _ANYWHERE.get(name)
        return replace(problem, hint=hint) if hint else problem
    habit = _VALUES.get((problem.table or "", problem.key or "", value)) if isinstance(value, str) else None
    if habit is not None:
        return replace(problem, hint=habit)
    if not problem.message.startswith("unknown key ") or problem.key is None:
        return problem
    key, table = problem.key, problem.table or ""
    if key in tables and isinstance(value, dict):
        return replace(problem, hint=_dotted_hint(key, table, value))
    hint = _IN_TABLE.get(table.partition("[")[0], {}).get(key) or _axis_hint(key, table) or _ANYWHERE.get(key)
    if hint is None and table == "model":
        hint = f"arguments of the model stand in model.args: write model.args.{key}"
    if hint is None or hint == f"write {table}.{key}":  # the word is right; tables of a run are not a loop's
        return problem
    if hint.startswith(f"write {table}.") and (problem.hint or "").startswith("did you mean"):
        return problem
    return replace(problem, hint=hint.replace(f"write {table}.", "write ") if table != "model" else hint)


def _axis_hint(key: str, table: str) -> str | None:
    """Return what to write for a plugin's name among the axes: the axis that the plugin owns."""
    catalogue = Catalogue.installed()
    if table != "mesh" or key not in catalogue.names():
        return None
    try:
        info = info_of(catalogue.load(key))
    except PluginError:
        return None
    return f"write {info.owns[0]}" if info is not None and info.owns else None


def _dotted_hint(key: str, table: str, value: dict[str, object]) -> str:
    inner = next(iter(value), "...")
    return (
        f"below the header [{table}] a line {key}.{inner} belongs to it; write it above the first header, or under "
        f"[{key}]"
    )
