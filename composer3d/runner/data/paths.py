"""Files of `[data] use`: their place, their kind, and suggestions for a path without any."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Literal

from composer3d.errors import DataError
from composer3d.manifest import inline, kind_of_file
from composer3d.runner.data.data_source import Report
from composer3d.runner.data.indexed_tokens import index_of
from composer3d.runner.data.tokens import TOKEN_SUFFIXES

__all__ = ["TEXT_SUFFIXES", "Located", "locate"]

_PROGRAMS = "c cfg cpp css go h hpp html ini java js lua py pyi rb rs sh sql ts"
_WRITINGS = "csv json jsonl md rst tex toml tsv txt xml yaml yml"
TEXT_SUFFIXES = tuple(f".{name}" for name in sorted(f"{_PROGRAMS} {_WRITINGS}".split()))
_CHOICES = '"python_docs", "synthetic", a file or folder, or "module:callable"'


@dataclass(frozen=True, kw_only=True)
class Located:
    """Return the files that a path of a manifest matches.

    Args:
        kind: Text to be tokenised, or tokens.
        files: Sorted by path; at least one.
    """

    kind: Literal["text", "tokens"]
    files: tuple[Path, ...]


def locate(use: str, *, folder: Path, report: Report | None = None) -> Located:
    """Find the files of a path; nothing is read.

    A file named itself is tokens if it ends in .bin or .npy, else text; PREFIX stands for PREFIX.bin where PREFIX.idx
    lies beside it. In a folder, and below it, files are taken by
    their suffix; hidden ones are not, and other kinds are reported.

    Args:
        use: A path, relative to the manifest's folder.
        folder: Of the manifest.
        report: Takes a message about files that are left out.

    Raises:
        DataError: There is no such path (with the nearest name), the folder holds nothing to read, or both kinds.
    """
    path, shown = _of_prefix(folder / use), inline(use)
    try:
        kind = kind_of_file(path)
    except FileNotFoundError:
        raise DataError(f"[data] use = {shown}: {_missing(use, folder)}") from None
    except OSError as error:
        raise DataError(f"[data] use = {shown} cannot be read: {(error.strerror or str(error)).lower()}") from None
    if kind is not None and kind != "a folder" or path.resolve() == Path(path.anchor or "/"):
        what = "the root of the file system" if kind == "a folder" else kind
        raise DataError(f"[data] use = {shown} is {what}; give {_CHOICES}")
    if kind is None:
        return Located(kind="tokens" if path.suffix in TOKEN_SUFFIXES else "text", files=(path,))
    try:
        os.scandir(path).close()
        found = [Path(file) for file in sorted(_files_below(path), key=lambda file: file.split(os.sep))]
    except OSError as error:  # an entry is removed while the folder is listed
        raise DataError(f"[data] use = {shown} cannot be listed: {error}") from None
    tokens = tuple(file for file in found if file.suffix in TOKEN_SUFFIXES)
    text = tuple(file for file in found if file.suffix.lower() in TEXT_SUFFIXES)
    indices = {index_of(file) for file in tokens}
    others = Counter(file.suffix or "no suffix" for file in found if file not in {*tokens, *text, *indices})
    listed = ", ".join(f"{count} {suffix}" for suffix, count in sorted(others.items()))
    if tokens and text:
        raise DataError(
            f"[data] use = {shown} holds both text ({text[0].name}) and tokens ({tokens[0].name}); move one kind away"
        )
    if not tokens and not text:
        there = f"only files of other kinds ({listed})" if listed else "no files"
        wanted = f"text ({', '.join(TEXT_SUFFIXES)}) or tokens ({', '.join(TOKEN_SUFFIXES)})"
        raise DataError(f"[data] use = {shown} is a folder with {there}; it must hold {wanted}")
    if others and report is not None:
        report(f"[data] use = {shown}: files of other kinds are left out: {listed}")
    return Located(kind="tokens" if tokens else "text", files=tokens or text)


def _of_prefix(path: Path) -> Path:
    """Return the .bin file of Megatron-LM's PREFIX, of which .bin and .idx lie there; any other path as it is."""
    if not path.name:
        return path
    tokens = path.with_name(f"{path.name}.bin")
    is_prefix = not os.path.exists(path) and os.path.isfile(tokens)  # False of names that are too long
    return tokens if is_prefix and index_of(tokens) else path


def _files_below(folder: Path) -> Iterator[str]:
    """Yield the regular files of a folder and those below it; hidden files and folders are not looked at.

    What may not be listed is left out, and folders that are links as well, which may lead to where they are. Names are
    looked at and no file is, unless it is a link: a folder may hold hundreds of thousands.
    """
    pending = [str(folder)]
    while pending:
        with contextlib.suppress(PermissionError), os.scandir(pending.pop()) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    pending.append(entry.path)
                elif entry.is_file(follow_symlinks=False) or (entry.is_symlink() and os.path.isfile(entry.path)):
                    yield entry.path


def _missing(use: str, folder: Path) -> str:
    """Say which part of a path is missing, and what is there that resembles it."""
    there, part = folder, use
    for part in Path(use).parts:
        if not (there / part).exists():
            break
        there = there / part
    shown = there.relative_to(folder) if there.is_relative_to(folder) else there
    try:
        names = sorted(entry.name for entry in there.iterdir()) if there.is_dir() else []
    except OSError:  # a folder of another user
        names = []
    choices = names + (["python_docs", "synthetic"] if there == folder else [])
    near = get_close_matches(part, choices, n=1, cutoff=0.6)
    hint = f'did you mean "{shown / near[0]}"?' if near else f"give {_CHOICES}"
    module, _, name = use.rpartition(".")
    if name.isidentifier() and (folder / f"{module.replace('.', '/')}.py").is_file():
        hint = f'write "{module}:{name}"'
    where = "beside the manifest" if there == folder else f'in "{shown}"'
    return f"there is no {inline(part)} {where}; {hint}"
