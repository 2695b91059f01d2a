"""Full weights of a run that saved adapters alone: its first ones, merged with the trained ones."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from composer3d.errors import CheckpointError, ManifestError
from composer3d.interfaces import Exports

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.checkpoint import TensorInfo
    from composer3d.composition import Preparation
    from composer3d.initialisation import Slab
    from composer3d.manifest import Manifest

__all__ = ["MergedWeights", "prepared"]

PREFIX = "model/"


@dataclass(frozen=True, kw_only=True, eq=False)
class MergedWeights:
    """A checkpoint of adapters, read as if it held the model that they were trained on, merged.

    Args:
        path: The folder `step-N` of a checkpoint that holds adapters alone.
        preparation: Its run's manifest, joined with its model.
    """

    path: Path
    preparation: Preparation

    @classmethod
    def open(cls, path: Path) -> MergedWeights:
        """Prepare the run that a checkpoint belongs to; its folder has the manifest.

        Raises:
            CheckpointError: There is nothing to merge, or the run's manifest is missing.
            ManifestError: It does not fit any more.
        """
        preparation = prepared(path)
        if not preparation.context.stash(Exports).merges:
            raise CheckpointError(f"{path}: holds all weights, there is nothing to merge; export it without --merge")
        return cls(path=path, preparation=preparation)

    def contents(self) -> dict[str, TensorInfo]:
        """Return shape and dtype of every tensor of the merged model, by key; tied ones once."""
        from composer3d.checkpoint import TensorInfo, contents

        model = self.preparation.model
        later = {fqn for group in self.preparation.context.ties for fqn in group[1:]}
        saved = contents(self.path)
        persistent = model.state_dict(keep_vars=True)
        tensors = {fqn: t for fqn, t in persistent.items() if fqn not in later}
        return {
            PREFIX + fqn: saved.get(PREFIX + fqn) or TensorInfo(shape=tuple(tensor.shape), dtype=tensor.dtype)
            for fqn, tensor in tensors.items()
        }

    def read(self, keys: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors one at a time. Memory: one tensor, and what merging it takes."""
        from composer3d.checkpoint import contents, read_tensor
        from composer3d.initialisation import Slab

        saved, merges = contents(self.path), self.preparation.context.stash(Exports).merges
        for key in keys:
            if key in saved:
                yield key, read_tensor(self.path, key)
                continue
            fqn = key.removeprefix(PREFIX)
            value = self._start(fqn)
            start = value.read() if isinstance(value, Slab) else value
            merge = merges.get(fqn)
            if merge is None:
                raise CheckpointError(f"{self.path}: the checkpoint lacks {key}")
            yield key, merge(start, lambda name: read_tensor(self.path, PREFIX + name))

    def _start(self, fqn: str) -> Tensor | Slab:
        """Return a parameter as the run started from it."""
        preparation = self.preparation
        if preparation.recipe is None:
            tensor: Tensor = preparation.model.state_dict()[fqn]
            return tensor
        return preparation.recipe.value(fqn, seed=preparation.context.manifest.train.seed)


def prepared(path: Path) -> Preparation:
    """Return the manifest of the run that a checkpoint belongs to, joined with its model; its folder has the manifest.

    Raises:
        CheckpointError: The run's manifest is missing.
        ManifestError: It does not fit any more.
    """
    import torch

    from composer3d.composition import prepare
    from composer3d.runner.data import open_source
    from composer3d.runner.model_factory import ModelFactory
    from composer3d.runner.tokenizer import with_tokenizer

    run = path.resolve().parent.parent
    manifest = with_tokenizer(_manifest(run))
    source = open_source(
        manifest.tables["data"], seed=manifest.train.seed, folder=manifest.document.folder, cache=run / "cache"
    )
    factory = ModelFactory(manifest, vocab_size=source.vocab_size)
    preparation = prepare(
        factory.build(), manifest, world_size=None, rank=0, device=torch.device("cpu"), purpose="check"
    )
    errors = [problem for problem in preparation.problems if problem.severity == "error"]
    if errors:
        raise ManifestError(errors)
    return preparation


def _manifest(run: Path) -> Manifest:
    """Return a run's manifest, its paths and references counted from where it was written."""
    from composer3d.manifest import read, type_manifest
    from composer3d.runner.runner_tables import TABLES

    described = run / "environment.json"
    if not (run / "manifest.toml").is_file() or not described.is_file():
        raise CheckpointError(
            f"{run}: has no manifest.toml and environment.json, which say what the run was; leave the "
            "checkpoint in the run's folder"
        )
    facts: Mapping[str, Mapping[str, str]] = json.loads(described.read_text(encoding="utf-8"))
    document = replace(read(run / "manifest.toml"), folder=Path(facts["manifest"]["folder"]))
    return type_manifest(document, tables=TABLES)
