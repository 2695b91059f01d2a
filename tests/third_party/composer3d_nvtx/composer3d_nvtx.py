"""NVTX ranges around composer3d's spans, as a package that is not part of composer3d."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from composer3d import Recorder, RunContext, hookimpl, plugin

__all__ = ["Nvtx"]


@plugin(family="profiling")
class Nvtx:
    """Show composer3d's spans as NVTX ranges in Nsight; without CUDA, as ranges of torch.profiler.

    Memory: none. Collectives: none.

    Args:
        every: Steps from one shown step to the next.
    """

    every: int = Field(default=1, ge=1)

    @hookimpl
    def composer3d_recorder(self, context: RunContext) -> Recorder:
        """Give the recorder of this machine."""
        return _Ranges(self.every, context.device.type == "cuda")


class _Ranges:
    """The spans inside every k-th step; spans outside steps (checkpoints, evaluation) are always shown."""

    def __init__(self, every: int, cuda: bool) -> None:
        self._every, self._cuda, self._shown = every, cuda, True

    def begin(self, name: str, attributes: Mapping[str, Any]) -> Any:
        import torch

        if name == "step":
            self._shown = attributes["step"] % self._every == 0
        if not self._shown:
            return name, None
        if self._cuda:
            return name, torch.cuda.nvtx.range_start(f"composer3d.{name}")
        span = torch.profiler.record_function(f"composer3d.{name}")
        span.__enter__()
        return name, span

    def end(self, token: Any) -> None:
        import torch

        name, span = token
        if name == "step":
            self._shown = True
        if span is None:
            return
        if self._cuda:
            torch.cuda.nvtx.range_end(span)
        else:
            span.__exit__(None, None, None)
