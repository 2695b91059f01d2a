"""Experts that are modules of a list, which a block's own code calls as it likes: recorded, exchanged, and replayed.

A loop over experts that skips those without tokens cannot exchange rows expert by expert: other ranks skip others. The
block runs twice instead. In the first run each expert records what it is given; all of it is exchanged at once, the
ranks that hold the experts run them, and the results come back. In the second run each expert returns its result. It
is the block's own code both times, so routing, weights and the order of sums are its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from composer3d import DataDependent, PluginError, listed_experts, propagation, torch_compat
from composer3d_plugins.sharding.expert_parallel.rerun_state import BlockState, random_states, restore_random_states
from composer3d_plugins.sharding.expert_parallel.token_exchange import (
    Note,
    exchange_counts,
    scale_gradients,
    send_rows,
)

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["local_experts", "shard_listed"]

# A call of an expert: its index, the rows that it is given, and what it returned in the first run.
_Call = tuple[int, "Tensor", "Tensor"]


def local_experts(num_experts: int, *, degree: int, rank: int) -> range:
    """Return the indexes of the experts that a rank holds: consecutive ones."""
    local = num_experts // degree
    return range(rank * local, (rank + 1) * local)


def shard_listed(
    block: nn.Module,
    name: str,
    mesh: DeviceMesh,
    *,
    fqn: str,
    note: Note,
    dependent: DataDependent,
    names: Sequence[str] | None = None,
) -> None:
    """Leave this rank its experts of a list, and exchange rows around the block's forward.

    Of a list that several blocks call it is done for each of them.

    Args:
        block: Whose forward calls the experts with rows, none of which it makes of what an expert has returned.
        name: Of the list, inside of the block; empty where the list itself has a forward.
        mesh: Of one dim, ep.
        fqn: Of the block, for messages.
        note: Called in every forward, as `token_exchange.Note`.
        dependent: Of the run; learns which experts were run without rows.
        names: Of the experts in the list, before any are dropped; None reads them.

    Memory: experts / ep; the block's activations twice. Collectives: 3 all-to-alls forward (counts, rows, results), 2
    backward.
    """
    experts: Any = block.get_submodule(name)
    names = [*listed_experts(experts)] if names is None else names  # those with parameters
    held = local_experts(len(names), degree=mesh.size(), rank=mesh.get_local_rank())
    widths = _widths(experts.get_submodule(names[held[0]]))
    for index, entry in enumerate(names):
        if index not in held:
            _drop_parameters(experts.get_submodule(entry))
    if not hasattr(type(experts), "running"):  # no other block calls them
        # Its own class, which code that asks for a list still takes for one; FQNs stay as they are.
        experts.__class__ = _list_class(type(experts))
    exchange = _Exchange(
        block,
        experts,
        names,
        held,
        mesh,
        fqn=fqn,
        list_name=name,
        note=note,
        dependent=dependent,
        widths=widths,
    )
    block.forward = exchange.around(block.forward)


def _widths(expert: nn.Module) -> dict[int, int]:
    """Return how wide an expert's results are, by the width of rows: what it does on meta with those it may take."""
    import torch

    tensors = {**dict(expert.named_parameters()), **dict(expert.named_buffers())}
    state = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    dtypes = [parameter.dtype for parameter in expert.parameters() if parameter.is_floating_point()]
    found: dict[int, int] = {}
    for width in dict.fromkeys(size for parameter in expert.parameters() for size in parameter.shape):
        rows = torch.empty(2, width, dtype=dtypes[0] if dtypes else None, device="meta")
        try:
            with torch.no_grad():
                made = torch.func.functional_call(expert, state, (rows,))
        except Exception:  # another width, or code that does not run on meta: its rows are taken to stay as wide
            continue
        if isinstance(made, torch.Tensor) and made.ndim == 2:
            found[width] = made.shape[1]
    return found


def _drop_parameters(expert: nn.Module) -> None:
    for module in expert.modules():
        for name in list(module._parameters):
            module._parameters[name] = None


class _StandIn:
    """An expert as the block's code sees it: something that can be called, and nothing else."""

    def __init__(self, exchange: _Exchange, index: int) -> None:
        self._exchange, self._index = exchange, index

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._exchange.called(self._index, args, kwargs)

    forward = __call__

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__(f"[{key}]")

    def __getattr__(self, name: str) -> Any:
        raise PluginError(
            f'expert_parallel: the forward of "{self._exchange.fqn}" reads "{name}" of an expert, which another rank '
            "may hold; experts of a list can be called with rows, and nothing else; or leave this list out of "
            "[sharding.expert_parallel] experts"
        )


def _list_class(cls: type) -> type:
    """Return a list's class with entries that stand for experts while the forward of a block around it runs."""

    def entries(self: Any) -> dict[str, Any]:
        return self._modules | self.running[-1].stand_ins if self.running else self._modules

    class Experts(cls):
        # Exchanges of the blocks whose code runs, innermost last.
        running: ClassVar[list[_Exchange]] = []

        def __getitem__(self, key: Any) -> Any:
            if not self.running or isinstance(key, slice):
                return [*entries(self).values()][key] if isinstance(key, slice) else super().__getitem__(key)
            return entries(self)[key] if isinstance(key, str) else [*entries(self).values()][int(key)]

        def __iter__(self) -> Iterator[Any]:
            return iter(entries(self).values()) if hasattr(cls, "append") else super().__iter__()

        def values(self) -> Any:
            return entries(self).values()

        def items(self) -> Any:
            return entries(self).items()

    Experts.__name__ = Experts.__qualname__ = cls.__name__
    return Experts


class _Exchange:
    """The two runs of a block around one exchange.

    Args:
        block: Around the list.
        experts: The list.
        names: Of the experts among its entries.
        held: Indexes of this rank's.
        mesh: Of one dim, ep.
        fqn: Of the block.
        list_name: Attribute of the block that holds the list.
        note: As of `shard_listed`.
        dependent: As of `shard_listed`.
        widths: Elements of a result row, by those of an input row; from `_widths`.

    Attributes:
        stand_ins: What the block's code finds in the list, by name.
    """

    def __init__(
        self,
        block: nn.Module,
        experts: nn.Module,
        names: Sequence[str],
        held: range,
        mesh: DeviceMesh,
        *,
        fqn: str,
        list_name: str,
        note: Note,
        dependent: DataDependent,
        widths: dict[int, int],
    ) -> None:
        self._block, self._widths = block, widths
        self._experts, self._held, self._group, self._degree = experts, held, mesh.get_group(), mesh.size()
        self.fqn, self._list_name, self._note, self._dependent = fqn, list_name, note, dependent
        self._names = names
        self.stand_ins = {name: _StandIn(self, index) for index, name in enumerate(names)}
        self._calls: list[_Call] = []
        self._recorded: list[_Call] = []
        self._results: list[Tensor] | None = None
        self._differs: list[Tensor] = []
        self._place = 0

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the block's forward with the exchange inside."""

        @functools.wraps(forward)
        def replayed(*args: Any, **kwargs: Any) -> Any:
            given = [leaf for leaf in torch_compat.tree_leaves([list(args), kwargs]) if hasattr(leaf, "_version")]
            versions = [leaf._version for leaf in given]
            states = random_states(given)
            state = BlockState(self._block)
            self._calls, self._results = [], None
            self._run(forward, args, kwargs)
            if [leaf._version for leaf in given] != versions:
                raise PluginError(
                    f'expert_parallel: the forward of "{self.fqn}" changes its input in place, and runs twice, around '
                    f'the exchange of rows for "{self._list_name or self.fqn}"; write `x = x + y` for `x += y` there'
                )
            restore_random_states(states)
            state.restore()
            calls, self._calls = self._calls, []
            # Rows are of this rank alone: a plugin that propagates a sequence would take them for one of all ranks.
            with torch_compat.hidden_from(propagation.SequencePropagation):
                self._results, tie = self._exchanged(calls, given)
            self._recorded, self._place, self._differs = calls, 0, []
            try:
                output = self._run(forward, args, kwargs)
                self._compare()
            finally:
                self._results, self._recorded, self._differs = None, [], []
            return output if calls else _tied(output, tie)

        return propagation.eagerly(replayed)

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        of_list: Any = type(self._experts)
        running: list[_Exchange] = of_list.running
        running.append(self)
        try:
            return forward(*args, **kwargs)
        finally:
            running.pop()

    def called(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Record what an expert is given, or return its result.

        Raises:
            PluginError: It is called with something else than one tensor, or with other rows than in the first run.
        """
        import torch

        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.ndim == 0:
            raise PluginError(f"{self._of(index)} is called with something else than one tensor of rows")
        if self._results is None:
            zeros, width = torch.zeros_like(x), self._widths.get(x.shape[-1], x.shape[-1])
            zeros = zeros if width == x.shape[-1] else zeros[..., :1].repeat(*[1] * (x.ndim - 1), width)
            self._calls.append((index, x, zeros))
            return zeros
        place, recorded = self._place, self._recorded
        self._place += 1
        if place >= len(recorded) or recorded[place][0] != index or recorded[place][1].shape != x.shape:
            raise PluginError(
                f"{self._of(index)} is called with other rows when the block runs again; its forward has to do the "
                "same twice"
            )
        with torch_compat.without_torch_functions():  # modes of plugins propagate the model's operators
            self._differs.append(_differ(x.detach(), recorded[place][1].detach()))
        return self._results[place]

    def _compare(self) -> None:
        """Refuse rows that depend on what experts return: in the first run that was zeros.

        Where sums have no fixed order, results of two runs differ by rounding.
        """
        import torch

        known = self._differs and torch_compat.active_fake_mode() is None and not self._differs[0].is_meta
        if not known or not bool(torch.stack(self._differs).any()):  # one wait for the accelerator
            return
        name = self._list_name or self.fqn
        raise PluginError(
            f'expert_parallel: the forward of "{self.fqn}" makes rows for one expert of "{name}" of what '
            "another has returned; all rows are exchanged at once, so they must not depend on results; sum these up "
            "in a tensor of their own, or leave the list out of [sharding.expert_parallel] experts"
        )

    def _expert(self, index: int) -> nn.Module:
        return self._experts.get_submodule(self._names[index])

    def _of(self, index: int) -> str:
        fqn = f"{self.fqn}.{self._list_name}" if self._list_name else self.fqn
        return f'expert_parallel: expert {index} of "{fqn}"'

    def _exchanged(self, calls: Sequence[_Call], given: Sequence[Tensor]) -> tuple[list[Tensor], Tensor]:
        """Return what the experts make of the rows that were recorded, by call, and the rows that came back."""
        import torch

        # Of shards of a sequence, this rank's positions; results are marked as those of the first run were.
        are_shards = [propagation.spec_of(x) is None for _, x, _ in calls]
        rows_of = [
            propagation.strip(x) if is_shard else x for (_, x, _), is_shard in zip(calls, are_shards, strict=True)
        ]
        like = rows_of[0] if calls else next(x for x in given if x.is_floating_point())
        # An expert that is called several times has the rows of its calls one after the other.
        order = sorted(range(len(calls)), key=lambda place: calls[place][0])
        flat = [x.flatten(0, -2) if x.ndim > 1 else x[None] for x in rows_of]
        sizes, called = [0] * len(self.stand_ins), [False] * len(self.stand_ins)
        for (index, _, _), rows_RD in zip(calls, flat, strict=True):
            sizes[index], called[index] = sizes[index] + rows_RD.shape[0], True
        told = [size if is_called else -1 for size, is_called in zip(sizes, called, strict=True)]
        counts_E = torch.tensor(told, device=like.device, dtype=torch.int64)
        rows = exchange_counts(
            counts_E,
            group=self._group,
            num_rows=sum(sizes),
            skew=self._dependent.routing_skew,
            width=like.shape[-1] if calls else 0,
        )
        self._note(rows.per_expert, rows.chosen)
        local = len(self._held)
        empty = like.new_zeros(0, rows.width or like.shape[-1])
        x_RD = torch.cat([empty, *(flat[place] for place in order)])
        pieces = list(
            send_rows(x_RD, rows, group=self._group).split(
                [size for source in rows.received_per_expert for size in source]
            )
        )
        for place, index in enumerate(self._held):
            mine = pieces[place::local]
            expert, used = self._expert(index), self._dependent.used
            used[expert] = used.get(expert, False) or rows.is_called[place]
            out = self._computed(index, torch.cat(mine))
            pieces[place::local] = out.split([piece.shape[0] for piece in mine])
        came = send_rows(torch.cat(pieces), rows, group=self._group, back=True)
        back = came.split([flat[place].shape[0] for place in order])
        results = {place: back[at].view(*rows_of[place].shape[:-1], came.shape[-1]) for at, place in enumerate(order)}
        for place, (_, _, first) in enumerate(calls):
            if are_shards[place]:
                propagation.copy_mark(first, results[place])
        return [results[place] for place in range(len(calls))], came

    def _computed(self, index: int, rows_RD: Tensor) -> Tensor:
        import torch

        expert = self._expert(index)

        def run(x_RD: Tensor) -> Tensor:
            # A row that nobody sent keeps the parameters in the graph, which data-parallel plugins reduce on all ranks,
            # and the exchange before it, whose backward all ranks have to call.
            given = x_RD if x_RD.shape[0] else torch.cat([x_RD, x_RD.new_zeros(1, x_RD.shape[1])])
            result = expert(given)[: x_RD.shape[0]]
            if result.shape[:-1] != x_RD.shape[:-1]:
                raise PluginError(
                    f"{self._of(index)} returns {list(result.shape)} of {list(x_RD.shape)}: not row by row"
                )
            return result

        return scale_gradients(run, rows_RD, degree=self._degree)


def _tied(output: Any, tie: Tensor) -> Any:
    """Return an output whose backward goes through the exchange, in a block that called none of its experts."""
    from composer3d import map_tensors

    return map_tensors(lambda leaf: leaf + tie.sum().to(leaf.dtype) if leaf.is_floating_point() else leaf, output)


def _differ(x: Tensor, recorded: Tensor) -> Tensor:
    """Return whether two runs' rows differ: by more than rounding, where an accelerator adds in no fixed order."""
    if x.device.type == "cpu":
        return ((x != recorded) & ~(x.isnan() & recorded.isnan())).any()  # NaN of both is the same
    import torch

    scale = recorded.abs().amax() if recorded.numel() else recorded.new_zeros(())
    return ((x - recorded).abs() > 16 * torch.finfo(x.dtype).eps * scale).any()
