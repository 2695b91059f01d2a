"""Numbers of the tokens that end documents, read out of a tokenizer's files; nothing in them is executed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["added_end_in_sentencepiece", "end_in_sentencepiece", "end_of_tokenizer", "number_of_token"]

_MOST_BYTES = 64 * 2**20
# Of sentencepiece's `ModelProto`: pieces, of which name and kind are used, and how the trainer calls the end.
_PIECES, _TRAINER, _PIECE, _KIND, _END_PIECE = 1, 2, 1, 3, 47
_CONTROL = 3
_ADDED = (b"<CLS>", b"<SEP>", b"<EOD>")  # by Megatron-LM before core 0.15
_WIRE_VARINT, _WIRE_64, _WIRE_BYTES, _WIRE_32 = 0, 1, 2, 5


def end_of_tokenizer(folder: Path) -> int | None:
    """Return the number of `eos_token` of a Hugging Face tokenizer; None where its files do not say.

    Args:
        folder: With `tokenizer_config.json`, and `tokenizer.json` or `vocab.json`.
    """
    stated = _json(folder / "tokenizer_config.json")
    token = stated.get("eos_token")
    token = token.get("content") if isinstance(token, dict) else token
    if not isinstance(token, str):
        return None
    added = stated.get("added_tokens_decoder")
    for number, each in added.items() if isinstance(added, dict) else ():
        if isinstance(each, dict) and each.get("content") == token and number.isdecimal():
            return int(number)
    found = number_of_token(folder / "tokenizer.json", token)
    return found if found is not None else _number(_json(folder / "vocab.json").get(token))


def number_of_token(file: Path, token: str) -> int | None:
    """Return the number of a token in a `tokenizer.json`; None where it is not there."""
    held = _json(file)
    added, model = held.get("added_tokens"), held.get("model")
    for each in added if isinstance(added, list) else ():
        if isinstance(each, dict) and each.get("content") == token:
            return _number(each.get("id"))
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    return _number(vocabulary.get(token)) if isinstance(vocabulary, dict) else None


def end_in_sentencepiece(file: Path) -> int | None:
    """Return the number of the control piece that ends sequences in a sentencepiece model; None where there is none."""
    pieces, end = _pieces_and_end(file)
    places = (n for n, piece in enumerate(pieces) if piece.get(_PIECE) == end and piece.get(_KIND) == _CONTROL)
    return next(places, None)


def added_end_in_sentencepiece(file: Path) -> int | None:
    """Return the number of `<EOD>` where <CLS>, <SEP> and <EOD> are added behind the pieces that a model has.

    Args:
        file: A sentencepiece model; None is returned for what is none.
    """
    names = [piece.get(_PIECE) for piece in _pieces_and_end(file)[0]]
    if not names:
        return None
    names += [name for name in _ADDED if name not in names]
    return names.index(_ADDED[-1])


def _pieces_and_end(file: Path) -> tuple[list[dict[int, int | bytes]], bytes]:
    """Return the pieces of a sentencepiece model, none where it is none, and what its trainer called the end."""
    pieces: list[dict[int, int | bytes]] = []
    end = b"</s>"
    try:
        content = file.read_bytes() if file.stat().st_size <= _MOST_BYTES else b""
        for number, value in _fields(content):
            if number == _PIECES and isinstance(value, bytes):
                pieces.append(dict(_fields(value)))
            elif number == _TRAINER and isinstance(value, bytes):
                stated = dict(_fields(value)).get(_END_PIECE)
                end = stated if isinstance(stated, bytes) else end
    except (OSError, ValueError):
        return [], end
    return pieces, end


def _json(file: Path) -> dict[str, Any]:
    try:
        held = json.loads(file.read_text(encoding="utf-8")) if file.stat().st_size <= _MOST_BYTES else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return held if isinstance(held, dict) else {}


def _number(value: Any) -> int | None:
    return value if type(value) is int and value >= 0 else None


def _fields(content: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the fields of a protocol buffer's message: whole numbers and bytes.

    Raises:
        ValueError: It is none.
    """
    at = 0
    while at < len(content):
        tag, at = _varint(content, at)
        wire = tag & 7
        if wire == _WIRE_VARINT:
            value, at = _varint(content, at)
            yield tag >> 3, value
            continue
        if wire == _WIRE_BYTES:
            size, at = _varint(content, at)
        elif wire in (_WIRE_64, _WIRE_32):
            size = 8 if wire == _WIRE_64 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + size > len(content):
            raise ValueError("cut off")
        if wire == _WIRE_BYTES:
            yield tag >> 3, content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            break
        byte = content[at]
        value, at = value | (byte & 127) << shift, at + 1
        if byte < 128:
            return value, at
    raise ValueError("no whole number")
