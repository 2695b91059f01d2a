"""`import_config`: a configuration of another system as a manifest, with a verdict for every key."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from composer3d.errors import ManifestError, Problem, did_you_mean
from composer3d.importing.commented_manifest import fill_in, write_manifest
from composer3d.importing.key_tables import load_key_table, path_of, systems
from composer3d.importing.launch_scripts.shell_flags import read_words
from composer3d.importing.leaves import Leaf, SourceTree, UnreadableSource
from composer3d.importing.recognition import form_of, keys_of_deepspeed, recognise
from composer3d.importing.source_file import parse, read_source_text
from composer3d.importing.translation import AUTO, Options, Translation, translate
from composer3d.importing.verdicts import ImportResult, Verdict
from composer3d.manifest import FILL_IN, make_importable

__all__ = ["import_config", "read_translation", "translate_tree"]

# What stands in for what is to be filled in, so that the rest of a manifest is checked; check has models for it.
_STAND_INS = {
    "data": 'data.use="synthetic"',
    "steps": "train.steps=100000",
}


def import_config(
    file: str | Path | None = None,
    *,
    flags: Sequence[str] = (),
    values: Mapping[str, str] | None = None,
    system: str | None = None,
    target: Literal["compose", "run"] | None = None,
    training_args: str | Path | None = None,
    world_size: int | None = None,
    model: str | None = None,
    data: str | None = None,
    source_version: str | None = None,
    allow: Sequence[str] = (),
    name: str | None = None,
) -> ImportResult:
    """Translate a configuration of another system into a manifest, and check that.

    Nothing of the source is imported, executed, unpickled or fetched.

    Args:
        file: The source; None where `flags` are all of it.
        flags: Of a Megatron-LM command line, in place of a file or after one, whose flags they override.
        values: Of variables that a launch script takes from outside of it, by name, or `1`, `2` of its arguments.
        system: Whose it is; default: recognised.
        target: A manifest for `compose`, or of `composer3d run`; default: what such files describe.
        training_args: Arguments of transformers' Trainer, as JSON, YAML or a command line: they fill in "auto".
        world_size: Ranks of the run, where the file does not say.
        model: `module:callable`, or a Hugging Face model's folder.
        data: `data.use` of the manifest; a file or folder is sought in the folder of the manifest, which `name` says.
        source_version: Of the source system, where defaults differ between versions.
        allow: Keys whose refusal is overruled, or blocks of such keys; `auto` is all that a trainer fills in.
        name: Of the manifest in problems; default: the source's with `.toml`.

    Raises:
        ManifestError: The source cannot be read, or is of no system that is known.
    """
    try:
        arguments = None if training_args is None else _arguments(Path(training_args))
    except UnreadableSource as error:
        raise ManifestError([error.problem]) from None
    options = Options(
        target=target,
        world_size=world_size,
        arguments=arguments,
        model=model,
        data=data,
        version=source_version,
        allowed=tuple(allow),
    )
    given = Flags(words=tuple(flags), values=dict(values or {}))
    path = None if file is None else Path(file)
    translation = read_translation(path, options, system=system, flags=given)
    return _result(translation, name or f"{'run' if path is None else path.stem}.toml")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Options of a command line beside a source.

    Args:
        words: Flags and their values.
        values: Of a script's variables.
    """

    words: tuple[str, ...] = ()
    values: Mapping[str, str] = field(default_factory=dict)


def read_translation(
    path: Path | None, options: Options, *, system: str | None = None, flags: Flags | None = None
) -> Translation:
    """Read a file and translate it; see `import_config`, which checks the result too.

    Raises:
        ManifestError: The source cannot be read, or is of no system that is known.
    """
    try:
        found, tree = _read(path, system, flags or Flags())
    except UnreadableSource as error:
        raise ManifestError([error.problem]) from None
    return translate_tree(found, tree, options)


def translate_tree(system: str, tree: SourceTree, options: Options) -> Translation:
    """Translate a source of a system, read into leaves before; see `import_config`, which checks the result too."""
    table = load_key_table(system)
    if options.target is None:
        options = replace(options, target="run" if table.target == "run" else "compose")
    module = import_module(f"composer3d.importing.{system}")
    if hasattr(module, "normalised"):
        tree = module.normalised(tree)
    translation = Translation(tree=tree, table=table, options=options)
    translate(translation, module.RULES)
    fill_in(translation)
    _check_allowed(translation)
    return translation


def _read(path: Path | None, system: str | None, flags: Flags) -> tuple[str, SourceTree]:
    if system is not None and system not in systems():
        hint = did_you_mean(system, systems())
        raise UnreadableSource(Problem(message=f'there is no importer for "{system}"', hint=hint))
    if flags.words and system not in (None, "megatron"):
        raise UnreadableSource(Problem(message="flags after -- are Megatron-LM's", hint="leave --from out"))
    if path is None:
        return "megatron", read_words(flags.words, None)
    text = read_source_text(path)
    if system is not None:
        tree = parse(text, str(path), form=form_of(path, text), values=flags.values)
        return system, read_words(flags.words, tree) if flags.words else tree
    found, tree = recognise(path, text, values=flags.values)
    if flags.words and found == "megatron":
        tree = read_words(flags.words, tree)
    if found is None:
        shared = keys_of_deepspeed(tree)
        message, hint = "no system is recognised by its keys", f"say whose it is with --from: {', '.join(systems())}"
        if shared:
            message = f"no system is recognised by its keys: {', '.join(shared)} are DeepSpeed's and GPT-NeoX's"
            hint = "write --from neox, if it is a part of GPT-NeoX's YAML, or --from deepspeed"
        raise UnreadableSource(Problem(message=message, file=str(path), hint=hint))
    return found, tree


def _arguments(path: Path) -> dict[str, Any]:
    """Read training arguments: a file of keys, or a command line with `--name value`."""
    text = read_source_text(path)
    if path.suffix.lower() in (".json", ".yaml", ".yml", ".toml") or text.lstrip()[:1] == "{":
        return parse(text, str(path), form=form_of(path, text)).values()
    from composer3d.importing.command_lines import read_flags

    return read_flags(text, str(path))


def _check_allowed(translation: Translation) -> None:
    """Report allowed keys that nothing refused: a slip, or a file that was mended since."""
    found = translation.verdicts.items()
    refused = [name for key, entry in found if entry.verdict is Verdict.REFUSED for name in {key, entry.key}]
    for allowed in translation.options.allowed:
        if allowed != AUTO and not any(key == allowed or key.startswith(f"{allowed}.") for key in refused):
            hint = did_you_mean(allowed, refused) or "leave --allow out"
            message = f"--allow {allowed}: no such key is refused"
            translation.problems.append(Problem(message=message, severity="error", hint=hint))


def _result(translation: Translation, name: str) -> ImportResult:
    tree, table = translation.tree, translation.table
    problems = [*tree.problems, *translation.problems]
    keys = tuple(translation.verdicts[key] for key in tree.leaves)
    at_places = {(problem.line, problem.key) for problem in problems if problem.severity == "error"}
    is_refused = False
    for key, leaf in tree.leaves.items():
        entry = translation.verdicts[key]
        if entry.verdict is not Verdict.REFUSED or entry.is_allowed:
            continue
        is_refused = True
        if (entry.line, leaf.path[-1]) not in at_places:
            problems.append(_refusal(translation, leaf, entry.note))
    is_good = not is_refused and not any(problem.severity == "error" for problem in problems)
    manifest = write_manifest(translation) if is_good else ""
    if is_good:
        found = _checked(manifest, name, translation)
        problems += found
        is_good = not any(problem.severity == "error" for problem in found)
    return ImportResult(
        ok=is_good,
        system={"system": table.name, "version": translation.options.version or table.version},
        keys=keys,
        manifest=manifest,
        problems=tuple(problems),
        world_size=_world(translation),
    )


def _refusal(translation: Translation, leaf: Leaf, note: str) -> Problem:
    return Problem(
        message=f"{leaf.shown} is refused: {note}",
        file=translation.tree.file,
        line=leaf.line,
        column=leaf.column,
        table=".".join(leaf.path[:-1]) or None,
        key=leaf.path[-1],
        hint=f"--allow {leaf.shown} imports the file without it",
    )


_CLASSES = "@sharded.unit_classes"


def _checked(manifest: str, name: str, translation: Translation) -> list[Problem]:
    """Return what `check` finds in the manifest; what is to be filled in is a warning at its line."""
    from composer3d import check
    from composer3d.checking import check_for_any_model

    if not translation.settings:
        return []  # a loop keeps everything: `check` takes a manifest without a table for that of a run
    make_importable(Path(name).resolve().parent)
    lines = manifest.splitlines()
    places = {
        what: next((number for number, line in enumerate(lines, 1) if f'"{FILL_IN}:{what}"' in line), None)
        for what in ("model", *_STAND_INS)
    }
    overrides = [stated for what, stated in _STAND_INS.items() if places[what] is not None]
    if places["data"] is not None:
        overrides += _without_chats(translation)
    elif places["model"] is not None and "data.chat.packing" in translation.settings:
        overrides += ['data.documents={positions="positions", numbers="documents"}']
    if places["model"] is not None or not any(path.startswith("model.") for path in translation.settings):
        # Classes of a model that is not here are no stand-in's.
        overrides += [f"{path}=[]" for path in (path_of(_CLASSES),) if path in translation.settings]
    overrides += _beside(name, translation)
    with tempfile.TemporaryDirectory(prefix="composer3d-import-") as folder:
        file = Path(folder, Path(name).name)
        file.write_text(manifest, encoding="utf-8")
        look = check if places["model"] is None else check_for_any_model
        found = look(file, world_size=_world(translation), overrides=overrides)
        problems = [
            replace(
                problem,
                file=name if problem.file == str(file) else problem.file,
                severity="warning" if _is_elsewhere(problem) else problem.severity,
            )
            for problem in found.problems
        ]
    for what, line in places.items():
        if line is not None:
            message = f'"{FILL_IN}:{what}" is to be filled in before check passes'
            hint = f"write it there, or import with --{what}" if what != "steps" else "write it there"
            problems.append(Problem(message=message, file=name, line=line, severity="warning", hint=hint))
    return problems


def _beside(name: str, translation: Translation) -> list[str]:
    """Return where files and folders lie that the manifest names beside itself: it is checked in another folder."""
    found = {
        path: translation.settings[path].value for path in ("data.use", "model.hf") if path in translation.settings
    }
    paths = {path: Path(name).resolve().parent / value for path, value in found.items() if isinstance(value, str)}
    return [f"{path}={json.dumps(str(place))}" for path, place in paths.items() if place.exists()]


def _is_elsewhere(problem: Problem) -> bool:
    """Return whether all that is wrong is that a model's files, or data, are not on this machine, as need not be."""
    is_model = problem.table == "model" and problem.message.startswith("there is no folder")
    return is_model or (str(problem.table).startswith("data") and '": there is no "' in problem.message)


def _without_chats(translation: Translation) -> list[str]:
    """Return what leaves out keys of chats and documents: no stand-in for data has any."""
    told = {".".join(path.split(".")[:2]) for path in translation.settings}
    off = {"data.chat": "false", "data.documents": "false", "data.padding": '"none"'}
    return [f"{path}={value}" for path, value in off.items() if path in told]


def _world(translation: Translation) -> int | None:
    """Return the world that is checked: the user's, the source's, or the least that can share; None is by degrees."""
    settings, stated = translation.settings, translation.options.world_size
    mesh = {path[5:]: setting.value for path, setting in settings.items() if path.startswith("mesh.")}
    kept = settings.get(path_of("@sharded.reshard_after_forward"))
    shards = kept.value if kept is not None and type(kept.value) is int else 1
    if shards == 1 and any(path.startswith(path_of("@coded")) for path in settings):
        shards = 2  # between which something is sent
    if stated is not None or mesh.get("dp_shard", -1) != -1:
        return stated
    others = math.prod(mesh.get(axis, 1) for axis in ("pp", "dp_replicate", "tp", "cp") if mesh.get(axis, 1) > 0)
    least = others * math.lcm(shards, mesh.get("ep", 1))
    if translation.ranks not in (None, 1) and translation.ranks % least == 0:
        return translation.ranks
    return None if mesh.get("ep", 1) == shards == 1 else least
