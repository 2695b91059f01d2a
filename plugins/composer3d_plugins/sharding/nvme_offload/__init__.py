"""NVMe offloading: optimizer state on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from composer3d import HostMemory, Metric, PluginError, RunContext, hookimpl, plugin, torch_compat
from composer3d_plugins.sharding.nvme_offload.disk import BLOCK, MIB, Foreseen, StateFile
from composer3d_plugins.sharding.nvme_offload.disk_buffers import Copies
from composer3d_plugins.sharding.nvme_offload.disk_optimizer import on_disk

if TYPE_CHECKING:
    from torch.optim import Optimizer


@plugin(family="sharding")
class NVMeOffload:
    """Keep the optimizer's moments in a file, and in memory those of the few pieces that are being stepped.

    While a piece is stepped the next ones are read and the last ones written, by threads, in requests that go past the
    page cache (O_DIRECT); on a file system without such requests, which is logged, they go through it. The optimizer is
    of the requested class, and computes the same as in memory, bit for bit. The file has no
    name: nothing is left when the run ends, whatever ends it. A checkpoint maps it as memory, and has the format of any
    other run's.
    Memory: of the moments 2 * depth + 1 pieces of chunk_mib each, pinned where there is an accelerator, on which one
        piece is; nothing else.
    Collectives: none.

    Source: Rajbhandari et al., ZeRO-Infinity: Breaking the GPU Memory Wall for Extreme Scale Deep Learning,
    arXiv:2104.07857.

    Args:
        folder: On the disk to use; default: the run's folder.
        chunk_mib: The most that one request reads or writes, and that is stepped at once of a moment, MiB; rounded down
            to whole blocks of 4 KiB, of which it is one at least. Only of optimizers that torch does not have, or that
            need whole matrices, a larger parameter is one piece.
        depth: Number of pieces that are read ahead, and of those that may be on their way back.
        threads: The number of requests under way at once.
    """

    folder: str | None = None
    chunk_mib: float = Field(default=16.0, ge=BLOCK / MIB, le=1 << 16, examples=[BLOCK / MIB])
    depth: int = Field(default=3, ge=1, le=1 << 10, examples=[1])
    threads: int = Field(default=4, ge=1, le=1 << 10, examples=[1])

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Claim the optimizer, which only one plugin can make, and refuse a path that is no folder."""
        context.claim("optimizer", by=self)
        if self.folder is not None:
            folder = context.manifest.document.folder / self.folder
            if folder.exists() and not folder.is_dir():
                raise PluginError(f'folder = "{self.folder}" is no folder')

    @hookimpl
    def composer3d_optimizer(
        self, context: RunContext, cls: type[Optimizer], groups: Sequence[Mapping[str, Any]]
    ) -> Optimizer:
        """Make the optimizer, a subclass of the requested class, and open its file."""
        if any(group.get("differentiable") for group in groups):
            raise PluginError(
                "nvme_offload does not do what differentiable = true asks: its pieces are stepped in place"
            )
        piece_bytes = int(self.chunk_mib * MIB) // BLOCK * BLOCK
        # A check makes no step, and a plan steps on fake tensors.
        is_foreseen = context.purpose in ("check", "plan") or torch_compat.active_fake_mode() is not None
        host = context.stash(HostMemory)
        file = (
            Foreseen(host)
            if is_foreseen
            else StateFile(self._folder(context), chunk_bytes=piece_bytes, num_threads=self.threads)
        )
        context.state[self] = file
        # On fake tensors host and device are one memory: what an accelerator copies is copied there too.
        is_planned = context.purpose == "plan" and context.run_device.type != "cpu"
        device = Copies(context.device, host, is_planned=is_planned)
        make = on_disk(cls, file=file, piece_bytes=piece_bytes, depth=self.depth, device=device)
        made: Optimizer = make(groups)
        return made

    def _folder(self, context: RunContext) -> Path | None:
        if context.purpose != "run":
            return None  # what only proves or plans opens no file
        if self.folder is None:
            return context.output
        return context.manifest.document.folder / self.folder

    @hookimpl
    def composer3d_measure(self, context: RunContext, step: int) -> list[Metric]:
        """Measure bytes read and written, summed over ranks."""
        file: StateFile | None = context.state.get(self)
        read, written = (file.read_bytes, file.written_bytes) if file is not None else (0, 0)
        return [
            Metric(name="nvme_read_bytes", value=read, reduction="sum"),
            Metric(name="nvme_written_bytes", value=written, reduction="sum"),
        ]

    @hookimpl
    def composer3d_close(self, context: RunContext, error: BaseException | None) -> None:
        """Let the system free the file."""
        file: StateFile | None = context.state.pop(self, None)
        if file is not None:
            file.close()
