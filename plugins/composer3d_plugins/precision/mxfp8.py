"""MXFP8 training of linear layers, by torchao."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from composer3d import (
    ConvertedLayers,
    Phase,
    PlannedShards,
    PluginError,
    Role,
    RunContext,
    Transform,
    has_stacked_experts,
    hookimpl,
    linear_layers,
    multiply_experts,
    on_local_shards,
    plugin,
    stacked_layers,
    torch_compat,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

BLOCK = 32


@plugin(family="precision")
class MXFP8:
    """Multiply the matrices of linear layers in MXFP8; weights, gradients and the optimizer keep their dtypes.

    Operands are quantised to float8 in blocks of 32 elements along the contracted dim, one power-of-two scale per
    block. Below compute capability 10.0 the products are emulated, and `check` says so; `plan` counts MXFP8 products.
    Memory: float8 copies of the operands of the layer that runs.
    Collectives: none of its own. Local shards under tp must be multiples of a block, so that scales equal those of one
    device.

    Source: Rouhani et al., Microscaling Data Formats for Deep Learning, arXiv:2310.10537; torchao's moe_training.

    Args:
        recipe: "mxfp8" runs the forward and both backward products in MXFP8; "mxfp8_wgrad_hp" computes weight gradients
            in the dtype of the activations.
        modules: Patterns of linear layers, or of modules whose linear layers are converted; default: all whose dims are
            multiples of 32.
        exclude: Patterns of layers that are not converted.
        emulate: Emulate the products on any device (true), or require hardware support (false); default: emulate where
            the device has no MXFP8 products.
    """

    recipe: Literal["mxfp8", "mxfp8_wgrad_hp"] = "mxfp8"
    modules: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    emulate: bool | None = None

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse `emulate = false` on a device without MXFP8 products."""
        if self.emulate is False and _lacks_products(context.device):
            raise PluginError(
                f"emulate = false, and this device ({context.device.type}) has no MXFP8 products",
                hint="leave emulate out; the plan says where products are emulated",
            )

    @hookimpl
    def composer3d_shard(self, context: RunContext) -> Transform | None:
        """Refuse local shards that are not multiples of a block, once it is planned which weights are sharded."""
        if context.layout.degree(Role.TENSOR) == 1:
            return None
        return Transform(
            name="mxfp8.blocks",
            phase=Phase.TENSOR,
            select=self._check_blocks,
            apply=lambda model, fqns, context: fqns,
            after=("tensor_parallel",),
            rows=lambda context: {},
        )

    @hookimpl
    def composer3d_convert(self, context: RunContext) -> Transform:
        """Convert the selected linear layers."""
        reason = "both replace what the same linear layers compute"
        return Transform(
            name="mxfp8",
            phase=Phase.CONVERT,
            select=self._select,
            apply=self._apply,
            rows=self._rows,
            conflicts=dict.fromkeys(("float8", "qlora"), reason),
        )

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        chosen = linear_layers(
            model,
            context,
            modules=self.modules,
            exclude=self.exclude,
            multiple=BLOCK,
            beside=stacked_layers(model),
        )
        context.state[self] = chosen
        return context.stash(ConvertedLayers).note(chosen, by="mxfp8")

    def _check_blocks(self, model: nn.Module, context: RunContext) -> list[str]:
        """Return the selected layers; [""] if their selection failed, which has reported its own error."""
        chosen: list[str] = context.state.get(self, [""])
        for fqn in chosen:
            dim, runs = context.stash(PlannedShards).by_parameter.get(f"{fqn}.weight", (0, (BLOCK,)))
            if any(size % BLOCK for size in runs):
                axis = " x ".join(context.layout.names(Role.TENSOR))
                raise PluginError(
                    f"mxfp8 multiplies blocks of {BLOCK}, and {axis} = {context.layout.degree(Role.TENSOR)} shards "
                    f'"{fqn}" into {" and ".join(map(str, runs))} {"inputs" if dim else "outputs"}',
                    hint=f"exclude it, or choose a smaller {axis}",
                )
        return chosen

    def _rows(self, context: RunContext) -> Mapping[str, Sequence[str]]:
        label = f"{self.recipe}_emulated" if self._emulates(context) else self.recipe
        return {label: context.state[self]}

    def _emulates(self, context: RunContext) -> bool:
        """Return whether products are emulated; a plan is of the devices of its hardware file, not of this machine's.

        What a device of that file cannot multiply in float8 the plan's time model takes as it is emulated, in float32.
        """
        if self.emulate is not None:
            return self.emulate
        return context.purpose != "plan" and not _has_products(context.device)

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        import torch
        import torch.nn.functional as F
        from torch import nn

        mx: Any = torch_compat.import_torchao("torchao.prototype.moe_training.mxfp8_linear")
        formats: Any = torch_compat.import_torchao("torchao.prototype.mx_formats.config")
        kernels: Any = torch_compat.import_torchao("torchao.quantization.quantize_.common")
        kernel = kernels.KernelPreference.EMULATED if self._emulates(context) else kernels.KernelPreference.AUTO
        planned = _planned_product() if context.purpose == "plan" and not self._emulates(context) else None
        rounding, keeps = formats.ScaleCalculationMode.RCEIL, self.recipe == "mxfp8_wgrad_hp"

        def product(x_BI: Tensor, weight_OI: Tensor, bias: Tensor | None) -> Tensor:
            if x_BI.shape[-1] % BLOCK or weight_OI.shape[0] % BLOCK:
                raise PluginError(
                    f"mxfp8 multiplies blocks of {BLOCK}, and tp shards a layer into {x_BI.shape[-1]} inputs and "
                    f"{weight_OI.shape[0]} outputs",
                    hint="exclude it, or choose a smaller tp",
                )
            # torchao does not take float16; float32 represents its values exactly.
            dtype = torch.float32 if x_BI.dtype is torch.float16 else x_BI.dtype
            x_TI = x_BI.reshape(-1, x_BI.shape[-1]).to(dtype)
            num_tokens = x_TI.shape[0]
            if not keeps:  # the weight gradient contracts over tokens: pad them to a multiple of a block
                x_TI = F.pad(x_TI, (0, 0, 0, -num_tokens % BLOCK))
            weight_OI = weight_OI.to(dtype).contiguous()
            y_TO: Any = (
                mx._to_mxfp8_then_scaled_mm(x_TI, weight_OI, kernel, rounding, keeps)
                if planned is None
                else planned(x_TI, weight_OI, keeps)
            )
            y_BO = y_TO[:num_tokens].to(x_BI.dtype).view(*x_BI.shape[:-1], -1)
            # torchao returns a view, and FSDP2 warns about root modules whose output is a view.
            y_BO = torch_compat.unviewed(y_BO)
            return y_BO if bias is None else y_BO + bias.to(y_BO.dtype)

        class Multiplied(nn.Linear):
            """Linear layer in MXFP8. Its class is assigned to the existing module, which keeps its identity."""

            def forward(self, input: Tensor) -> Tensor:
                """Multiply in MXFP8, on the local shards of a DTensor."""
                y: Tensor = on_local_shards(product, input, self.weight, self.bias)
                return y

        Multiplied.__name__ = Multiplied.__qualname__ = "MXFP8Linear"
        for fqn in fqns:
            module = model.get_submodule(fqn)
            if has_stacked_experts(module):
                multiply_experts(module, partial(product, bias=None), fqn=fqn, by="mxfp8")
            else:
                module.__class__ = Multiplied
        return fqns


def _has_products(device: torch.device) -> bool:
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (10, 0)


def _lacks_products(device: torch.device) -> bool:
    """Return whether it is known that a device has none: of a GPU elsewhere, of which a plan is, nothing is."""
    import torch

    return not _has_products(device) and (device.type != "cuda" or torch.cuda.is_available())


def _planned_product() -> Callable[[Tensor, Tensor, bool], Tensor]:
    """Return a product of the operators that a device with MXFP8 products runs, for tensors without values.

    torchao's quantisation kernels exist on such devices alone. Each reads its operand once, and writes float8 elements
    and one scale a block; the operands are saved in their own dtypes.
    """
    import torch

    def quantised(operand_KL: Tensor) -> tuple[Tensor, Tensor]:
        rows, columns = operand_KL.shape
        # Tensor cores read scales in tiles of 128 rows and 4 blocks.
        padded = -(-rows // 128) * 128, -(-columns // (4 * BLOCK)) * 4
        scales = operand_KL.new_empty(padded, dtype=torch.float8_e8m0fnu)
        return operand_KL.to(torch.float8_e4m3fn), scales

    def multiplied(a_MK: Tensor, b_NK: Tensor) -> Tensor:
        (a, scale_a), (b, scale_b) = quantised(a_MK), quantised(b_NK)
        y_MN: Tensor = torch_compat.scaled_product(a, b.t(), scale_a, scale_b, a_MK.dtype)
        return y_MN

    class Planned(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, keeps: bool) -> Tensor:
            ctx.save_for_backward(x_TI, weight_OI)
            ctx.keeps = keeps
            return multiplied(x_TI, weight_OI)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
            (x_TI, weight_OI), grad_TO = ctx.saved_tensors, gradients[0].contiguous()
            grad_OI = grad_TO.t() @ x_TI if ctx.keeps else multiplied(grad_TO.t(), x_TI.t())
            return multiplied(grad_TO, weight_OI.t()), grad_OI, None

    def product(x_TI: Tensor, weight_OI: Tensor, keeps: bool) -> Tensor:
        y_TO: Tensor = Planned.apply(x_TI, weight_OI, keeps)
        return y_TO

    return product
