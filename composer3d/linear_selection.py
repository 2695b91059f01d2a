"""Linear layers for precision plugins: their selection, and their product where tp has sharded the weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from composer3d.errors import PluginError
from composer3d.patterns import select

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from composer3d.context import RunContext

__all__ = ["ConvertedLayers", "LinearSharding", "linear_layers", "linear_sharding", "on_local_shards"]


@dataclass(kw_only=True, eq=False)
class ConvertedLayers:
    """Stash of the layers whose products a plugin computes otherwise: `context.stash(ConvertedLayers)`.

    Noted in `select` of CONVERT, for plugins that replace plain linear layers later: their own `select` knows.

    Attributes:
        by_fqn: The plugin that converts a layer, by FQN.
    """

    by_fqn: dict[str, str] = field(default_factory=dict)

    def note(self, fqns: Sequence[str], *, by: str) -> list[str]:
        """Note layers, and return them.

        Args:
            fqns: Of the layers.
            by: Name of the plugin.
        """
        self.by_fqn.update(dict.fromkeys(fqns, by))
        return list(fqns)


def linear_layers(
    model: nn.Module,
    context: RunContext,
    *,
    modules: Sequence[str] | None,
    exclude: Sequence[str] = (),
    multiple: int = 1,
    beside: Mapping[str, tuple[int, ...]] | None = None,
) -> list[str]:
    """Return the FQNs of linear layers that a plugin may convert.

    Subclasses of `nn.Linear` are left alone: their forward may be another, or, as in torch's attention, is not called.

    Args:
        model: The whole model.
        modules: Patterns of layers, or of modules whose layers are taken; None takes all that can be converted.
        exclude: Patterns of layers to leave out.
        multiple: Inputs and outputs must be multiples of this.
        beside: Modules that count as layers too, with the dims of their matrices: those of `stacked_layers`.

    Raises:
        PatternError: A pattern matches nothing.
        PluginError: A layer that was named has other sizes, or none is left, or, without names, none in the blocks.
    """
    layers = _sizes(model) | dict(beside or {})

    def inside(patterns: Sequence[str]) -> list[str]:
        found: list[str] = []
        for pattern in patterns:
            names = select(pattern, context.fqns)
            within = [fqn for name in names for fqn in layers if f"{fqn}.".startswith(f"{name}.")]
            if not within:
                raise PluginError(f'the pattern "{pattern}" matches modules without linear layers')
            found += within
        return found

    def fits(fqn: str) -> bool:
        return not any(size % multiple for size in layers[fqn])

    left_out = set(inside(exclude))
    named = list(layers) if modules is None else inside(modules)
    chosen = [fqn for fqn in dict.fromkeys(named) if fqn not in left_out]
    odd = [fqn for fqn in chosen if not fits(fqn)]
    if odd and modules is not None:
        kind, sizes = "stacks matrices" if odd[0] in (beside or {}) else "is a linear layer", layers[odd[0]][:2]
        raise PluginError(
            f'"{odd[0]}" {kind} of {" x ".join(map(str, sizes))}, and both must be multiples of {multiple}',
            hint="exclude it",
        )
    result = [fqn for fqn in chosen if fits(fqn)]
    if not result:
        raise PluginError(
            f"no layer is left to convert: of {len(layers)} linear layers, {len(named)} are named, and exclude or "
            f"sizes that are no multiples of {multiple} leave out the rest"
        )
    if modules is None and not exclude and context.has_blocks:
        _refuse_none_in_blocks(result, context, multiple)
    return result


def _sizes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    from torch import nn

    linear = {fqn: module for fqn, module in model.named_modules() if type(module) is nn.Linear}
    return {fqn: (module.in_features, module.out_features) for fqn, module in linear.items()}


def _refuse_none_in_blocks(fqns: Sequence[str], context: RunContext, multiple: int) -> None:
    # Those of GPT-2 in transformers are no linear layers of torch, for one.
    blocks = tuple(f"{fqn}." for fqn in select(context.blocks, context.fqns))
    if not any(fqn.startswith(blocks) for fqn in fqns):
        raise PluginError(
            f'nothing in the blocks "{context.blocks}" would be converted: they have no linear layer of torch with '
            f"sizes that are multiples of {multiple}",
            hint=f'if the rest is meant, write modules = ["{fqns[0]}"]',
        )


class LinearSharding(NamedTuple):
    """The summed dim of a linear layer's products that is sharded over tp.

    Args:
        of: Which of three: "inputs" I are summed over in y_...O, "outputs" O in the gradient of x_...I, "tokens" in
            that of w_OI.
        mesh: The ranks of the shards, one dim.
    """

    of: Literal["inputs", "outputs", "tokens"]
    mesh: DeviceMesh

    def largest(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum over all ranks.

        Args:
            values: Of any shape, equal on all ranks of the mesh; also the result's shape.

        Collectives: one all-reduce of them.
        """
        from torch.distributed.tensor import DTensor, Partial

        found: Tensor = DTensor.from_local(values, self.mesh, (Partial("max"),), run_check=False).full_tensor()
        return found


def linear_sharding(x: Any, weight: Any) -> LinearSharding | None:
    """Return the sharding that `on_local_shards` computes a layer with; None where the layer is whole.

    A scale shared by many elements equals one device's only if ranks agree on it where the dim of these elements is
    sharded.

    Args:
        x: The layer's input x_...I; a plain tensor or a DTensor.
        weight: Its weight w_OI, a plain tensor or a DTensor of one mesh dim: within a forward data parallelism has
            gathered it.

    Raises:
        ValueError: The weight is sharded along more than one dim.
    """
    from torch.distributed.tensor import DTensor

    if not isinstance(weight, DTensor):
        return None
    (placement,), mesh = weight.placements, weight.device_mesh
    if placement.is_shard():
        return LinearSharding("outputs" if placement.is_shard(0) else "inputs", mesh)
    return LinearSharding("tokens", mesh) if isinstance(x, DTensor) and x.placements[0].is_shard() else None


def on_local_shards(product: Callable[..., Tensor], x: Any, weight: Any, bias: Any, *others: Any) -> Any:
    """Compute a linear layer by `product(x, weight, bias, *others)` on local tensors, whether sharded or whole.

    Where the weight is a DTensor of tp, every rank computes on its shards: y_...(O/T) where w_(O/T)I is sharded along
    outputs, a partial sum of y_...O where w_O(I/T) is sharded along inputs. Gradients of replicated tensors in products
    with sharded ones are sums over ranks.
    Collectives: none, except to redistribute `x` to the placement that the weight requires.

    Args:
        product: Linear in its local shards, differentiable.
        x: `[..., in]`.
        weight: `[out, in]`, or stored in another form with these dims.
        bias: `[out]` or None.
        others: Further parameters or None.
    """
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    if not isinstance(weight, DTensor):
        return product(x, weight, bias, *others)
    (placement,), mesh = weight.placements, weight.device_mesh
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, (Replicate(),), run_check=False)
    result: Any = x.placements
    if placement.is_shard(0):
        x, result = x.redistribute(placements=(Replicate(),)), (Shard(x.ndim - 1),)
    elif placement.is_shard(1):
        x, result = x.redistribute(placements=(Shard(x.ndim - 1),)), (Partial(),)
    is_sharded = not (placement.is_replicate() and x.placements[0].is_replicate())

    def local(tensor: Any) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        meets = is_sharded and tensor.placements[0].is_replicate()
        return tensor.to_local(grad_placements=(Partial(),) if meets else None)

    own_bias = local(bias)
    if own_bias is not None and placement.is_shard(1) and mesh.get_local_rank() != 0:
        own_bias = own_bias * 0.0  # it is added once, and every rank has a gradient
    y = product(local(x), local(weight), own_bias, *map(local, others))
    return DTensor.from_local(y, mesh, result, run_check=False)
