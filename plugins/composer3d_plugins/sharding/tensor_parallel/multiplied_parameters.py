"""Parameters that a module's own code multiplies, by matmul, einsum or a linear function, and that stay no layers.

Each is tried, sharded along one of its dims. What the code computes from activations with it is sharded then, until it
is summed over with another parameter, sharded alike: w_(F/T) of an MLP with w_(F/T)D, heads with the projection of
what they give. Whatever else needs all of it leaves the parameter whole.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from composer3d import RunContext, StoredOrders, torch_compat
from composer3d.propagation import Call, Marks, Placed, PropagationError, kind_of, name_of, on_meta, reader_of
from composer3d_plugins.sharding.tensor_parallel.block_dry_run import BlockDryRun
from composer3d_plugins.sharding.tensor_parallel.fused_projections import runs_of
from composer3d_plugins.sharding.tensor_parallel.local_weights import finding, held_by
from composer3d_plugins.sharding.tensor_parallel.module_roles import Roles
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import Rule, Rules
from composer3d_plugins.sharding.tensor_parallel.tied_parameters import owner_of
from composer3d_plugins.sharding.tensor_parallel.weight_shards import distribute

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["WeightSearch", "multiplied", "place_weights"]

# Functions that give a parameter in another form, and those that add or join it.
SHOWN = frozenset("expand expand_as view reshape unsqueeze squeeze to type_as __getitem__ repeat".split())
ADDED = frozenset("add add_ __add__ __radd__ __iadd__ cat concat stack __get__ size dim".split())
# Runs of one block that are tried.
MOST_RUNS = 400


def multiplied(block: nn.Module) -> Iterator[str]:
    """Yield the names of a block's parameters of several dims that code of the model's own uses as it likes."""
    for fqn, module in block.named_modules():
        is_list = type(module) in (nn.ParameterList, nn.ParameterDict)
        if kind_of(module) != "other" or (type(module).__module__.startswith("torch.nn.") and not is_list):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if 2 <= parameter.ndim <= 4 and parameter.is_floating_point():
                yield f"{fqn}.{name}" if fqn else name


@dataclass(kw_only=True)
class WeightSearch:
    """Search for the parameters of one block that can be sharded.

    Args:
        block: One of its form.
        call: What it is called with.
        degree: Ranks along tp.
        roles: Of its linear layers.
        where: FQN, for messages.
        excluded: Names of parameters that stay whole.

    Attributes:
        found: The sharded dims.
        reasons: Why others stay whole.
        num_runs: Ways tried so far.
    """

    block: nn.Module
    call: Call
    degree: int
    roles: Roles
    where: str
    excluded: Collection[str] = ()
    found: dict[str, Placed] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    num_runs: int = 0
    _contracting: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _last: dict[str, tuple[int, ...]] = field(default_factory=dict)
    # What failed: the modules that were entered, what was sharded of their parameters, and how it failed.
    _failed: list[tuple[frozenset[str], dict[str, Placed], PropagationError]] = field(default_factory=list)

    def rules(self) -> Rules:
        """Return the rules of the modules that own what can be sharded."""
        shapes = {name: tuple(parameter.shape) for name, parameter in self.block.named_parameters()}
        names = [name for name in multiplied(self.block) if name in shapes and name not in self.excluded]
        names = self._but_added(names) if names and not self.call.has_values else []
        for name in names:
            if name not in self.found:
                self._try(name, shapes, names)
        rules: Rules = {}
        for name, placed in self.found.items():
            reader = reader_of(self.block, owner_of(name))
            before = rules[reader].weights if reader in rules else ()
            own = name.removeprefix(f"{reader}." if reader else "")
            rules[reader] = Rule(style="weights", weights=(*before, (own, placed)))
        for name, parts in self._contracting.items():
            packed = len(parts) > 1
            rules[name] = Rule(style="packed_rowwise" if packed else "rowwise", parts=parts if packed else None)
        return rules

    def _but_added(self, names: Sequence[str]) -> list[str]:
        """Return the parameters but those that code adds to activations or joins with them alone, as positions are."""
        held: dict[int, tuple[str, Tensor]] = {}
        others: set[str] = set()

        def see(tensors: Mapping[str, Tensor]) -> None:
            held.update({id(tensors[name]): (name, tensors[name]) for name in names})

        def note(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> None:
            given = [leaf for leaf in torch_compat.tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
            found = {held[id(leaf)][0] for leaf in given if id(leaf) in held}
            if found and name_of(func) in SHOWN and isinstance(result, Tensor):
                held[id(result)] = min(found), result
            elif found and (name_of(func) not in ADDED or len(given) == len(found)):
                others.update(found)  # what is made of parameters alone may be multiplied

        try:
            on_meta(self.block, self.call.fresh(), seen=see, notes=[note])
        except Exception:  # a model's own code may raise anything
            return list(names)
        self.reasons |= dict.fromkeys(set(names) - others, "it is added to activations, or joined with them")
        return [name for name in names if name in others]

    def _try(self, name: str, shapes: Mapping[str, tuple[int, ...]], names: Collection[str]) -> None:
        for placed in self._places(shapes[name]):
            wanted = {**self.found, name: placed}
            error = self._error(wanted, name)
            if error is not None and error.summed is not None:
                others = [other for other in names if other not in wanted]
                wanted, error = self._with_others(wanted, name, error, shapes, others)
            if error is None:
                self.found, self._contracting = wanted, self._last
                self.reasons.pop(name, None)
                return
            self.reasons.setdefault(name, str(error))
        if not any(self._places(shapes[name])):
            self.reasons[name] = f"none of its sizes {list(shapes[name])} divides by tp = {self.degree}"

    def _with_others(
        self,
        wanted: dict[str, Placed],
        name: str,
        error: PropagationError,
        shapes: Mapping[str, tuple[int, ...]],
        others: Collection[str],
    ) -> tuple[dict[str, Placed], PropagationError | None]:
        """Shard parameters that a sharded activation is summed with, one after another, as far as that helps."""
        for other in others:
            for placed in self._places(shapes[other]):
                if error.summed is None or error.summed % sum(placed.parts):
                    continue
                longer = {**wanted, other: placed}
                found = self._error(longer, name)
                if found is None:
                    return longer, None
                if found.summed is not None and found.step > error.step:
                    rest = [each for each in others if each != other]
                    return self._with_others(longer, name, found, shapes, rest)
        return wanted, error

    def _places(self, shape: tuple[int, ...]) -> Iterator[Placed]:
        for count in (1, 3, 2):
            for dim, size in enumerate(shape):
                if size % (count * self.degree) == 0:
                    yield Placed(dim=dim, parts=(size // count,) * count)

    def _error(self, weights: Mapping[str, Placed], name: str) -> PropagationError | None:
        """Return what a block with these weights does that cannot be; None if nothing.

        A run fails as an earlier one did if it has sharded the same of the modules that the earlier one entered.
        """
        for modules, sharded, error in self._failed:
            if self._read_in(modules, weights) == sharded:
                return error
        self.num_runs += 1
        if self.num_runs > MOST_RUNS:
            return PropagationError("it has too many parameters to try")
        entered: set[str] = set()
        for training in (True, False):
            roles = replace(self.roles, weights=weights)
            dry_run = BlockDryRun(block=self.block, degree=self.degree, roles=roles, training=training)
            try:
                dry_run.propagate(self.call, self.where)
            except PropagationError as error:
                error.step = len(dry_run.record.entries)
                modules = frozenset(entered | dry_run.record.entered)
                self._failed.append((modules, self._read_in(modules, weights), error))
                return error
            entered |= dry_run.record.entered
            # Layers that sum over what these weights have sharded, and not another layer.
            ends = {end: (set(sources), parts) for end, (sources, parts) in dry_run.contracting.items()}
            self._last = {end: parts for end, (sources, parts) in ends.items() if sources & weights.keys()}
            if name not in dry_run.products.summed & dry_run.products.multiplied:
                return PropagationError("nothing sums over what it is multiplied with")
        return None

    def _read_in(self, modules: Collection[str], weights: Mapping[str, Placed]) -> dict[str, Placed]:
        """Return of weights those that the code of one of these modules multiplies."""
        return {name: at for name, at in weights.items() if reader_of(self.block, owner_of(name)) in modules}


def place_weights(
    module: nn.Module, fqn: str, weights: Mapping[str, Placed], *, mesh: DeviceMesh, context: RunContext
) -> None:
    """Shard parameters of a module whose code multiplies them.

    Args:
        module: Its code is propagated.
        fqn: In the whole model.
        weights: What is sharded of each, by their names in the module.
        mesh: Of one dim, tp.
        context: Of the run.
    """
    from torch.distributed.tensor import Shard

    marks: dict[str, Marks] = {}
    for name, placed in weights.items():
        full = f"{fqn}.{name}" if fqn else name
        if len(placed.parts) > 1:
            names, runs = context.names_of(full), runs_of(placed.parts, mesh.size())
            context.stash(StoredOrders).keep(names, dim=placed.dim, runs=runs)
        holder, own = held_by(module, name)
        distribute(holder, own, Shard(placed.dim), mesh=mesh, fqn=full, context=context)
        marks[name] = Marks(mesh.size(), frozenset({full}), is_weight=True)

    def local(name: str) -> Tensor:
        holder, own = held_by(module, name)
        parameter: Any = holder._parameters[own]
        return marks[name].mark(torch_compat.unviewed(parameter.to_local()), weights[name])

    module.forward = finding(module, lambda: {name: local(name) for name in weights})
