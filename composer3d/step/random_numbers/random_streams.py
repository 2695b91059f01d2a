"""Random streams: numbers drawn in a forward are functions of the seed, the step, the module and the sample.

*By sample.* A function mode of torch is on while micro-batches run. What draws with the samples along its leading dim
draws, for each of them, from (seed, step, the sample's index in the global batch, FQN of the module whose code draws,
how manieth draw of it): the rows of what one device draws for the global batch, whatever the data-parallel degree, the
micro-batches, the stages of a pipeline, and on all ranks along tp; of a sharded sequence each rank takes the numbers of
its positions, and of weights that attention drops on torch's math path those of its queries and heads. A single number
(whether a layer is left out) is the same for all samples of the step. Any other draw without samples takes the first
one of the micro-batch, and a module that several stages call draws on each by itself; `verify` reports both.
Recomputation draws what the forward drew: torch restores its default generator, whose state before each draw is
remembered with what was drawn.

*By rank.* Everything else that draws (compiled code, CUDA's fused attention on shards, regions that are sharded over
tp) takes torch's default generators, in two streams a rank. Ranks along tp hold the same activations between their
sharded regions, so dropout there must draw the same numbers: the *replicated* stream leaves tp out. Inside sharded
regions each rank holds other values: the *sharded* stream takes tp in.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from composer3d import torch_compat
from composer3d.errors import StepError
from composer3d.initialisation import seed_of
from composer3d.mesh import Layout, Role
from composer3d.mesh.held_shards import DimShard, Held, Shards
from composer3d.step.microbatches import num_samples
from composer3d.step.random_numbers import sample_draws
from composer3d.step.random_numbers.counter_random import Rows
from composer3d.step.random_numbers.draw_sites import Callers, Draw, Drawn, Site
from composer3d.step.random_numbers.generator_states import Generators

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d.interfaces import Batch, Part

__all__ = ["Streams"]

Policy = Literal["auto", "samples", "ranks"]
_EVALUATION = -1


class Streams:
    """The random streams of one rank; outside micro-batches the loop's own random state is left as it is.

    Args:
        seed: Of the run.
        layout: Its axes.
        rank: Of this process.
        device: Where parameters live.
        parts: Called for this rank's modules.
        policy: "auto" draws by sample from the first step on, if that draws anything.
    """

    def __init__(
        self,
        *,
        seed: int,
        layout: Layout,
        rank: int,
        device: torch.device,
        parts: Callable[[], Sequence[Part]] = tuple,
        policy: Policy = "ranks",
    ) -> None:
        coordinates = layout.coordinates(rank)
        shared = layout.names(Role.STAGE, Role.BATCH, Role.SEQUENCE, Role.EXPERT, Role.INDEPENDENT)
        own = layout.names(Role.TENSOR)
        self._seed, self._generators = seed, Generators(device=device)
        self._replicated = "/".join(f"{name}={coordinates[name]}" for name in shared)
        self._sharded = "/".join([self._replicated, *(f"{name}={coordinates[name]}" for name in own)])
        beside = layout.names(Role.STAGE, Role.BATCH, Role.EXPERT, Role.INDEPENDENT)
        self._beside_positions = "/".join(f"{name}={coordinates[name]}" for name in beside)
        self._islands = "/".join(str(coordinates[name]) for name in layout.names(Role.INDEPENDENT))
        sequences = layout.names(Role.SEQUENCE)
        self._positions = "/".join(str(coordinates[name]) for name in sequences)
        # Of what all ranks draw alike: as the first of them, which one device is.
        self._first_positions = "/".join("0" for _ in sequences)
        self._shares_positions = layout.degree(Role.SEQUENCE) > 1
        self._index, self._degree = layout.index(rank, Role.BATCH), layout.degree(Role.BATCH)
        self._tensor: dict[str, Any] = {"index": layout.index(rank, Role.TENSOR), "degree": layout.degree(Role.TENSOR)}
        self._shard: DimShard | None = None
        self._held: Held | None = None
        self._place = (0, 0, 0)
        self._outside: list[Tensor] | None = None
        self._callers, self.policy = Callers(parts), policy
        self.sites: dict[tuple[str, str, str], Site] = {}
        self.watch: Callable[[Any, tuple[Any, ...], dict[str, Any]], None] | None = None
        self.piece: tuple[int, int, int] | None = None  # of a batch: its samples; samples, micro-batches before
        # Drawn now: a number for all samples; numbers that all ranks of a sequence have.
        self.is_loss = self.is_common = self.is_shared = False
        self._mode: Any = None
        self._is_on = self._is_sharded = False
        self._first: int | None = None  # the step that decides whether the model draws
        self._has_drawn = self._is_unseen = False
        self._marked: list[Tensor] | None = None
        self.begin()

    # ---- position of a forward ---------------------------------------------------------------------------------------

    def begin(self, step: int = 0) -> None:
        """Begin a step: its samples are counted from the first."""
        self._step = step
        self._num_samples = self._num_evaluations = self._num_draws = 0
        self._announced: list[Rows | None] = []
        self._rows: Rows | None = None
        self._counts: dict[str, int] = {}
        self._known: set[int] = set()
        self._drawn: dict[int, Drawn] = {}
        self._shared: dict[int, int] = {}  # seeds of draws by rank that ranks along a sequence share

    def mark(self) -> Callable[[], None]:
        """Return what forgets the samples that follow in the open step."""
        return functools.partial(setattr, self, "_num_samples", self._num_samples)

    def announce(self, microbatches: Sequence[Batch], *, evaluates: bool = False) -> None:
        """Record which samples this rank has: data-parallel ranks have equal, consecutive parts."""
        sizes = [num_samples((each.args, each.kwargs, each.target)) for each in microbatches]
        local = sum(size or 0 for size in sizes)
        whole, before, _ = (local, 0, 0) if self.piece is None or evaluates else self.piece
        first = self._index * whole + before + (0 if evaluates else self._num_samples)
        self._announced = []
        for size in sizes:
            self._announced.append(Rows(first=first, count=size) if size else None)
            first += size or 0
        if evaluates:
            self._num_evaluations += 1
        else:
            self._num_samples += whole * self._degree
        self._turn_on(evaluates=evaluates)

    @contextlib.contextmanager
    def over(self, microbatches: Sequence[Batch], *, evaluates: bool = False) -> Iterator[None]:
        """Run micro-batches inside, each of which enters its stream."""
        self.announce(microbatches, evaluates=evaluates)
        try:
            yield
        finally:
            self.leave()

    def enter(self, step: int, microbatch: int, stage: int = 0, *, index: int | None = None) -> None:
        """Start the replicated stream of a micro-batch in torch's default generators.

        Args:
            step: Its number.
            microbatch: Index of the forward within the step.
            stage: Of several on this rank.
            index: Of those that were announced; None draws by rank.
        """
        if self._outside is None:
            self._outside = self._generators.states()
        self._note_late(step)
        self._place = (step, microbatch + (self.piece[2] if self.piece and step != _EVALUATION else 0), stage)
        self._rows = self._announced[index] if index is not None and index < len(self._announced) else None
        self._counts.clear()
        self._set(self._replicated, 0)
        if self.policy == "auto" and not self._has_drawn and not self._is_unseen:
            self._marked = self._generators.states()

    def evaluate(self, microbatch: int, stage: int = 0) -> None:
        """Start the stream of a micro-batch of an evaluation: the same in each evaluation, batch for batch."""
        self.enter(_EVALUATION, (self._num_evaluations << 16) + microbatch, stage, index=microbatch)
        self._marked = None

    def leave(self) -> None:
        """Restore the random state that was there before the first `enter`; nothing if there was none."""
        self._turn_off()
        if self._outside is not None:
            self._generators.restore(self._outside)
            self._outside = None

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Run the backward of a forward that has left the stream; the random state is restored afterwards.

        A recomputation inside sets the state of its forward; regions that draw from the sharded stream then go on in
        the replicated one, as they did there.
        """
        self._outside = self._generators.states()
        self._turn_on()
        try:
            yield
        finally:
            self.leave()

    def of_loss(self, loss: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        """Return a loss that draws as such, wherever it is called: in a pipeline a module of the last stage does it."""

        @functools.wraps(loss)
        def wrapped(output: Any, target: Any) -> Any:
            self.is_loss = True
            try:
                return loss(output, target)
            finally:
                self.is_loss = False

        return wrapped

    @contextlib.contextmanager
    def sharded(self, site: int, *, dim: int | None = None, parts: Sequence[int] = ()) -> Iterator[None]:
        """Draw from the sharded stream inside.

        Inside a micro-batch the replicated stream continues with another seed afterwards, and the sharded one depends
        on the seed before: two draws at one site differ, and a recomputation, for which torch restores the generators,
        repeats its draws.

        Args:
            site: Identifies the place within one micro-batch.
            dim: Of what is drawn inside, the one that is sharded over tp. Samples then draw for the whole of it, and
                every rank takes its share.
            parts: Sizes in the whole tensor of what stands one after another in that dim, each sharded over all ranks.
        """
        import torch

        before, states = (
            torch.default_generator.initial_seed(),
            self._generators.states() if self._outside is None else None,
        )
        self._set(self._sharded, site + 1, before)
        outer, self._is_sharded, self._has_drawn = (self._is_sharded, self._shard), True, True
        self._shard = None if dim is None else DimShard(dim=dim, parts=tuple(parts), **self._tensor)
        try:
            yield
        finally:
            self._is_sharded, self._shard = outer
            if states is None:
                self._set(self._replicated, 1, before)
            else:
                self._generators.restore(states)

    @contextlib.contextmanager
    def holding(self, held: Held) -> Iterator[None]:
        """Draw inside for what a rank of a sequence's axis has: by sample, its part of what one device draws.

        By rank, numbers of tensors that are whole on all ranks along that axis are the same on all of them.
        """
        import torch

        outer, self._held = self._held, held
        before = torch.default_generator.initial_seed()
        is_by_rank = self._is_whole and self.policy == "ranks" and self._outside is not None
        if is_by_rank:
            usual = seed_of(self._seed, *self._place, self._beside_positions, 3, len(self._shared))
            self._generators.seed(self._shared.setdefault(before, usual))
        try:
            yield
        finally:
            self._held = outer
            if is_by_rank:
                self._generators.seed(seed_of(self._seed, before, 4))

    # ---- draws by sample ---------------------------------------------------------------------------------------------

    def _turn_on(self, *, evaluates: bool = False) -> None:
        if self.policy == "ranks" or self._is_on:
            return
        if self.policy == "auto" and not evaluates and not self._has_drawn and self._first not in (None, self._step):
            return
        self._mode = self._mode or torch_compat.function_mode(self._call)
        self._mode.__enter__()
        self._is_on = True

    def _turn_off(self) -> None:
        if self._is_on:
            self._is_on = False
            self._mode.__exit__(None, None, None)

    def _note_late(self, step: int) -> None:
        """Notice that a model which drew nothing in its first step has begun to."""
        import torch

        marked, self._marked = self._marked, None
        if marked is not None and not self._has_drawn and not all(map(torch.equal, marked, self._generators.states())):
            if self._place[0] == self._first:
                self._is_unseen = True  # by something that no mode sees, and will not see later either
                return
            raise StepError(
                f"the forward of step {self._place[0]} drew random numbers, and that of step {self._first} none, so "
                'nothing looked for them; write random_numbers = "samples" in [train], or "ranks"'
            )
        if self._first is None and step != _EVALUATION and self.policy != "ranks":
            self._first = step

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a torch function; what draws, by sample."""
        import torch

        if torch.compiler.is_compiling() or self._rows is None:
            return func(*args, **kwargs)
        draw, before = sample_draws.draw_of(func, args, kwargs), torch.default_generator.initial_seed()
        if draw is None or self.are_seeded:
            return func(*args, **kwargs)
        if draw.written is not None:
            with self._mode:
                return draw.written()
        shard = self._shards_of(draw)
        drawn = self._drawn.get(before) or self._next(func, draw, before, shard)
        has_samples = draw.has_samples(drawn.rows.count, shard) and draw.by_sample is not None
        if self._is_sharded and (self._shard is None or not has_samples):
            return func(*args, **kwargs)
        self.is_common, self.is_shared = draw.is_common(drawn.rows.count), self._is_whole
        first = 0 if self.is_common else drawn.rows.first
        own = ("positions", self._positions) if shard is not None and shard.is_of_sequence else ()
        self._generators.seed(seed_of(drawn.key, first, 0 if self._shard is None else self._shard.index, *own))
        try:
            if not has_samples:
                return func(*args, **kwargs)
            if self.watch is not None:
                self.watch(func, args, kwargs)
            with torch_compat.without_torch_functions():
                return draw.by_sample(drawn.key, drawn.rows, shard)  # type: ignore[misc]
        finally:
            self.is_common = self.is_shared = False
            self._generators.seed(drawn.after)

    @property
    def are_seeded(self) -> bool:
        """Whether the model has seeded the generators by itself, inside of a micro-batch."""
        import torch

        return self._outside is not None and torch.default_generator.initial_seed() not in self._known

    @property
    def _is_whole(self) -> bool:
        """Whether what is drawn now is the same tensor on all ranks of a sequence's axis."""
        return self._held is not None and self._held.shard is None

    def _shards_of(self, draw: Draw) -> Shards | None:
        """Return the shards of what is drawn; without positions where it has none, or is called with whole samples."""
        shards = None if draw.is_called else Shards.of(self._shard, self._held)
        return shards if shards is not None and shards.fits(draw.shape) else Shards.of(self._shard, None)

    def _is_alike(self, draw: Draw, shard: Shards | None) -> bool:
        """Return whether ranks of a sequence's axis have the numbers of one device, or their part of them."""
        if self._is_whole and self._held is not None:
            padding = self._held.padding
            return (
                padding is None
                or (shard is not None and padding in shard.inner_first)
                or not padding.touches(draw.shape)
            )
        is_alike = not self._shares_positions or (shard is not None and shard.is_of_sequence)
        is_single = max((*draw.shape[1:], 1)) == 1
        return is_alike or (is_single and draw.shape[:1] in ((), (self._rows.count if self._rows else 0,)))

    def _next(self, func: Any, draw: Draw, before: int, shard: Shards | None) -> Drawn:
        """Number a draw that no forward of this step has made before."""
        assert self._rows is not None, "inside a micro-batch"
        fqn, place, stage = self._callers.caller(is_loss=self.is_loss)
        number = self._counts.get(fqn, 0)
        self._counts[fqn] = number + 1
        step, microbatch, _ = self._place
        which = microbatch >> 16 if step == _EVALUATION else 0
        # Of one number a sample, and of positions that are known, ranks along a sequence axis have those of one device.
        is_alike = self._is_alike(draw, shard)
        own = self._first_positions if is_alike or self._is_whole else self._positions
        own = "" if is_alike and max((*draw.shape[1:], 1)) == 1 else own
        key = seed_of(
            self._seed,
            "sample",
            step,
            which,
            self._islands,
            own,
            fqn,
            number,
            *(() if stage is None else ("stage", stage)),
        )
        self._num_draws += 1
        after = seed_of(self._seed, *self._place, self._replicated, 2, self._num_draws)
        self._known.add(after)
        drawn = self._drawn[before] = Drawn(key=key, rows=self._rows, after=after)
        self._has_drawn = self._has_drawn or step != _EVALUATION
        site = (fqn, func.__name__, place)
        if site not in self.sites or self.watch is not None:
            self.sites[site] = Site(
                fqn=fqn,
                function=func.__name__,
                place=place,
                shape=draw.shape,
                num_samples=self._rows.count,
                by_sample=(draw.has_samples(self._rows.count, shard) or draw.is_common(self._rows.count))
                and (not self._is_sharded or self._shard is not None)
                and is_alike
                and stage is None,
            )
        return drawn

    def _set(self, name: str, site: int, *before: int) -> None:
        seed = seed_of(self._seed, *self._place, name, site, *before)
        self._known.add(seed)
        self._generators.seed(seed)
