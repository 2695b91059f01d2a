"""Linear layer with a frozen weight, in NF4 or its own dtype, and a trained low-rank adapter.

Shape suffixes: B tokens, I and O a layer's inputs and outputs, R the adapter's rank.
"""

from __future__ import annotations

import contextlib
import functools
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import on_local_shards
from composer3d_plugins.precision.qlora.nf4 import Format, levels

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = [
    "Adapter",
    "become_adapted",
    "draws_per_shard",
    "is_linear",
    "is_transposed",
    "run_eagerly",
    "table_of",
    "update_of",
]


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """Adapter of one linear layer.

    Args:
        fqn: FQN of the layer.
        form: Format of the stored weight; None where it is not quantised.
        rank: Inner dim of the adapter; 0 if the layer has none.
        scale: Factor of the adapter's product.
        dropout: Probability of dropout on the adapter's input.
        is_transposed: Whether the weight is `[in, out]`.
        sharded_random: Opens the random stream of sharded activations.
    """

    fqn: str
    form: Format | None
    rank: int
    scale: float
    dropout: float
    is_transposed: bool
    sharded_random: Callable[..., contextlib.AbstractContextManager[None]]


def is_linear(module: nn.Module) -> bool:
    """Return whether a layer is supported. Subclasses are not: their forward may differ, or, as in torch's attention,
    may never be called.
    """
    from torch import nn

    return type(module) is nn.Linear or is_transposed(module)


def is_transposed(module: nn.Module) -> bool:
    """Return whether it is the linear layer of GPT-2 in transformers, whose weight is `[in, out]`."""
    cls = type(module)
    return (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")


def update_of(a_RI: Tensor, b_OR: Tensor, scale: float, *, transposed: bool) -> Tensor:
    """Return the adapter's update of a weight, `[out, in]`, or transposed."""
    update_OI = scale * (b_OR @ a_RI)
    return update_OI.t() if transposed else update_OI


def become_adapted(module: Any, adapter: Adapter) -> None:
    """Convert a linear layer to an adapted one in place, which keeps its identity, hooks and FQN.

    Adds zero parameters `lora_a` `[rank, in]` and `lora_b` `[out, rank]` on the weight's device.
    """
    import torch
    from torch import nn

    module.adapter, module.has_reordered_inputs = adapter, False
    weight = module.weight
    # A narrower dtype would round small updates away.
    dtype = weight.dtype if weight.dtype.itemsize >= 4 else torch.float32
    if adapter.rank:
        out_features, in_features = reversed(weight.shape) if adapter.is_transposed else weight.shape
        for name, shape in (("lora_a", (adapter.rank, in_features)), ("lora_b", (out_features, adapter.rank))):
            module.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype, device=weight.device)))
    module.__class__ = _adapted_class(type(module))


def draws_per_shard(module: Any) -> bool:
    """Return whether each rank draws the dropout mask of its own shard of the inputs."""
    from torch.distributed.tensor import DTensor

    adapter: Adapter = module.adapter
    return bool(adapter.rank and adapter.dropout) and (isinstance(module.weight, DTensor) and _is_input_sharded(module))


def run_eagerly(module: Any) -> None:
    """Exclude a module from compilation, which cannot trace changes of generator state."""
    forward = module.forward
    if getattr(forward, "composer3d_eager", False):
        return

    @functools.wraps(forward)
    def eager(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    eager.composer3d_eager = True  # type: ignore[attr-defined]
    module.forward = eager


def _is_input_sharded(module: Any) -> bool:
    """Return whether tp shards a weight along its inputs."""
    found: bool = module.weight.placements[0].is_shard(0 if module.adapter.is_transposed else 1)
    return found


def _adapted_class(cls: type[nn.Module]) -> type[nn.Module]:
    base: Any = cls

    class Adapted(base):
        def forward(self, input: Tensor) -> Any:
            """Return the sum of the frozen weight's product and the adapter's."""
            return _on_local_shards(self, input)

    Adapted.__name__ = Adapted.__qualname__ = f"Adapted{cls.__name__}"
    return Adapted


def _on_local_shards(module: Any, x: Any) -> Any:
    """Compute on the local shard of a weight that tp shards, or on the plain weight."""
    from torch.distributed.tensor import DTensor

    weight = module.weight.t() if module.adapter.is_transposed else module.weight
    is_sharded = isinstance(weight, DTensor) and _is_input_sharded(module)
    a, b = getattr(module, "lora_a", None), getattr(module, "lora_b", None)

    def product(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor | None, b: Tensor | None) -> Tensor:
        return _product(module, x, weight, bias, a, b, is_sharded=is_sharded)

    return on_local_shards(product, x, weight, module.bias, a, b)


def _product(
    module: Any,
    x_BI: Tensor,
    weight_OI: Tensor,
    bias: Tensor | None,
    a_RI: Tensor | None,
    b_OR: Tensor | None,
    *,
    is_sharded: bool,
) -> Tensor:
    import torch.nn.functional as F

    from composer3d_plugins.precision.qlora.product import StoredProduct

    adapter: Adapter = module.adapter
    if adapter.form is None:
        y_BO = F.linear(x_BI, weight_OI, bias)
    else:
        y_BO = StoredProduct.apply(
            x_BI, weight_OI, bias, table_of(module, weight_OI.device), adapter.form, adapter.is_transposed
        )
    if a_RI is None or b_OR is None:
        return y_BO
    x_BI = x_BI.to(a_RI.dtype)
    if adapter.dropout and module.training:
        with _drawing(module, x_BI) if is_sharded else contextlib.nullcontext():
            x_BI = F.dropout(x_BI, adapter.dropout)
    return y_BO + (adapter.scale * F.linear(F.linear(x_BI, a_RI), b_OR)).to(y_BO.dtype)


def _drawing(module: Any, x: Tensor) -> contextlib.AbstractContextManager[None]:
    """Enter the random stream of an input sharded over tp; even shards draw their part of one device's numbers.

    Args:
        module: Adapted layer whose weight is sharded along its inputs.
        x: Local input, its last dim sharded.
    """
    adapter: Adapter = module.adapter
    site = zlib.crc32(adapter.fqn.encode()) << 16
    whole = module.weight.shape[0 if adapter.is_transposed else 1]
    if x.shape[-1] * module.weight.device_mesh.size(0) != whole or module.has_reordered_inputs:
        return adapter.sharded_random(site)
    return adapter.sharded_random(site, dim=x.ndim - 1, parts=(whole,))


def table_of(module: Any, device: torch.device) -> Tensor:
    """Return the NF4 table on a device, cached in the module: creating it copies from the host."""
    table: Tensor | None = vars(module).get("levels")
    if table is None or table.device != device:
        table = module.levels = levels(device)
    return table
