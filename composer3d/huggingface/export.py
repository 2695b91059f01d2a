"""Export of a checkpoint to a folder that `from_pretrained` loads."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.errors import ModelError
from composer3d.huggingface.folder import import_transformers
from composer3d.huggingface.weight_names import reverted, tied_name
from composer3d.initialisation import ties

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Exporter", "save_description"]

# Tokenizers, chat templates, processors, and code that comes with a model; never weights.
_BESIDES = ("*.json", "*.jinja", "*.model", "*.txt", "*.py")
_NOT_THESE = ("config.json", "generation_config.json", "*.index.json")


def save_description(folder: Path, config: Any, to: Path) -> None:
    """Write a run's configuration, and copy what else describes a model, into a folder that is made.

    Args:
        folder: Of the model.
        config: With the overrides and the dtype of the run.
        to: The new folder.
    """
    to.mkdir(parents=True, exist_ok=True)
    for pattern in _BESIDES:
        for file in sorted(folder.glob(pattern)):
            if file.is_file() and not any(file.match(other) for other in _NOT_THESE):
                shutil.copyfile(file, to / file.name)
    generation = folder / "generation_config.json"
    if generation.is_file():
        shutil.copyfile(generation, to / generation.name)
    config.save_pretrained(to)


class Exporter:
    """Turns tensors of a checkpoint into those that a model's folder holds, one at a time.

    Args:
        description: A folder that `save_description` wrote.
        trust_remote_code: Run the Python in it.
    """

    def __init__(self, description: Path, *, trust_remote_code: bool = False) -> None:
        import_transformers()
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            self._config = AutoConfig.from_pretrained(
                description, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except ValueError as error:
            raise ModelError(
                f"{description} brings its own Python code, which is not run",
                hint="read it, and say --trust-remote-code",
            ) from error
        with torch.device("meta"):
            self.model: Any = AutoModelForCausalLM.from_config(self._config, trust_remote_code=trust_remote_code)
        self._names = {group[0]: tied_name(self.model, group) for group in ties(self.model)}

    def convert(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by the names in the files."""
        return reverted(self.model, {self._names.get(name, name): tensor for name, tensor in tensors.items()})

    def plan(self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> list[list[str]]:
        """Return which tensors have to be converted together: one each, if taking them one by one comes to the same."""
        import torch

        blanks = {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}
        together = {name: value.shape for name, value in self.convert(blanks).items()}
        try:
            apart = dict(self._apart(blanks))
        except Exception:  # conversions that need several tensors raise what they like where one is missing
            apart = {}
        return [[name] for name in shapes] if apart == together else [list(shapes)]

    def describe(self, description: Path, to: Path, dtype: torch.dtype | None, more: Mapping[str, Any]) -> None:
        """Copy everything but weights into a folder.

        Args:
            description: As given to the class.
            to: Folder, which exists; its files are not overwritten.
            dtype: Of the weights there, None where it is the run's.
            more: Further entries of the configuration.
        """
        for file in sorted(description.iterdir()):
            if not (to / file.name).exists():
                shutil.copyfile(file, to / file.name)
        if dtype is not None:
            self._config.dtype = dtype
            self._config.save_pretrained(to)
        if more:
            written = json.loads((to / "config.json").read_text(encoding="utf-8"))
            (to / "config.json").write_text(json.dumps({**written, **more}, indent=2) + "\n", encoding="utf-8")

    def _apart(self, blanks: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
        for name, blank in blanks.items():
            yield from ((key, value.shape) for key, value in self.convert({name: blank}).items())
