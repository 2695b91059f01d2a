"""Model folders: a path, or a model's name in the Hugging Face cache of this machine."""

from __future__ import annotations

import importlib
import logging
import re
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from composer3d.errors import ModelError

__all__ = ["CONFIG", "TOKENIZER", "find_folder", "import_transformers"]

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
_TALKATIVE = ("torch", "torchao")
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def import_transformers() -> None:
    """Import what every model of transformers needs; 2 s.

    Warnings of other packages during their import are dropped: transformers imports torchao, which names each of its
    kernels that is for another machine.

    Raises:
        ModelError: The extra `hf` is not installed.
    """
    if find_spec("transformers") is None:
        raise ModelError('Hugging Face models need the extra "hf"', hint='pip install "composer3d[hf]"')

    levels = {logging.getLogger(name): logging.getLogger(name).level for name in _TALKATIVE}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        importlib.import_module("transformers.modeling_utils")
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def find_folder(name: str, *, beside: Path) -> Path:
    """Return the folder of a model; nothing is downloaded.

    Args:
        name: A path, relative to `beside`; or the name of a model that the Hugging Face cache holds.
        beside: The folder of the manifest.

    Raises:
        ModelError: There is neither, or the folder holds no configuration.
    """
    path = _beside(name, beside)
    if not _is_dir(path):
        path = _cached(name, beside)
    if not (path / CONFIG).is_file():
        raise ModelError(f'the folder "{name}" holds no {CONFIG}', hint="name a folder that save_pretrained wrote")
    return path


def _beside(name: str, beside: Path) -> Path:
    try:
        return beside / Path(name).expanduser()
    except RuntimeError:  # `~name` of a user that there is not
        return beside / name


def _is_dir(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # a name that is too long, for example
        return False


def _cached(name: str, beside: Path) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    if _NAME.fullmatch(name):
        try:
            return Path(snapshot_download(name, local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            pass
    parent = (beside / name).parent
    try:
        folders = sorted(entry.name for entry in parent.iterdir() if entry.is_dir()) if _is_dir(parent) else []
    except OSError:  # a folder of somebody else's
        folders = []
    near = get_close_matches(Path(name).name, folders, n=1, cutoff=0.6)
    shown = Path(name).parent / near[0] if near else None
    raise ModelError(
        f'there is no folder "{name}" beside the manifest, and no model of that name in the Hugging Face cache',
        hint=f'did you mean "{shown}"?' if shown else f"nothing is downloaded; hf download {name} does that",
    )
