"""Models that ranks train of their own, and bring together every few steps: local SGD, DiLoCo, Streaming DiLoCo.

Shapes: N elements of a fragment's local shards, in one flat buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from composer3d import (
    Axis,
    CodedCollectives,
    Decisions,
    PluginError,
    Role,
    RunContext,
    Stateful,
    StepAction,
    StepPoint,
    StepState,
    hookimpl,
    plugin,
    select_fqns,
    torch_compat,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["LocalSGD"]

AXIS = "island"
OUTER = ("diloco", "streaming_diloco")  # methods with an outer optimizer
PUBLISHED = (0.7, 0.9)  # of DiLoCo: outer learning rate and Nesterov momentum


@plugin(family="communication", owns=(AXIS,), axes=(Axis(name=AXIS, role=Role.INDEPENDENT),))
class LocalSGD:
    """Train a model on each island of ranks by itself, on samples of its own, and bring them together now and then.

    Islands do not reduce gradients: a step of one is that of one device on its samples, which `verify` proves; what
    they exchange is outside of that contract. The state of inner optimizers stays on its island.

    average: every `every` steps parameters are the mean of all islands'.
    post_local: the same, after `warmup_steps` steps of ordinary data parallelism.
    diloco: the mean of the islands' parameters is a step of an outer optimizer from those before: with d = before -
        mean, v <- outer_momentum v + d, and outer_lr (d + outer_momentum v) is subtracted (Nesterov).
    streaming_diloco: the same for one of `fragments` parts of the blocks after the other, at equal distances within
        `every` steps. The exchange may take `overlap` steps, in which training goes on; `mix` is then the part of an
        island's own parameters that stays.
    Published settings of the outer optimizer were found over hundreds of outer steps from a trained model: in 80 of
    them, from scratch, plain averaging had the lower loss (2.21 beside 2.47, 100,000 parameters, 4 islands).
    With a step count that is no multiple of `every` islands end with parameters of their own; an exported model is the
    first one's.

    Memory: average: a buffer of the largest fragment's local shards. With an outer optimizer besides the outer
        parameters and their momentum, in float32: two more copies of the local shards; with overlap three.
    Collectives: one all-reduce a fragment and dtype over island in every `every`-th step; in warm-up steps one of all
        gradients.

    Source: Sebastian Stich, Local SGD Converges Fast and Communicates Little, arXiv:1805.09767; Tao Lin et al., Don't
    Use Large Mini-Batches, Use Local SGD, arXiv:1808.07217; Arthur Douillard et al., DiLoCo, arXiv:2311.08105, and
    Streaming DiLoCo with Overlapping Communication, arXiv:2501.18512.

    Args:
        method: See above.
        every: Steps from one exchange to the next.
        outer_lr: Of the outer optimizer; default: 0.7.
        outer_momentum: Of the outer optimizer; default: 0.9.
        warmup_steps: Steps of ordinary data parallelism at the beginning: gradients are averaged over islands, weighted
            by their valid tokens.
        fragments: Parts of the blocks that are exchanged at steps of their own; the rest goes with the first.
        overlap: Steps that an exchange may take.
        mix: Part of an island's own parameters that stays when an overlapped exchange has ended; default: 0.5.
    """

    method: Literal["average", "post_local", "diloco", "streaming_diloco"] = "diloco"
    every: int = Field(default=100, ge=1)
    outer_lr: float | None = Field(default=None, gt=0)
    outer_momentum: float | None = Field(default=None, ge=0, lt=1)
    warmup_steps: int = Field(default=0, ge=0)
    fragments: int = Field(default=1, ge=1)
    overlap: int = Field(default=0, ge=0)
    mix: float | None = Field(default=None, ge=0, lt=1)

    @hookimpl
    def composer3d_configure(self, context: RunContext) -> None:
        """Refuse options that would do nothing, and exchanges that never happen."""
        for name in ("outer_lr", "outer_momentum"):
            if getattr(self, name) is not None and self.method not in OUTER:
                raise PluginError(
                    f'{name} has no effect with method = "{self.method}", which has no outer optimizer',
                    hint='write method = "diloco"',
                )
        for name, nothing in (("fragments", 1), ("overlap", 0), ("mix", None)):
            if getattr(self, name) != nothing and self.method != "streaming_diloco":
                raise PluginError(
                    f'{name} has no effect with method = "{self.method}"', hint='write method = "streaming_diloco"'
                )
        if self.mix is not None and not self.overlap:
            raise PluginError("mix has no effect without overlap: an exchange ends in the step in which it begins")
        if (self.method == "post_local") != (self.warmup_steps > 0) and self.method in ("post_local", "average"):
            raise PluginError(
                f'method = "{self.method}" with warmup_steps = {self.warmup_steps}: post_local is average after a '
                "warm-up",
                hint='write method = "post_local" and warmup_steps' if self.warmup_steps else "state warmup_steps",
            )
        if self.every < self.fragments or self.overlap >= max(self.every // self.fragments, 1):
            raise PluginError(
                f"every = {self.every} has no room for {self.fragments} fragments that take {self.overlap} steps each",
                hint="overlap has to be below every / fragments",
            )
        num_steps = getattr(context.manifest.train, "steps", None)
        if num_steps is not None and self.warmup_steps + self.every > num_steps:
            raise PluginError(
                f"the run has {num_steps} steps, and islands first meet after {self.warmup_steps + self.every}",
                hint="lower every, or train for longer",
            )
        if self.fragments > 1:
            blocks = len(select_fqns(context.blocks, context.fqns)) if context.fqns else self.fragments
            if blocks < self.fragments:
                raise PluginError(f"fragments = {self.fragments}, and the model has {blocks} blocks")
        if self.warmup_steps:
            context.claim("gradients", by=self)

    @hookimpl
    def composer3d_step_actions(self, context: RunContext) -> Sequence[StepAction]:
        """Bring islands together after the optimizer's step; average gradients in warm-up steps."""
        islands = context.state[self] = Islands(self, context)
        note = f"islands exchange parameters in one of {self.every} steps; a plan is of a step in which they do not"
        context.stash(Decisions).notes.append(note)
        actions = [
            StepAction(name="local_sgd.begin", point=StepPoint.BEGIN, run=islands.begin),
            StepAction(name="local_sgd", point=StepPoint.PARAMETERS_SYNCHRONISED, run=islands.meet),
        ]
        if self.warmup_steps:
            actions.append(StepAction(name="local_sgd.warmup", point=StepPoint.UNSCALED, run=islands.average_gradients))
        return actions

    @hookimpl
    def composer3d_state(self, context: RunContext) -> Mapping[str, Stateful] | None:
        """Save outer parameters and their momentum."""
        if self.method not in OUTER:
            return None
        islands: Islands = context.state[self]
        islands.allocate()
        return {"outer": islands}


@dataclass(kw_only=True, eq=False)
class Fragment:
    """Parameters that are exchanged together.

    Args:
        fqns: Of this rank's parameters.
        offset: Steps after those of the first fragment.
        started: Step in which the exchange in flight began; None where there is none.
        total_N: Sum of all islands' parameters, once `work` has ended.
        work: The exchange in flight; None once it was waited for.
    """

    fqns: list[str]
    offset: int
    started: int | None = None
    total_N: Tensor | None = None
    work: Any = None


class Islands:
    """What an island has of the others, and the exchange.

    Args:
        options: The plugin.
        context: Of the run.
    """

    def __init__(self, options: LocalSGD, context: RunContext) -> None:
        self._options, self._context = options, context
        self._outer: dict[str, Tensor] = {}
        self._momentum: dict[str, Tensor] = {}
        self._in_flight: dict[str, Tensor] = {}
        self._is_current = False  # outer parameters are those of a checkpoint, or of a step before
        self._fragments: list[Fragment] | None = None
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
        is_tried = state.context.purpose == "verify"
        for fragment in self._parts():
            if fragment.started is not None and step - fragment.started >= options.overlap:
                self._finish(fragment)
            since = step + 1 - options.warmup_steps - fragment.offset
            if (since > 0 and since % options.every == 0) or is_tried:
                self._start(fragment, step)
                if options.overlap == 0 or is_tried:
                    self._finish(fragment)

    def average_gradients(self, state: StepState) -> None:
        """Average gradients over islands in a warm-up step, weighted by the islands' valid tokens.

        Collectives: one all-reduce of all gradients and a count, for each dtype.
        """
        import torch
        import torch.distributed as dist

        if state.step >= self._options.warmup_steps or not self._is_run():
            return
        grads = [_local(p.grad) for _, p in self._trained() if p.grad is not None]
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            held = [grad for grad in grads if grad.dtype == dtype and grad.numel()]
            wide = torch.promote_types(dtype, torch.float32)
            flat = [grad.flatten().to(wide) * max(state.count, 1) for grad in held]
            count = torch.full((1,), max(state.count, 1), dtype=wide, device=self._context.device)
            total = torch.cat([*(each.to(count.device) for each in flat), count])
            dist.all_reduce(total, group=self._group())
            for grad, mean in zip(held, (total[:-1] / total[-1]).split([g.numel() for g in held]), strict=True):
                grad.copy_(mean.view_as(grad))

    def _acts(self, step: int) -> bool:
        """Return whether islands are to meet: not in plans, and in verify where exchanges are counted alone."""
        if self._context.purpose == "verify":
            return not self._context.stash(CodedCollectives).is_exact
        return self._is_run() and step >= self._options.warmup_steps

    def _is_run(self) -> bool:
        return self._context.purpose == "run"

    def _start(self, fragment: Fragment, step: int) -> None:
        """Send this island's parameters.

        Collectives: one all-reduce.
        """
        import torch
        import torch.distributed as dist

        flat = [_wide(self._parameters()[fqn]).flatten() for fqn in fragment.fqns]
        fragment.total_N = torch.cat(flat) if flat else None
        fragment.started = step
        if fragment.total_N is not None:  # else of other ranks' stages, on all islands
            fragment.work = dist.all_reduce(fragment.total_N, group=self._group(), async_op=self._options.overlap > 0)

    def _finish(self, fragment: Fragment) -> None:
        """Wait for all islands' parameters, and take a step with their mean."""
        import torch

        if fragment.work is not None:
            fragment.work.wait()
        total_N = fragment.total_N
        fragment.total_N = fragment.work = fragment.started = None
        if total_N is None:
            return
        parameters = self._parameters()
        local = [_local(parameters[fqn]) for fqn in fragment.fqns]
        pieces = (total_N / self._context.degrees[AXIS]).split([each.numel() for each in local])
        with torch.no_grad():
            for fqn, parameter, piece in zip(fragment.fqns, local, pieces, strict=True):
                mean = piece.view_as(parameter)
                new = self._stepped(fqn, mean) if self._options.method in OUTER else mean
                # A weight of zero would turn what is not finite into NaN.
                parameter.copy_(new if not self._mix else self._mix * parameter + (1 - self._mix) * new)

    def _stepped(self, fqn: str, mean: Tensor) -> Tensor:
        """Return the outer parameter after a step to the islands' mean.

        Written from the mean: at a rate of 1 without momentum it is the mean, to the last bit.
        """
        outer, momentum = _local(self._outer[fqn]), _local(self._momentum[fqn])
        distance = outer - mean
        momentum.mul_(self._mu).add_(distance)
        new = mean if self._lr == 1 else mean + (1 - self._lr) * distance
        outer.copy_(new if self._mu == 0 else new - self._lr * self._mu * momentum)
        return outer

    # ---- parameters --------------------------------------------------------------------------------------------------

    def _trained(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(fqn, p) for fqn, p in self._context.named_parameters() if p.requires_grad and p.is_floating_point()]

    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self._trained())

    def _parts(self) -> list[Fragment]:
        """Return the fragments, whose blocks alternate: block i is in fragment i modulo their number."""
        if self._fragments is None:
            num, context = self._options.fragments, self._context
            blocks = select_fqns(context.blocks, context.fqns) if num > 1 else []
            place = {fqn: index % num for index, fqn in enumerate(blocks)}
            held: list[list[str]] = [[] for _ in range(num)]
            for fqn, _ in self._trained():
                held[next((at for block, at in place.items() if fqn.startswith(f"{block}.")), 0)].append(fqn)
            offsets = (index * self._options.every // num for index in range(num))
            self._fragments = [Fragment(fqns=fqns, offset=offset) for fqns, offset in zip(held, offsets, strict=True)]
        return self._fragments

    def _group(self) -> Any:
        return self._context.mesh.get_group(AXIS)

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
        started = [-1 if fragment.started is None else fragment.started for fragment in self._parts()]
        for fragment in self._parts():
            if fragment.work is not None:
                fragment.work.wait()
                fragment.work = None
            if fragment.total_N is not None:
                for tensor, piece in zip(*self._pieces_in_flight(fragment, fragment.total_N), strict=True):
                    tensor.copy_(piece.view_as(tensor))
        return {
            "parameters": dict(self._outer),
            "momentum": dict(self._momentum),
            "in_flight": dict(self._in_flight),
            "started": started,
            "islands": self._context.degrees[AXIS],
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Take them back."""
        import torch

        named = {"parameters": self._outer, "momentum": self._momentum, "in_flight": self._in_flight}
        for name, held in named.items():
            for fqn, tensor in held.items():
                if state[name][fqn] is not tensor:
                    tensor.copy_(state[name][fqn])
        islands = self._context.degrees[AXIS]
        for fragment, started in zip(self._parts(), state["started"], strict=True):
            if started >= 0:
                fragment.started = int(started)
                tensors = [_local(self._in_flight[fqn]).flatten() for fqn in fragment.fqns]
                fragment.total_N = torch.cat(tensors) if tensors else None
                if fragment.total_N is not None and state["islands"] != islands:  # it is the sum of others
                    fragment.total_N *= islands / state["islands"]
        self._is_current = True

    def _pieces_in_flight(self, fragment: Fragment, total_N: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        held = [_local(self._in_flight[fqn]) for fqn in fragment.fqns]
        return held, list(total_N.split([tensor.numel() for tensor in held]))


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
