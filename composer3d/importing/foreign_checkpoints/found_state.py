"""Weights and optimizer state out of another system's checkpoint, by FQN."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from composer3d.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["FoundState", "number_in", "unwrapped_name"]

_WRAPPERS = re.compile(r"(?:^module\.)|_orig_mod\.|_checkpoint_wrapped_module\.|_fsdp_wrapped_module\.")
_STEPS = re.compile(r"(?:step[-_]?|checkpoint-|iter_0*)(\d+)", re.IGNORECASE)


@dataclass(kw_only=True)
class FoundState:
    """Weights and optimizer state.

    Attributes:
        system: That wrote it.
        weights: By FQN.
        moments: By FQN and name of the optimizer's state.
        step: Optimizer steps that were done; None where nothing says.
        skipped: What was not read, each with its reason.
    """

    system: str
    weights: dict[str, Tensor] = field(default_factory=dict)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    step: int | None = None
    skipped: list[str] = field(default_factory=list)

    def convert(self, dtype: torch.dtype) -> None:
        """Convert floating-point weights, and what the optimizer keeps of their shape."""
        for fqn, tensor in self.weights.items():
            self.weights[fqn] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        for state in self.moments.values():
            state.update({name: value.to(dtype) for name, value in state.items() if name != "step"})

    def complete(self, path: Path) -> FoundState:
        """Give every parameter's state its step as a tensor, and refuse state of parameters that are not there.

        Raises:
            CheckpointError: No weights were found, or the optimizer has state of others, or of other shapes.
        """
        import torch

        if not self.weights:
            raise CheckpointError(f"{path}: has no weights that could be read")
        scalars = torch.float32
        if all(tensor.dtype == torch.float64 for tensor in self.weights.values()):
            scalars = torch.float64  # as a program of that default dtype makes them
        for fqn, state in self.moments.items():
            if fqn not in self.weights:
                raise CheckpointError(f"{path}: the optimizer has state of {fqn}, and there is no such weight")
            for name, tensor in state.items():
                if tensor.numel() != 1 and tensor.shape != self.weights[fqn].shape:
                    raise CheckpointError(
                        f"{path}: {name} of {fqn} has the shape {list(tensor.shape)}, and the weight "
                        f"{list(self.weights[fqn].shape)}"
                    )
            if "step" in state:
                self.step = int(state["step"]) if self.step is None else self.step
                state["step"] = state["step"].reshape(()).to(scalars)
        for state in self.moments.values():
            if "step" not in state and "exp_avg" in state and self.step is not None:
                state["step"] = torch.tensor(float(self.step), dtype=scalars)
        return self


def unwrapped_name(name: str) -> str:
    """Return a name without those of wrappers around modules."""
    return _WRAPPERS.sub("", name)


def number_in(paths: Iterable[Path]) -> int | None:
    """Return the number of the step in the first name that has one."""
    found = (match for path in paths for match in [_STEPS.search(path.name)] if match)
    return next((int(match[1]) for match in found), None)
