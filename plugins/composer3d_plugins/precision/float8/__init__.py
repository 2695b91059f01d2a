"""Float8 training of linear layers, by torchao."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    ConvertedLayers,
    LayoutOffer,
    LayoutTraits,
    Phase,
    PluginError,
    Role,
    RunContext,
    StepAction,
    StepPoint,
    StepState,
    Transform,
    Units,
    has_stacked_experts,
    hookimpl,
    linear_layers,
    plugin,
    stacked_layers,
    torch_compat,
)
from composer3d_plugins.precision.float8.float8_layers import MULTIPLE, choose, convert, layer_class, multiply_stacked
from composer3d_plugins.precision.float8.gather import gather_as_bytes, needs_bytes, precompute_scales

if TYPE_CHECKING:
    import torch
    from torch import nn


PRODUCTS = "float8_e4m3fn"
_FSDP2_GATHERS = "all_gather = true: weights are gathered in float8 by FSDP2; nothing else gathers them"


def _table(wanted: LayoutTraits, degrees: Mapping[str, int]) -> Mapping[str, Any] | None:
    """Multiply in float8 where products are to be of that dtype."""
    return {} if wanted.product_dtype == PRODUCTS else None


@plugin(family="precision", offer=LayoutOffer(table=_table, choices={"product_dtype": (PRODUCTS,)}))
class Float8:
    """Multiply the matrices of linear layers in float8; weights, gradients and the optimizer keep their dtypes.

    Every operand is scaled so that its largest element is the largest of float8. The recipes differ in the granularity
    of scales: "tensorwise" a whole tensor, "rowwise" every row, "rowwise_with_gw_hp" every row, and the gradients of
    weights are computed in the dtype of the activations. Where the device has no float8 products they are emulated by
    rounding to float8 and multiplying in the wider dtype, and `check` says so; `plan` counts float8 products.
    Memory: float8 copies of the operands of the layer at work.
    Collectives: none of its own under data parallelism alone. all_gather = true: FSDP2 gathers converted weights as one
        byte an element, and after every optimizer step one all-reduce a mesh agrees on their scales. Under tp the
        scales of sharded tensors are agreed by all-reduces of one number, or one a row, for every sharded operand and
        product.

    Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433; torchao.float8.

    Args:
        recipe: Granularity of scales.
        modules: Patterns of linear layers, or of modules whose linear layers are converted; default: all whose dims are
            multiples of 16, as the hardware needs.
        exclude: Patterns of layers that are not converted.
        min_dim: Leave layers whose input or output is smaller.
        auto: Leave layers that are too small to gain anything, by torchao's thresholds for the recipe.
        all_gather: FSDP2 gathers weights in float8. Only with "tensorwise".
        emulate: Emulate, or not; default: where the device has no float8 products.
    """

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    modules: tuple[str, ...] | None = None
    exclude: tuple[str, ...] = ()
    min_dim: int | None = Field(default=None, ge=1)
    auto: bool = False
    all_gather: bool = False
    emulate: bool | None = None

    @hookimpl
    def composer3d_layout(self, degrees: Mapping[str, int]) -> LayoutTraits:
        """Describe the part in a layout."""
        return LayoutTraits(product_dtype=PRODUCTS, gather_bytes=1 if self.all_gather else None)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse recipes that torchao does not have."""
        if self.all_gather and self.recipe != "tensorwise":
            raise PluginError(
                f'all_gather = true needs one scale a weight, and recipe = "{self.recipe}" has one a row; a rank holds '
                "only some of a weight's rows",
                hint='write recipe = "tensorwise", or leave all_gather out',
            )
        if self.all_gather:
            context.claim("all_gather", by=self)
        if self.auto and self.recipe == "rowwise_with_gw_hp":
            raise PluginError(
                'auto = true has no thresholds for recipe = "rowwise_with_gw_hp": none were measured',
                hint="state min_dim, modules or exclude",
            )
        if self.emulate is False and _lacks_products(context.device):
            raise PluginError(
                f"emulate = false, and this device ({_name(context.device)}) has no float8 products",
                hint="leave emulate out; the plan says where products are emulated",
            )

    @hookimpl
    def composer3d_convert(self, context: RunContext) -> list[Transform]:
        """Convert the layers; FSDP2 gathers them as bytes where the backend knows no float8."""
        convert = Transform(
            name="float8",
            phase=Phase.CONVERT,
            select=self._select,
            apply=self._apply,
            rows=self._rows,
            requires={"fsdp2": _FSDP2_GATHERS} if self.all_gather else {},
        )
        if not self.all_gather:
            return [convert]
        gather = Transform(
            name="float8.all_gather",
            phase=Phase.COMMUNICATE,
            select=lambda model, context: context.units(None),
            apply=_apply_gather,
        )
        # Otherwise the first step would scale each rank's shard along tp alone, and all others the whole weight.
        scales = Transform(
            name="float8.scales",
            phase=Phase.MATERIALISE,
            select=self._select_again,
            apply=_apply_scales,
        )
        return [convert, gather, scales]

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> StepAction | None:
        """Agree on the scales of weights once they are final."""
        if not self.all_gather:
            return None
        return StepAction(name="float8", point=StepPoint.PARAMETERS_FINAL, run=_precompute)

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        chosen = choose(
            model,
            context.fqns,
            recipe=self.recipe,
            modules=self.modules,
            exclude=self.exclude,
            min_dim=self.min_dim or 1,
            auto=self.auto,
        )
        if self.modules is None and not (self.exclude or self.auto or self.min_dim):
            linear_layers(
                model, context, modules=None, multiple=MULTIPLE, beside=stacked_layers(model)
            )  # refuses to leave all blocks as they are
        context.state[self] = chosen
        return context.stash(ConvertedLayers).note(chosen, by="float8")

    def _select_again(self, model: nn.Module, context: RunContext) -> list[str]:
        """Return the layers chosen before, or raise the same error again."""
        chosen: list[str] = context.state.get(self) or self._select(model, context)
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

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        float8: Any = torch_compat.import_torchao("torchao.float8")
        recipe = float8.Float8LinearConfig.from_recipe_name(self.recipe)
        config = replace(recipe, emulate=self._emulates(context))
        gathered = replace(config, enable_fsdp_float8_all_gather=True) if self.all_gather else config
        tied = {fqn for group in context.ties for fqn in group}
        cls = layer_class(by_row=self.recipe != "tensorwise")
        for fqn in fqns:
            if has_stacked_experts(model.get_submodule(fqn)):
                multiply_stacked(model.get_submodule(fqn), config, fqn=fqn)
                continue
            # A tied weight is also what an embedding looks up, in full precision.
            convert(model.get_submodule(fqn), config if f"{fqn}.weight" in tied else gathered, cls)
        return list(fqns)


def _apply_gather(model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
    tensor = context.views.joined(context.layout.names(Role.TENSOR))
    for shards in context.views.shards:
        if needs_bytes(shards.get_group()):
            gather_as_bytes(context.stash(Units))
        # DTensor takes the largest over both dims in one all-reduce where they are known as one.
        context.views.flattened(context.views.beside(shards, tensor))
    return list(fqns)


def _apply_scales(model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
    precompute_scales(model)
    return list(fqns)


def _precompute(state: StepState) -> None:
    for part in state.parts:
        precompute_scales(part.module)


def _has_products(device: torch.device) -> bool:
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _lacks_products(device: torch.device) -> bool:
    """Return whether it is known that a device has none: of a GPU elsewhere, of which a plan is, nothing is."""
    import torch

    return not _has_products(device) and (device.type != "cuda" or torch.cuda.is_available())


def _name(device: torch.device) -> str:
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    return torch.cuda.get_device_name(device)
