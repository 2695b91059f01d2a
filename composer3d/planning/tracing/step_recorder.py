"""Recording of one rank's step: operators, collectives and bytes of every stretch of it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.planning.tracing.calls import Calls, calls_of, flat, form_of
from composer3d.planning.tracing.offloaded_work import OffloadedWork, host_state, state_tensors
from composer3d.planning.tracing.running_module import Place, watch_modules
from composer3d.planning.tracing.storages import LASTING, MADE_FORWARD, MADE_LATER, StorageCounter
from composer3d.planning.tracing.traced import DISPATCH, SegmentKind

if TYPE_CHECKING:
    from composer3d import Composition
    from composer3d.observation import Collective
    from composer3d.planning.tracing.fake_composition import Averages

__all__ = ["Recording", "Stretch", "record_step"]

_ACTIONS: Mapping[str, SegmentKind] = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "input_backward",
    "backward_weight": "weight_backward",
    "optimizer": "optimizer",
}
_NO_WORK = ("c10d::", "_c10d_functional::", "prim::", "profiler::", "aten::promote_types", "aten::_local_scalar_dense")
_MESSAGES = frozenset({"send", "recv"})
# Of a message: "forward" or "backward", stage and micro-batch of the action that it is for, or from.
_Purpose = tuple[str, int, int]
# Host work for an operator on DTensors, besides the operators that it decomposes into.
_DISPATCH: Calls = (DISPATCH, "", (), 0, 0)


@dataclass(kw_only=True, eq=False)
class Stretch:
    """An action of the step, or the operators between two actions, as recorded.

    Args:
        kind: As in `Segment`.
        stage: As in `Segment`.
        microbatch: None outside of micro-batches.
        operators: Number of calls by operator, dtype and shapes.
        collectives: In order, each with whether the next operator waits for it.
        peaks: At the most bytes alive, by the module that ran: total bytes, bytes made in forwards, bytes of gradients,
            and the number of storages.
        left: As it ends: bytes alive, bytes of them made in forwards, and the number of storages.
    """

    kind: SegmentKind
    stage: int
    microbatch: int | None
    operators: Counter[Calls] = field(default_factory=Counter)
    collectives: list[tuple[Collective, bool]] = field(default_factory=list)
    peaks: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    left: tuple[int, int, int] = (0, 0, 0)


@dataclass(kw_only=True, eq=False)
class Recording:
    """A recorded step.

    Args:
        stretches: In order.
        parameters: Bytes of parameters.
        buffers: Bytes of buffers.
        optimizer: Bytes of optimizer state, after the step.
        batch: Bytes of the batch.
        gradients: Bytes of gradients at the end of the last backward.
        activations: Most bytes made in forwards that were alive at the end of one.
        prepared: Bytes, in `num_prepared` storages, that the first step allocated for all micro-batches, and kept.
        host: Most bytes in host memory.
        pooled: Of these, bytes that are kept there for pieces, however many of them there are.
        averages: Bytes of moving averages.
        peak: Most bytes alive at any moment.
    """

    stretches: list[Stretch] = field(default_factory=list)
    parameters: int = 0
    buffers: int = 0
    optimizer: int = 0
    batch: int = 0
    gradients: int = 0
    activations: int = 0
    prepared: int = 0
    num_prepared: int = 0
    host: int = 0
    pooled: int = 0
    averages: int = 0
    peak: int = 0


class _Observer:
    """Observes every operator and every span of a step."""

    def __init__(self, run: Composition, optimizer: Any, memory: torch_compat.ResultMemory | None) -> None:
        from composer3d import HostMemory
        from composer3d.observation import Collectives

        self.run, self.result, self.place = run, Recording(), Place()
        self._optimizer = optimizer
        host, is_accelerated = run.context.stash(HostMemory), run.context.run_device.type != "cpu"
        self.storages = StorageCounter(self._note_peak, host if is_accelerated else None)
        self.offloaded = OffloadedWork(host, self.storages, self._count, is_accelerated=is_accelerated)
        with torch_compat.with_values():
            self.collectives = Collectives.over(run.mesh)
        # By their numbers, since their hash is Python's; they are kept, so that no other one gets the number.
        self._known: dict[int, tuple[Any, str, bool, bool, bool]] = {}
        self._wrapped: dict[Any, bool] = {}  # by the types of an operator's tensors
        self._calls: dict[Any, Calls] = {}
        self._made_by: dict[Any, Calls] = {}
        self._recall = None if memory is None else memory.recaller()
        self._open: list[Stretch] = []
        self._between = self._stretch("gradients", 0, None)
        # Received, and not yet used: each with the action that it is for, as far as that is known.
        self._messages: list[tuple[Collective, bool, _Purpose | None]] = []
        self._purposes: dict[int, _Purpose] = {}
        self._is_quiet = self._is_forward_backward = False
        self._births: list[tuple[int, int]] = []
        self._unused: list[Any] = []

    def _stretch(self, kind: SegmentKind, stage: int, microbatch: int | None) -> Stretch:
        made = Stretch(kind=kind, stage=stage, microbatch=microbatch)
        self.result.stretches.append(made)
        return made

    @property
    def stretch(self) -> Stretch:
        """The open stretch, or the one between actions."""
        return self._open[-1] if self._open else self._between

    # ---- spans -------------------------------------------------------------------------------------------------------

    def begin(self, name: str, attributes: Mapping[str, Any]) -> Any:
        """Open a stretch for a span that is an action."""
        if name == "forward_backward":
            self._is_forward_backward = True
            return name
        kind = _ACTIONS.get(name)
        if kind is None:
            return None
        if kind == "optimizer":
            self._measure_gradients()
        made = self._stretch(kind, attributes.get("stage", 0), attributes.get("microbatch"))
        self._open.append(made)
        self._take_messages(made)
        self.storages.kind = MADE_FORWARD if kind == "forward" else MADE_LATER
        self._note_peak()
        return made

    def end(self, token: Any) -> None:
        """Close the stretch of a span."""
        if token == "forward_backward":
            self._is_forward_backward = False
        elif token is not None:
            self._open.remove(token)
            self.storages.kind = MADE_LATER
            if token.kind == "forward":
                self._measure_activations()
            token.left = self.storages.live, self.storages.kinds[MADE_FORWARD], self.storages.num_live
            self._between = self._stretch("gradients", token.stage, None)
            self._note_peak()

    def _measure_activations(self) -> None:
        modules = [module for part in self.run.parts for module in part.module.modules()]
        gathered = [tensor for module in modules for tensor in torch_compat.fsdp_buffers(module)]
        # Parameters that were gathered in a forward are not saved for the backward.
        self.storages.recount([*gathered, *(p for module in modules for p in module.parameters(recurse=False))])
        self.result.activations = max(self.result.activations, self.storages.kinds[MADE_FORWARD])

    def preparing(self, is_on: bool) -> None:
        """Exclude operators that only the first step of a run executes."""
        self._is_quiet = is_on
        sign = -1 if is_on else 1
        self.result.prepared += sign * self.storages.live
        self.result.num_prepared += sign * self.storages.num_live
        if not is_on:
            # The loss of a micro-batch that only taught shapes is kept until the step's losses are summed.
            self.run._engine.loss_totals.forget()
            self.storages.restart()

    def restart(self) -> None:
        """Discard the recording; for a run whose first step differs from the others."""
        self.result.stretches.clear()
        self.result.activations = 0
        self._messages.clear()
        # Tables made of Python's numbers come from no operator: an optimizer's state has some.
        self.storages.track(state_tensors(self._optimizer))
        self.storages.settle()
        self.storages.restart()
        self._between = self._stretch("gradients", 0, None)

    # ---- memory ------------------------------------------------------------------------------------------------------

    def _note_peak(self) -> None:
        """Record the most bytes by stretch and module: extrapolation needs more than the one maximum."""
        if self._is_quiet:
            return
        peaks, module, storages = self.stretch.peaks, self.place.module, self.storages
        if storages.live > peaks.get(module, (-1,))[0]:
            # Until the gradients are known, the clock stands for those that were there.
            peaks[module] = (storages.live, storages.kinds[MADE_FORWARD], storages.clock, storages.num_live)

    def _measure_gradients(self) -> None:
        gradients = [p.grad for part in self.run.parts for p in part.module.parameters() if p.grad is not None]
        self.result.gradients = self.storages.bytes_of(gradients)
        self._births = self.storages.births_of(gradients)
        stepped = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        # Without any gradient left, the backward stepped, or a plugin holds them elsewhere.
        known = gradients and not self.run.context.claimants("moved_gradients")
        self._unused = [p for p in stepped if p.grad is None] if known else []

    def free_unused_state(self) -> bool:
        """Free the optimizer state of parameters that got no gradient; return whether there was some.

        State is made before the recorded step, when it is not known yet which parameters the model uses.
        """
        return any([self._optimizer.state.pop(parameter, None) for parameter in self._unused])

    def finish(self) -> None:
        """Replace clock readings in peaks by bytes of gradients."""
        births = self._births
        for stretch in self.result.stretches:
            stretch.peaks = {
                module: (live, made, sum(size for birth, size in births if birth <= clock), number)
                for module, (live, made, clock, number) in stretch.peaks.items()
            }
        self.result.peak = max(live for stretch in self.result.stretches for live, *_ in stretch.peaks.values())

    # ---- operators ---------------------------------------------------------------------------------------------------

    def handle(self, operator: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record it; wrapper tensors decompose it first."""
        is_wrapped = self._wrapped.get(types)
        if is_wrapped is None:
            is_wrapped = self._wrapped[types] = any(map(torch_compat.is_wrapper_subclass, types))
        if is_wrapped:
            if not self._is_quiet:
                self.stretch.operators[_DISPATCH] += 1
            return NotImplemented
        known = self._known.get(id(operator))
        if known is None:
            known = self._known[id(operator)] = operator, *self._look_at(operator)
        _, name, is_collective, is_silent, makes_nothing = known
        placed = None
        if not (is_silent or self._is_quiet or self.storages.is_paused):
            placed = self.offloaded.placed(name, operator, args, kwargs, kind=self.stretch.kind)
        is_here = placed is not None and placed.is_whole
        make = None if self._recall is None else self._recall(operator, args, kwargs)
        if make is None:
            result = operator(*args, **kwargs)
            # Views and operators in place make nothing; what is new then is a backend's own: gloo copies in a wait.
            self.storages.see(result, known=makes_nothing, is_in_host=is_here)
        else:
            result = make(args, kwargs)
            if not makes_nothing:
                self.storages.see(result, is_in_host=is_here)
        if self._is_quiet or is_silent or self.storages.is_paused:
            return result
        if self.offloaded.copied(args, result):
            return result
        if placed is not None and not is_collective:
            self.offloaded.count(placed, name, operator, args, kwargs, result)
            if placed.is_whole:
                return result
        calls = None if make is None else self._made_by.get(make)
        if calls is not None:
            self.stretch.operators[calls] += 1
            return result
        # A propagation compares sizes on meta in the first step alone, which is the step that a plan records.
        if torch_compat.works_on_meta(args):
            return result
        if is_collective:
            self._collect(operator, args)
            return result
        calls = self._calls_of(name, operator, args, kwargs, result)
        if make is not None:
            self._made_by[make] = calls
        self.stretch.operators[calls] += 1
        return result

    def _count(self, calls: Calls, number: int) -> None:
        if not self._is_quiet:
            self.stretch.operators[calls] += number

    def _look_at(self, operator: Any) -> tuple[str, bool, bool, bool]:
        name = operator.name()
        is_collective = self.collectives.is_collective(operator)
        is_silent = not is_collective and (torch_compat.is_view(operator) or name.startswith(_NO_WORK))
        short = name.replace("::", ".").split(".")
        makes_nothing = torch_compat.is_in_place(operator) or torch_compat.is_view(operator)
        return ".".join(short[:2]), is_collective, is_silent, makes_nothing

    def await_message(self, tensor: Any, kind: str, stage: int, microbatch: int) -> None:
        """Remember which action a message is of: a schedule may run others in between."""
        self._purposes[id(tensor)] = kind, stage, microbatch

    def _take_messages(self, made: Stretch) -> None:
        """Give an action what was received for it."""
        own = (None, _purpose_of(made))
        made.collectives += [(row, waits) for row, waits, purpose in self._messages if purpose in own]
        self._messages = [message for message in self._messages if message[2] not in own]

    def _collect(self, operator: Any, args: tuple[Any, ...]) -> None:
        before = len(self.collectives.rows)
        self.collectives.observe(operator, args)
        waits = operator.namespace == "c10d"
        rows = self.collectives.rows[before:]
        purposes = [self._purposes.pop(id(leaf), None) for leaf in flat(args) if hasattr(leaf, "untyped_storage")]
        for row, purpose in zip(rows, purposes if len(purposes) == len(rows) else [None] * len(rows), strict=True):
            if row.op in _MESSAGES and self._is_forward_backward and not self._open:
                if row.op == "recv":
                    self._messages.append((row, waits, purpose))
                else:
                    self._sender(purpose).collectives.append((row, waits))
            else:
                self.stretch.collectives.append((row, waits))

    def _sender(self, purpose: _Purpose | None) -> Stretch:
        """Return the action that made what is sent: the last one, where it is not known."""
        actions = [stretch for stretch in reversed(self.result.stretches) if stretch.kind != "gradients"]
        return next((each for each in actions if _purpose_of(each) == purpose), next(iter(actions), self._between))

    def _calls_of(self, name: str, operator: Any, args: Any, kwargs: Any, result: Any) -> Calls:
        """Return what is counted of a call, which depends on the form of its tensors and on its other arguments."""
        try:
            form = (operator, form_of(args), form_of(kwargs.values()) if kwargs else (), form_of((result,)))
            known = self._calls.get(form)
        except TypeError:  # an argument without a hash
            return calls_of(name, operator, args, kwargs, result)
        if known is None:
            known = self._calls[form] = calls_of(name, operator, args, kwargs, result)
        return known


def _purpose_of(stretch: Stretch) -> _Purpose | None:
    """Return what the messages of an action are for; the halves of a backward have those of the first."""
    if stretch.microbatch is None:
        return None
    return "backward" if stretch.kind == "input_backward" else stretch.kind, stretch.stage, stretch.microbatch


@contextlib.contextmanager
def record_step(
    run: Composition,
    optimizer: Any,
    batch: Any,
    *,
    memory: torch_compat.ResultMemory | None = None,
    averages: Averages | None = None,
) -> Iterator[_Observer]:
    """Record the step that runs inside; existing storages count as lasting.

    Args:
        run: The composition.
        optimizer: Of the composition, with its state.
        batch: This rank's tensors of the step.
        memory: Of the fake mode that is on, which is then asked for results directly.
        averages: That the loop keeps of the parameters; None where it keeps none.
    """
    from composer3d import HostMemory

    observer = _Observer(run, optimizer, memory)
    result, storages = observer.result, observer.storages
    modules = [part.module for part in run.parts]
    parameters = [p for module in modules for p in module.parameters()]
    buffers = [b for module in modules for b in module.buffers()]
    storages.track([*parameters, *buffers])
    result.parameters, result.buffers = storages.bytes_of(parameters), storages.bytes_of(buffers)
    host = run.context.stash(HostMemory)
    for tensor in host_state(optimizer, host):
        host.keep(tensor)
    storages.track(state_tensors(optimizer))
    kept = {} if averages is None else averages.state_dict()["averages"]
    for fqn in (fqn for fqn, parameter in run.named_parameters() if fqn in kept and host.holds(parameter)):
        host.keep(kept[fqn])
    leaves = torch_compat.tree_leaves(batch)
    storages.track([*kept.values(), *leaves])
    result.averages, result.batch = storages.bytes_of(kept.values()), storages.bytes_of(leaves)
    assert storages.kinds[LASTING] == storages.live, "nothing has run yet"
    storages.kind = MADE_LATER
    storages.restart()
    run.context.watch(observer)
    with (
        storages,
        observer.offloaded.watching_disk(),
        watch_modules(modules, observer.place),
        torch_compat.dispatch_mode(observer.handle, compiles=False, knows_devices=True),
    ):
        yield observer
    result.optimizer = storages.bytes_of(state_tensors(optimizer))
    if run.context.run_device.type != "cpu":
        result.pooled = host.pooled
        result.host = storages.host_peak + host.pooled
    observer.finish()
