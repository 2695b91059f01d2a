"""Tokenizer of `[data]`: that of a folder, or the one beside the model's weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from composer3d.errors import ManifestError, ModelError, did_you_mean
from composer3d.huggingface import TOKENIZER, find_folder
from composer3d.manifest import Manifest

__all__ = ["with_tokenizer"]


def with_tokenizer(manifest: Manifest) -> Manifest:
    """Return a manifest whose `[data] tokenizer` is `bytes`, `bpe`, or the path of a tokenizer.json.

    A manifest that is silent takes the one of its Hugging Face model for text, if one lies there.

    Raises:
        ManifestError: There is no tokenizer where `[data] tokenizer` points.
    """
    table, model = manifest.tables.get("data"), manifest.tables.get("model")
    if table is None:
        return manifest
    name = table.tokenizer
    if name in ("bytes", "bpe") or table.kind in ("synthetic", "user"):
        return manifest
    if name is None:
        path = _of_model(getattr(model, "hf", None), manifest.document.folder)
    else:
        path = _stated(name, manifest)
    return manifest if path is None else _with(manifest, str(path))


def _with(manifest: Manifest, tokenizer: str) -> Manifest:
    tables = {**manifest.tables, "data": replace(manifest.tables["data"], tokenizer=tokenizer)}
    return replace(manifest, tables=tables)


def _of_model(hf: str | None, folder: Path) -> Path | None:
    if hf is None:
        return None
    try:
        path = find_folder(hf, beside=folder) / TOKENIZER
    except (ModelError, ImportError):  # the model's own problem, told there
        return None
    return path.absolute() if path.is_file() else None


def _stated(name: str, manifest: Manifest) -> Path:
    path = manifest.document.folder / name
    try:
        path = path / TOKENIZER if path.is_dir() else path
        if path.is_file():
            return path.absolute()
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        problem = manifest.document.problem(("data", "tokenizer"), f'"{name}" cannot be read: {reason}')
        raise ManifestError([problem]) from None
    where = f'the folder "{name}" holds no {TOKENIZER}' if path.name == TOKENIZER else f'there is no "{name}"'
    beside = [entry.name for entry in manifest.document.folder.iterdir() if (entry / TOKENIZER).is_file()]
    hint = did_you_mean(name, ["bytes", "bpe", *beside])
    raise ManifestError([manifest.document.problem(("data", "tokenizer"), where, hint=hint)])
