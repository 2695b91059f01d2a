"""Int8 training of linear layers, by torchao."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from composer3d import (
    ConvertedLayers,
    Phase,
    PluginError,
    RunContext,
    Transform,
    has_stacked_experts,
    hookimpl,
    linear_layers,
    linear_sharding,
    multiply_experts,
    on_local_shards,
    plugin,
    stacked_layers,
    torch_compat,
)

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d import LinearSharding


@plugin(family="precision")
class Int8:
    """Multiply the matrices of linear layers in int8; weights, gradients and the optimizer keep their dtypes.

    Every row of the one operand and every column of the other has a scale of its own, its largest element. Each of the
    three products of a layer may be left in the dtype of the activations. Under tp ranks agree on the scales of sharded
    operands, so that they are those of one device.
    Memory: int8 copies of the operands of the layer at work.
    Collectives: none of its own under data parallelism. Under tp one all-reduce (a maximum) a sharded layer, in the
        forward if it is sharded along its inputs, of a number a token and output; else in the backward, of a number a
        token and input.

    Source: torchao's int8 mixed-precision training; Xi et al., Jetfire, arXiv:2403.12422.

    Args:
        output: Multiply inputs and weights in int8.
        grad_input: Multiply gradients of outputs and weights in int8.
        grad_weight: Multiply inputs and gradients of outputs in int8.
        modules: Patterns of linear layers, or of modules whose linear layers are converted; default: all whose dims are
            multiples of 16, as the hardware needs.
        exclude: Patterns of layers that are not converted.
    """

    output: bool = True
    grad_input: bool = True
    grad_weight: bool = True
    modules: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse a table without any int8 product."""
        if not (self.output or self.grad_input or self.grad_weight):
            raise PluginError("output, grad_input and grad_weight are false, so nothing is multiplied in int8")

    @hookimpl
    def composer3d_convert(self, context: RunContext) -> Transform:
        """Convert the layers."""
        reason = "both replace what the same linear layers compute"
        return Transform(
            name="int8",
            phase=Phase.CONVERT,
            select=self._select,
            apply=self._apply,
            conflicts=dict.fromkeys(("float8", "mxfp8", "qlora"), reason),
        )

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        chosen = linear_layers(
            model, context, modules=self.modules, exclude=self.exclude, multiple=16, beside=stacked_layers(model)
        )
        return context.stash(ConvertedLayers).note(chosen, by="int8")

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        import torch
        from torch import nn

        from composer3d_plugins.precision.int8.products import Form, Products

        training: Any = torch_compat.import_torchao("torchao.prototype.quantized_training.int8_mixed_precision")
        form = Form(
            output=self.output,
            grad_input=self.grad_input,
            grad_weight=self.grad_weight,
            multiply=training.scaled_int8_mm,
        )

        def product(x: Tensor, weight: Tensor, bias: Tensor | None, sharding: LinearSharding | None) -> Tensor:
            # Sums of products of int8 are beyond float16 before they are scaled.
            wide: list[Any] = [x, weight, bias]
            if x.dtype is torch.float16:
                wide = [None if tensor is None else tensor.float() for tensor in wide]
            y: Tensor = Products.apply(*wide, form, sharding)
            return y.to(x.dtype)

        class Multiplied(nn.Linear):
            """A linear layer in int8; the module stays the object that it is."""

            def forward(self, input: Tensor) -> Tensor:
                """Multiply."""
                sharding = linear_sharding(input, self.weight)
                y: Tensor = on_local_shards(partial(product, sharding=sharding), input, self.weight, self.bias)
                return y

        Multiplied.__name__ = Multiplied.__qualname__ = "Int8Linear"
        for fqn in fqns:
            module = model.get_submodule(fqn)
            if has_stacked_experts(module):
                multiply_experts(module, partial(product, bias=None, sharding=None), fqn=fqn, by="int8")
            else:
                module.__class__ = Multiplied
        return fqns
