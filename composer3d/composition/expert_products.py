"""Products with stacked weights of experts, replaced by those of a precision: each expert's matrix is a linear layer's.

Shape suffixes: R rows, E experts, I inputs, O outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.composition.expert_contract import has_stacked_experts
from composer3d.errors import PluginError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["multiply_experts", "stacked_layers"]

# Returns y_RO of x_RI and w_OI, differentiable.
Product = Callable[["Tensor", "Tensor"], "Tensor"]
# Functions that return views of a weight, or ask what it is.
_VIEWS = frozenset(
    "__getitem__ __get__ __len__ __hash__ __iter__ adjoint as_strided chunk data_ptr detach dim element_size expand "
    "flatten is_contiguous is_floating_point movedim mT narrow numel permute requires_grad_ reshape select size split "
    "squeeze stride swapaxes swapdims t tensor_split transpose unbind unflatten unsqueeze untyped_storage view "
    "view_as".split()
)
_MATMULS = frozenset(("matmul", "mm", "bmm", "__matmul__"))
_GROUPED = frozenset(("grouped_mm", "_grouped_mm"))


def stacked_layers(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the modules with stacked weights of experts, each with both dims of one matrix after the other."""
    found: dict[str, tuple[int, ...]] = {}
    for fqn, module in model.named_modules():
        sizes = tuple(size for parameter in module.parameters() if parameter.ndim == 3 for size in parameter.shape[1:])
        if sizes and has_stacked_experts(module):
            found[fqn] = sizes
    return found


def multiply_experts(module: Any, product: Product, *, fqn: str, by: str) -> None:
    """Let the forward of a module with stacked weights multiply them by a function, expert by expert.

    Its own code runs; products of rows and weights in it are taken over: `grouped_mm`, `linear` and `matmul` with the
    weights of one expert, and `bmm` with those of several. Results in other dtypes than the code's are cast back.
    Collectives: none.

    Args:
        module: With the contract of `has_stacked_experts`.
        product: Of rows and one expert's matrix.
        fqn: Of the module, for messages.
        by: The plugin's name, for messages.

    Raises:
        PluginError: In the forward, where a weight is used by another function.
    """
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        weights = [
            getattr(owner, name)
            for owner in module.modules()
            for name, held in owner._parameters.items()
            if held is not None and held.ndim == 3
        ]
        if weights[0].is_meta:
            return inner(*args, **kwargs)
        with _mode(weights, product, fqn=fqn, by=by):
            return inner(*args, **kwargs)

    forward.composer3d_eager = True  # type: ignore[attr-defined]  # sizes of groups are values
    module.forward = forward


def _mode(weights: Sequence[Any], product: Product, *, fqn: str, by: str) -> Any:
    import torch
    from torch.overrides import TorchFunctionMode

    held = {torch_compat.storage_key(weight) for weight in weights}

    def is_weight(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and torch_compat.storage_key(value) in held

    class Replaced(TorchFunctionMode):
        """Products with the weights go to the precision's."""

        def __torch_function__(
            self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            name, given = getattr(function, "__name__", ""), {**(kwargs or {})}
            values = [*args, *given.values()]
            if not any(map(is_weight, values)):
                return function(*args, **given)
            if name in _GROUPED and is_weight(values[1]):
                return _grouped(product, *args, **given)
            if name == "linear" and is_weight(values[1]) and values[1].ndim == 2:
                return _linear(product, *args, **given)
            if name in _MATMULS and is_weight(values[1]) and not is_weight(values[0]):
                return _matmul(product, values[0], values[1])
            result = function(*args, **given)
            if name in _VIEWS and all(
                is_weight(each) for each in torch_compat.tree_leaves(result) if _has_values(each)
            ):
                return result
            raise PluginError(
                f'{by}: the experts of "{fqn}" use their weights in `{name}`, which it does not compute; write '
                f'F.grouped_mm, F.linear, torch.matmul or torch.bmm with them, or exclude "{fqn}"'
            )

    return Replaced()


def _has_values(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _product(product: Product, x: Tensor, w_OI: Tensor) -> Tensor:
    """Return y_RO; without rows there is nothing to quantise, and the weight's gradient is zero."""
    return product(x, w_OI).to(x.dtype) if x.numel() else x @ w_OI.t()


def _linear(product: Product, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = _product(product, input, weight)
    return y if bias is None else y + bias


def _matmul(product: Product, x: Tensor, weight: Tensor) -> Tensor:
    import torch

    if weight.ndim == 2:
        return _product(product, x, weight.t())
    pairs = zip(x.expand(weight.shape[0], *x.shape[-2:]), weight, strict=True)
    return torch.stack([_product(product, x_RI, w_IO.t()) for x_RI, w_IO in pairs])


def _grouped(product: Product, input: Tensor, weight: Tensor, *, offs: Tensor, **options: Any) -> Tensor:
    """Return y_RO; rows beyond the last group's, of which torch says nothing, are zeros."""
    import torch

    pieces = [
        _product(product, input[first:last], w_IO.t())
        for (first, last), w_IO in zip(_bounds(offs, input.shape[0]), weight, strict=True)
    ]
    y_RO = torch.cat(pieces)
    rest = input.shape[0] - y_RO.shape[0]
    return y_RO if not rest else torch.cat([y_RO, y_RO.new_zeros(rest, y_RO.shape[1])])


def _bounds(ends_E: Tensor, num_rows: int) -> Iterator[tuple[int, int]]:
    """Yield the first row of each group, and the one after its last; as many for each where there are no values."""
    number = ends_E.shape[0]
    is_fake = torch_compat.active_fake_mode() is not None
    ends = [num_rows * (index + 1) // number for index in range(number)] if is_fake else ends_E.tolist()
    yield from zip([0, *ends[:-1]], ends, strict=True)
