"""Modules that hold experts, stacked or as a list: found by what they are, or named by patterns."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from composer3d import (
    PluginError,
    Role,
    RunContext,
    caller_of,
    chosen_by_values,
    expert_form,
    listed_experts,
    select_fqns,
    shared_by_experts,
    stacked_number,
)
from composer3d_plugins.sharding.expert_parallel.expert_rows import refuse_unknown_rows, rows_of_experts

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Experts", "find_experts"]

_CONTRACT = (
    "a module with `num_experts`, parameters that begin with that dim, and a forward of (tokens, experts of each, "
    "their weights; parameters may then have the rows of one after those of another), of (rows in order of experts, "
    "how many each has), or of (rows, as many for each); an nn.ModuleList or nn.ModuleDict, or lists in one, whose "
    "entries, or their rows, the code around it chooses by values; an nn.ParameterList or nn.ParameterDict of a matrix "
    "for each, or parameters of three dims beside a router, of a number that an attribute with `expert` states; a name "
    'with "expert" says so too, and then a module need not say how many'
)


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Experts of one layer.

    Args:
        fqn: Of the module that holds them: stacked parameters, or a list.
        number: How many.
        is_list: Whether they are modules of a list.
        blocks: By each FQN of what holds them, that of the module whose forward is changed: of a list, the one around
            it that has a forward. There are several where layers share it.
        is_sorted: Whether it is called with rows in order of experts.
        shared: Names of its parameters, or of buffers in a list, that all experts have, and every rank.
        names: Of a list, its entries that are experts; of stacks that a block's own code multiplies, these.
        is_multiplied: Whether it holds weights alone, which a block's own code multiplies rows with.
        rows: Of stacked experts, names of buffers that have a row for each.
    """

    fqn: str
    number: int
    is_list: bool
    blocks: Mapping[str, str]
    is_sorted: bool = False
    shared: frozenset[str] = frozenset()
    names: tuple[str, ...] = ()
    is_multiplied: bool = False
    rows: frozenset[str] = frozenset()

    def holds(self, tensor: str) -> bool:
        """Return whether a parameter or buffer, by its FQN, is of one expert."""
        names = (tensor.removeprefix(f"{fqn}.") for fqn in self.blocks if tensor.startswith(f"{fqn}."))
        return any(name not in self.shared and (not self.is_list or self.place_of(name) is not None) for name in names)

    def held(self, tensor: str, *, rank: int, degree: int) -> slice | None:
        """Return the rows that a rank of ep has of a buffer, by its FQN; of a list all, or none; None of stacks."""
        names = [tensor.removeprefix(f"{fqn}.") for fqn in self.blocks if tensor.startswith(f"{fqn}.")]
        local = self.number // degree
        if not self.is_list:
            return slice(rank * local, (rank + 1) * local) if any(name in self.rows for name in names) else None
        places = [place for name in names if (place := self.place_of(name)) is not None]
        return slice(0, None if places[0] // local == rank else 0)

    def place_of(self, name: str) -> int | None:
        """Return the number of the expert that a name inside of a list is of; None of an entry that is none."""
        found = (place for place, entry in enumerate(self.names) if f"{name}.".startswith(f"{entry}."))
        return next(found, None)

    def list_of(self, parameter: str) -> str | None:
        """Return the FQN of the list that has a parameter, by its FQN; None of stacks, which all ranks have."""
        return next((fqn for fqn in self.blocks if parameter.startswith(f"{fqn}.")), None) if self.is_list else None


def find_experts(model: nn.Module, patterns: Sequence[str] | None, context: RunContext) -> list[Experts]:
    """Return the experts of a model, in order.

    Args:
        model: The whole one.
        patterns: Of what holds them; None looks for all.
        context: With all FQNs.

    Raises:
        PluginError: There are none, a pattern matches something else, or their number does not divide by ep.
        PatternError: A pattern matches nothing.
    """
    degree = context.degrees["ep"]
    if patterns is None:
        found = _found(model)
        if not found:
            lists = [fqn for fqn, module in model.named_modules() if _is_list(module)]
            seen = f"; its lists of modules: {', '.join(lists)}" if lists else "; it has no list of modules"
            seen += _missed(model)
            raise PluginError(
                f"expert_parallel found no experts in {type(model).__name__}: it looked for {_CONTRACT}{seen}",
                hint="name what holds them: experts = [...], or remove [sharding.expert_parallel]",
            )
    else:
        found = []
        for fqn in dict.fromkeys(name for pattern in patterns for name in select_fqns(pattern, context.fqns)):
            each = _recognised(model, fqn, model.get_submodule(fqn), is_said=True, named=True)
            if each is None:
                kind = type(model.get_submodule(fqn)).__name__
                raise PluginError(f'expert_parallel: "{fqn}" ({kind}) holds no experts: what does is {_CONTRACT}')
            _refuse_blocks(model, each, context)
            found.append(each)
    if patterns is None and len(fitting := [each for each in found if each.number % degree == 0]):
        # Routers in a list, of which tokens choose one, are chosen by values too, and stay as they are.
        found = [each for each in found if each in fitting or _says_experts(each.fqn, model.get_submodule(each.fqn))]
    for each in found:
        divisors = ", ".join(str(n) for n in range(2, each.number + 1) if each.number % n == 0)
        if degree > each.number:
            raise PluginError(
                f'ep = {degree} is more than the {each.number} experts of "{each.fqn}"; ep may be {divisors}'
            )
        if each.number % degree:
            raise PluginError(
                f'"{each.fqn}" has {each.number} experts, which do not divide by ep = {degree}; ep may be {divisors}'
            )
        if each.rows and degree > 1:
            refuse_unknown_rows(model.get_submodule(each.fqn), each.fqn)
    _refuse_shared(model, found, degree)
    if degree > 1 and context.layout.degree(Role.STAGE) > 1:
        _refuse_tied(model, found)
    if degree > 1 and set(context.layout.names(Role.TENSOR)) & set(context.layout.carved_from("ep")):
        _refuse_lists(found, degree, context)
    return found


def _found(model: nn.Module) -> list[Experts]:
    """Return what is known for experts by what it is, and beside that by its name, in the model's order."""
    found: dict[str, Experts] = {}
    for is_named in (False, True):
        for fqn, module in model.named_modules():
            if is_named and not _says_experts(fqn, module):
                continue
            beside = all(not _is_within(fqn, other) and not _is_within(other, fqn) for other in found)
            inside = any(_is_within(fqn, other) and found[other].is_list for other in found)
            is_free = beside if is_named else not inside
            if is_free and (each := _recognised(model, fqn, module, is_said=is_named)):
                found[fqn] = each
    return [found[fqn] for fqn, _ in model.named_modules() if fqn in found]


def _is_within(fqn: str, other: str) -> bool:
    return fqn == other or not other or fqn.startswith(f"{other}.")


def _says_experts(fqn: str, module: nn.Module) -> bool:
    """Return whether a name says experts that tokens choose, of a list its attribute's, of a module its class's too."""
    from torch import nn

    names = fqn.rpartition(".")[2]
    if not isinstance(module, nn.ModuleDict | nn.ModuleList):
        names += type(module).__name__
    return "expert" in names.lower() and "shared" not in names.lower()


def _recognised(model: nn.Module, fqn: str, module: nn.Module, *, is_said: bool, named: bool = False) -> Experts | None:
    """Return the experts that a module holds, if it does.

    Args:
        model: The whole one.
        fqn: Of the module.
        module: Itself.
        is_said: Whether its name, or the manifest, says that it holds experts.
        named: Whether the manifest does.
    """
    form = expert_form(module, is_stated=is_said)
    if form is not None:
        return Experts(
            fqn=fqn,
            number=stacked_number(module),
            is_list=False,
            blocks={name: name for name in _names(model, module)},
            is_sorted=form != "chosen",
            shared=shared_by_experts(module),
            rows=frozenset(rows_of_experts(module)),
        )
    if fqn and _is_list(module, named=named) and (is_said or chosen_by_values(model, fqn)):
        blocks = {name: caller_of(model, name) for name in _names(model, module)}
        names = tuple(listed_experts(module))
        shared = _shared_buffers(module, names)
        return Experts(fqn=fqn, number=len(names), is_list=True, blocks=blocks, names=names, shared=shared)
    return _multiplied(model, fqn, module, is_said=is_said, named=named)


def _shared_buffers(module: nn.Module, names: Sequence[str]) -> frozenset[str]:
    """Return the names of buffers in a list that several of its experts have: all ranks use them."""
    owners: dict[int, set[str]] = {}
    held = [(entry, *each) for entry in names for each in module.get_submodule(entry).named_buffers()]
    for entry, _, buffer in held:
        owners.setdefault(id(buffer), set()).add(entry)
    return frozenset(f"{entry}.{name}" for entry, name, buffer in held if len(owners[id(buffer)]) > 1)


def _multiplied(model: nn.Module, fqn: str, module: nn.Module, *, is_said: bool, named: bool) -> Experts | None:
    """Return experts whose weights a block's own code multiplies: of a parameter list, or stacks beside its router."""
    from torch import nn

    around = model.get_submodule(fqn.rpartition(".")[0])
    numbers = {value for owner in (module, around) for name, value in vars(owner).items() if _says_number(name, value)}
    own = {name: held for name, held in module._parameters.items() if held is not None}
    is_list = isinstance(module, nn.ParameterList | nn.ParameterDict)
    if is_list:
        found = len(own) > 1 and all(held.ndim == 2 for held in own.values())
        names, number = tuple(own), len(own)
        is_said = is_said or number in numbers or "expert" in type(around).__name__.lower()
        if not found or not fqn or not (is_said or chosen_by_values(model, fqn)):
            return None
    else:
        names = tuple(name for name, held in own.items() if held.ndim == 3 and held.shape[0] > 1)
        sizes = {own[name].shape[0] for name in names}
        is_layer = type(module).__module__.startswith("torch.")
        if not names or is_layer or not (named or sizes <= numbers or (is_said and len(sizes) == 1)):
            return None
        number = math.gcd(*sizes)
    blocks = {name: caller_of(model, name) for name in _names(model, module)}
    inside = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    shared = frozenset() if is_list else frozenset(name for name in inside if name not in names)
    return Experts(
        fqn=fqn, number=number, is_list=is_list, blocks=blocks, shared=shared, names=names, is_multiplied=True
    )


def _says_number(name: str, value: object) -> bool:
    return "expert" in name and "shared" not in name and type(value) is int and value > 1


def _names(model: nn.Module, module: nn.Module) -> list[str]:
    """Return all FQNs of a module."""
    return [fqn for fqn, other in model.named_modules(remove_duplicate=False) if other is module]


def _missed(model: nn.Module) -> str:
    """Return which modules hold weights of three dims, and why they are no experts; empty if there are none."""
    said = []
    for fqn, module in model.named_modules():
        own = {name: tuple(held.shape) for name, held in module.named_parameters(recurse=False) if held.ndim == 3}
        if not own:
            continue
        sizes = sorted({shape[0] for shape in own.values()})
        numbers = {name: value for name, value in vars(module).items() if "expert" in name and type(value) is int}
        if len(sizes) > 1:
            why = f"stacks {', '.join(f'{shape[0]} in {name}' for name, shape in own.items())}"
        else:
            why = f"stacks {sizes[0]}, and says {numbers or 'nothing'} of its number of experts"
        said.append(f'"{fqn}" ({type(module).__name__}) {why}')
    found = f"; of modules with weights of three dims {'; '.join(said[:3])}" if said else ""
    return found + _mixed(model) + ("" if said else _flat(model))


def _flat(model: nn.Module) -> str:
    """Return which modules say a number of experts and have so many rows, or a multiple; empty if there are none."""
    said: dict[type, str] = {}
    for fqn, module in model.named_modules():
        numbers = [(name, n) for name, n in vars(module).items() if "experts" in name and type(n) is int and n > 1]
        for stated, number in numbers:
            flat = [name for name, held in module.named_parameters() if held.ndim == 2 and held.shape[0] % number == 0]
            if len(flat) > 1 and not any(_is_list(inner) for inner in module.modules()):
                why = (
                    f'"{fqn}" ({type(module).__name__}) says {stated} = {number}, and has weights of two dims, '
                    f"{', '.join(flat[:3])}, of which no rows are known to be one expert's"
                )
                said.setdefault(type(module), why)
    return f"; {'; '.join([*said.values()][:3])}" if said else ""


def _mixed(model: nn.Module) -> str:
    """Return which dicts hold weights of modules of several classes, as experts never do; empty if there are none."""
    from torch import nn

    said = []
    for fqn, module in model.named_modules():
        if not isinstance(module, nn.ModuleDict) or not len(module):
            continue
        classes = Counter(type(entry).__name__ for entry in listed_experts(module).values())
        if len(classes) > 1 and max(classes.values()) > 1:
            held = " and ".join(f"{number} {name}" for name, number in classes.items())
            said.append(f'"{fqn}" ({type(module).__name__}) holds {held}')
    return f"; of dicts of modules {'; '.join(said[:3])}" if said else ""


def _is_list(module: nn.Module, *, named: bool = True) -> bool:
    """Return whether a module is a list that may hold experts; of one that is not named, a dict's are of one class."""
    from torch import nn

    if not isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    entries = list(listed_experts(module).values())
    if len(entries) < 2 or any(isinstance(entry, nn.ModuleList | nn.ModuleDict) for entry in entries):
        return False
    is_one = isinstance(module, nn.ModuleList) or len({type(entry) for entry in entries}) == 1
    return (named or is_one) and any(True for _ in module.parameters())


def _refuse_blocks(model: nn.Module, named: Experts, context: RunContext) -> None:
    """Refuse the list of the model's blocks, which every sample passes in turn, where these hold experts."""
    blocks = set(select_fqns(context.blocks, context.fqns)) if named.is_list and context.has_blocks else set()
    inside = [each.fqn for each in _found(model) if each.fqn != named.fqn and _is_within(each.fqn, named.fqn)]
    if inside and blocks >= {f"{named.fqn}.{name}" for name in named.names}:
        raise PluginError(
            f'expert_parallel: "{named.fqn}" is the list of the model\'s blocks, and their experts are in '
            f'"{inside[0]}"{" and others" * (len(inside) > 1)}',
            hint="name these in experts, or leave experts out, which finds them",
        )


def _refuse_lists(found: Sequence[Experts], degree: int, context: RunContext) -> None:
    """Refuse lists where ranks of tp hold other experts: their modules are sharded over tp, as any others."""
    outer = context.layout.beside_experts
    for each in found:
        if each.is_list or each.is_sorted or each.shared or each.is_multiplied:
            kind = (
                "is a list of modules, which tp shards" if each.is_list else "is called with rows in order of experts"
            )
            if each.is_multiplied:
                kind = "holds weights that the code of a block multiplies"
            elif each.shared:
                kind = f"has {min(each.shared)}, which its experts share"
            raise PluginError(
                f"ep = {degree} does not divide dp_shard x cp = {outer}, so that it takes ranks of tp, and "
                f'"{each.fqn}" {kind}; stacked weights that tokens choose can be whole there, and no others',
                hint=f"choose an ep that divides {outer}",
            )


def _refuse_shared(model: nn.Module, found: Sequence[Experts], degree: int) -> None:
    """Refuse parameters of several experts, of one list or of two, that ranks of ep would not hold alike."""
    owners: dict[int, tuple[Experts, str]] = {}
    for each in found:
        for name, parameter in model.get_submodule(each.fqn).named_parameters(remove_duplicate=False):
            first, other = owners.setdefault(id(parameter), (each, name))
            if first is not each and _holder(first, other, degree) != _holder(each, name, degree):
                raise PluginError(
                    f'expert_parallel: "{each.fqn}.{name}" is also "{first.fqn}.{other}": lists may share experts, of '
                    f"which ep = {degree} gives each rank the same ones, in the same places; give both the same "
                    "order and number, or name one of them in experts"
                )
            if first is each and other != name and name not in each.shared:
                raise PluginError(
                    f'expert_parallel: "{each.fqn}.{name}" is also "{first.fqn}.{other}": a rank of ep has an expert '
                    "of a list as a whole, and ranks would train two of what several experts hold (in modules with "
                    "stacked weights what all experts share stays whole); call it in the forward around the experts, "
                    "give each weights of its own, or leave these out of [sharding.expert_parallel] experts"
                )


def _refuse_tied(model: nn.Module, found: Sequence[Experts]) -> None:
    """Refuse experts that several layers have, of which stages of a pipeline would hold replicas."""
    owners: dict[int, str] = {}
    for each in found:
        names = [*each.blocks]
        for parameter in model.get_submodule(each.fqn).parameters():
            names.insert(0, owners.setdefault(id(parameter), each.fqn))
        other = next((name for name in names if name != each.fqn), None)
        if other is not None:
            raise PluginError(
                f'expert_parallel: "{each.fqn}" and "{other}" have the same experts, of which each stage of a pipeline '
                "holds a replica; replicas of experts are not kept equal over ep",
                hint="set pp = 1, or leave these out of [sharding.expert_parallel] experts",
            )


def _holder(experts: Experts, name: str, degree: int) -> tuple[bool, int]:
    """Return whether a parameter is of a list, and which rank of ep holds its expert; of stacks, how many they are."""
    if not experts.is_list:
        return False, experts.number
    return True, (experts.place_of(name) or 0) * degree // experts.number
