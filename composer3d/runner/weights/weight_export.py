"""Export of a checkpoint's weights as safetensors files; nothing of the checkpoint is executed.

The folder of a Hugging Face model gets what `from_pretrained` needs besides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d.errors import CheckpointError
from composer3d.processes import file_objection
from composer3d.runner.weights.merged_weights import MergedWeights
from composer3d.runner.weights.quantised_weights import find_form

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d.checkpoint import TensorInfo
    from composer3d.huggingface import Exporter
    from composer3d.interfaces import ExportForm

__all__ = ["DEFAULT_SHARD_BYTES", "Exported", "export", "export_checkpoint", "find_description"]

PREFIX = "model/"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DESCRIPTION = "huggingface"  # in a run's folder
DEFAULT_SHARD_BYTES = 5 * 1024**3


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of `export_checkpoint`.

    Args:
        checkpoint: The one that was found.
        files: Written files, with the keys in each.
    """

    checkpoint: Path
    files: Mapping[Path, Sequence[str]]

    @property
    def num_tensors(self) -> int:
        """Number of tensors in all files."""
        return sum(map(len, self.files.values()))

    @property
    def size_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)


def export_checkpoint(
    source: Path,
    *,
    to: Path,
    dtype: str | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    merge: bool = False,
    quantise: bool = False,
    trust_remote_code: bool = False,
) -> Exported:
    """Find a checkpoint, and write its weights; what `composer3d export` does.

    Args:
        source: A run's folder, of which the newest checkpoint is taken, or a checkpoint.
        to: A folder, or a file that ends with `.safetensors`.
        dtype: Name of a torch dtype that floating-point tensors become; None keeps them.
        max_shard_bytes: Largest file; a single tensor may exceed it.
        merge: Write the model that saved adapters were trained on, with them put in.
        quantise: Write quantised weights in the form of the plugin that the run trained for them with.
        trust_remote_code: Run Python that lies in the folder of a Hugging Face model.

    Raises:
        CheckpointError: As `export`, or there is no checkpoint, or it is not one to merge or quantise.

    Memory: one file's tensors. Collectives: none.
    """
    import torch

    from composer3d.checkpoint import find_checkpoint

    path = find_checkpoint(source)
    description = find_description(path)
    form, config = find_form(path) if quantise else (None, None)
    files = export(
        path,
        to=to,
        dtype=getattr(torch, dtype) if dtype else None,
        max_shard_bytes=max_shard_bytes,
        description=description,
        trust_remote_code=trust_remote_code,
        merged=MergedWeights.open(path) if merge else None,
        form=form,
        config=config,
    )
    return Exported(checkpoint=path, files=files)


def find_description(path: Path) -> Path | None:
    """Return the folder in which the checkpoint's run keeps the description of its Hugging Face model; None without.

    Raises:
        CheckpointError: It is such a run's, and the description is missing.
    """
    from composer3d.checkpoint import read_state, validated_run

    run = validated_run(path, read_state(path))
    if run is None or "hf" not in run["record"].get("model", {}):
        return None
    folder = path.resolve().parent.parent / DESCRIPTION
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"{path}: its run had a Hugging Face model, and {folder} with its configuration is not there; leave the "
            "checkpoint in the run's folder"
        )
    return folder


def export(
    path: Path,
    *,
    to: Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    description: Path | None = None,
    trust_remote_code: bool = False,
    merged: MergedWeights | None = None,
    form: ExportForm | None = None,
    config: Callable[[], Mapping[str, Any]] | None = None,
) -> dict[Path, list[str]]:
    """Write the model's tensors of a checkpoint.

    Files are written beside their names and renamed when they are whole, the index last.

    Args:
        path: The folder `step-N` of a checkpoint.
        to: A folder, or a file that ends with `.safetensors`.
        dtype: What floating-point tensors become; None keeps them.
        max_shard_bytes: Largest file; a single tensor may exceed it.
        description: Of a Hugging Face model, see `find_description`: tensors get the names that `save_pretrained` gives
            them, and the folder the rest of what is there.
        trust_remote_code: Run Python that lies in the description.
        merged: Reads the checkpoint in place of its own tensors.
        form: What becomes of the tensors of a file, and the metadata that says so; config: what `config.json` says.

    Returns:
        The files with the keys in each.

    Raises:
        CheckpointError: The checkpoint is not complete or holds no model, the target exists or cannot be written, or
            one file is too small.

    Memory: one file's tensors. Collectives: none.
    """
    from composer3d.checkpoint import contents, read_tensors

    held = contents(path) if merged is None else merged.contents()
    infos = {key: info for key, info in held.items() if key.startswith(PREFIX)}
    if not infos:
        raise CheckpointError(f"{path}: holds no weights of a model")
    exporter = None if description is None else _exporter(description, to, trust_remote_code)
    if exporter is not None and merged is None:
        _refuse_adapters(path, infos, exporter)
    shards = _files_of_keys(infos, dtype, max_shard_bytes, _together(infos, exporter))
    if form and exporter:
        _check_form(path, config, len(shards))
    files = _places(to, len(shards), sum(_bytes(info, dtype) for info in infos.values()))
    written, total = dict[Path, list[str]](), 0
    for file, keys in zip(files, shards, strict=True):
        read = partial(read_tensors, path) if merged is None else merged.read
        tensors, metadata = _formed(_tensors(read(keys), dtype, exporter), form)
        written[file] = list(tensors)
        total += sum(tensor.nbytes for tensor in tensors.values())
        _write(file, tensors, metadata)
    _write_index(written, total)
    if exporter is not None and description is not None:
        exporter.describe(description, to, dtype, config() if form and config else {})
    return written


def _formed(tensors: dict[str, Tensor], form: ExportForm | None) -> tuple[dict[str, Tensor], dict[str, str]]:
    return (tensors, {}) if form is None else form(tensors)


def _check_form(path: Path, config: Callable[[], Mapping[str, Any]] | None, num_shards: int) -> None:
    if config is None:
        raise CheckpointError(f"{path}: from_pretrained knows no such weights; leave --quantise out")
    if num_shards > 1:
        raise CheckpointError(
            f"{path}: from_pretrained reads of one file what its quantised weights are, and there are {num_shards}; "
            "raise --max-shard"
        )


def _places(to: Path, num_shards: int, total_bytes: int) -> list[Path]:
    """Return the files, none of which exists yet, in a folder that does."""
    files = _files(to, num_shards)
    if len(files) < num_shards:
        raise CheckpointError(f"{to}: one file would have {total_bytes} bytes; name a folder, or raise --max-shard")
    existing = next((file for file in (*files, files[0].with_name(INDEX)) if os.path.exists(file)), None)
    if existing is not None:
        raise CheckpointError(f"{existing} exists and is not overwritten; name another place with --to")
    folder = files[0].parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise CheckpointError(
            f"{to}: {folder} is no folder and cannot be made one; name another place with --to"
        ) from None
    except OSError as error:
        raise CheckpointError(_unwritable(folder, error.strerror or str(error))) from error
    if (reason := file_objection(_beside(files[0]))) is not None:
        raise CheckpointError(_unwritable(files[0], reason))
    return files


def _unwritable(path: Path, reason: str) -> str:
    return f"{path} cannot be written: {reason.lower()}; name another place with --to"


def _beside(file: Path) -> Path:
    return file.with_name(f"{file.name}.tmp")


def _write_index(written: Mapping[Path, Sequence[str]], total_bytes: int) -> None:
    if len(written) < 2:
        return
    weight_map = {key: file.name for file, keys in written.items() for key in keys}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
    next(iter(written)).with_name(INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(file: Path, tensors: dict[str, Tensor], metadata: Mapping[str, str]) -> None:
    from safetensors.torch import save_file

    beside = _beside(file)
    beside.touch()
    mode = beside.stat().st_mode  # safetensors would leave it to its owner alone
    save_file(tensors, beside, metadata={"format": "pt", **metadata})
    beside.chmod(mode)
    os.replace(beside, file)


def _exporter(description: Path, to: Path, trust_remote_code: bool) -> Exporter:
    from composer3d.huggingface import Exporter

    if to.suffix == ".safetensors":
        raise CheckpointError(
            f"{to}: a Hugging Face model is exported to a folder, since from_pretrained loads folders"
        )
    return Exporter(description, trust_remote_code=trust_remote_code)


def _together(infos: Mapping[str, TensorInfo], exporter: Exporter | None) -> list[list[str]]:
    """Return which tensors have to be in one file."""
    if exporter is None:
        return [[key] for key in infos]
    shapes = {key.removeprefix(PREFIX): (info.shape, info.dtype) for key, info in infos.items()}
    return [[PREFIX + name for name in group] for group in exporter.plan(shapes)]


def _refuse_adapters(path: Path, infos: Mapping[str, TensorInfo], exporter: Exporter) -> None:
    known = {PREFIX + name for name in exporter.model.state_dict()}
    strange = next((key for key in infos if key not in known), None)
    if strange is not None and not known & infos.keys():
        raise CheckpointError(
            f"{path}: holds adapters such as {strange.removeprefix(PREFIX)} and not the model that they belong to; "
            "export it with --merge"
        )


def _tensors(
    read: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None, exporter: Exporter | None
) -> dict[str, Tensor]:
    tensors = {key.removeprefix(PREFIX): tensor.to(_target(tensor.dtype, dtype)) for key, tensor in read}
    if exporter is not None:
        tensors = exporter.convert(tensors)
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _files_of_keys(
    infos: Mapping[str, TensorInfo], dtype: torch.dtype | None, max_shard_bytes: int, together: Sequence[Sequence[str]]
) -> list[list[str]]:
    """Fill one file after the other, in the order of the keys."""
    shards: list[list[str]] = [[]]
    filled = 0
    for keys in together:
        size = sum(_bytes(infos[key], dtype) for key in keys)
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1] += keys
        filled += size
    return shards


def _files(to: Path, num_shards: int) -> list[Path]:
    if to.suffix == ".safetensors":
        return [to]
    if num_shards == 1:
        return [to / SINGLE]
    return [to / f"model-{number:05}-of-{num_shards:05}.safetensors" for number in range(1, num_shards + 1)]


def _bytes(info: TensorInfo, dtype: torch.dtype | None) -> int:
    import math

    return math.prod(info.shape) * _target(info.dtype, dtype).itemsize


def _target(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype
