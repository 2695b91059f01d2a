"""Quantisation-aware training, with torchao's fake quantisers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import Phase, RunContext, Transform, hookimpl, linear_layers, on_shares, plugin, torch_compat

if TYPE_CHECKING:
    from torch import Tensor, nn


@plugin(family="precision")
class QAT:
    """Train linear layers with the rounding that they will have when they are quantised.

    Weights, and with activations = "int8" the inputs of every token, are rounded and brought back in the forward;
    gradients pass as if they were not. What is trained, saved and exported are the weights themselves: torchao's
    `quantize_` of the same format then gives the model that was trained for. Under tp a layer that is cut along its
    inputs scales its shares of a token, which are finer scales than those of one device.
    Memory: rounded copies of the operands of the layer at work.
    Collectives: none of its own.

    Source: Jacob et al., Quantization and Training of Neural Networks, arXiv:1712.05877; torchao.quantization.qat.

    Args:
        weights: Their dtype.
        group_size: Neighbours in a row of a weight that share a scale, at least 2: a weight alone would be its scale.
        activations: "int8" scales every token by itself; "none" leaves them.
        modules: Patterns of linear layers, or of modules whose linear layers are converted; default: all whose dims
            are multiples of group_size.
        exclude: Patterns of those that are left as they are.
    """

    weights: Literal["int4", "int8"] = "int4"
    group_size: int = Field(default=32, ge=2)
    activations: Literal["int8", "none"] = "int8"
    modules: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()

    @hookimpl
    def composer3d_convert(self, context: RunContext) -> Transform:
        """Convert the layers."""
        reason = "both replace what the same linear layers compute"
        return Transform(
            name="qat",
            phase=Phase.CONVERT,
            select=self._select,
            apply=self._apply,
            conflicts=dict.fromkeys(("float8", "int8", "mxfp8", "qlora"), reason),
        )

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        return linear_layers(model, context, modules=self.modules, exclude=self.exclude, multiple=self.group_size)

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        import torch
        import torch.nn.functional as F
        from torch import nn

        qat: Any = torch_compat.import_torchao("torchao.quantization.qat")
        made: Any = torch_compat.import_torchao("torchao.quantization.qat.fake_quantizer")
        of_weights = made.IntxFakeQuantizer(
            qat.IntxFakeQuantizeConfig(getattr(torch, self.weights), group_size=self.group_size)
        )
        of_tokens = made.IntxFakeQuantizer(qat.IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False))

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if self.activations == "int8":
                x = of_tokens(x)
            return F.linear(x, of_weights(weight), bias)

        class Rounded(nn.Linear):
            """A linear layer that rounds; the module stays the object that it is."""

            def forward(self, input: Tensor) -> Tensor:
                """Round and multiply."""
                y: Tensor = on_shares(product, input, self.weight, self.bias)
                return y

        Rounded.__name__ = Rounded.__qualname__ = "FakeQuantizedLinear"
        for fqn in fqns:
            model.get_submodule(fqn).__class__ = Rounded
        return fqns
