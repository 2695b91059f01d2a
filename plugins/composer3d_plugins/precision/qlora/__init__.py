"""Low-rank adapters on frozen weights, which are quantised to NF4 as they arrive, or left as they are."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    Exports,
    Phase,
    PlannedShards,
    PluginError,
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
    draws_by_share,
    is_linear,
    is_transposed,
    run_eagerly,
    table_of,
    update_of,
)
from composer3d_plugins.precision.qlora.frozen_base import Chosen, digest
from composer3d_plugins.precision.qlora.nf4 import BLOCK, Format
from composer3d_plugins.precision.qlora.sharded_adapters import cut_adapters, in_bytes, stored_like
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

    With quantize = "nf4" the weights of the linear layers in blocks, and of those with adapters, are quantised before
    sharding as they arrive, so in every layout to the same values, and multiplied after they are dequantised. Of NF4,
    64 neighbours of a row share a scale of one byte, and `scale_block` scales a factor and a mean. Layers whose rows
    are no multiple of 64 are not quantised. quantize = "none" is LoRA. Linear layers are torch's, and those of GPT-2 in
    transformers. A starts uniform, B at zero. The gradients of adapters are those of one device; only adapters are
    trained, and saved: `composer3d export --merge` puts them into the weights that they were trained on.
    Memory: of a quantised weight 33 + 8 / scale_block bytes for 64 elements, divided as the layout divides weights, and
        9 bytes more (8 between scales) wherever tp shards a row within scales that share a factor; the
        values of the layer at work; adapters of rank * (in + out) elements, whose gradients and optimizer state are the
        only ones. While weights arrive, some copies of one of them.
    Collectives: none of its own under data parallelism: frozen parameters have no gradients to reduce. Under tp one
        all-reduce a step for every adapter matrix that is not sharded.

    Source: Dettmers et al., QLoRA, arXiv:2305.14314; Hu et al., LoRA, arXiv:2106.09685; torchao's NF4.

    Args:
        rank: Inner dim of the adapters.
        alpha: The adapters' product is scaled by alpha / rank; default: twice the rank.
        dropout: Probability of dropout on the adapters' inputs.
        modules: Patterns of linear layers with adapters, or of modules whose linear layers have them; default: those in
            the model's blocks.
        quantize: "nf4", or "none".
        keep: Patterns of layers that are not quantised.
        scale_block: Scales that share a factor; fewer, where it does not divide the scales of a row; default 32.
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
        """Refuse options that would do nothing."""
        if self.keep and self.quantize == "none":
            raise PluginError('keep = [...] with quantize = "none", which keeps all weights', hint="remove keep")
        if self.scale_block is not None and self.quantize == "none":
            raise PluginError(
                'scale_block has no effect with quantize = "none": weights that are kept have no scales',
                hint="remove scale_block",
            )

    @hookimpl
    def composer3d_convert(self, context: RunContext) -> Transform:
        """Make the adapters; weights are stored once sharded, so that other plugins shard plain ones."""
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
            select=self._select_cut,
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
        """Quantise a weight that arrives."""
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

    # ---- which layers ------------------------------------------------------------------------------------------------

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
        # So that groups of the optimizer may name them.
        context.parameter_fqns += tuple(f"{fqn}.{name}" for fqn in adapted for name in ("lora_a", "lora_b"))
        context.parameter_fqns += tuple(f"{each.fqn}.{name}" for each in stacked for name in each.adapters)
        return list(dict.fromkeys([*quantised, *adapted, *context.state[self].stacked]))

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
            return [""]  # the selection of layers failed, which is told once
        return list(dict.fromkeys([*chosen.quantised, *chosen.adapted, *chosen.stacked]))

    def _select_cut(self, model: nn.Module, context: RunContext) -> list[str]:
        """Adapt the formats to tp's shards; the values do not change."""
        chosen: Chosen | None = context.state.get(self)
        for fqn, form in list(chosen.quantised.items()) if chosen is not None else ():
            dim, runs = context.stash(PlannedShards).by_parameter.get(f"{fqn}.weight", (0, ()))
            fitting = form.cut(runs) if dim == 1 else form
            if fitting is None:
                raise PluginError(
                    f'tp = {context.degrees["tp"]} cuts the weight of "{fqn}" into shares of '
                    f"{' and '.join(map(str, runs))} columns, and in NF4 two neighbours are one byte",
                    hint="name the layer in keep, or choose another tp",
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
        """Return a parameter of the exported model: the dequantised weight plus the adapters' product."""
        from composer3d_plugins.precision.qlora.nf4 import levels

        base = weight if form is None else form.dequantised(form.quantised(weight), levels("cpu"))
        if not is_adapted:
            return base.to(weight.dtype)
        a, b = read(f"{layer}.lora_a"), read(f"{layer}.lora_b")
        return (base.to(a.dtype) + update_of(a, b, self._scale, transposed=transposed)).to(weight.dtype)

    # ---- what is done to them ----------------------------------------------------------------------------------------

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
                # An adapter matrix with the rows or columns of a reordered weight is reordered alike.
                module.has_reordered_inputs = (order.dim == 0) == module.adapter.is_transposed
                name, dim = ("lora_a", 1) if module.has_reordered_inputs else ("lora_b", 0)
                orders.keep(context.names_of(f"{fqn}.{name}"), dim=dim, runs=order.runs)
            cut_adapters(module)
            if draws_by_share(module):
                # With all that it is in: between graphs there would be DTensors, whose gradients the compiler guesses.
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
