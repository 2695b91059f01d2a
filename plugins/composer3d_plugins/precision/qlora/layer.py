"""A linear layer with a frozen weight, stored in NF4 or as it is, and a trained product of two narrow matrices."""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import on_shares
from composer3d_plugins.precision.qlora.nf4 import Format, levels

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["Adapter", "become_adapted", "is_linear", "is_transposed", "update_of"]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What a layer does beside its product.

    Args:
        fqn: The layer's.
        form: Of the stored weight; None where it is kept as it is.
        rank: Of the trained product; 0 where there is none.
        scale: Its factor.
        dropout: Of its input.
        is_transposed: Whether the weight is `[in, out]`.
        sharded_random: Opens the random stream of cut activations.
    """

    fqn: str
    form: Format | None
    rank: int
    scale: float
    dropout: float
    is_transposed: bool
    sharded_random: Callable[[int], contextlib.AbstractContextManager[None]]


def is_linear(module: nn.Module) -> bool:
    """Leave subclasses alone: their forward may be another, or, as in torch's attention, is not called."""
    from torch import nn

    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Tell whether it is the linear layer of GPT-2 in transformers, whose weight is `[in, out]`."""
    cls = type(module)
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


def update_of(a: Tensor, b: Tensor, scale: float, *, transposed: bool) -> Tensor:
    """Return what the adapter adds to the weight, `[out, in]`, or transposed."""
    update = scale * (b @ a)
    return update.t() if transposed else update


def become_adapted(module: Any, adapter: Adapter) -> None:
    """Let a linear layer compute as an adapted one; it stays the object that it is, so hooks and other names stay.

    Its parameters `lora_a` `[rank, in]` and `lora_b` `[out, rank]` are made where its weight is, without values.
    """
    import torch
    from torch import nn

    module.adapter = adapter
    if adapter.form is not None:
        module.stored_product = _stored_product(adapter.form, adapter.is_transposed)
    weight = module.weight
    # Small updates would be lost in a narrower dtype.
    dtype = weight.dtype if weight.dtype.itemsize >= 4 else torch.float32
    if adapter.rank:
        out_features, in_features = reversed(weight.shape) if adapter.is_transposed else weight.shape
        for name, shape in (("lora_a", (adapter.rank, in_features)), ("lora_b", (out_features, adapter.rank))):
            module.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype, device=weight.device)))
    module.__class__ = _adapted_class(type(module))


def _adapted_class(cls: type[nn.Module]) -> type[nn.Module]:
    base: Any = cls

    class Adapted(base):
        def forward(self, input: Tensor) -> Any:
            """Return the product of the frozen weight and that of the adapter."""
            return _on_shares(self, input)

    Adapted.__name__ = Adapted.__qualname__ = f"Adapted{cls.__name__}"
    return Adapted


def _on_shares(module: Any, x: Any) -> Any:
    """Compute on this rank's share of a weight that is cut along tp, as the cut says, or on the whole."""
    from torch.distributed.tensor import DTensor

    weight = module.weight.t() if module.adapter.is_transposed else module.weight
    is_cut = isinstance(weight, DTensor) and weight.placements[0].is_shard(1)
    a, b = getattr(module, "lora_a", None), getattr(module, "lora_b", None)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None) -> Tensor:
        return _product(module, x, weight, bias, a, b, is_cut=is_cut)

    return on_shares(product, x, weight, module.bias, a, b)


def _product(
    module: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    a: Tensor | None,
    b: Tensor | None,
    *,
    is_cut: bool,
) -> Tensor:
    import torch.nn.functional as F

    adapter: Adapter = module.adapter
    if adapter.form is None:
        y = F.linear(x, weight, bias)
    else:
        y = module.stored_product(x, weight, bias, _levels(module, weight.device))
    if a is None or b is None:
        return y
    x = x.to(a.dtype)
    if adapter.dropout and module.training:
        drawn = adapter.sharded_random(zlib.crc32(adapter.fqn.encode()) << 16) if is_cut else contextlib.nullcontext()
        with drawn:
            x = F.dropout(x, adapter.dropout)
    return y + (adapter.scale * F.linear(F.linear(x, a), b)).to(y.dtype)


def _levels(module: Any, device: torch.device) -> Tensor:
    """Return the table of a device; made once, for making it copies from the host."""
    table: Tensor | None = vars(module).get("levels")
    if table is None or table.device != device:
        table = module.levels = levels(device)
    return table


@functools.cache
def _stored_product(form: Format, is_transposed: bool) -> Callable[..., Tensor]:
    """Return what multiplies by a stored weight without keeping its values for the backward, which makes them again.

    One function for all layers of a format, made before the compiler looks: it defines no class, and compiles equal
    blocks once only if they call the same.
    """
    import torch
    import torch.nn.functional as F

    def values(stored: Tensor, levels: Tensor) -> Tensor:
        # A transposed layer's stored weight has its own rows, and its values are those of a linear layer.
        return form.dequantised(stored.t(), levels).t() if is_transposed else form.dequantised(stored, levels)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, stored: Tensor, bias: Tensor | None, levels: Tensor) -> Tensor:
            ctx.save_for_backward(stored, levels)
            return F.linear(x, values(stored, levels).to(x.dtype), None if bias is None else bias.to(x.dtype))

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
            stored, levels = ctx.saved_tensors
            (gradient,) = gradients
            return gradient @ values(stored, levels).to(gradient.dtype), None, None, None

    @torch.compiler.allow_in_graph
    def product(x: Tensor, stored: Tensor, bias: Tensor | None, levels: Tensor) -> Tensor:
        y: Tensor = Product.apply(x, stored, bias, levels)
        return y

    return product
