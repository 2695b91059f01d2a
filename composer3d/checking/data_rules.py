"""Data of a manifest as `check` sees them: there, of the stated kind, and long enough."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.checking.called import argument_problems, resolve, uncallable
from composer3d.errors import DataError, Problem, ReferenceFailure

if TYPE_CHECKING:
    from composer3d.manifest import Document, Manifest
    from composer3d.runner.data import DataTable

__all__ = ["UNREAD", "data_problems", "vocab_size_of"]

# The vocabulary of data that are not there: they fit any model.
UNREAD = 1

# Text below this size is read whole: a fraction of a second, and binary files are found too.
_READ_BYTES = 1 << 26


def data_problems(manifest: Manifest) -> list[Problem]:
    """Look whether the data are there and long enough, without preparing or calling anything."""
    from composer3d.runner.data import counts_of

    document, table = manifest.document, manifest.tables.get("data")
    if table is None:
        return []
    if not table.blend:
        return _source_problems(table, document, ("data",))
    problems = []
    for number, part in enumerate(table.sources):
        problems += _source_problems(part, document, ("data", "blend", number))
    try:
        counts_of([1.0 if each.weight is None else each.weight for each in table.blend])
    except DataError as error:
        problems.append(document.problem(("data", "blend"), str(error).removeprefix("[data] ")))
    return problems


def _source_problems(table: DataTable, document: Document, place: tuple[str | int, ...]) -> list[Problem]:
    if table.kind == "synthetic":
        return []
    use = (*place, "use")
    if table.kind == "user":
        try:
            factory = resolve(table.use, document)
        except ReferenceFailure as error:
            return [document.problem(use, error.message, hint=error.hint)]
        if problem := uncallable(factory, table.use, document, place):
            return [problem]
        return list(argument_problems(factory, table.use, table.args, document, place, derived={}))
    try:
        _probe(table, document.folder)
    except DataError as error:
        # The table is said by the problem's place.
        return [document.problem(use, str(error).removeprefix("[data] "))]
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        return [document.problem(use, f'use = "{table.use}" cannot be read: {reason}')]
    return []


def _probe(table: DataTable, folder: Path) -> None:
    """Raise a DataError for text or token files that are missing, empty, of another kind, or too short."""
    import numpy as np

    from composer3d.runner.data import (
        MappedTokens,
        Text,
        bpe_key,
        held_out,
        locate,
        map_token_file,
        probe_chats,
        python_docs,
        read_tokenizer,
        tokenizer_key,
    )

    if table.tokenizer == "bpe":
        bpe_key("", table.vocab_size or 0)  # says which extra is missing
    if table.has_file:
        tokenizer_key("", Path(table.tokenizer or ""))
        read_tokenizer(Path(table.tokenizer or ""))
    if table.kind == "python_docs":
        arrays: list[Any] = [np.frombuffer(python_docs(), np.uint8)]
    else:
        located = locate(table.use, folder=folder)
        if table.kind == "chat":
            probe_chats(located.files, table, folder=folder)
            return
        if located.kind == "tokens":
            arrays = [map_token_file(file, table) for file in located.files]
        else:
            num_bytes = sum(file.stat().st_size for file in located.files)
            if num_bytes <= _READ_BYTES:
                num_bytes = Text.from_files(located.files, use=table.use).num_bytes
            arrays = [MappedTokens(located.files[0], dtype=np.dtype(np.uint8), size=num_bytes)]
    # A BPE token stands for a byte or more, so text with too few bytes has too few tokens.
    held_out(arrays, table, vocab_size=None, facts={})


def vocab_size_of(data: DataTable, folder: Path) -> int | None:
    """Return below what the data's tokens are, as far as that is known without reading them."""
    if data.blend:
        sizes = [vocab_size_of(part, folder) for part in data.sources]
        return max((size for size in sizes if size is not None), default=None)
    if data.kind == "synthetic" or data.tokenizer == "bpe":
        return data.vocab_size or (256 if data.kind == "synthetic" else None)
    if data.kind == "user":
        return data.vocab_size
    if data.has_file:
        return _size_of_tokenizer(data.tokenizer or "")
    from composer3d.runner.data import locate

    try:
        is_text = data.kind in ("python_docs", "chat") or locate(data.use, folder=folder).kind == "text"
    except DataError:  # `data_problems` tells it
        return UNREAD
    return 256 if is_text else data.vocab_size


def _size_of_tokenizer(path: str) -> int | None:
    """Return what the tokens of a tokenizer.json are below; None where `data_problems` reports why not."""
    from composer3d.runner.data import read_tokenizer

    try:
        return max(read_tokenizer(Path(path)).get_vocab(with_added_tokens=True).values(), default=-1) + 1
    except (DataError, ImportError):
        return None
