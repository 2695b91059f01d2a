"""Low-bit optimizer state: Adam's moments in 8 or 4 bits an element, in torchao's formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import LayoutTraits, PluginError, RunContext, hookimpl, plugin
from composer3d_plugins.precision.low_bit_optimizer.adam import low_bit
from composer3d_plugins.precision.low_bit_optimizer.moments import FORMATS, Format

if TYPE_CHECKING:
    from torch.optim import Optimizer

MIN_NUMEL = 4096
# Of the two float32 moments of a parameter: elements and the scales of their blocks.
STATE_PARTS = {"8bit": 0.26, "4bit": 0.14, "fp8": 0.26}


@plugin(family="precision")
class LowBitOptimizer:
    """Keep the moments of Adam or AdamW block-wise quantised; the step itself computes in float32.

    A block of elements shares a float32 scale. "8bit" and "4bit" look elements up in a table that is denser near zero,
    "fp8" rounds them to float8. A second moment above zero stays above it; as torchao rounds, that of a gradient below
    a 2500th ("fp8": a 700th) of its block's greatest becomes zero, and the element steps by thousands of learning rates
    once it has no gradient. It works on local shards, so in every layout. Checkpoints hold the moments in float32: they
    load in any layout, and into AdamW itself; in the same layout a resumed run is bit-identical.
    Memory: a byte ("4bit": half) an element and moment, 4 bytes a block, for the tables 1 KiB ("4bit": 64 bytes, "fp8":
        none) a moment and parameter; small tensors keep float32. One parameter's moments in float32 while it is
        stepped; all of them while a checkpoint is saved or loaded.
    Collectives: none.

    Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861; Li et al., Memory Efficient
    Optimizers with 4-bit States, arXiv:2309.01507; torchao.optim.

    Args:
        format: Of the quantised moments.
        block_size: Elements that share a scale; default 256, and 128 for "4bit".
        min_numel: Tensors of which a rank holds fewer elements keep float32 moments, as those that are no multiple of
            block_size.
    """

    format: Literal["8bit", "4bit", "fp8"] = "8bit"
    block_size: int | None = Field(default=None, ge=2, multiple_of=2)
    min_numel: int = Field(default=MIN_NUMEL, ge=1)

    @hookimpl
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Describe the part in a layout."""
        return LayoutTraits(state_bytes=8 * STATE_PARTS[self.format])

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Claim the optimizer, which only one plugin can make."""
        context.claim("optimizer", by=self, each_alone=True)

    @hookimpl
    def composer3d_optimizer(
        self, context: RunContext, cls: type[Optimizer], groups: Sequence[Mapping[str, Any]]
    ) -> Optimizer:
        """Make the optimizer, a subclass of Adam or AdamW."""
        import torch

        if cls not in (torch.optim.AdamW, torch.optim.Adam):
            raise PluginError(
                f"low_bit_optimizer keeps the moments of Adam and AdamW, and the optimizer is {cls.__name__}",
                hint="choose another optimizer, or leave [precision.low_bit_optimizer] out",
            )
        for name in ("maximize", "capturable", "differentiable"):
            if any(group.get(name) for group in groups):
                raise PluginError(f"low_bit_optimizer does not do what {name} = true asks of {cls.__name__}")
        default = FORMATS[self.format]
        form = Format(kind=self.format, block_size=self.block_size or default.block_size, min_numel=self.min_numel)
        if context.purpose == "check" and self.min_numel != MIN_NUMEL:
            self._refuse_to_do_nothing(groups)
        # One kernel for all parameters is what these two choose, and here every parameter is stepped by itself.
        kept = [{key: value for key, value in group.items() if key not in ("fused", "foreach")} for group in groups]
        return low_bit(cls, form)(kept)

    def _refuse_to_do_nothing(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Refuse if every parameter is too small; decided on the whole model, since a stage may hold small ones alone.

        With the number that is the default a model may be small: then it tries out what a larger one will do.
        """
        largest = max(parameter.numel() for group in groups for parameter in group["params"])
        if largest < self.min_numel:
            raise PluginError(
                f"min_numel = {self.min_numel} leaves all moments in float32: the largest parameter has {largest}",
                hint="choose a smaller one, or leave [precision.low_bit_optimizer] out",
            )
