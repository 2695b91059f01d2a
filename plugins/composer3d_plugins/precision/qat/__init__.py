"""Quantisation-aware training, with torchao's fake quantisers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    ConvertedLayers,
    Exports,
    Phase,
    RunContext,
    Transform,
    has_stacked_experts,
    hookimpl,
    linear_layers,
    multiply_experts,
    plugin,
    stacked_layers,
    summed_dims,
)
from composer3d_plugins.precision.qat.conversion import described, flattened

if TYPE_CHECKING:
    from torch import Tensor, nn


@plugin(family="precision")
class QAT:
    """Train linear layers with the rounding that they will have when they are quantised.

    Weights, and with activations = "int8" the inputs of every token, are quantised and dequantised in the forward;
    gradients pass straight through. The weights themselves are trained and saved: `composer3d export --quantise` writes
    the quantised model that was trained for, in torchao's tensors; stacked weights of experts, for which torchao has
    none, as values that are rounded so. Under tp ranks agree on the scales of sharded
    operands, so that they are those of one device.
    Memory: rounded copies of the operands of the layer at work.
    Collectives: none of its own under data parallelism. Under tp one all-reduce (a maximum) in the forward of a layer
        that is sharded along its inputs, of two numbers a token, and another one where a shard boundary splits a group
        of its weight, of a number a group.

    Source: Jacob et al., Quantization and Training of Neural Networks, arXiv:1712.05877; torchao.quantization.qat.

    Args:
        weights: Dtype of the quantised weights.
        group_size: Neighbours in a row of a weight that share a scale, at least 2: a group of one weight would be its
            own scale.
        activations: "int8" scales every token by itself; "none" leaves them.
        modules: Patterns of linear layers, or of modules whose linear layers are converted; default: all whose dims are
            multiples of group_size.
        exclude: Patterns of layers that are not converted.
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
        stacked = stacked_layers(model)
        chosen = linear_layers(
            model, context, modules=self.modules, exclude=self.exclude, multiple=self.group_size, beside=stacked
        )
        options: dict[str, Any] = {
            "dtype": self.weights,
            "group_size": self.group_size,
            "activations": self.activations,
        }
        # A tied weight is exported once, under its first name, and may be what an embedding looks up.
        first = {fqn: group[0] for group in context.ties for fqn in group}
        sources = {name: first.get(name, name) for name in (f"{fqn}.weight" for fqn in chosen if fqn not in stacked)}
        experts = {
            f"{fqn}.{name}": dim
            for fqn in chosen
            if fqn in stacked
            for name, dim in summed_dims(model.get_submodule(fqn), fqn=fqn, by="qat").items()
        }
        context.stash(ConvertedLayers).note(chosen, by="qat")
        exports = context.stash(Exports)
        exports.form = lambda tensors: flattened(self._rounded(tensors, experts), sources=sources, **options)
        exports.config = lambda: described(model, sources=sources, **options)
        return chosen

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        from torch import nn

        from composer3d_plugins.precision.qat.fake_quantised_linear import Rounding

        rounding = Rounding.of(weights=self.weights, group_size=self.group_size, activations=self.activations)

        class Rounded(nn.Linear):
            """A linear layer that rounds; the module stays the object that it is."""

            def forward(self, input: Tensor) -> Tensor:
                """Round and multiply."""
                return rounding.linear(self, input, context)

        Rounded.__name__ = Rounded.__qualname__ = "FakeQuantizedLinear"
        for fqn in fqns:
            module: Any = model.get_submodule(fqn)
            if has_stacked_experts(module):
                multiply_experts(module, rounding.product, fqn=fqn, by="qat")
            else:
                module.__class__, module.fqn = Rounded, fqn
        return fqns

    def _rounded(self, tensors: Mapping[str, Tensor], experts: Mapping[str, int]) -> dict[str, Tensor]:
        """Return a file's tensors, stacked weights of experts as their values in the quantised model.

        Args:
            tensors: By name.
            experts: Of stacked weights, the dim that is summed over.
        """
        from composer3d_plugins.precision.qat.fake_quantised_linear import Rounding

        rounding = Rounding.of(weights=self.weights, group_size=self.group_size, activations=self.activations)
        return {
            name: rounding.stacked(tensor, dim=experts[name]) if name in experts else tensor
            for name, tensor in tensors.items()
        }
