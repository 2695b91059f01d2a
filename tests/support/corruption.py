"""Random damage to the files of a folder."""

from __future__ import annotations

import random
from pathlib import Path

__all__ = ["KINDS", "corrupt"]

KINDS = ("flip", "flips", "truncate", "zero", "overwrite", "append", "insert", "delete", "swap", "copy")


def corrupt(folder: Path, chance: random.Random) -> str:
    """Damage one file, or two by exchanging them; return the description of the damage.

    Args:
        folder: Every file below it may be chosen.
        chance: Chooses.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    kind, file = chance.choice(KINDS), chance.choice(files)
    data = bytearray(file.read_bytes())
    at = chance.randrange(len(data))
    length = min(chance.choice((1, 8, 64, 4096)), len(data) - at)
    if kind == "flip":
        data[at] ^= 1 << chance.randrange(8)
    elif kind == "flips":
        for _ in range(8):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    elif kind == "truncate":
        del data[at:]
    elif kind == "zero":
        data[at : at + length] = bytes(length)
    elif kind == "overwrite":
        data[at : at + length] = chance.randbytes(length)
    elif kind == "append":
        data += chance.choice((b"\n", b"\0" * 512, chance.randbytes(length)))
    elif kind == "insert":
        data[at:at] = chance.randbytes(length)
    elif kind == "delete":
        file.unlink()
    other = chance.choice(files)
    if kind in ("swap", "copy"):
        content = other.read_bytes()
        if kind == "swap":
            other.write_bytes(data)
        data = bytearray(content)
    if kind != "delete":
        file.write_bytes(data)
    beside = f" with {other.relative_to(folder)}" if kind in ("swap", "copy") else f" at {at}"
    return f"{kind} {file.relative_to(folder)}{beside}"
