"""Islands: what each has of the others, when they meet, and the outer optimizer.

Shapes: N elements of a fragment's local shards, in one flat buffer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from composer3d import CodedCollectives, RunContext, StepError, StepState, block_codec, torch_compat
from composer3d_plugins.communication.local_sgd.fragments import Fragment, divided
from composer3d_plugins.communication.local_sgd.island_means import IslandSums, Total

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["AXIS", "OUTER", "Islands", "Settings"]

AXIS = "island"
OUTER = ("diloco", "streaming_diloco")  # methods with an outer optimizer
PUBLISHED = (0.7, 0.9)  # of DiLoCo: outer learning rate and Nesterov momentum


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of the plugin that are read here, which says what they are."""

    method: Literal["average", "post_local", "diloco", "streaming_diloco"]
    every: int
    outer_lr: float | None
    outer_momentum: float | None
    warmup_steps: int
    fragments: int
    overlap: int
    mix: float | None
    quantise: Literal["int8", "fp8", "int4"] | None
    weigh: Literal["equal", "tokens"]
    samples: tuple[int, ...] | None


class Islands:
    """Parameters that an island and the others last agreed on, with the outer momentum, and their exchange.

    Args:
        options: Of the plugin.
        context: Of the run.
    """

    def __init__(self, options: Settings, context: RunContext) -> None:
        self._options, self._context = options, context
        self._outer: dict[str, Tensor] = {}
        self._momentum: dict[str, Tensor] = {}
        self._in_flight: dict[str, Tensor] = {}
        self._is_current = False  # outer parameters are those of a checkpoint, or of a step before
        self._fragments: list[Fragment] | None = None
        self._codec = None if options.quantise is None else block_codec(options.quantise)
        self._lr = PUBLISHED[0] if options.outer_lr is None else options.outer_lr
        self._mu = PUBLISHED[1] if options.outer_momentum is None else options.outer_momentum
        self._mix = (0.5 if options.mix is None else options.mix) if options.overlap else 0.0

    # ---- steps -------------------------------------------------------------------------------------------------------

    def begin(self, state: StepState) -> None:
        """Take the parameters with which a run begins as those of the outer optimizer."""
        if self._options.method in OUTER and not self._is_current:
            self._take_up()

    def meet(self, state: StepState) -> None:
        """Begin and end the exchanges of a step."""
        options, step = self._options, state.step
        if not self._acts(step):
            if step + 1 == options.warmup_steps and options.method in OUTER:
                self._take_up()  # the islands are one until here
            return
        is_tried, weight = state.context.purpose == "verify", self._weight(state)
        for fragment in self._parts():
            fragment.tokens += weight
            if fragment.started is not None and step - fragment.started >= options.overlap:
                self._finish(fragment)
            since = step + 1 - options.warmup_steps - fragment.offset
            if (since > 0 and since % options.every == 0) or is_tried:
                self._start(fragment, step)
                if options.overlap == 0 or is_tried:
                    self._finish(fragment)

    def _weight(self, state: StepState) -> float:
        """Return the island's valid targets in a step, if islands are weighed by them."""
        targets = state.num_targets() if self._options.weigh == "tokens" else 0.0
        if targets is None:
            raise StepError(
                f'weigh = "tokens": how many valid targets the loss of step {state.step} has is not known; announce '
                'them by run.step(number, target=...), give run.backward (sum, count), or write weigh = "equal"'
            )
        return float(targets)

    def average_gradients(self, state: StepState) -> None:
        """Average gradients over islands in a warm-up step, weighted by the islands' valid tokens.

        Losses that do not say how many they have weigh the same, as ranks' do.
        Collectives: one all-reduce of all gradients and a count, for each dtype.
        """
        import torch
        import torch.distributed as dist

        if state.step >= self._options.warmup_steps or not self._is_run():
            return
        targets = state.num_targets()
        weight = 1.0 if targets is None else float(targets)
        grads = [_local(p.grad) for _, p in self._trained() if p.grad is not None]
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            held = [grad for grad in grads if grad.dtype == dtype and grad.numel()]
            wide = torch.promote_types(dtype, torch.float32)
            flat = [grad.flatten().to(wide) * weight for grad in held]
            count = torch.full((1,), weight, dtype=wide, device=self._context.device)
            total = torch.cat([*(each.to(count.device) for each in flat), count])
            dist.all_reduce(total, group=self._group())
            total[-1].clamp_(min=torch.finfo(wide).tiny)  # nobody has a target
            for grad, mean in zip(held, (total[:-1] / total[-1]).split([g.numel() for g in held]), strict=True):
                grad.copy_(mean.view_as(grad))

    @contextlib.contextmanager
    def evaluated(self) -> Iterator[None]:
        """Train nothing inside: parameters hold the mean of all islands', and get their own values back after.

        Memory: one more copy of this rank's shards. Collectives: one all-reduce.
        """
        import torch

        held = [_local(parameter) for _, parameter in self._trained()]
        held = [each for each in held if each.numel()]
        with torch.no_grad():
            own = [each.clone() for each in held]
            if held:
                flat_N = torch.cat([_wide(each).flatten() for each in held])
                samples, island = self._options.samples, self._context.coordinates[AXIS]
                weight = None if samples is None else float(samples[island])
                total = self._sums(None).begin(flat_N, weight=weight, is_async=False)()
                self._put(held, total.sum_N / total.weight)
            try:
                yield
            finally:
                for each, value in zip(held, own, strict=True):
                    each.copy_(value)

    def planned(self) -> list[tuple[str, int]]:
        """Return of each fragment the collective of an exchange, and its bytes on this rank."""
        import torch

        local = {fqn: _local(p) for fqn, p in self._context.planned_parameters() if _is_trained(p)}
        sums, is_weighed = self._sums(self._codec), self._options.weigh != "equal"
        found = []
        for fragment in self._divided(local):
            held = [local[fqn] for fqn in fragment.fqns]
            wide = functools.reduce(torch.promote_types, (each.dtype for each in held), torch.float32)
            length = sum(each.numel() for each in held)
            found.append(sums.travelling(length, wide.itemsize, is_weighed=is_weighed) if length else ("sends", 0))
        return found

    def _acts(self, step: int) -> bool:
        """Return whether islands are to meet: not in plans, and in verify where exchanges are counted alone."""
        if self._context.purpose == "verify":
            return not self._context.stash(CodedCollectives).is_exact
        return self._is_run() and step >= self._options.warmup_steps

    def _is_run(self) -> bool:
        return self._context.purpose == "run"

    def _start(self, fragment: Fragment, step: int) -> None:
        """Send this island's parameters, or with a codec how far they are from the outer ones.

        Collectives: one all-reduce, or one all-gather.
        """
        import torch

        parameters = self._parameters()
        flat = [_wide(parameters[fqn]).flatten() for fqn in fragment.fqns]
        fragment.started, tokens, fragment.tokens = step, fragment.tokens, 0.0
        x_N = torch.cat(flat) if flat else None
        if x_N is None or not x_N.numel():  # of other ranks' stages or shards, on all islands
            return
        sums = self._sums(self._codec)
        if self._codec is not None:
            x_N = self._flat(fragment) - x_N
            self._note(sums, x_N.numel())
        weight = None if self._options.weigh == "equal" else max(tokens, 1.0)
        fragment.wait = sums.begin(x_N, weight=weight, is_async=self._options.overlap > 0)

    def _finish(self, fragment: Fragment) -> None:
        """Wait for all islands' parameters, and take a step with their mean."""
        import torch

        total = fragment.total()
        fragment.started = fragment.wait = None
        if total is None:
            return
        mean_N = total.sum_N / total.weight
        parameters = self._parameters()
        local = [_local(parameters[fqn]) for fqn in fragment.fqns]
        with torch.no_grad():
            if self._codec is not None:
                mean_N = self._flat(fragment) - mean_N
            pieces = mean_N.split([each.numel() for each in local])
            for fqn, parameter, piece in zip(fragment.fqns, local, pieces, strict=True):
                mean = piece.view_as(parameter)
                new = self._stepped(fqn, mean) if self._options.method in OUTER else mean
                # A weight of zero would turn what is not finite into NaN.
                parameter.copy_(new if not self._mix else self._mix * parameter + (1 - self._mix) * new)

    def _stepped(self, fqn: str, mean: Tensor) -> Tensor:
        """Return the outer parameter after a step to the islands' mean.

        In the order of the paper's formula. At a rate of 1 without momentum it is the mean, to the last bit.
        """
        outer, momentum = _local(self._outer[fqn]), _local(self._momentum[fqn])
        distance = outer - mean
        momentum.mul_(self._mu).add_(distance)
        is_mean = self._lr == 1 and self._mu == 0
        outer.copy_(mean if is_mean else outer - self._lr * (distance + self._mu * momentum))
        return outer

    def _note(self, sums: IslandSums, length: int) -> None:
        """Let `verify` try the codec on numbers of its own."""
        exchanges = self._context.stash(CodedCollectives).exchanges
        key = ("weights", sums.group.group_name)
        if key not in exchanges:
            exchanges[key] = sums.exchange()
        exchanges[key].lengths.add(length)

    # ---- parameters --------------------------------------------------------------------------------------------------

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(fqn, p) for fqn, p in self._context.named_parameters() if _is_trained(p)]

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self._trained())

    def _flat(self, fragment: Fragment) -> Tensor:
        """Return the outer parameters of a fragment, N."""
        import torch

        return torch.cat([_local(self._outer[fqn]).flatten() for fqn in fragment.fqns])

    def _put(self, held: list[Tensor], flat_N: Tensor) -> None:
        for each, piece in zip(held, flat_N.split([each.numel() for each in held]), strict=True):
            each.copy_(piece.view_as(each))

    def _parts(self) -> list[Fragment]:
        if self._fragments is None:
            self._fragments = self._divided(fqn for fqn, _ in self._trained())
        return self._fragments

    def _divided(self, fqns: Iterable[str]) -> list[Fragment]:
        return divided(fqns, num=self._options.fragments, every=self._options.every, context=self._context)

    def _group(self) -> Any:
        return self._context.mesh.get_group(AXIS)

    def _sums(self, codec: Any) -> IslandSums:
        return IslandSums(codec=codec, group=self._group(), num_islands=self._context.degrees[AXIS])

    def allocate(self) -> None:
        """Allocate the outer parameters and their momentum, each laid out as its parameter."""
        import torch

        for fqn, parameter in self._trained():
            self._outer[fqn] = _widened(parameter.detach())
            self._momentum[fqn] = torch.zeros_like(self._outer[fqn])
            if self._options.overlap:
                self._in_flight[fqn] = torch.zeros_like(self._outer[fqn])

    def _take_up(self) -> None:
        import torch

        with torch.no_grad():
            for fqn, parameter in self._trained():
                _local(self._outer[fqn]).copy_(_local(parameter))
        self._is_current = True

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return outer parameters and momentum, and the sums of exchanges in flight, which are waited for."""
        totals = [fragment.total() for fragment in self._parts()]
        for fragment, total in zip(self._parts(), totals, strict=True):
            if total is not None:
                self._put([_local(self._in_flight[fqn]) for fqn in fragment.fqns], total.sum_N)
        return {
            "parameters": dict(self._outer),
            "momentum": dict(self._momentum),
            "in_flight": dict(self._in_flight),
            "started": [-1 if fragment.started is None else fragment.started for fragment in self._parts()],
            "weights": [0.0 if total is None else float(total.weight) for total in totals],
            "is_difference": self._codec is not None,
            "tokens": self._everybodys_tokens(),
            "islands": self._context.degrees[AXIS],
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take them back."""
        named = {"parameters": self._outer, "momentum": self._momentum, "in_flight": self._in_flight}
        for name, held in named.items():
            for fqn, tensor in held.items():
                if state[name][fqn] is not tensor:
                    tensor.copy_(state[name][fqn])
        for index, (fragment, started) in enumerate(zip(self._parts(), state["started"], strict=True)):
            fragment.tokens = self._own_tokens([row[index] for row in state["tokens"]])
            if started >= 0:
                fragment.started = int(started)
                self._take_flight(fragment, state["weights"][index], state["is_difference"])
        self._is_current = self._options.method in OUTER

    def _take_flight(self, fragment: Fragment, weight: float, is_difference: bool) -> None:
        """Take an exchange back that was in flight; one of another run may have sent the other of both forms."""
        import torch

        tensors = [_local(self._in_flight[fqn]).flatten() for fqn in fragment.fqns]
        if not tensors or not weight:
            return
        total_N = torch.cat(tensors)
        if is_difference != (self._codec is not None):
            total_N = weight * self._flat(fragment) - total_N
        fragment.wait = lambda: Total(sum_N=total_N, weight=weight)

    def _everybodys_tokens(self) -> list[list[float]]:
        """Return the tokens of all islands by fragment. Collectives: one all-gather, where islands are weighed."""
        import torch

        own = [fragment.tokens for fragment in self._parts()]
        if self._options.weigh == "equal":
            return [[0.0] * len(own)] * self._context.degrees[AXIS]
        sent = torch.tensor(own, dtype=torch.float64, device=self._context.device)
        received = sent.new_empty((self._context.degrees[AXIS], len(own)))
        torch_compat.all_gather_single(received.view(-1), sent, group=self._group())
        found: list[list[float]] = received.tolist()
        return found

    def _own_tokens(self, tokens: list[float]) -> float:
        """Return this island's tokens; of another number of islands an equal part of all."""
        num = self._context.degrees[AXIS]
        return tokens[self._context.coordinates[AXIS]] if len(tokens) == num else sum(tokens) / num


def _is_trained(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad and parameter.is_floating_point()


def _local(tensor: Any) -> Tensor:
    return torch_compat.local_of(tensor).detach()


def _wide(tensor: Any) -> Tensor:
    import torch

    local = _local(tensor)
    return local.to(torch.promote_types(local.dtype, torch.float32))


def _widened(tensor: Tensor) -> Tensor:
    """Return a copy in float32 at least."""
    import torch

    return tensor.to(torch.promote_types(tensor.dtype, torch.float32), copy=True)
