"""`new_plugin`: a package with a worked plugin of a family, its entry point, and tests that pass."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from composer3d.errors import PluginError, did_you_mean
from composer3d.registry import FAMILIES, Catalogue

__all__ = ["NewPlugin", "filled", "new_plugin"]

_TEMPLATES = Path(__file__).parent / "templates"
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True, kw_only=True)
class NewPlugin:
    """Package that was written.

    Args:
        folder: Of the package.
        files: In it.
        module: That holds the plugin.
        table: Of manifests that switch it on.
    """

    folder: Path
    files: tuple[Path, ...]
    module: str
    table: str


def new_plugin(name: str, *, family: str, folder: str | Path | None = None) -> NewPlugin:
    """Write a package with a plugin of a family that works, and tests of it that pass.

    Its tests answer the four headings: numerics, collectives, state, refusals. What it does is an example to replace.

    Args:
        name: Of the plugin, its table in manifests and its entry point: lower case with underscores.
        family: `sharding`, `scheduling`, `precision`, `communication` or `profiling`.
        folder: That is made; default: the name.

    Raises:
        PluginError: The name is none, or an installed plugin's, the family is unknown, or the folder is there or
            cannot be made.
    """
    if family not in FAMILIES:
        raise PluginError(f'there is no family "{family}"', hint=did_you_mean(family, FAMILIES))
    if not _NAME.fullmatch(name):
        hint = "write lower case with underscores, for example clip_by_layer"
        raise PluginError(f'"{name}" cannot be the name of a plugin', hint=hint)
    if keyword.iskeyword(name) or name in sys.stdlib_module_names:
        kind = "word of Python's own" if keyword.iskeyword(name) else "module of Python's own"
        raise PluginError(
            f'"{name}" cannot be the name of a plugin: it is a {kind}', hint=f"name it {name}_plugin, say"
        )
    installed = Catalogue.installed()
    if name in installed.names():
        raise PluginError(f'"{name}" is a plugin already, of {installed.origin(name)}', hint="choose another name")
    target = Path(name if folder is None else folder)
    module = f"composer3d_{name}"
    words = {
        "@NAME@": name,
        "@CLASS@": "".join(part.capitalize() for part in name.split("_")),
        "@MODULE@": module,
        "@PROJECT@": module.replace("_", "-"),
        "@FAMILY@": family,
    }
    contents = {
        "pyproject.toml": "pyproject.toml.txt",
        "README.md": "README.md.txt",
        ".github/workflows/tests.yml": "tests.yml.txt",
        f"{module}.py": f"{family}.py.txt",
        f"tests/test_{module}.py": f"test_{family}.py.txt",
    }
    texts = {path: filled(template, words) for path, template in contents.items()}
    try:
        target.mkdir(parents=True)
    except FileExistsError:
        raise PluginError(f"{target} is there and is not overwritten", hint="name another folder with --to") from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise PluginError(f"{target} cannot be made: {reason}", hint="name another folder with --to") from error
    for path, text in texts.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_text(text, encoding="utf-8")
    return NewPlugin(
        folder=target,
        files=tuple(target / path for path in texts),
        module=module,
        table=f"[{family}.{name}]",
    )


def filled(template: str, words: Mapping[str, str]) -> str:
    """Return a template with words in place of its placeholders.

    Args:
        template: File in `templates/`.
        words: By placeholder.
    """
    text = (_TEMPLATES / template).read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace(word, value)
    return text
