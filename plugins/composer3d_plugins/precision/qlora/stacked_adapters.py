"""Adapters of stacked experts: one low-rank adapter per matrix of a stacked weight.

The module's own code runs; its products with a stacked weight are computed expert by expert, dequantising one matrix at
a time. An adapter is defined on the matrix as it is stored, w_PQ + scale * b_PA a_AQ, so that it does not depend on the
dim over which the module contracts.

Shape suffixes: E experts, P rows and Q columns of a stored matrix, A the adapters' inner dim, R rows of tokens.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from composer3d import RunContext, place, stacked_layers, standing_in
from composer3d_plugins.precision.qlora.adapter import table_of
from composer3d_plugins.precision.qlora.nf4 import BLOCK, Format

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "StackedAdapter",
    "adapt_stacked",
    "adapter_seed",
    "merged_stacked",
    "select_stacked",
    "start_stacked",
    "store_stacked",
    "stored_stacked",
]

A, B = "lora_a", "lora_b"


@dataclass(frozen=True, kw_only=True)
class StackedAdapter:
    """Adapters of one module with stacked weights.

    Args:
        fqn: FQN of the module.
        forms: Formats of its stacked weights, by name in the module; None for a weight that is not quantised.
        rank: Inner dim of the adapters; 0 if there are none.
        scale: Factor of the adapters' products.
        dropout: Probability of dropout on the adapters' inputs.
    """

    fqn: str
    forms: Mapping[str, Format | None]
    rank: int
    scale: float
    dropout: float

    @property
    def adapters(self) -> list[str]:
        """Names of the adapter parameters in the module."""
        return [f"{name}_{kind}" for name in self.forms for kind in (A, B)] if self.rank else []


def select_stacked(
    model: nn.Module,
    context: RunContext,
    *,
    adapted: set[str],
    quantised: set[str],
    group: int,
    options: Mapping[str, Any],
) -> list[StackedAdapter]:
    """Return the adapters of the modules with stacked weights.

    Args:
        model: The whole model.
        context: Its ties are read.
        adapted: FQNs of modules that get adapters.
        quantised: FQNs of modules whose weights are quantised, if their rows are multiples of 64.
        group: Maximum number of scales with a common factor.
        options: `rank`, `scale` and `dropout`.
    """
    tied = {fqn for names in context.ties for fqn in names}
    found = []
    for fqn in stacked_layers(model):
        if fqn not in adapted | quantised:
            continue
        weights = {name: p for name, p in model.get_submodule(fqn).named_parameters() if p.ndim == 3}
        forms = {
            name: Format.of(weight.shape[2], group=group)
            if fqn in quantised and weight.shape[2] % BLOCK == 0 and f"{fqn}.{name}" not in tied
            else None
            for name, weight in weights.items()
        }
        rank = options["rank"] if fqn in adapted else 0
        found.append(StackedAdapter(fqn=fqn, forms=forms, **{**options, "rank": rank}))
    return found


def adapt_stacked(module: nn.Module, adapter: StackedAdapter) -> dict[str, Tensor]:
    """Add zero adapters to a module with stacked weights, in place.

    Returns the quantised weights by FQN if the module has values; none if it is on meta.

    Memory: one dequantised matrix at a time. Collectives: none.
    """
    import torch
    from torch import nn

    for name in adapter.forms if adapter.rank else ():
        owner, short = _owner(module, name)
        weight = getattr(owner, short)
        number, rows, columns = weight.shape
        dtype = weight.dtype if weight.dtype.itemsize >= 4 else torch.float32
        for kind, shape in ((A, (number, adapter.rank, columns)), (B, (number, rows, adapter.rank))):
            made = nn.Parameter(torch.zeros(shape, dtype=dtype, device=weight.device))
            owner.register_parameter(f"{short}_{kind}", made)
    waiting = {}
    for name, form in adapter.forms.items():
        weight = module.get_parameter(name)
        if form is not None and not weight.is_meta:
            waiting[f"{adapter.fqn}.{name}"] = stored_stacked(weight.detach().cpu(), form)
    inner = module.forward

    @functools.wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden_TD = args[0] if args else next(iter(kwargs.values()))
        weights = {_owner(module, name): _Weight.of(module, name, adapter) for name in adapter.forms}

        def product(key: tuple[Any, str], x_RI: Tensor, w_OI: Tensor) -> Tensor:
            return weights[key].product(module, x_RI, w_OI)

        shapes = {key: weight.shape for key, weight in weights.items()}
        remedy = "name other layers in [precision.qlora] modules, and these in keep where weights are quantised"
        with standing_in(shapes, product, like=hidden_TD, fqn=adapter.fqn, by="qlora", remedy=remedy):
            return inner(*args, **kwargs)

    forward.composer3d_eager = True  # type: ignore[attr-defined]  # sizes of groups are values
    module.forward = forward
    return waiting


def _owner(module: nn.Module, name: str) -> tuple[Any, str]:
    path, _, short = name.rpartition(".")
    return module.get_submodule(path), short


@dataclass(frozen=True, kw_only=True)
class _Weight:
    """Stacked weight and adapters during one forward: plain local tensors of this rank's experts."""

    stored_EPW: Tensor
    a_EAQ: Tensor | None
    b_EPA: Tensor | None
    form: Format | None
    adapter: StackedAdapter

    @classmethod
    def of(cls, module: nn.Module, name: str, adapter: StackedAdapter) -> _Weight:
        """Read the module's current tensors: all-gathered, or this rank's experts under expert parallelism."""
        owner, short = _owner(module, name)
        a, b = (getattr(owner, f"{short}_{kind}", None) for kind in (A, B))
        return cls(
            stored_EPW=_plain(getattr(owner, short)),
            a_EAQ=_plain(a),
            b_EPA=_plain(b),
            form=adapter.forms[name],
            adapter=adapter,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the weight before quantisation."""
        number, rows, width = self.stored_EPW.shape
        return number, rows, width if self.form is None else self.form.features(width)

    def product(self, module: nn.Module, x_RI: Tensor, w_OI: Tensor) -> Tensor:
        """Return y_RO; the view's offset and strides identify the expert and whether its matrix is transposed."""
        import torch.nn.functional as F

        from composer3d_plugins.precision.qlora.product import StoredProduct

        _, rows, columns = self.shape
        expert = int(w_OI.storage_offset()) // (rows * columns)
        is_transposed = tuple(w_OI.shape) != (rows, columns) or (w_OI.stride(-1) != 1 and columns > 1)
        stored = self.stored_EPW[expert].t() if is_transposed else self.stored_EPW[expert]
        if not x_RI.numel():
            y_RO = x_RI.new_zeros(*x_RI.shape[:-1], w_OI.shape[0])
        elif self.form is None:
            y_RO = F.linear(x_RI, stored.to(x_RI.dtype))
        else:
            levels = table_of(module, stored.device)
            y_RO = StoredProduct.apply(x_RI, stored, None, levels, self.form, is_transposed)
        if self.a_EAQ is None or self.b_EPA is None:
            return y_RO
        first, second = self.a_EAQ[expert], self.b_EPA[expert]
        if is_transposed:
            first, second = second.t(), first.t()
        x_RI = F.dropout(x_RI.to(first.dtype), self.adapter.dropout, module.training)
        return y_RO + (self.adapter.scale * F.linear(F.linear(x_RI, first), second)).to(y_RO.dtype)


def _plain(value: Any) -> Any:
    from torch.distributed.tensor import DTensor

    return value.to_local() if isinstance(value, DTensor) else value


def merged_stacked(adapter: StackedAdapter, name: str, weight: Tensor, read: Callable[[str], Tensor]) -> Tensor:
    """Return a stacked weight of the exported model: the dequantised weight plus its adapters' updates."""
    from composer3d_plugins.precision.qlora.nf4 import levels

    form = adapter.forms[name]
    base = weight if form is None else form.dequantised(form.quantised(weight.flatten(0, 1)), levels("cpu"))
    base = base.view(weight.shape)
    if not adapter.rank:
        return base.to(weight.dtype)
    a_EAQ, b_EPA = (read(f"{adapter.fqn}.{name}_{kind}") for kind in (A, B))
    return (base.to(a_EAQ.dtype) + adapter.scale * (b_EPA @ a_EAQ)).to(weight.dtype)


def stored_stacked(tensor: Tensor, form: Format) -> Tensor:
    """Return a stacked weight in its stored form, uint8 `[experts, rows, width]`."""
    return form.quantised(tensor.flatten(0, 1)).view(*tensor.shape[:2], -1)


def store_stacked(module: nn.Module, adapter: StackedAdapter, waiting: dict[str, Tensor]) -> None:
    """Replace plain weights by stored ones with the same placements: empty, or filled from `waiting`.

    Args:
        module: Module with stacked weights; on meta, its stored weights are too.
        adapter: Adapter of the module.
        waiting: Quantised weights by FQN of a model that was passed with values; this module's are removed.
    """
    import torch
    from torch import nn
    from torch.distributed.tensor import DTensor

    for name, form in adapter.forms.items():
        if form is None:
            continue
        owner, short = _owner(module, name)
        weight = getattr(owner, short)
        shape = torch.Size((*weight.shape[:2], form.width(weight.shape[2])))
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        empty = torch.empty(*local.shape[:2], shape[2], dtype=torch.uint8, device=local.device)
        value: Tensor = empty
        if isinstance(weight, DTensor):
            value = DTensor.from_local(
                empty,
                weight.device_mesh,
                weight.placements,
                run_check=False,
                shape=shape,
                stride=(shape[1] * shape[2], shape[2], 1),
            )
        setattr(owner, short, nn.Parameter(value, requires_grad=False))
        if (full := waiting.pop(f"{adapter.fqn}.{name}", None)) is not None:
            place(getattr(owner, short), full)


def start_stacked(module: nn.Module, adapter: StackedAdapter, context: RunContext) -> None:
    """Initialise the adapters, each from its own generator, so that they are the same in every layout."""
    import torch

    table_of(module, context.device)
    for name in adapter.forms if adapter.rank else ():
        owner, short = _owner(module, name)
        a, b = (getattr(owner, f"{short}_{kind}") for kind in (A, B))
        generator = torch.Generator().manual_seed(adapter_seed(context.manifest.train.seed, f"{adapter.fqn}.{name}"))
        bound = 1 / math.sqrt(a.shape[-1])
        full = torch.rand(a.shape, dtype=a.dtype, generator=generator).mul_(2 * bound).sub_(bound)
        place(a, full)
        place(b, torch.zeros(b.shape, dtype=b.dtype))


def adapter_seed(seed: int, fqn: str) -> int:
    """Return the seed of a layer's adapters."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {fqn}".encode(), digest_size=7).digest(), "big")
