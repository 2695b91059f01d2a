"""TOML of an imported manifest: tables in the order of the documents, with a comment for every key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer3d.importing.translation import Setting, Translation
from composer3d.manifest import FILL_IN, inline

__all__ = ["fill_in", "write_manifest"]

_ORDER: tuple[str, ...] = (
    "run",
    "mesh",
    "model",
    "data",
    "train",
    "optimizer",
    "lr_schedule",
    "ema",
    "checkpoint",
    "evaluation",
)
_ORDER += ("stability", "sharding", "scheduling", "precision", "communication", "profiling")
_FAMILIES = _ORDER[_ORDER.index("sharding") :]
_WIDEST = 116


def fill_in(translation: Translation) -> None:
    """Complete a manifest of `composer3d run`: its model, its data and its steps never go by default."""
    if not translation.is_run:
        return
    options, settings = translation.options, translation.settings
    if options.model is not None:
        for path in [path for path in settings if path.split(".")[0] == "model" and path != "model.blocks"]:
            del settings[path]
        key = "use" if ":" in options.model else "hf"
        translation.put(f"model.{key}", options.model, reason="from --model")
    if not settings.keys() & {"model.use", "model.hf"}:
        translation.put("model.use", f"{FILL_IN}:model", reason="the source names no model that could be built here")
    if options.data is not None:
        translation.put("data.use", options.data, reason="from --data")
    if not settings.keys() & {"data.use", "data.blend"}:
        translation.put("data.use", f"{FILL_IN}:data", reason="the source names no data that could be read here")
    steps = (options.arguments or {}).get("max_steps")
    if "train.steps" not in settings and isinstance(steps, int) and steps > 0:
        translation.put("train.steps", steps, reason="max_steps of the training arguments")
    if "train.steps" not in settings:
        translation.put("train.steps", f"{FILL_IN}:steps", reason="the source does not say how many")


def write_manifest(translation: Translation) -> str:
    """Return the manifest as TOML."""
    table = translation.table
    target = "composer3d run" if translation.is_run else "composer3d.compose(), in a loop of your own"
    lines = [f"# Imported from {translation.tree.file}, {table.title}; for {target}.", "composer3d = 1"]
    kept = {path: setting for path, setting in translation.settings.items() if translation.is_kept(path)}
    tables = _by_table(kept)
    for name in sorted(tables, key=lambda name: (_ORDER.index(name.split(".")[0]), name.count("."))):
        lines += ["", *_header(name, tables[name])]
        for key, setting in tables[name].items():
            if key:
                lines += _entry(key, setting)
    own = {path: setting for path, setting in translation.settings.items() if path not in kept}
    return "\n".join([*lines, *_loop(own, translation.loop)]) + "\n"


def _by_table(settings: Mapping[str, Setting]) -> dict[str, dict[str, Setting]]:
    tables: dict[str, dict[str, Setting]] = {}
    for path, setting in settings.items():
        parts = path.split(".")
        depth = 2 if parts[0] in _FAMILIES else 1
        tables.setdefault(".".join(parts[:depth]), {})[".".join(parts[depth:])] = setting
    return tables


def _header(name: str, keys: Mapping[str, Setting]) -> list[str]:
    header = f"[{name}]"
    return _commented(header, keys[""].reason) if "" in keys else [header]


def _entry(key: str, setting: Setting) -> list[str]:
    return _commented(f"{key} = {inline(setting.value)}", setting.reason)


def _commented(line: str, reason: str) -> list[str]:
    reason = inline(reason)[1:-1].replace('\\"', '"').replace("\\\\", "\\")  # controls stay escaped
    if not reason:
        return [line]
    if len(line) + len(reason) + 4 <= _WIDEST:
        return [f"{line}  # {reason}"]
    return [f"# {reason}", line]


def _loop(own: Mapping[str, Setting], code: list[str]) -> list[str]:
    """Return what the loop does itself, as comments: lines of code, then keys of a run."""
    if not own and not code:
        return []
    lines = ["", "# The loop's own lines:"]
    lines += [f"#   {line}" for line in [*_optimizer_lines(own), *code]]
    rest = {path: setting for path, setting in own.items() if path.split(".")[0] not in ("optimizer", "lr_schedule")}
    rest.pop("train.grad_clip", None)
    if rest:
        lines.append("# In a manifest of `composer3d run` these would be:")
        for path, setting in rest.items():
            lines.append(f"#   {path} = {inline(setting.value)}  # {setting.reason}")
    return lines


_CLASSES = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}


def _optimizer_lines(own: Mapping[str, Setting]) -> list[str]:
    given: dict[str, Any] = {
        path.removeprefix("optimizer."): item.value for path, item in own.items() if path.startswith("optimizer.")
    }
    lines = []
    name = given.pop("use", None)
    if isinstance(name, str):
        cls = _CLASSES.get(name, name.replace(":", "."))
        options = {key: value for key, value in given.items() if key not in ("groups", "args", "no_decay")}
        options |= given.get("args", {})
        shown = [f"{key}={tuple(value) if isinstance(value, list) else value!r}" for key, value in options.items()]
        lines.append(f"optimizer = run.optimizer({', '.join([cls, *shown])})")
    clip = own.get("train.grad_clip")
    if clip is not None and clip.value != float("inf"):
        lines.append(f"run.clip_grad_norm_({clip.value})  # {clip.reason}")
    return lines
