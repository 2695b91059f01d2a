"""Source files: found, read within bounds, and parsed by what their text is."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from composer3d.errors import Problem
from composer3d.importing.leaves import SourceTree, TreeBuilder, UnreadableSource
from composer3d.manifest import kind_of_file

__all__ = ["parse", "read_source_text"]

_LARGEST_BYTES = 1 << 18  # the largest configuration that was found has 40 kB


def read_source_text(path: Path) -> str:
    """Return the text of a file of another system.

    Raises:
        UnreadableSource: It is missing, no file, too large, or no text.
    """
    file = str(path)
    try:
        kind = kind_of_file(path)
        if kind is not None:
            raise UnreadableSource(Problem(message=f"cannot be read: it is {kind}", file=file))
        with path.open("rb") as opened:
            content = opened.read(_LARGEST_BYTES + 1)
    except FileNotFoundError:
        raise UnreadableSource(Problem(message=f'there is no file "{file}"')) from None
    except (OSError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).lower()
        raise UnreadableSource(Problem(message=f"cannot be read: {reason}", file=file)) from None
    if len(content) > _LARGEST_BYTES:
        raise UnreadableSource(Problem(message="cannot be read: it is larger than 256 KiB", file=file))
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        message = f"is not UTF-8: byte 0x{content[error.start]:02x}"
        raise UnreadableSource(Problem(message=message, file=file, line=line)) from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise UnreadableSource(Problem(message="holds a NUL, so it is no text", file=file, line=line))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def parse(text: str, file: str, *, form: str, values: Mapping[str, str] | None = None) -> SourceTree:
    """Read a text into leaves.

    Args:
        text: Of the file.
        file: Named in problems.
        form: `json`, `yaml`, `toml`, `flags`, `script` or `log`.
        values: Of a script's variables, as the user gives them.

    Raises:
        UnreadableSource: It is not of that form.
    """
    if form == "json":
        from composer3d.importing.relaxed_json import read_json

        return read_json(text, file)
    if form == "yaml":
        from composer3d.importing.yaml_leaves import read_yaml

        return read_yaml(text, file)
    if form == "log":
        from composer3d.importing.argument_log import read_argument_log

        return read_argument_log(text, file)
    if form in ("flags", "script"):
        from composer3d.importing.launch_scripts.shell_flags import read_command_line, read_script

        return read_script(text, file, values or {}) if form == "script" else read_command_line(text, file)
    return _read_toml(text, file)


def _read_toml(text: str, file: str) -> SourceTree:
    import tomli

    from composer3d.manifest import locate

    builder = TreeBuilder(file=file)
    try:
        places = locate(text)
        values = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise builder.fail(f"is not valid TOML: {error.msg}", error.lineno, error.colno) from None
    except Exception as error:  # nested too deeply, or a number of too many digits
        line, column = getattr(error, "line", 1), getattr(error, "column", 1)
        raise builder.fail(f"is not valid TOML: {error}", line, column) from None

    def walk(path: tuple[str, ...], value: object) -> None:
        if isinstance(value, dict) and value:
            for key, item in value.items():
                walk((*path, key), item)
            return
        if path:
            line, column = places.get(path, (1, 1))
            builder.add(path, value, line, column)

    walk((), values)
    return builder.tree(text)
