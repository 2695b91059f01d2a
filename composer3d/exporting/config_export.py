"""`export_config`: a manifest as a configuration of another system; the verdicts are those of reading it back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from composer3d.errors import ManifestError, Problem, did_you_mean
from composer3d.exporting.export_result import ExportResult
from composer3d.exporting.manifest_comparison import UNSAID, compare
from composer3d.exporting.meaning import Meaning, meaning_of
from composer3d.exporting.writers import Writer, WrittenFile, simple_keys, targets, writer_of
from composer3d.importing import Options, Translation, Verdict, load_key_table, parse, translate_tree, write_manifest
from composer3d.manifest import FILL_IN, read, read_text

__all__ = ["export_config"]


def export_config(
    manifest: str | Path,
    *,
    to: str,
    world_size: int | None = None,
    overrides: Sequence[str] = (),
    allow: Sequence[str] = (),
) -> ExportResult:
    """Write a manifest as a configuration of another system.

    The file is imported again, and every key of the manifest has the verdict that comparing the two manifests gives:
    nothing is called carried that does not come back.

    Args:
        manifest: A path, or the name of a shipped manifest.
        to: `deepspeed`, `accelerate` or `torchtitan`.
        world_size: Ranks of the run, where the manifest's degrees do not say.
        overrides: `table.key=value`, as `--set` takes them.
        allow: Keys whose refusal is overruled.

    Raises:
        ManifestError: The manifest is wrong, or there is no such system.
    """
    if to not in targets():
        hint = did_you_mean(to, targets()) or f"one of: {', '.join(targets())}"
        raise ManifestError([Problem(message=f'manifests are not exported to "{to}"', hint=hint)])
    meaning = meaning_of(read(manifest, overrides), world=world_size)
    writer, table = writer_of(to), load_key_table(to)
    file = WrittenFile()
    writer.write(meaning, file)
    simple_keys(meaning, table, file)
    translation = _read_back(to, writer, file, meaning)
    there = meaning_of(read_text(write_manifest(translation)), world=meaning.world)
    keys = compare(meaning, there, translation, writer, unsaid=file.unsaid, allowed=allow)
    name = meaning.manifest.document.file
    refused = [entry for entry in keys if entry.verdict is Verdict.REFUSED and not entry.is_allowed]
    problems = [Problem(message=message, severity="warning", file=name) for message in file.warnings]
    for entry in refused:
        message = f"{entry.key} is refused: {entry.note}"
        hint = f"--allow {entry.key} writes the file without it"
        problems.append(Problem(message=message, file=name, line=entry.line, hint=hint))
    for key in allow:
        if not any(entry.key == key and entry.is_allowed for entry in keys):
            message, hint = f"--allow {key}: no such key is refused", "leave --allow out"
            problems.append(Problem(message=message, file=name, hint=hint))
    is_good = not any(problem.severity == "error" for problem in problems)
    return ExportResult(
        ok=is_good,
        system={"system": table.name, "version": table.version},
        keys=keys,
        text=writer.format(file.nested()) if is_good else "",
        problems=tuple(problems),
    )


def _read_back(system: str, writer: Writer, file: WrittenFile, meaning: Meaning) -> Translation:
    """Return the import of what was written, without what it leaves to be filled in."""
    tree = parse(writer.reread(file.nested()), f"the {system} file", form=writer.form)
    options = Options(target="run" if meaning.is_run else "compose", world_size=meaning.world)
    translation = translate_tree(system, tree, options)
    for path, setting in list(translation.settings.items()):
        if isinstance(setting.value, str) and setting.value.startswith(f"{FILL_IN}:"):
            del translation.settings[path]
    if meaning.is_run and "train.steps" not in translation.settings:  # the table of a run has some number of steps
        translation.put("train.steps", meaning.get("train.steps"), reason=UNSAID)
    return translation
