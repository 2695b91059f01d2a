"""Low-rank adapters on frozen weights, quantised to NF4 while they are loaded or kept in their dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    ConvertedLayers,
    Exports,
    Phase,
    PlannedShards,
    PluginError,
    Role,
    RunContext,
    Stateful,
    StoredOrders,
    Transform,
    hookimpl,
    place,
    plugin,
    select_fqns,
    stacked_layers,
)
from composer3d_plugins.precision.qlora.adapter import (
    Adapter,
    become_adapted,
    draws_per_shard,
    is_linear,
    is_transposed,
    run_eagerly,
    table_of,
    update_of,
)
from composer3d_plugins.precision.qlora.frozen_base import Chosen, digest
from composer3d_plugins.precision.qlora.nf4 import BLOCK, Format
from composer3d_plugins.precision.qlora.sharded_adapters import in_bytes, shard_adapters, stored_like
from composer3d_plugins.precision.qlora.stacked_adapters import (
    adapt_stacked,
    adapter_seed,
    merged_stacked,
    select_stacked,
    start_stacked,
    store_stacked,
    stored_stacked,
)

if TYPE_CHECKING:
    from torch import Tensor, nn


@plugin(family="precision")
class QLoRA:
    """Freeze the model and train low-rank adapters beside its linear layers: y = W x + alpha / rank * B A x.

    quantize = "nf4" quantises the weights of linear layers in the model's blocks, and of layers with adapters, before
    they are sharded, so that their values are the same in every layout; each is dequantised when its layer runs. In
    NF4, 64 consecutive elements of a row have one scale of one byte, and `scale_block` scales have one factor and one
    mean. Layers whose rows are no multiple of 64 are not quantised. quantize = "none" is LoRA. Supported layers are
    torch's `nn.Linear` and transformers' `Conv1D` (GPT-2). A is initialised uniformly, B to zero. Adapter gradients
    equal those of one device. Only adapters are trained and saved; `composer3d export --merge` adds them to the base
    weights.
    Memory: 33 + 8 / scale_block bytes per 64 elements of a quantised weight, sharded like other weights; 9 bytes more
        (8 between scales) wherever tp shards a row within scales that have a common factor; the dequantised weight of
        the layer that runs; adapters of rank * (in + out) elements, the only parameters with gradients and optimizer
        state. While weights are loaded, some copies of one of them.
    Collectives: none of its own under data parallelism: frozen parameters have no gradients to reduce. Under tp one
        all-reduce a step for every adapter matrix that is not sharded.

    Source: Dettmers et al., QLoRA, arXiv:2305.14314; Hu et al., LoRA, arXiv:2106.09685; torchao's NF4.

    Args:
        rank: Inner dim of the adapters.
        alpha: Numerator of the adapters' scale alpha / rank; default: twice the rank.
        dropout: Probability of dropout on the adapters' inputs.
        modules: Patterns of linear layers that get adapters, or of modules whose linear layers do; default: all linear
            layers in the model's blocks.
        quantize: "nf4" (QLoRA), or "none" (LoRA).
        keep: Patterns of layers that are not quantised.
        scale_block: Number of scales with a common factor; fewer where it does not divide the scales of a row; default
            32.
    """

    rank: int = Field(default=16, ge=1, le=1 << 16, examples=[1])
    alpha: float | None = Field(default=None, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    modules: tuple[str, ...] | None = None
    quantize: Literal["nf4", "none"] = "nf4"
    keep: tuple[str, ...] = ()
    scale_block: int | None = Field(default=None, ge=1)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse options without an effect."""
        if self.keep and self.quantize == "none":
            raise PluginError('keep = [...] with quantize = "none", which keeps all weights', hint="remove keep")
        if self.scale_block is not None and self.quantize == "none":
            raise PluginError(
                'scale_block has no effect with quantize = "none": weights that are kept have no scales',
                hint="remove scale_block",
            )

    @hookimpl
    def composer3d_convert(self, context: RunContext) -> Transform:
        """Create the adapters. Weights are quantised after other plugins have sharded them as plain tensors."""
        reason = "both replace what the same linear layers compute; float8 has no products of 4-bit weights"
        return Transform(
            name="qlora",
            phase=Phase.CONVERT,
            select=self._select,
            apply=self._apply,
            rows=self._rows,
            conflicts={"float8": reason},
        )

    @hookimpl
    def composer3d_shard(self, context: RunContext) -> list[Transform]:
        """Store quantised weights, shard adapters like their weights, and initialise them."""
        store = Transform(
            name="qlora.store",
            phase=Phase.TENSOR,
            select=self._fit_formats,
            apply=self._store,
            after=("tensor_parallel",),
            rows=lambda context: {},
        )
        start = Transform(
            name="qlora.start",
            phase=Phase.MATERIALISE,
            select=self._selected,
            apply=self._start,
            rows=lambda context: {},
        )
        return [store, start]

    @hookimpl
    def composer3d_load_parameter(self, context: RunContext, fqn: str, tensor: Tensor) -> Tensor | None:
        """Quantise a weight while it is loaded."""
        chosen: Chosen = context.state[self]
        if fqn in context.parameter_fqns:
            chosen.digests[fqn] = digest(tensor)
        if (of_experts := chosen.stacked_form(fqn)) is not None:
            return stored_stacked(tensor, of_experts)
        layer, _, name = fqn.rpartition(".")
        if name != "weight" or layer not in chosen.quantised:
            return None
        return chosen.quantised[layer].quantised(tensor)

    @hookimpl
    def composer3d_state(self, context: RunContext) -> Mapping[str, Stateful]:
        """Save digests that identify the frozen weights."""
        return {"base": context.state[self]}

    # ---- selection ---------------------------------------------------------------------------------------------------

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        layers: dict[str, Any] = {fqn: module for fqn, module in model.named_modules() if is_linear(module)}
        every = {**layers, **dict.fromkeys(stacked_layers(model))}
        inside = _inside((context.blocks,), every, context) if context.has_blocks else list(every)
        adapted = inside if self.modules is None else _inside(self.modules, every, context)
        if not adapted:
            raise PluginError("the model has no linear layer in its blocks; name layers with modules = [...]")
        tied = {fqn for group in context.ties for fqn in group}
        kept = set(_inside(self.keep, every, context))
        group = 32 if self.scale_block is None else self.scale_block
        chosen = set(inside) | set(adapted) if self.quantize == "nf4" else set()
        stacked = select_stacked(
            model,
            context,
            adapted=set(adapted),
            quantised=chosen - kept,
            group=group,
            options={"rank": self.rank, "scale": self._scale, "dropout": self.dropout},
        )
        adapted = [fqn for fqn in adapted if fqn in layers]
        quantised = {
            fqn: Format.of(layers[fqn].weight.shape[1], group=group)
            for fqn in dict.fromkeys([*inside, *adapted])
            if fqn in chosen & layers.keys()
            and layers[fqn].weight.shape[1] % BLOCK == 0
            and f"{fqn}.weight" not in tied
            and fqn not in kept
        }
        if (
            self.quantize == "nf4"
            and not quantised
            and not any(form for each in stacked for form in each.forms.values())
        ):
            raise PluginError(
                f"no layer is left to quantise: {BLOCK} neighbours in a row of a weight share a scale, and no layer "
                "that is neither tied nor kept has rows of a multiple of that",
                hint='write quantize = "none"',
            )
        context.state[self] = Chosen(
            quantised=quantised,
            adapted=tuple(adapted),
            stacked={each.fqn: each for each in stacked},
            scale=self._scale,
            quantize=self.quantize,
        )
        merges = context.stash(Exports).merges
        for fqn in context.parameter_fqns:
            layer, _, name = fqn.rpartition(".")
            if name == "weight" and layer in layers:
                form, rest = quantised.get(layer), (layer in adapted, is_transposed(layers[layer]))
                merges[fqn] = partial(self._merged, layer, form, *rest)
            else:
                merges[fqn] = lambda weight, read: weight
        for each in stacked:
            merges.update({f"{each.fqn}.{name}": partial(merged_stacked, each, name) for name in each.forms})
        # Patterns of optimizer groups may name adapters.
        context.parameter_fqns += tuple(f"{fqn}.{name}" for fqn in adapted for name in ("lora_a", "lora_b"))
        context.parameter_fqns += tuple(f"{each.fqn}.{name}" for each in stacked for name in each.adapters)
        converted = dict.fromkeys([*quantised, *adapted, *context.state[self].stacked])
        return context.stash(ConvertedLayers).note(list(converted), by="qlora")

    def _rows(self, context: RunContext) -> Mapping[str, Sequence[str]]:
        chosen: Chosen = context.state[self]
        stacked = chosen.stacked.values()
        rows = {
            "adapters": (*chosen.adapted, *(each.fqn for each in stacked if each.rank)),
            "nf4": (*chosen.quantised, *(each.fqn for each in stacked if any(each.forms.values()))),
        }
        return {label: fqns for label, fqns in rows.items() if fqns}

    def _selected(self, model: nn.Module, context: RunContext) -> list[str]:
        chosen: Chosen | None = context.state.get(self)
        if chosen is None:
            return [""]  # the selection of layers failed and has reported its error
        return list(dict.fromkeys([*chosen.quantised, *chosen.adapted, *chosen.stacked]))

    def _fit_formats(self, model: nn.Module, context: RunContext) -> list[str]:
        """Choose formats whose pieces fit the local shards under tp; dequantised values do not change."""
        chosen: Chosen | None = context.state.get(self)
        for fqn, form in list(chosen.quantised.items()) if chosen is not None else ():
            dim, runs = context.stash(PlannedShards).by_parameter.get(f"{fqn}.weight", (0, ()))
            fitting = form.fitted(runs) if dim == 1 else form
            if fitting is None:
                axis = " x ".join(context.layout.names(Role.TENSOR))
                raise PluginError(
                    f'{axis} = {context.layout.degree(Role.TENSOR)} shards the weight of "{fqn}" into '
                    f"{' and '.join(map(str, runs))} columns, and in NF4 two of them are stored in one byte",
                    hint=f"name the layer in keep, or choose another {axis}",
                )
            assert chosen is not None, "it has formats"
            chosen.quantised[fqn] = fitting
        return self._selected(model, context)

    @property
    def _scale(self) -> float:
        return (2.0 * self.rank if self.alpha is None else self.alpha) / self.rank

    def _merged(
        self,
        layer: str,
        form: Format | None,
        is_adapted: bool,
        transposed: bool,
        weight: Tensor,
        read: Callable[[str], Tensor],
    ) -> Tensor:
        """Return a parameter of the exported model: the dequantised weight plus the adapter's update."""
        from composer3d_plugins.precision.qlora.nf4 import levels

        base = weight if form is None else form.dequantised(form.quantised(weight), levels("cpu"))
        if not is_adapted:
            return base.to(weight.dtype)
        a, b = read(f"{layer}.lora_a"), read(f"{layer}.lora_b")
        return (base.to(a.dtype) + update_of(a, b, self._scale, transposed=transposed)).to(weight.dtype)

    # ---- conversion, storage, initialisation -------------------------------------------------------------------------

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        chosen: Chosen = context.state[self]
        for fqn, parameter in model.named_parameters():
            parameter.requires_grad_(False)
            if not parameter.is_meta:
                chosen.digests[fqn] = digest(parameter.detach())
        for fqn in fqns:
            module: Any = model.get_submodule(fqn)
            if fqn in chosen.stacked:
                chosen.waiting |= adapt_stacked(module, chosen.stacked[fqn])
                continue
            form = chosen.quantised.get(fqn)
            if form is not None and not module.weight.is_meta:
                chosen.waiting[fqn] = form.quantised(module.weight.detach().cpu())
            adapter = Adapter(
                fqn=fqn,
                form=form,
                rank=self.rank if fqn in chosen.adapted else 0,
                scale=self._scale,
                dropout=self.dropout,
                is_transposed=is_transposed(module),
                sharded_random=lambda site, **share: context.streams.sharded(site, **share),
            )
            become_adapted(module, adapter)
        return fqns

    def _store(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        chosen: Chosen = context.state[self]
        orders = context.stash(StoredOrders)
        for fqn in fqns:
            module: Any = model.get_submodule(fqn)
            if fqn in chosen.stacked:
                store_stacked(module, chosen.stacked[fqn], chosen.waiting)
                continue
            if module.weight is None:  # of an expert that another rank holds
                continue
            order = orders.by_name.get(f"{fqn}.weight")
            if order is not None and fqn in chosen.adapted:
                # The adapter matrix of a reordered dim is reordered like the weight.
                module.has_reordered_inputs = (order.dim == 0) == module.adapter.is_transposed
                name, dim = ("lora_a", 1) if module.has_reordered_inputs else ("lora_b", 0)
                orders.keep(context.names_of(f"{fqn}.{name}"), dim=dim, runs=order.runs)
            shard_adapters(module)
            if draws_per_shard(module):
                # With its enclosing modules: a graph break here would pass DTensors between graphs, and the compiler
                # guesses the placements of their gradients.
                for name in _enclosing(fqn):
                    run_eagerly(model.get_submodule(name))
            form = chosen.quantised.get(fqn)
            if form is not None:
                if order is not None and order.dim == 1:
                    orders.keep(context.names_of(f"{fqn}.weight"), dim=1, runs=in_bytes(order.runs, form))
                module.weight = stored_like(module.weight, form)
                if fqn in chosen.waiting:
                    full = context.in_stored_order(f"{fqn}.weight", chosen.waiting.pop(fqn))
                    place(module.weight, full)
        return fqns

    def _start(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> Sequence[str]:
        import torch

        chosen: Chosen = context.state[self]
        for fqn in fqns:
            module: Any = model.get_submodule(fqn)
            if fqn in chosen.stacked:
                start_stacked(module, chosen.stacked[fqn], context)
                continue
            if module.weight is None:
                continue
            if fqn in chosen.quantised:
                table_of(module, context.device)  # now, for compiled code makes none
            if fqn in chosen.adapted:
                generator = torch.Generator().manual_seed(adapter_seed(context.manifest.train.seed, fqn))
                a, bound = module.lora_a, 1 / math.sqrt(module.lora_a.shape[1])
                full = torch.rand(a.shape, dtype=a.dtype, generator=generator).mul_(2 * bound).sub_(bound)
                place(a, context.in_stored_order(f"{fqn}.lora_a", full))
                place(module.lora_b, torch.zeros(module.lora_b.shape))
        return fqns


def _inside(patterns: Sequence[str], layers: Mapping[str, Any], context: RunContext) -> list[str]:
    """Return the linear layers that patterns match, or that are inside of matched modules."""
    found: list[str] = []
    for pattern in patterns:
        inside = [
            fqn for name in select_fqns(pattern, context.fqns) for fqn in layers if f"{fqn}.".startswith(f"{name}.")
        ]
        if not inside:
            raise PluginError(f'the pattern "{pattern}" matches modules without linear layers')
        found += inside
    return list(dict.fromkeys(found))


def _enclosing(fqn: str) -> list[str]:
    """Return the FQNs of the modules around one, and its own."""
    names = fqn.split(".")
    return [".".join(names[:end]) for end in range(1, len(names) + 1)]
