"""Float8 linear layers: their selection, and the conversion of a module in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from composer3d import PluginError, multiply_experts, select_fqns, stacked_layers, torch_compat

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["MULTIPLE", "choose", "convert", "is_worthwhile", "layer_class", "multiply_stacked"]

MULTIPLE = 16


def choose(
    model: nn.Module,
    fqns: Sequence[str],
    *,
    recipe: str,
    modules: Sequence[str] | None,
    exclude: Sequence[str],
    min_dim: int,
    auto: bool,
) -> list[str]:
    """Return the FQNs of the layers to convert.

    Args:
        model: The whole model.
        fqns: Of all its modules.
        modules: Patterns; None takes every linear layer whose dims are multiples of 16.
        exclude: Patterns of layers to leave out.
        min_dim: Least number of input and of output features.
        auto: Whether torchao's thresholds apply as well.

    Raises:
        PatternError: A pattern matches nothing.
        PluginError: A layer that was named cannot be converted, or none is left.
    """
    linear = _sizes(model) | stacked_layers(model)
    chosen = [fqn for fqn in linear if not _odd(linear[fqn])] if modules is None else []
    for pattern in modules or ():
        inside = [fqn for name in select_fqns(pattern, fqns) for fqn in linear if f"{fqn}.".startswith(f"{name}.")]
        if not inside:
            raise PluginError(f'the pattern "{pattern}" matches modules without linear layers')
        for fqn in inside:
            if _odd(linear[fqn]):
                raise PluginError(
                    f'"{fqn}" is a linear layer of {" x ".join(map(str, linear[fqn][:2]))}; '
                    f"float8 products need multiples of {MULTIPLE}",
                    hint="exclude it",
                )
        chosen += inside
    names = [name for pattern in exclude for name in select_fqns(pattern, fqns)]
    left_out = {fqn for name in names for fqn in linear if f"{fqn}.".startswith(f"{name}.")}
    result = [
        fqn
        for fqn in dict.fromkeys(chosen)
        if fqn not in left_out
        and min(linear[fqn]) >= min_dim
        and (
            not auto
            or all(
                is_worthwhile(*pair, recipe=recipe) for pair in zip(linear[fqn][::2], linear[fqn][1::2], strict=True)
            )
        )
    ]
    if not result:
        raise PluginError(
            f"no layer is left to convert: of {len(linear)} linear layers, {len(chosen)} are named or have dims that "
            f"are multiples of {MULTIPLE}, and exclude, min_dim or auto leave out the rest"
        )
    return result


def is_worthwhile(in_features: int, out_features: int, *, recipe: str) -> bool:
    """Return whether a layer gains by float8, by the thresholds that torchao measured on H100.

    Source: torchao.float8, performance tables of its README and `_auto_filter_for_recipe`.
    """
    if in_features % MULTIPLE or out_features % MULTIPLE:
        return False
    if recipe == "tensorwise":
        return not (in_features <= 4096 and out_features <= 1024)
    return out_features > 2048 and in_features > 1024 and not (out_features <= 4096 and in_features <= 2048)


def layer_class(*, by_row: bool) -> type[nn.Module]:
    """Return torchao's layer, whose outputs are no views: FSDP2 warns about a head that returns one.

    Args:
        by_row: Whether rows of the input have scales of their own. torchao cannot copy what has, and makes one row of
            all dims but the last, which of some views needs a copy.
    """
    from torch.distributed.tensor import DTensor

    float8: Any = torch_compat.import_torchao("torchao.float8.float8_linear")

    class Multiplied(float8.Float8Linear):
        """A linear layer in float8."""

        def forward(self, input: Tensor) -> Tensor:
            """Multiply."""
            y: Tensor = super().forward(input.contiguous() if by_row else input)
            return y if isinstance(y, DTensor) else torch_compat.unviewed(y)

    Multiplied.__name__ = Multiplied.__qualname__ = "Float8Linear"
    return Multiplied


def convert(module: Any, config: Any, cls: type[nn.Module]) -> None:
    """Make a linear layer compute as torchao's does.

    The module stays the object that it is, so that hooks on it and other names of it stay too.

    Args:
        module: The linear layer, weight_OI.
        config: torchao's.
        cls: From `layer_class`, one for all layers: the compiler tells them apart by it.
    """
    from torch import nn

    float8: Any = torch_compat.import_torchao("torchao.float8")
    holder = nn.Module()
    holder.add_module("linear", module)
    # torchao swaps children of what it is given, and prepares the compiler.
    made: Any = float8.convert_to_float8_training(holder, config=config).linear
    for name, value in vars(made).items():
        if name not in vars(module):
            setattr(module, name, value)
    module.weight = made.weight
    module.__class__ = cls


def multiply_stacked(module: Any, config: Any, *, fqn: str) -> None:
    """Make a module with stacked weights of experts multiply each expert's rows as a converted layer does.

    Rows of zeros fill up a group of rows: the gradient of its weight sums over a multiple of 16 of them, as the
    hardware needs.

    Args:
        module: With the contract of `has_stacked_experts`.
        config: torchao's.
        fqn: Of the module.
    """
    import torch.nn.functional as F

    float8: Any = torch_compat.import_torchao("torchao.float8.float8_linear")
    config = dataclasses.replace(config, enable_fsdp_float8_all_gather=False)
    layer = float8.Float8Linear(MULTIPLE, MULTIPLE, bias=False, config=config, device="meta")

    def product(x_RI: Tensor, w_OI: Tensor) -> Tensor:
        x_PI = F.pad(x_RI.contiguous(), (0, 0, 0, -x_RI.shape[0] % MULTIPLE))
        y_PO: Tensor = float8.matmul_with_hp_or_float8_args.apply(x_PI, w_OI.t(), layer.linear_mm_config, layer.config)
        return y_PO[: x_RI.shape[0]]

    multiply_experts(module, product, fqn=fqn, by="float8")


def _sizes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    linear: dict[str, Any] = {fqn: module for fqn, module in model.named_modules() if _is_linear(module)}
    return {fqn: (module.in_features, module.out_features) for fqn, module in linear.items()}


def _is_linear(module: nn.Module) -> bool:
    """Leave subclasses alone: their forward may be another, or, as in torch's attention, is not called."""
    from torch import nn

    return type(module) is nn.Linear


def _odd(sizes: Sequence[int]) -> bool:
    return any(size % MULTIPLE for size in sizes)
