"""Experts that a block's own code calls as it likes: what they are given is recorded, exchanged, and replayed.

A loop over experts that skips those without tokens cannot exchange rows expert by expert: other ranks skip others. The
block runs twice instead. In the first run what is called records what it is given; all of it is exchanged at once, the
ranks that hold the experts run them, and the results come back. In the second run everything called returns its
result. It is the block's own code both times, so routing, weights and the order of sums are its own. Calls with rows
that are made of results wait for these: they are recorded in the second run, and the block runs once more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, cast

from composer3d import DataDependent, PluginError, propagation, torch_compat
from composer3d_plugins.sharding.expert_parallel.call_exchange import (
    Calls,
    by_rank,
    exchange_calls,
    is_exchangeable,
    tied,
)
from composer3d_plugins.sharding.expert_parallel.call_sources import number_of, row_of, shown
from composer3d_plugins.sharding.expert_parallel.rerun_state import (
    BlockState,
    differ,
    has_values,
    random_states,
    restore_random_states,
)
from composer3d_plugins.sharding.expert_parallel.result_flow import BY_INDEX, BY_ROWS, ResultFlow
from composer3d_plugins.sharding.expert_parallel.token_exchange import scaled, send_pieces

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from composer3d_plugins.sharding.expert_parallel.call_sources import Source

__all__ = ["BlockExchange", "exchange_around"]


@dataclass(kw_only=True, eq=False)
class _Call:
    """A call of a block's code.

    Attributes:
        key: Place of its source among the block's, and its number there.
        rows: That it was given.
        first: What it returned in the run that recorded it.
        waits: Whether its rows are made of results that were not known.
        depends: How they are, as of `ResultFlow`.
        result: Once it is known.
        is_taken: Whether the code has called it in the present run.
    """

    key: tuple[int, int]
    rows: Tensor
    first: Tensor
    waits: bool
    depends: int
    result: Tensor | None = None
    is_taken: bool = False


def exchange_around(
    block: nn.Module, mesh: DeviceMesh, *, fqn: str, dependent: DataDependent, peers: Any = None
) -> BlockExchange:
    """Return the exchange around a block's forward, the same for everything that the block calls.

    Args:
        block: Whose forward is changed.
        mesh: Of one dim, ep.
        fqn: Of the block, for messages.
        dependent: Of the run; learns which experts were run without rows.
        peers: Process group of those that gather the same experts; None where nobody does.
    """
    found: BlockExchange | None = getattr(block.forward, "composer3d_exchange", None)
    if found is None or found.block is not block:
        found = BlockExchange(block, mesh, fqn=fqn, dependent=dependent, peers=peers)
        block.forward = found.around(block.forward)
    return found


class BlockExchange:
    """The runs of a block around exchanges of rows; arguments as of `exchange_around`.

    Memory: the block's activations once for every run but the last, of which experts are no part. Collectives: 3
    all-to-alls forward (counts, rows, results), 2 backward; as many again for calls with rows made of results, whose
    end is known by one all-to-all of counts.
    """

    def __init__(self, block: nn.Module, mesh: DeviceMesh, *, fqn: str, dependent: DataDependent, peers: Any) -> None:
        self.block, self.fqn, self.dependent = block, fqn, dependent
        self._group, self._degree, self._rank, self._peers = mesh.get_group(), mesh.size(), mesh.get_local_rank(), peers
        self._sources: list[Source] = []
        self._known, self._made = list[_Call](), list[_Call]()
        self._differs: list[Tensor] = []
        self._flow: ResultFlow | None = None
        self._after: BlockState | None = None
        self._fill, self._is_chained = cast("float | None", None), False
        self._usually: dict[int, tuple[int, ...]] = {}

    def add(self, source: Source) -> None:
        """Exchange the rows of more experts."""
        self._sources.append(source)

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the block's forward with the exchange inside."""
        outside = propagation.OutsideState(self.block.modules())

        @functools.wraps(forward)
        def replayed(*args: Any, **kwargs: Any) -> Any:
            given = [leaf for leaf in torch_compat.tree_leaves([list(args), kwargs]) if hasattr(leaf, "_version")]
            states = random_states(given)

            def run(fill: float | None) -> Any:
                restore_random_states(states)
                # Taken back before experts run, which may leave something in the block, once.
                before = None if fill is None else BlockState(self.block, outside.now())
                output = self._run(lambda: forward(*args, **kwargs), given, fill)
                if before is not None:
                    self._after = BlockState(self.block, outside.now()) if self._is_chained else None
                    before.restore()
                return output

            try:
                return self._rounds(run, given)
            finally:
                self._known, self._made, self._differs, self._flow, self._after = [], [], [], None, None

        replayed.composer3d_exchange = self  # type: ignore[attr-defined]
        return propagation.eagerly(replayed)

    def _rounds(self, run: Callable[[float | None], Any], given: Sequence[Tensor]) -> Any:
        """Run the block and exchange rows in turn, until it calls nothing with rows that are not known."""
        self._known, self._is_chained, tie, is_idle = [], False, None, False
        output = run(0.0)
        while True:
            made = self._decided(run)
            # Rows are of this rank alone: a plugin that propagates a sequence would take them for one of all ranks.
            with torch_compat.hidden_from(propagation.SequencePropagation):
                told, came = self._exchanged(made, given, tie)
            if came is None:
                if self._after is not None:
                    self._after.restore()  # the last run was the one
                break
            tie, is_idle = came, all(call.waits for call in made)
            self._known += [call for call in made if not call.waits]
            self._is_chained = self._is_chained or told.wait
            output = run(0.0 if told.wait else None)
            self._refuse_others()
            if not told.wait:
                break
        return tied(output, tie) if is_idle else output

    def _run(self, forward: Callable[[], Any], given: Sequence[Tensor], fill: float | None) -> Any:
        """Run the block's own code; without a value for what is not known, all has to be."""
        versions = [leaf._version for leaf in given]
        self._made, self._differs, self._fill = [], [], fill
        self._flow = None if fill is None else ResultFlow()
        for call in self._known:
            call.is_taken = False
        with ExitStack() as stack:
            if self._flow is not None:
                stack.enter_context(self._flow)
            for source in self._sources:
                stack.enter_context(source.running(self))
            output = forward()
        if [leaf._version for leaf in given] != versions:
            raise PluginError(
                f'expert_parallel: the forward of "{self.fqn}" changes its input in place, and runs twice, around '
                f'the exchange of rows for "{self._sources[0].fqn}"; write `x = x + y` for `x += y` there'
            )
        return output

    def called(self, source: Source, number: int, rows: Tensor) -> Tensor:
        """Record what something is given, or return its result.

        Raises:
            PluginError: It is called with other rows than in an earlier run.
        """
        import torch

        key = (self._sources.index(source), number)
        known = self._matched(key, rows)
        if known is not None and known.result is not None:
            known.is_taken = True
            return known.result
        if self._flow is None or self._fill is None:
            raise PluginError(
                f'expert_parallel: {number} of "{source.fqn}" is called with other rows when the block runs again; its '
                "forward has to do the same twice"
            )
        first = torch.zeros_like(rows)  # with what plugins know of rows
        if self._fill:
            first = first + self._fill * torch.arange(1, first.numel() + 1, device=first.device).view_as(first).sin()
        given = row_of(source, rows)
        if (made := source.result(number, given)) != given:
            one = first[..., :1] if len(given) == 1 else first.flatten(1)[:, :1].reshape(-1, *[1] * len(made))
            first = one.repeat(*[1] * (one.ndim - len(made)), *made)
        how = self._flow.depends(rows)
        # Without values nothing tells whether rows of memory are others than those to which results were written.
        waits = how > (0 if has_values(rows) else BY_ROWS)
        self._made.append(_Call(key=key, rows=rows, first=first, waits=waits, depends=how))
        self._flow.mark(first)
        return first

    def _matched(self, key: tuple[int, int], rows: Tensor) -> _Call | None:
        """Return the call that this is again: the next of the same with as many rows, and with the same ones."""
        for call in self._known:
            if call.key != key or call.is_taken or call.rows.shape != rows.shape:
                continue
            if not has_values(rows):
                return call
            with torch_compat.without_torch_functions():  # modes of plugins propagate the model's operators
                differs = differ(rows.detach(), call.rows.detach())
                if not self._is_chained:  # one wait for the accelerator, when the run is over
                    self._differs.append(differs)
                    return call
                if not bool(differs):
                    return call
        return None

    def _decided(self, run: Callable[[float | None], Any]) -> list[_Call]:
        """Return what a run has called anew, with what waits for results.

        Memory to which a result was written may have other rows beside it: with another value in the place of all
        results, those that depend on none are the same.
        """
        made = self._made
        waiting = [place for place, call in enumerate(made) if call.waits and self._sources[call.key[0]].is_varied]
        doubtful = [place for place in waiting if made[place].depends < BY_INDEX]
        if doubtful and has_values(made[0].rows):
            run(1.0)
            for place, (call, other) in enumerate(zip(made, self._made, strict=False)):
                if call.key != other.key or call.rows.shape != other.rows.shape:
                    break
                if place in doubtful:
                    with torch_compat.without_torch_functions():
                        call.waits = bool(differ(other.rows.detach(), call.rows.detach()))
        return made

    def _refuse_others(self) -> None:
        """Refuse rows that are not those of an earlier run, whose results would be of others.

        Where sums have no fixed order, results of two runs differ by rounding.
        """
        import torch

        is_other = any(not call.is_taken for call in self._known)
        if not is_other and self._differs:
            is_other = bool(torch.stack(self._differs).any())  # one wait for the accelerator
        if is_other:
            raise PluginError(
                f'expert_parallel: the forward of "{self.fqn}" gives what it calls of "{self._sources[0].fqn}" other '
                "rows when it runs again, around the exchange of rows: they are drawn, or made of results by something "
                "else than torch's functions; or leave these out of [sharding.expert_parallel] experts"
            )

    def _exchanged(
        self, made: Sequence[_Call], given: Sequence[Tensor], tie: Tensor | None
    ) -> tuple[Calls, Tensor | None]:
        """Exchange the rows that were recorded and set their results; return what came back, in one dim.

        It is None where no rank has sent any, after the first exchange.
        """
        import torch

        calls = sorted((call for call in made if not call.waits), key=lambda call: self._place(call.key))
        # Of shards of a sequence, this rank's positions; results are marked as those of the first run were.
        are_shards = [propagation.spec_of(call.rows) is None for call in calls]
        flat = [
            (propagation.strip(call.rows) if is_shard else call.rows)
            for call, is_shard in zip(calls, are_shards, strict=True)
        ]
        like = flat[0] if flat else next(x for x in given if x.is_floating_point())
        told = self._told(calls, flat, like, waits=any(call.waits for call in made))
        if tie is not None and not told.are_new:
            return told, None
        sent = torch.cat([like.new_zeros(0) if tie is None else tie[:0], *(x.reshape(-1) for x in flat)])
        numbers = [sum(n * math.prod(of_row) for n, of_row in of_rank) for of_rank in told.received]
        got = send_pieces(sent, told.sent, numbers, group=self._group)
        made_RD, sizes = self._computed(scaled(got, float(self._degree)), told)
        came = send_pieces(scaled(made_RD, 1.0 / self._degree), sizes, self._sizes_back(told), group=self._group)
        shapes = [self._result_of(call.key, x) for call, x in zip(calls, flat, strict=True)]
        pieces = came.split([math.prod(shape) for shape in shapes])
        for call, shape, is_shard, result in zip(calls, shapes, are_shards, pieces, strict=True):
            call.result = result.view(shape)
            if is_shard:
                propagation.copy_mark(call.first, call.result)
        return told, came

    def _told(self, calls: Sequence[_Call], flat: Sequence[Tensor], like: Tensor, *, waits: bool) -> Calls:
        places = [self._place(call.key) for call in calls]
        rows: list[int | None] = [None] * sum(source.total for source in self._sources)
        sizes: list[tuple[int, ...]] = [()] * len(rows)
        for place, call, x in zip(places, calls, flat, strict=True):
            given = row_of(self._sources[call.key[0]], x)
            if not is_exchangeable(given):
                self._refuse_call(f"samples of {shown(given)} elements, which it relates: of three dims at most")
            if sizes[place] not in ((), given):
                self._refuse_call(
                    f"rows of {shown(sizes[place])} and of {shown(given)} elements; they are exchanged as of one size"
                )
            rows[place], sizes[place] = (rows[place] or 0) + number_of(x, given), given
        return exchange_calls(
            rows,
            sizes,
            are_samples=not all(source.is_rowwise for source in self._sources),
            waits=waits,
            group=self._group,
            peers=self._peers,
            device=like.device,
            parts=[source.total // self._degree for source in self._sources],
            skew=self.dependent.routing_skew,
        )

    def _refuse_call(self, given: str) -> NoReturn:
        raise PluginError(
            f'expert_parallel: the forward of "{self.fqn}" gives one expert of "{self._sources[0].fqn}" {given}; or '
            "leave these out of [sharding.expert_parallel] experts"
        )

    def _place(self, key: tuple[int, int]) -> int:
        """Return the place among all that is called, of which a rank has consecutive ones."""
        local = [source.total // self._degree for source in self._sources]
        rank, at = divmod(key[1], local[key[0]])
        return rank * sum(local) + sum(local[: key[0]]) + at

    def _sizes_back(self, told: Calls) -> list[int]:
        """Return the elements of results that come from each rank."""
        elements = [0] * len(told.chosen)
        for index, source in enumerate(self._sources):
            for number in range(source.total):
                place = self._place((index, number))
                if told.chosen[place]:
                    elements[place] = told.chosen[place] * math.prod(source.result(number, told.sizes[place]))
        return by_rank(elements, self._degree)

    def _computed(self, got: Tensor, told: Calls) -> tuple[Tensor, list[int]]:
        """Return the results of what this rank holds, in one dim, and how many elements go to each rank."""
        import torch

        pieces = got.split([n * math.prod(of_row) for of_rank in told.received for n, of_row in of_rank])
        local, first = len(told.received[0]), 0
        made: list[list[Tensor]] = [[] for _ in told.received]
        for index, source in enumerate(self._sources):
            number, rows = source.total // self._degree, []
            for at in range(first, first + number):
                sizes = {of_rank[at][1] for of_rank in told.received if of_rank[at][0]} or {self._usual(index, told)}
                if len(sizes) > 1:
                    self._refuse_call(
                        f"samples, by rank, of {' and '.join(map(shown, sorted(sizes)))} elements, which it relates; "
                        "let the batches of ranks be as long"
                    )
                rows.append(torch.cat(pieces[at::local]).view(-1, *sizes.pop()))
            source.note([x.numel() // x.shape[-1] for x in rows], self._chosen(index, told))
            results = source.compute(rows, told.is_called[first : first + number])
            for at, (x, result) in enumerate(zip(rows, results, strict=True)):
                held = self._rank * number + at
                if result.shape[:1] != x.shape[:1] or (
                    x.shape[0] and tuple(result.shape[1:]) != source.result(held, tuple(x.shape[1:]))
                ):
                    raise PluginError(
                        f'expert_parallel: expert {held} of "{source.fqn}" returns {list(result.shape)} of '
                        f"{list(x.shape)}: not row by row, or of other sizes than it has on meta"
                    )
                counts = [of_rank[first + at][0] for of_rank in told.received]
                for of_rank, part in zip(made, result.split(counts), strict=True):
                    of_rank.append(part.reshape(-1))
            first += number
        flat = [part for of_rank in made for part in of_rank]
        # What stands for the rows of nobody keeps the exchange in the graph, whose backward all ranks have to call.
        return torch.cat([*flat, got[:0].to(flat[0].dtype)]), [sum(x.numel() for x in of_rank) for of_rank in made]

    def _usual(self, index: int, told: Calls) -> tuple[int, ...]:
        """Return the sizes of a row for what nobody has called: those of others, of now or before."""
        source, local = self._sources[index], len(told.received[0])
        first = sum(each.total // self._degree for each in self._sources[:index])
        places = range(first, first + source.total // self._degree)
        received = [of_rank[at][1] for of_rank in told.received for at in places if of_rank[at][0]]
        sent = [told.sizes[rank * local + at] for rank in range(self._degree) for at in places]
        found = next(iter(filter(None, (*received, *sent))), None) or self._usually.get(index) or source.given()
        self._usually[index] = found or (1,)
        return self._usually[index]

    def _chosen(self, index: int, told: Calls) -> list[int]:
        places = [self._place((index, number)) for number in range(self._sources[index].total)]
        return [told.chosen[place] * math.prod(told.sizes[place][:-1]) for place in places]

    def _result_of(self, key: tuple[int, int], x: Tensor) -> tuple[int, ...]:
        """Return the sizes of the results of rows."""
        source = self._sources[key[0]]
        given = row_of(source, x)
        return *x.shape[: x.ndim - len(given)], *source.result(key[1], given)
