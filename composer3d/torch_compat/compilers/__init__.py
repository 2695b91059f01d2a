"""torch.compile, captured graphs and graph passes."""

from __future__ import annotations

from composer3d.torch_compat.compilers.undisabled import nothing_compiles

__all__ = ["nothing_compiles"]
