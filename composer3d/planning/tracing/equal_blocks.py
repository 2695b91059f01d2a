"""Equal blocks: detection of blocks that are alike, and stages truncated to a few of them."""

from __future__ import annotations

import types
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from composer3d import patterns
from composer3d.errors import TransformError
from composer3d.planning.tracing.built_state import OF_MODULES, BuiltState, UnreadableStateError
from composer3d.planning.tracing.code_state import plugin_packages

if TYPE_CHECKING:
    import torch
    from torch import nn

    from composer3d.composition import Preparation
    from composer3d.interfaces import Part

__all__ = [
    "BlockTruncation",
    "Known",
    "NoChainError",
    "form_of",
    "form_of_tensor",
    "kind_of",
    "prefixes",
    "treatments",
]

Known = dict[int, tuple[Any, str]]
_MADE_BY = "composer3d_block"  # of nodes of the graph: the block whose result they are of
_NEAREST = 256  # nodes between a block and the one before it


class NoChainError(Exception):
    """Equal blocks stand side by side, as tables and branches do, so that none can be left out."""


# Attributes in which blocks keep their own number.
_NUMBERS = frozenset({"index", "layer_id", "layer_idx", "layer_number"})


class BlockTruncation:
    """Truncates every stage to a few blocks, where all blocks of a stage are alike.

    The first ones are kept, and instead of the last of those the stage's last one if transforms treat it differently:
    tensor parallelism all-gathers the sequence after the last block. An omitted block stays in the module list, holds
    no parameters, and returns its input in the structure that the block before it returned. It is emptied before any
    transform but the split, so every plugin treats the stage like a short one.

    Args:
        keep: Most blocks per stage; None keeps all.
        whole: Blocks of the longest stages that are not truncated, where that is more.

    Attributes:
        names: FQNs of every stage's blocks, in order, omitted ones included.
        kept: FQNs of every stage's kept blocks.
        are_alike: Whether all blocks of each stage have equal structure, and every transform treats all but the first
            and the last the same.
    """

    def __init__(self, keep: int | None, *, whole: int = 0) -> None:
        self._keep, self._whole = keep, whole
        self.names: list[list[str]] = []
        self.kept: list[list[str]] = []
        self.are_alike = False

    def apply(self, parts: Sequence[Part], preparation: Preparation) -> None:
        """Compare the blocks of each stage, and empty the surplus ones where they are alike."""
        context = preparation.context
        try:
            names = patterns.select(context.blocks, context.fqns)
        except TransformError:  # no single list of equal blocks
            names = []
        for part in parts:
            have = {fqn for fqn, module in part.module.named_modules() if any(True for _ in module.parameters())}
            self.names.append([fqn for fqn in names if fqn in have])
        known: Known = {}
        self.are_alike = (
            bool(names)
            and not _are_tied(names, context.ties)
            and all(_are_treated_alike(preparation, found[1:-1]) for found in self.names)
            and all(
                len({form_of(part.module.get_submodule(fqn), known) for fqn in found}) == 1
                for part, found in zip(parts, self.names, strict=True)
            )
        )
        self.kept = [self._kept(preparation, found) if self.are_alike else found for found in self.names]
        omitted: set[str] = set()
        for part, found, kept in zip(parts, self.names, self.kept, strict=True):
            last: list[Any] = [None]
            if len(kept) == len(found):
                continue
            chain = _Chain(kept)
            for fqn in found:
                if fqn in kept:
                    part.module.get_submodule(fqn).register_forward_hook(partial(_note, last))
                    part.module.get_submodule(fqn).register_forward_hook(partial(chain.look, fqn))
                else:
                    _empty(part.module.get_submodule(fqn), last, like=kept[1] if len(kept) > 2 else kept[0])
                    omitted.add(fqn)
        if omitted:
            preparation.selected[:] = [
                (transform, tuple(fqn for fqn in fqns if omitted.isdisjoint(prefixes(fqn))))
                for transform, fqns in preparation.selected
            ]

    def _kept(self, preparation: Preparation, names: list[str]) -> list[str]:
        if self._keep is None or len(names) <= max(self._keep, self._whole):
            return names
        if _are_treated_alike(preparation, names[-2:]):
            return names[: self._keep]
        return [*names[: self._keep - 1], names[-1]]

    def is_idle(self, *, short: int, if_longer: bool) -> bool:
        """Return whether a trace of the stages would say nothing: those of unequal lengths are traced whole.

        Args:
            short: Blocks of the shorter one of two traces.
            if_longer: A shorter trace has all blocks of stages that are no longer than this one's.
        """
        lengths = {len(names) for names in self.names}
        if if_longer:
            return not self.are_alike or len(lengths) > 1 or max(lengths) < max(self._keep or 0, self._whole + 1)
        return self._keep == short and self.are_alike and len(lengths) > 1 and max(lengths) > max(short, self._whole)

    def places_of(self, module: str) -> list[tuple[str, str, int]]:
        """Return a module's name by stage, with its block's place in the stage instead of its number.

        In a stage of three blocks the middle one is both the second and the one before the last.

        Returns:
            The name inside its block, or of a module outside of blocks; the block's place: `first`, `before last`,
            `last`, a number from the front, or empty; and the stage's position on this rank.
        """
        for index, kept in enumerate(self.kept):
            for place, name in enumerate(kept):
                if module == name or module.startswith(f"{name}."):
                    places = ["first"] if place == 0 else [f"{place}"] if place < max(2, len(kept) - 2) else []
                    if place >= max(1, len(kept) - 2):
                        places = [*places, ("before last", "last")[place - len(kept) + 2]]
                    return [(module[len(name) :], each, index) for each in places]
        return [(module, "", 0)]


class _Chain:
    """Looks, in the first forward with gradients, whether each kept block is given what the one before it made.

    Args:
        kept: FQNs of the blocks of a stage.
    """

    def __init__(self, kept: Sequence[str]) -> None:
        self._before = dict(zip(kept[1:], kept, strict=False))
        self._last = kept[-1]
        self._looked_at: set[str] = set()

    def look(self, fqn: str, _: Any, args: tuple[Any, ...], output: Any) -> None:
        """Refuse a block that others are no chain with; a forward hook."""
        import torch

        given = next(iter(args), None)
        made = output[0] if isinstance(output, tuple | list) and output else output
        if not isinstance(given, torch.Tensor) or not isinstance(made, torch.Tensor):
            return
        # Behind the last block another form may be wanted: tensor parallelism gathers a sequence there.
        before, after = ((each.shape, each.is_floating_point()) for each in (given, made))
        if fqn in self._before and fqn != self._last and before != after:
            raise NoChainError(
                f'"{fqn}" makes {(*made.shape,)} of {(*given.shape,)}, which no other block can be given'
            )
        node: Any = made.grad_fn
        if node is not None and fqn not in self._looked_at:
            self._looked_at.add(fqn)
            node.metadata[_MADE_BY] = fqn
            previous = self._before.get(fqn)
            if previous in self._looked_at and not _comes_from(given.grad_fn, previous):
                raise NoChainError(f'"{fqn}" is not given what "{previous}" made')


def _comes_from(node: Any, block: str) -> bool:
    """Return whether a node of the graph, or one of the nearest before it, made a block's result."""
    waiting, seen = [node], set[Any]()
    while waiting and len(seen) < _NEAREST:
        each = waiting.pop(0)
        if each is None or each in seen:
            continue
        if each.metadata.get(_MADE_BY) == block:
            return True
        seen.add(each)
        waiting += [inner for inner, _ in each.next_functions]
    return False


def _note(last: list[Any], _: Any, __: Any, output: Any) -> None:
    """Keep the structure of a block's output, without its tensors."""
    import torch

    if isinstance(output, torch.Tensor):
        last[0] = None
    elif isinstance(output, tuple | list):
        last[0] = (
            type(output),
            [_Tensor(tuple(each.shape)) if isinstance(each, torch.Tensor) else each for each in output[1:]],
        )


class _Tensor(NamedTuple):
    """A tensor that a block returns beside the first; units of narrow dtypes take it as another dtype."""

    shape: tuple[int, ...]


def _empty(block: nn.Module, last: list[Any], *, like: str) -> None:
    """Let a block return its input; of further results those that it was given in their places, as sums of losses.

    Args:
        block: That is omitted.
        last: Structure of what the block before it returned.
        like: Name of a block that is kept, and like it.
    """

    def forward(hidden: Any, *given: Any, **_: Any) -> Any:
        if last[0] is None:
            return hidden
        kind, rest = last[0]
        inputs = [*given, *(None for _ in rest)]
        passed = [
            (value if getattr(value, "shape", None) == each.shape else None) if isinstance(each, _Tensor) else each
            for each, value in zip(rest, inputs, strict=False)
        ]
        return kind([hidden, *passed])

    block._modules.clear()
    block._parameters.clear()
    block._buffers.clear()
    block.forward = forward
    # For RunContext.planned_parameters.
    block.composer3d_like = like  # type: ignore[assignment]


def form_of(block: nn.Module, known: Known) -> tuple[Any, ...]:
    """Return a key that is equal for blocks of equal structure.

    Args:
        block: One of them.
        known: As for `kind_of`.
    """
    modules = tuple((fqn, *kind_of(module, known)) for fqn, module in block.named_modules())
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return modules, tuple((fqn, form_of_tensor(tensor)) for fqn, tensor in tensors)


def form_of_tensor(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return shape, dtype, and whether it is trained."""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def kind_of(module: nn.Module, known: Known) -> tuple[Any, ...]:
    """Return a module's class and its attributes by value, except its own layer number, modules, and what torch keeps.

    Args:
        module: On meta.
        known: Digests of what was looked at before, which blocks share.
    """
    values = [
        (name, _value_of(value, known))
        for name, value in sorted(vars(module).items())
        if name not in _NUMBERS and name not in OF_MODULES and not name.lstrip("_").startswith("composer3d_")
    ]
    return type(module).__qualname__, _digest_of(type(module), known), tuple(values)


def _value_of(value: Any, known: Known) -> Any:
    import torch

    if value is None or isinstance(value, int | float | str):
        return value
    if isinstance(value, torch.Tensor):
        return form_of_tensor(value)
    if isinstance(value, torch.nn.Module):  # one that is not registered, as a stage has others'
        return type(value).__qualname__
    value = value.__func__ if isinstance(value, types.MethodType) else value
    code = value.func if isinstance(value, partial) else value
    library = str((code if isinstance(code, types.FunctionType | type) else type(code)).__module__)
    # Functions of plugins name the block that they are on.
    is_plugins = callable(value) and library.partition(".")[0] in plugin_packages()
    return None if is_plugins else _digest_of(value, known)


def _digest_of(value: Any, known: Known) -> str:
    found = known.get(id(value))
    if found is None:
        state = BuiltState()
        try:
            state.add(value)
            digest = state.digest_here()
        except (UnreadableStateError, RecursionError):
            digest = f"{id(value)}"  # equal to itself alone
        found = known[id(value)] = (value, digest)
    return found[1]


def treatments(preparation: Preparation, names: Sequence[str]) -> list[tuple[frozenset[str], ...]]:
    """Return what every transform selects inside each of these blocks."""
    rows: dict[str, list[frozenset[str]]] = {name: [] for name in names}
    for _, fqns in preparation.selected:
        inside: dict[str, set[str]] = {name: set() for name in names}
        for fqn in fqns:
            owner = next((name for name in prefixes(fqn) if name in inside), None)
            if owner is not None:
                inside[owner].add(fqn[len(owner) :])
        for name, found in inside.items():
            rows[name].append(frozenset(found))
    return [tuple(row) for row in rows.values()]


def _are_treated_alike(preparation: Preparation, names: Sequence[str]) -> bool:
    return len({*treatments(preparation, names)}) <= 1


def prefixes(fqn: str) -> list[str]:
    """Return the names of a module and of all that it is in: `a`, `a.b` and `a.b.c` of the last."""
    parts = fqn.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _are_tied(names: Sequence[str], ties: Sequence[tuple[str, ...]]) -> bool:
    return any(any(fqn == name or fqn.startswith(f"{name}.") for name in names) for group in ties for fqn in group)
