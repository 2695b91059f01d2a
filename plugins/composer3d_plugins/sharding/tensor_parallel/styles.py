"""Styles of a plan: parameters become DTensors over tp, and hooks convert activations to DTensors and back.

A module's own forward runs on DTensors, so that every kind of linear layer works; the model's code around it sees plain
tensors of this rank's size. Shapes, with B batch, S sequence, D model dim, F features of a projection, T degree of tp:

| style          | input                  | output                 | weight                 |
|----------------|------------------------|------------------------|------------------------|
| colwise        | x_BSD or x_B(S/T)D     | y_BS(F/T)              | w_(F/T)D               |
| rowwise        | x_BS(F/T)              | y_BSD or y_B(S/T)D     | w_D(F/T)               |
| vocab          | tokens_BS              | y_BSD or y_B(S/T)D     | w_(V/T)D               |
| head           | x_BSD or x_B(S/T)D     | logits_BSV or _BS(V/T) | w_(V/T)D               |
| sequence       | x_B(S/T)D              | y_B(S/T)D              | replicated             |
| split, gather  | x_BSD, x_B(S/T)D       | y_B(S/T)D, y_BSD       | none                   |

(S/T) stands where sequence_parallel shards the sequence.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from composer3d import RunContext, StoredOrders, TransformError, torch_compat
from composer3d.propagation import (
    SEQUENCE,
    Marks,
    Placed,
    PropagatedModule,
    activation_of,
    eagerly,
    exchanged,
    kind_of,
    repeatable,
    replaced,
    site_of,
    spec_of,
    strip,
)
from composer3d_plugins.sharding.tensor_parallel.activation_layouts import Activations, local_results
from composer3d_plugins.sharding.tensor_parallel.attention import HeadsOf
from composer3d_plugins.sharding.tensor_parallel.exchanging_projections import Exchanges
from composer3d_plugins.sharding.tensor_parallel.fused_projections import runs_of
from composer3d_plugins.sharding.tensor_parallel.logits import ShardedLogits
from composer3d_plugins.sharding.tensor_parallel.multiplied_parameters import place_weights
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import CONTRACTING, EXPANDING, Rule, Rules, region_of
from composer3d_plugins.sharding.tensor_parallel.plan_sources import Made
from composer3d_plugins.sharding.tensor_parallel.region import Region
from composer3d_plugins.sharding.tensor_parallel.tied_parameters import owner_of
from composer3d_plugins.sharding.tensor_parallel.vocabulary_lookups import sum_lookups
from composer3d_plugins.sharding.tensor_parallel.weight_shards import distribute

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard

__all__ = ["Applier"]


@dataclass(frozen=True, kw_only=True)
class Applier:
    """Apply a plan's rules to a part of the model.

    Args:
        model: The part.
        made: The plan of the whole model.
        sequence_dim: The dim of activations that is sharded by sequence_parallel; None where nothing is.
        loss_parallel: Whether a head leaves its logits sharded along the vocabulary, logits_BS(V/T).
    """

    model: nn.Module
    made: Made
    context: RunContext
    sequence_dim: int | None
    loss_parallel: bool

    @property
    def rules(self) -> Rules:
        """Rules by module."""
        return self.made.rules

    @cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh of one dim, tp; cached, since torch makes a new one for every lookup of a hook."""
        return self.context.mesh["tp"]

    @cached_property
    def _sequence(self) -> Shard | None:
        """Sharding of activations along the sequence; None where they are replicated.

        Hooks hold this and not the dim: with `dynamic`, the compiler takes a number that a function holds for a symbol,
        of which no Shard can be made.
        """
        from torch.distributed.tensor import Shard

        return None if self.sequence_dim is None else Shard(self.sequence_dim)

    @cached_property
    def _activations(self) -> Activations:
        return Activations.of(self.mesh, self.context)

    @cached_property
    def _held(self) -> dict[str, nn.Module]:
        """The modules of this part; a stage lacks the blocks of the others, or what is in them."""
        return dict(self.model.named_modules())

    @cached_property
    def _marks(self) -> Marks:
        return Marks(self.mesh.size())

    @cached_property
    def _sequence_marks(self) -> Marks:
        return Marks(self.mesh.size(), frozenset({SEQUENCE}))

    def apply(self, fqns: Sequence[str]) -> None:
        """Apply the rules of the modules with these names, of which each stands for another module."""
        exchanges = Exchanges.of(self.model, self._activations, self.context)  # before code is propagated
        regions = self._make_regions(fqns)
        for fqn in fqns:
            rule = self.rules[fqn]
            module = self.model.get_submodule(fqn)
            region = regions.get(region_of(fqn, self.rules) or "") if rule.style in (*EXPANDING, *CONTRACTING) else None
            if rule.style in EXPANDING:
                self._colwise(fqn, module, rule, region, exchanges)
            elif rule.style in CONTRACTING:
                self._rowwise(fqn, module, rule, regions, exchanges)
            elif rule.style == "vocab":
                self._vocab(fqn, module, rule)
            elif rule.style == "head":
                self._head(fqn, module, rule)
            elif rule.style == "attention":
                self._attention(fqn, module)
            elif rule.style == "local" or (rule.style == "sequence" and self.sequence_dim is not None):
                self._pointwise(fqn, module, rule)
            elif rule.style == "weights":
                place_weights(module, fqn, dict(rule.weights), mesh=self.mesh, context=self.context)
            elif rule.style in ("split", "gather", "split_gather") and self.sequence_dim is not None:
                self._boundary(fqn, module, rule)

    def _make_regions(self, fqns: Sequence[str]) -> dict[str, Region]:
        regions: dict[str, Region] = {}
        for fqn in fqns:
            name = region_of(fqn, self.rules) if self.rules[fqn].style in EXPANDING else None
            if name is not None and name not in regions:
                regions[name] = Region(self._activations.share, is_known=self._is_propagated(name))
        self._prepare_code()
        for fqn in self.made.gathered:
            inside = [name for name in fqns if self.rules[name].style in EXPANDING and name.startswith(f"{fqn}.")]
            if fqn in self._held and inside:
                assert self._sequence is not None, "found only then"
                regions[region_of(inside[0], self.rules) or ""].gather(self._held[fqn], self._sequence)
        for name, region in regions.items():
            region.wrap(self.model.get_submodule(name))
        return regions

    def _prepare_code(self) -> None:
        """Make the model's own code correct on local shards; see `fitting`."""
        held = self._held
        for (fqn, name), value in self.made.sizes.items():
            if fqn in held:
                setattr(held[fqn], name, value)
        for fqn, placed in self.made.apart.items():
            if fqn in held and fqn not in self.rules:
                self._draw_apart(fqn, held[fqn], placed)
        for fqn in self.made.propagated:
            if fqn in held and next(held[fqn].parameters(), None) is not None:
                PropagatedModule(held[fqn], fqn, mesh=self.mesh, shard_dim=self._dim_around(fqn), context=self.context)

    def _dim_around(self, fqn: str) -> int | None:
        """Return the dim along which the activation is sharded that a propagated module takes."""
        if any(not block or fqn == block or fqn.startswith(f"{block}.") for block in self.made.unsharded):
            return None
        if not self.made.is_stated:
            return self.sequence_dim
        inside = [
            rule
            for name, rule in self.rules.items()
            if rule.style in (*EXPANDING, "attention", "sequence") and (not fqn or name.startswith(f"{fqn}."))
        ]
        return self.sequence_dim if not inside or any(rule.is_sharded for rule in inside) else None

    def _is_propagated(self, fqn: str) -> bool:
        return any(not other or fqn == other or fqn.startswith(f"{other}.") for other in self.made.propagated)

    def _placement(self, rule: Rule) -> Shard | None:
        """Return how activations outside the region are sharded there, None where they are replicated."""
        return self._sequence if rule.is_sharded else None

    def _place(self, fqn: str, module: nn.Module, name: str, dim: int | None) -> None:
        from torch.distributed.tensor import Replicate, Shard

        distribute(
            module,
            name,
            Replicate() if dim is None else Shard(dim),
            mesh=self.mesh,
            fqn=f"{fqn}.{name}",
            context=self.context,
        )
        for group in self.context.ties:
            for other in group if f"{fqn}.{name}" in group else ():
                # A stage may lack its owner.
                if other in self.made.unread and owner_of(other) in self._held:
                    setattr(self._held[owner_of(other)], other.rpartition(".")[2], getattr(module, name))

    def _reorder(self, name: str, *, dim: int, runs: Sequence[tuple[int, int]]) -> None:
        self.context.stash(StoredOrders).keep(self.context.names_of(name), dim=dim, runs=runs)

    def _place_linear(self, fqn: str, module: Any, rule: Rule, *, along: str) -> None:
        """Shard a linear layer's weight_OI along outputs or inputs; a bias_O belongs to the outputs."""
        outputs = 0 if kind_of(module) == "linear" else 1
        dim = outputs if along == "outputs" else 1 - outputs
        if rule.parts is not None:
            runs = runs_of(rule.parts, self.mesh.size())
            self._reorder(f"{fqn}.weight", dim=dim, runs=runs)
            if along == "outputs" and module.bias is not None:
                self._reorder(f"{fqn}.bias", dim=0, runs=runs)
        self._place(fqn, module, "weight", dim)
        self._place(fqn, module, "bias", 0 if along == "outputs" else None)

    def _colwise(self, fqn: str, module: Any, rule: Rule, region: Region | None, exchanges: Exchanges) -> None:
        assert region is not None, "checked with the plan"
        self._place_linear(fqn, module, rule, along="outputs")

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return (region.enter(args[0], placement), *args[1:])

        size, placement = module.weight.shape[0 if kind_of(module) == "linear" else 1], self._placement(rule)
        parts = rule.parts or (size,)
        is_propagated = self._is_propagated(fqn)
        # Known by the layer they come from, so that what is gathered of them is not taken for another one's.
        marks = Marks(self.mesh.size(), frozenset({fqn}), rule.ranges) if rule.gathered else self._marks

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor:
            local: Tensor = torch_compat.unviewed(output.to_local())
            return marks.mark(local, Placed(dim=local.ndim - 1, parts=parts)) if is_propagated else local

        if not exchanges.gather_in(fqn, module, region, placement):
            module.register_forward_pre_hook(repeatable(before))
        module.register_forward_hook(repeatable(after))

    def _rowwise(self, fqn: str, module: Any, rule: Rule, regions: dict[str, Region], exchanges: Exchanges) -> None:
        self._place_linear(fqn, module, rule, along="inputs")
        around = [region for name, region in regions.items() if not name or fqn.startswith(f"{name}.")]
        outputs = 0 if kind_of(module) == "linear" else 1
        share = module.weight.shape[1 - outputs] // self.mesh.size()
        placement, is_propagated = self._placement(rule), self._is_propagated(fqn)
        stand_for = torch_compat.backward_hooks.stand_for

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            from torch.distributed.tensor import Shard

            for region in around:
                region.leave()
            x = strip(args[0])
            if x.shape[-1] != share:
                raise TransformError(
                    f'"{fqn}" was given {x.shape[-1]} features, and its share is {share}: the code before it computes '
                    "with sizes of the whole model"
                )
            return (stand_for(self._activations.wrap(x, Shard(x.ndim - 1)), args[0]), *args[1:])

        def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            self._activations.refuse_uneven(output, placement)
            local: Tensor = self._activations.unwrap(output, placement)
            if placement is not None and is_propagated:
                self._sequence_marks.mark(local, Placed(dim=placement.dim, parts=(output.shape[placement.dim],)))
            return local

        exchanges.sum_in(fqn, module, placement)
        module.register_forward_pre_hook(repeatable(before))
        module.register_forward_hook(repeatable(after))

    def _vocab(self, fqn: str, module: nn.Module, rule: Rule) -> None:
        sum_lookups(module, self._activations, self._placement(rule))
        self._place(fqn, module, "weight", 0)

    def _head(self, fqn: str, module: nn.Module, rule: Rule) -> None:
        self._place_linear(fqn, module, rule, along="outputs")
        share, placement = self._activations.share, self._placement(rule)
        stand_for = torch_compat.backward_hooks.stand_for
        module.register_forward_pre_hook(lambda _, args: (stand_for(share(args[0], placement), args[0]), *args[1:]))
        if self.loss_parallel:
            module.register_forward_hook(
                lambda module, args, output: ShardedLogits.of(output, self.mesh, self.context.span)
            )
        else:
            module.register_forward_hook(lambda module, args, output: self._activations.unwrap(output, None))

    def _attention(self, fqn: str, module: Any) -> None:
        """Shard torch's attention module along its heads: w_(3D)D per part, output projection w_D(D/T)."""
        size, degree = module.embed_dim, self.mesh.size()
        for name in ("in_proj_weight", "in_proj_bias"):
            if getattr(module, name) is not None:
                self._reorder(f"{fqn}.{name}", dim=0, runs=runs_of((size,) * 3, degree))
        for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight", "k_proj_weight", "v_proj_weight"):
            self._place(fqn, module, name, 0)
        self._place(f"{fqn}.out_proj", module.out_proj, "weight", 1)
        self._place(f"{fqn}.out_proj", module.out_proj, "bias", None)
        given = self.made.given.get(fqn, (False,) * 3)
        marks = self._sequence_marks if self._is_propagated(fqn) else None
        heads = HeadsOf(module=module, fqn=fqn, mesh=self.mesh, context=self.context, given=given, marks=marks)
        module.forward = heads.forward if not module.dropout else eagerly(functools.partial(heads.forward))

    def _pointwise(self, fqn: str, module: nn.Module, rule: Rule) -> None:
        """Let a norm or dropout work on x_B(S/T)D: gradients of its parameters are Partial over tp."""
        from torch.distributed.tensor import Shard

        if kind_of(module) == "embedding":
            self._looked_up(fqn, module)
            return
        for name, _ in list(module.named_parameters(recurse=False)):
            self._place(fqn, module, name, None)
        has_parameters = next(module.parameters(recurse=False), None) is not None
        if has_parameters:
            # Any dim but the normed one does: which of the others is sharded makes no difference to the module.
            # Projections join all but the last, which torch 2.11 does where the first of them is sharded.
            joins = rule.style == "local" or kind_of(module) in ("linear", "transposed")
            share = Shard(0) if joins else self._sequence if rule.dim is None else Shard(rule.dim)
            forward = module.forward
            # In propagated code a tensor says itself whether it is sharded; elsewhere it is.
            is_known = rule.style == "sequence" and self._is_propagated(fqn)

            def wrapped(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
                spec = spec_of(x)
                output: Any = forward(
                    self._activations.wrap(strip(x), None if is_known and spec is None else share), *args, **kwargs
                )
                marks = self._sequence_marks if spec is not None and spec.is_sequence else self._marks
                return local_results(output, like=x, spec=spec, marks=marks)

            module.forward = wrapped
        elif rule.style == "sequence":
            self._draw_apart(fqn, module)

    def _draw_apart(self, fqn: str, module: nn.Module, found: Placed | None = None) -> None:
        """Let dropout on x_B(S/T)D, or on what is sharded as found, draw other numbers on every rank."""
        forward, context = module.forward, self.context
        degree, is_known = self.mesh.size(), self._is_propagated(fqn)

        def drawn(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not module.training:
                return forward(x, *args, **kwargs)
            spec = spec_of(x)
            placed = found if spec is None else spec.placed
            if placed is None and not is_known and x.ndim > 2:
                placed = Placed(dim=1, parts=(x.shape[1] * degree,))
            where = (None, ()) if placed is None else (placed.dim, placed.parts)
            with context.streams.sharded(site_of(fqn), dim=where[0], parts=where[1]):
                return forward(x, *args, **kwargs)

        # Of torch's own dropouts it is known that they draw nothing; others may by any name.
        if getattr(module, "p", None) != 0.0:
            module.forward = eagerly(drawn)

    def _looked_up(self, fqn: str, module: nn.Module) -> None:
        """Let an embedding (of positions, say) look up indices_B(S/T), this rank's shard of the sequence."""
        self._place(fqn, module, "weight", None)

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            from torch.distributed.tensor import Shard

            indices: Any = self._activations.wrap(args[0], None)
            share = Shard(indices.ndim - 1)
            self._activations.refuse_uneven(indices, share)
            return (indices.redistribute(placements=[share]), *args[1:])

        module.register_forward_pre_hook(repeatable(before))
        module.register_forward_hook(repeatable(lambda module, args, output: torch_compat.unviewed(output.to_local())))

    def _boundary(self, fqn: str, module: nn.Module, rule: Rule) -> None:
        """Shard the activation that the module takes along the sequence, or all-gather its first output."""
        share = self._sequence

        def sharded(x: Tensor) -> Tensor:
            return exchanged(x, lambda local: self._activations.divided(local, share))

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            key = activation_of(args, kwargs)
            if key is None:
                raise TransformError(f'"{fqn}" was given no activation of three dims to shard along the sequence')
            return replaced(args, kwargs, key, sharded)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            whole = exchanged(
                first, lambda local: self._activations.unwrap(self._activations.wrap(strip(local), share), None)
            )
            return (whole, *output[1:]) if isinstance(output, tuple) else whole

        if rule.style != "gather":
            module.register_forward_pre_hook(repeatable(before), with_kwargs=True)
        if rule.style != "split":
            # Hooks of the model's own are given the full sequence.
            module.register_forward_hook(repeatable(after), prepend=True)
