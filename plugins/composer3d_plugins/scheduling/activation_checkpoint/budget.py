"""Recomputation under a budget of bytes, chosen by the measured time and size of every operator's results."""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d import PluginError, Role, RunContext, torch_compat
from composer3d_plugins.scheduling.activation_checkpoint.buffer_updates import Found

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

__all__ = ["Budget", "Choice", "Measured", "Result", "choose"]

GIB = 2**30

Key = tuple[Any, int]  # an operator, and which of its calls in the unit


@dataclass(frozen=True, kw_only=True)
class Result:
    """Results of one operator of a unit that the backward needs.

    Args:
        num_bytes: Bytes of their storages.
        time_s: Seconds that the operator took.
    """

    num_bytes: int
    time_s: float


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurements of one forward of a unit.

    Args:
        input_bytes: Bytes kept even if all of it is recomputed: its inputs.
        saved_bytes: Bytes kept if nothing is recomputed.
        time_s: Seconds to recompute all of it.
        results: Results that may be kept, by operator and call.
    """

    input_bytes: int
    saved_bytes: int
    time_s: float
    results: Mapping[Key, Result]


@dataclass(kw_only=True)
class Choice:
    """Decision for a unit.

    Args:
        is_recomputed: False keeps everything that autograd saves.
        kept: Results that a recomputed unit keeps.
        num_bytes: Bytes that the unit keeps from its forward to its backward.
    """

    is_recomputed: bool = True
    kept: set[Key] = field(default_factory=set)
    num_bytes: int = 0


def choose(units: Mapping[str, Measured], budget_bytes: float) -> dict[str, Choice]:
    """Choose the results to keep within the budget, for the least recomputation time.

    Results are kept in the order of seconds per byte; then units whose results are all kept, or for which there is
    room, are not recomputed at all: operators without needed results need not run again either.

    Raises:
        PluginError: The inputs alone exceed the budget.
    """
    chosen = {fqn: Choice(num_bytes=unit.input_bytes) for fqn, unit in units.items()}
    left = budget_bytes - sum(choice.num_bytes for choice in chosen.values())
    if left < 0:
        least = sum(choice.num_bytes for choice in chosen.values())
        raise PluginError(
            f"the budget is {budget_bytes:.0f} bytes a forward, and with everything recomputed the inputs of "
            f"{len(units)} units still take {least}",
            hint="raise the budget, or recompute larger units",
        )
    candidates = sorted(
        ((result.time_s / max(result.num_bytes, 1), fqn, key) for fqn, unit in units.items()
         for key, result in unit.results.items()),
        key=lambda entry: -entry[0],
    )  # fmt: skip
    for _, fqn, key in candidates:
        num_bytes = units[fqn].results[key].num_bytes
        if num_bytes <= left:
            chosen[fqn].kept.add(key)
            chosen[fqn].num_bytes += num_bytes
            left -= num_bytes
    for fqn, choice in chosen.items():
        more = units[fqn].saved_bytes - choice.num_bytes
        if more <= left:
            left -= more
            chosen[fqn] = Choice(is_recomputed=False, num_bytes=units[fqn].saved_bytes)
    return chosen


class Budget:
    """Measures units in the first forward, then decides once for the run.

    Args:
        fraction: Budget as a fraction of the bytes kept without recomputation; or
        gib: Budget in GiB, of one forward of this rank's stage.
        collectives: Operators whose results are always kept: ranks may choose differently.
        context: Of the run.
    """

    def __init__(
        self, *, fraction: float | None, gib: float | None, collectives: Sequence[Any], context: RunContext
    ) -> None:
        self._fraction, self._gib, self._context = fraction, gib, context
        self._collectives = frozenset(collectives)
        self.measured: dict[str, Measured] = {}
        self.chosen: dict[str, Choice] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that all units keep, as decided."""
        return sum(choice.num_bytes for choice in self.chosen.values())

    def wrap(
        self, fqn: str, unit: nn.Module, forward: Callable[..., Any], options: Mapping[str, Any]
    ) -> Callable[..., Any]:
        """Return a forward that is measured once and then follows the decision."""
        import torch
        from torch.utils.checkpoint import checkpoint

        @functools.wraps(forward)
        def budgeted(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            if fqn not in self.chosen and fqn not in self.measured and not torch_compat.in_backward():
                found = Found(fqn=fqn, block=unit, arguments=(args, kwargs))
                with found.discarded():
                    self.measured[fqn] = _measure(unit, forward, args, kwargs)
                found.refuse_changed()  # measuring has changed it once more
            choice = self.chosen.get(fqn, Choice())
            if not choice.is_recomputed:
                return forward(*args, **kwargs)
            found = Found(fqn=fqn, block=unit, arguments=(args, kwargs))
            contexts = found.contexts(self._contexts(choice))
            return checkpoint(found.marking(forward), *args, **options, context_fn=contexts, **kwargs)

        return budgeted

    def decide(self, *_: Any) -> None:
        """Decide, once all units of a forward are measured."""
        if self.chosen or not self.measured:
            return
        whole = sum(unit.saved_bytes for unit in self.measured.values())
        budget = whole * self._fraction if self._fraction is not None else (self._gib or 0.0) * GIB
        chosen = choose(self._agreed(), budget)
        self.chosen = chosen

    def _agreed(self) -> dict[str, Measured]:
        """Return measurements equal along tensor and sequence axes, where recomputed operators run collectives."""
        import torch
        import torch.distributed as dist

        if torch_compat.active_fake_mode() is not None:
            return self.measured  # all ranks of a plan make the same guesses
        layout, mesh = self._context.layout, self._context.mesh
        axes = [axis for axis in layout.names(Role.TENSOR, Role.SEQUENCE) if self._context.degrees[axis] > 1]
        times = [result.time_s for unit in self.measured.values() for result in unit.results.values()]
        shared = torch.tensor(times, dtype=torch.float64, device=self._context.device)
        for axis in axes:
            group = mesh[axis].get_group()
            dist.broadcast(shared, group=group, group_src=0)
        agreed = iter(shared.tolist())
        return {
            fqn: Measured(
                input_bytes=unit.input_bytes,
                saved_bytes=unit.saved_bytes,
                time_s=unit.time_s,
                results={
                    key: Result(num_bytes=result.num_bytes, time_s=next(agreed)) for key, result in unit.results.items()
                },
            )
            for fqn, unit in self.measured.items()
        }

    def _contexts(self, choice: Choice) -> Callable[[], Any]:
        from torch.utils.checkpoint import CheckpointPolicy

        collectives, kept = self._collectives, choice.kept

        def contexts() -> Any:
            calls: dict[bool, Counter[Any]] = {False: Counter(), True: Counter()}

            def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
                counts = calls[context.is_recompute]
                counts[operator] += 1
                is_kept = operator in collectives or (operator, counts[operator]) in kept
                return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

            return torch_compat.selective_contexts(policy)

        return contexts


def _measure(
    unit: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Measured:
    """Run a unit once more, and discard the result; random state is restored afterwards."""
    import torch

    device = next((each.device for each in torch_compat.tree_leaves((args, kwargs)) if hasattr(each, "device")), None)
    device = device or torch.device("cpu")
    probe = _Probe(device, stay=[*unit.parameters(), *unit.buffers()])
    inputs = [each for each in torch_compat.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)]
    input_keys = {_key(each): _bytes(each) for each in inputs if each.requires_grad}
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        begin_s = probe.now()
        with torch.autograd.graph.saved_tensors_hooks(probe.saved, lambda tensor: tensor):
            with torch_compat.dispatch_mode(probe.operator, compiles=False, opens=False):
                forward(*args, **kwargs)
        time_s = probe.now() - begin_s
    return Measured(
        input_bytes=sum(input_keys.values()),
        saved_bytes=sum(({key: size for key, (size, _) in probe.needed.items()} | input_keys).values()),
        time_s=time_s,
        results=probe.results(),
    )


class _Probe:
    """Records one forward: operators, their time, their results, and those that autograd saves."""

    def __init__(self, device: torch.device, stay: Sequence[Tensor]) -> None:
        self._device = device
        self._stay = {_key(each) for each in stay}
        self._calls: Counter[Any] = Counter()
        self._made: dict[int, tuple[Key, float]] = {}
        self._spoilt: set[int] = set()
        # By storage: its size, and the tensor, so that no other storage takes its place.
        self.needed: dict[int, tuple[int, Tensor]] = {}
        self._alive: list[Any] = []
        # A plan runs operators on fake tensors, which take no time and draw nothing.
        self._is_planned = torch_compat.active_fake_mode() is not None

    def now(self) -> float:
        """Return the time in seconds, after the device has finished."""
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def operator(self, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record its results."""
        import torch

        if torch_compat.works_on_meta(args):
            return operator(*args, **kwargs)
        self._calls[operator] += 1
        key = operator, self._calls[operator]
        before = self._random_state() if torch.Tag.nondeterministic_seeded in operator.tags else None
        begin_s = self.now()
        result = operator(*args, **kwargs)
        time_s = self.now() - begin_s if not self._is_planned else _guessed_s(operator, args, kwargs, result)
        written = {_key(each) for each in torch_compat.written_tensors(operator, args, kwargs)}
        self._spoilt |= written
        given = {_key(each) for each in torch_compat.tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        # What draws is drawn again with everything else that draws, else the numbers after it would be others.
        draws = before is not None and self._draws(operator, before)
        for each in torch_compat.tree_leaves(result):
            if isinstance(each, torch.Tensor) and _key(each) not in given:
                self._alive.append(each)
                if not draws:
                    self._made[_key(each)] = key, time_s
        return result

    def _draws(self, operator: Any, before: Tensor) -> bool:
        import torch

        if self._is_planned:  # attention draws only with dropout, and so may everything else that says so
            return "attention" not in operator.name()
        return not torch.equal(before, self._random_state())

    def saved(self, tensor: Tensor) -> Tensor:
        """Record a tensor that autograd saves, except parameters and buffers."""
        # A propagation that is entered shows sizes of more than this rank has.
        with torch_compat.without_torch_functions():
            if _key(tensor) not in self._stay:
                self.needed[_key(tensor)] = _bytes(tensor), tensor.detach()
            return tensor

    def results(self) -> dict[Key, Result]:
        """Return results that may be kept instead of being recomputed."""
        sizes: Counter[Key] = Counter()
        times: dict[Key, float] = {}
        # Of an operator with several results all are kept: one that is changed afterwards spoils the others.
        spoilt = {self._made[storage][0] for storage in self._spoilt if storage in self._made}
        for storage, (num_bytes, _) in self.needed.items():
            if storage in self._made and self._made[storage][0] not in spoilt:
                key, times[key] = self._made[storage][0], self._made[storage][1]
                sizes[key] += num_bytes
        return {key: Result(num_bytes=size, time_s=times[key]) for key, size in sizes.items()}

    def _random_state(self) -> Tensor:
        import torch

        return torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else torch.get_rng_state()


def _guessed_s(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
    """Return an operator's relative time on fake tensors: a byte counts as a hundred operations.

    That is what accelerators have in common, give or take a factor of three.
    """
    import torch

    leaves = torch_compat.tree_leaves((args, kwargs, result))
    num_bytes = sum(torch_compat.held_tensor(each).nbytes for each in leaves if isinstance(each, torch.Tensor))
    return (torch_compat.num_flops(operator, args, kwargs, result) + 100.0 * num_bytes) * 1e-14


def _key(tensor: Any) -> int:
    return torch_compat.storage_key(torch_compat.held_tensor(tensor))


def _bytes(tensor: Any) -> int:
    return int(torch_compat.held_tensor(tensor).untyped_storage().nbytes())
