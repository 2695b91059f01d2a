"""Compression methods of a run: tensors and axes that they apply to, steps in which they are active, and residuals."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from composer3d import (
    CodedCollectives,
    CodedExchange,
    PluginError,
    ReplicaReductions,
    RunContext,
    resolve_reference,
    seed_of,
)
from composer3d_plugins.communication.compression.codecs import make_codec
from composer3d_plugins.communication.compression.exchange import (
    CodedAllGather,
    CodedReduceScatter,
    Owed,
    gather_rows,
    reduce_rows,
)
from composer3d_plugins.communication.compression.low_rank import Factors, LowRank
from composer3d_plugins.communication.compression.replica_means import ReplicaMeans, mean_by
from composer3d_plugins.communication.compression.residuals import Residuals

if TYPE_CHECKING:
    from torch import Tensor, nn

    from composer3d import Codec

__all__ = ["Options", "Wire"]

Travelling = Literal["gradients", "weights", "replicas"]
DEFAULT_RANK, DEFAULT_RATIO = 4, 0.01


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the plugin that are read here, which says what they are.

    Args:
        inside: Codec of gradients between ranks that hold shards.
    """

    gradients: str | None
    inside: str | None
    weights: str | None
    block: int
    rounding: Literal["nearest", "stochastic"]
    rank: int | None
    ratio: float | None
    start_step: int
    min_numel: int
    error_feedback: bool


class Wire:
    """Codecs of a run, and whether they are in use.

    Attributes:
        residuals: Of error feedback, if there is any.
        factors: Of products of low rank, if there are any.

    Args:
        options: The plugin.
        context: Of the run.
    """

    def __init__(self, options: Options, context: RunContext) -> None:
        import torch

        self._options, self._context = options, context
        self._coded = context.stash(CodedCollectives)
        self._is_begun, self._num_replaced = True, 0
        self._names: dict[tuple[nn.Module, str], str] = {}
        is_random = options.rounding == "stochastic"
        self._generator = torch.Generator(device=context.device) if is_random else None
        self.residuals = Residuals(context=context) if options.error_feedback else None
        self.factors: Factors | None = None
        self._codecs: dict[Travelling, Codec] = {}
        self._low_rank: LowRank | None = None
        if options.gradients == "powersgd":
            rank = DEFAULT_RANK if options.rank is None else options.rank
            self.factors = Factors(rank=rank, seed=context.manifest.train.seed)
            self._low_rank = LowRank(factors=self.factors)
        elif options.gradients is not None:
            self._codecs["gradients"] = self._codecs["replicas"] = self._made(options.gradients)
            if options.inside is not None and options.inside != options.gradients:
                self._codecs["gradients"] = self._made(options.inside)
        if options.weights is not None:
            self._codecs["weights"] = self._made(options.weights)
        self.reduce_scatter = CodedReduceScatter(
            codec=lambda numel: self._codec("gradients", numel),
            note=lambda group, length: self._note("gradients", group, length),
        )
        self.all_gather = CodedAllGather(
            codec=lambda numel: self._codec("weights", numel),
            note=lambda group, length: self._note("weights", group, length),
        )
        self.replica_means = ReplicaMeans(
            method=lambda numel: self._codec("replicas", numel),
            note=lambda group, length: self._note("replicas", group, length),
            residuals=self.residuals,
            name_of=lambda held: self._names[held],
        )

    def replace_all_reduces(self) -> None:
        """Take the place of all-reduces over replicas that were made since the last call."""
        made = self._context.stash(ReplicaReductions).made
        for reduction in made[self._num_replaced :]:
            if reduction.group.size() > 1:
                reduction.replace(self.replica_means)
        self._num_replaced = len(made)

    def allocate(self) -> None:
        """Take the names of parameters, and make what earlier steps leave behind: zeros, and first factors."""
        for part in self._context.parts:
            first = {fqn: group[0] for group in self._context.ties for fqn in group} if part.num_stages == 1 else {}
            for prefix, module in part.module.named_modules():
                for name in module._parameters:
                    fqn = f"{prefix}.{name}" if prefix else name
                    fqn = f"{fqn} of stage {part.index}" if fqn in part.copies else first.get(fqn, fqn)
                    self._names[module, name] = fqn
        for reduction in self._context.stash(ReplicaReductions).made:
            for held in reduction.parameters() if reduction.group.size() > 1 else ():
                self._allocate(self._names[held], getattr(*held), reduction.group)

    def _allocate(self, name: str, parameter: nn.Parameter, group: Any) -> None:
        if self.residuals is not None:
            self.residuals.allocate(name, parameter, group)
        if self.factors is not None:
            self.factors.allocate(name, _wide(parameter), key=_key_of(name, parameter))

    def begin(self, step: int) -> None:
        """Begin a step; plans and verify show what a run does once it compresses."""
        self._is_begun = step >= self._options.start_step or self._context.purpose != "run"
        if self._generator is not None:
            seed = self._context.manifest.train.seed
            self._generator.manual_seed(seed_of(seed, "compression", step, self._context.rank))
        for state in (self.residuals, self.factors):
            if state is not None:
                state.begin()

    def taken(self) -> None:
        """End a step that the optimizer has taken."""
        for state in (self.residuals, self.factors):
            if state is not None:
                state.taken()

    def _made(self, name: str) -> Codec:
        options = self._options
        if ":" not in name:
            ratio = DEFAULT_RATIO if options.ratio is None else options.ratio
            return make_codec(name, block=options.block, generator=self._generator, ratio=ratio)
        make = resolve_reference(name, self._context.manifest.document.folder)
        given = {"block": options.block} if _takes_block(make) else {}
        _refuse_arguments(name, make, given)
        made = make(**given)
        lacking = [
            each for each in ("num_bytes", "encode", "decode", "bound", "is_repeatable") if not hasattr(made, each)
        ]
        if lacking:
            raise PluginError(
                f'"{name}" returns {type(made).__name__}, which has no {" and no ".join(lacking)}',
                hint="composer3d.Codec lists what a codec has",
            )
        found: Codec = made
        return found

    def _codec(self, what: Travelling, numel: int) -> Any:
        if self._coded.is_exact or not self._is_begun or numel < self._options.min_numel:
            return None
        return self._low_rank if what == "replicas" and self._low_rank is not None else self._codecs[what]

    def _note(self, what: Travelling, group: Any, length: int) -> None:
        if (what, group.group_name) not in self._coded.exchanges:
            self._coded.exchanges[what, group.group_name] = self._exchange(what, group)
        self._coded.exchanges[what, group.group_name].lengths.add(length)

    def _exchange(self, what: Travelling, group: Any) -> CodedExchange:
        """Return an exchange of its own for `verify`, with nothing left over from the run."""
        codec = self._codecs.get(what)
        if what == "gradients":
            return CodedExchange(what=what, codec=codec, group=group, run=lambda x_WN: reduce_rows(x_WN, codec, group))
        if what == "weights":
            return CodedExchange(what=what, codec=codec, group=group, run=lambda x_N: gather_rows(x_N, codec, group))
        rounds = None if self.residuals is None else lambda: self._rounds(group)
        return CodedExchange(
            what=what,
            codec=codec,
            group=group,
            run=lambda x_N: mean_by(self._fresh(), _as_matrix(x_N), group, None),
            rounds=rounds,
            name=str(self._fresh()),
        )

    def _fresh(self) -> Codec | LowRank:
        """Return the method of replicas, with factors of its own."""
        if self._low_rank is None:
            return self._codecs["replicas"]
        return LowRank(factors=Factors(rank=self._low_rank.factors.rank, seed=0))

    def _rounds(self, group: Any) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
        """Return an exchange with error feedback, which begins with nothing owed."""
        import torch

        method, held = self._fresh(), list[Owed]()

        def run(x_N: Tensor) -> tuple[Tensor, Tensor]:
            owed = held[0] if held else Owed(sender_N=torch.zeros_like(x_N), owner_N=torch.zeros_like(x_N))
            held[:] = [owed]
            mean_N = mean_by(method, _as_matrix(x_N), group, owed)
            return mean_N, owed.sender_N + group.size() * owed.owner_N

        return run


def _key_of(name: str, parameter: nn.Parameter) -> str:
    """Return the name of what is kept for this rank's shard of a parameter, and on its replicas alone."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return name
    mesh, placements = parameter.device_mesh, parameter.placements
    index = [mesh.get_local_rank(dim) for dim, each in enumerate(placements) if not each.is_replicate()]
    return " ".join([name, *map(str, index)])


def _as_matrix(x_N: Tensor) -> dict[str, Tensor]:
    """Return numbers as a matrix that is nearly square, and the rest of them."""
    rows = max(math.isqrt(x_N.numel()), 1)
    whole = x_N.numel() // rows * rows
    return {"matrix": x_N[:whole].view(rows, -1), "rest": x_N[whole:]}


def _wide(parameter: nn.Parameter) -> Tensor:
    import torch
    from torch.distributed.tensor import DTensor

    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    return local.detach().to(torch.promote_types(local.dtype, torch.float32))


def _refuse_arguments(name: str, make: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Refuse what makes a codec of other arguments than it is given."""
    try:
        inspect.signature(make).bind(**given)
    except ValueError:  # of a class of C's
        return
    except TypeError as error:
        called = "with block alone" if given else "without arguments"
        raise PluginError(
            f'"{name}" is called {called}, and takes others: {error}',
            hint="give its parameters defaults, or name a function that makes it",
        ) from error


def _takes_block(make: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError):  # of a class of C's, which says what it takes where it is called
        return True
    return any(each.name == "block" or each.kind is each.VAR_KEYWORD for each in parameters)
