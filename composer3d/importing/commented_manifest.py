"""TOML of an imported manifest: tables in the order of the documents, with a comment for every key."""

from __future__ import annotations

from collections.abc import Mapping

from composer3d.importing.loop_lines import loop_lines
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
    return "\n".join([*lines, *_loop(own, kept, translation.loop)]) + "\n"


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


def _loop(own: Mapping[str, Setting], kept: Mapping[str, Setting], code: list[str]) -> list[str]:
    """Return what the loop does itself, as comments: lines of code, then keys of a run."""
    if not own and not code:
        return []
    lines = ["", "# The loop's own lines:"]
    lines += [f"#   {_in_one_line(line)}" for line in loop_lines({**kept, **own}, code)]
    rest = {path: setting for path, setting in own.items() if path.split(".")[0] not in ("optimizer", "lr_schedule")}
    rest.pop("train.grad_clip", None)
    if rest:
        lines.append("# In a manifest of `composer3d run` these would be:")
        for path, setting in rest.items():
            lines.append(f"#   {path} = {inline(setting.value)}  # {_in_one_line(setting.reason)}")
    return lines


def _in_one_line(text: str) -> str:
    """Return a text of the source as a comment may hold it."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)
