"""Units of FSDP2: those that ranks use in part, or not at all, those of several backwards, and entered modules."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from composer3d.torch_compat.fsdp_units import late_gathers
from composer3d.torch_compat.fsdp_units.early_gathers import EarlyGroup
from composer3d.torch_compat.fsdp_units.gathered_writes import versions_of, write_back
from composer3d.torch_compat.fsdp_units.one_rank import OneRankGroup
from composer3d.torch_compat.fsdp_units.unit_entries import Entries, entries_of
from composer3d.torch_compat.fsdp_units.unit_gradients import (
    fill_gradients,
    gradient_of,
    gradient_version,
    shard_gradients,
)
from composer3d.torch_compat.fsdp_units.unit_hooks import UnseenGathers
from composer3d.torch_compat.fsdp_units.unit_places import Places
from composer3d.torch_compat.function_transforms import outside_transforms
from composer3d.torch_compat.layouts import fsdp_groups

__all__ = ["Units", "release_units", "watch_units"]


def watch_units(module: Any) -> Units:
    """Let every unit of FSDP2 reduce the gradients of all its parameters, and keep a record of what units send.

    FSDP2 packs the gradients that there are: where ranks use other parameters of a unit, as with an expert that no row
    of a rank goes to, they send other parameters, or other sizes, to each other, and no rank notices. torch 2.13 has a
    setter for it, which reduces zeros after each call of a unit that is called several times, and torch 2.11 none. So
    the classes of groups and states, which are private (torch 2.11-2.15), get subclasses.

    Args:
        module: A part; its units are those of one backward.
    """
    root = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    units = Units(root)
    names = {id(child): fqn for fqn, child in module.named_modules()}
    entered: dict[Any, Entries] = {}
    for child in module.modules():
        state = child._get_fsdp_state() if hasattr(child, "_get_fsdp_state") else None
        if state is None or hasattr(state, "watched"):
            continue
        cls: Any = type(state)
        state.__class__, state.units = _watched_state(cls), units
        units.states.append(state)
        state.watched = [group for group, _, _ in fsdp_groups(child)]
        for group in state.watched:
            cls = type(group)
            group.__class__ = _watched_group(cls)
            entered[group] = entries_of(child, group, functools.partial(units.enter, state, child))
    # Numbers are the same on all ranks: those that hold other experts may have another number of units of these.
    sizes = {group: group.mesh_info.mesh.size() for group in entered}
    units.groups += sorted(entered, key=lambda group: -sizes[group])
    units.num_common = sum(size == max(sizes.values()) for size in sizes.values())
    for index, group in enumerate(units.groups):
        group.watch(units, index, entered[group], Places(group, names))
    return units


def release_units(module: Any) -> None:
    """Let units of a part be resharded that a graph has saved; see `Units.release`."""
    state: Any = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
    if hasattr(state, "units"):
        state.units.release()


class Units:
    """The record of a rank's units.

    Attributes:
        before: Called before each collective of all ranks, with what is then added to `sent`; it may raise.
        sent: What was gathered and reduced in this step, in order: twice the index of the unit, plus 1 for gradients.
        used: Parameters of FSDP2 that got a gradient on this rank in this step.
        agree: Called with whether this rank has used each parameter of a unit that is to be reduced; returns whether
            any rank has. None where that is found out after the backward.
        idle: Sharded parameters whose gradients are zeros on this rank, while nobody has said whether others used them.
        unused: Sharded parameters that no rank has used, as far as `agree` was called.
        states: FSDP2's, in the order of their modules.
        groups: Theirs; each has the parameters that are gathered as one.
        is_trained: Whether a backward that runs now is one whose gradients are used.
        builds_graph: Whether the backward that runs now is differentiated itself.
        left: Called after a forward that did not begin in the root; None where nobody asks.
        entered: Called when a forward begins, in whatever unit.
        ended: Called when it has ended.
        outdated: Called with the FQN of a parameter that was written since the forward of a backward, to raise.
        passed: Called with the FQN of a parameter in whose place a forward finds another tensor, to raise.
        written: Called with FQN, shard and gathered tensor of a parameter into whose gathered tensor was written.

    Args:
        root: FSDP2's state of the part; None where it has none.
    """

    def __init__(self, root: Any) -> None:
        self.root, self.states, self.groups = root, list[Any](), list[Any]()
        self.is_trained = self.builds_graph = False
        self.left: Callable[[], None] | None = None
        self.passed: Callable[[str], None] = lambda fqn: None
        self.entered: Callable[[], None] = lambda: None
        self.ended: Callable[[], None] = lambda: None
        self.outdated: Callable[[str], None] = lambda fqn: None
        self.written: Callable[[str, Any, Any], None] = lambda fqn, shard, whole: None
        self.before: Callable[[int], None] | None = None
        self.num_common = 0
        self.sent: list[int] = []
        self.used: set[Any] = set()
        self.agree: Callable[[Sequence[bool]], Sequence[bool]] | None = None
        self.idle: set[Any] = set()
        self.unused: set[Any] = set()
        self._due: list[Any] = []  # replicas in the order in which they are reduced, next one last

    def begin(self) -> None:
        """Forget the last step."""
        self.sent.clear()
        self._due.clear()
        for parameters in (self.used, self.idle, self.unused):
            parameters.clear()
        for group in self.groups:
            group.is_used = False

    def send(self, item: int) -> None:
        """Record a collective that begins now."""
        if self.before is not None and item // 2 < self.num_common:
            self.before(item)
        self.sent.append(item)

    def describe(self, item: int) -> str:
        """Return what an entry of `sent` does, with its module."""
        return f"{('gathers', 'reduces')[item % 2]} {self.groups[item // 2]._module_fqn or 'the root'}"

    def num_unused(self) -> int:
        """Return the number of trained parameters that got no gradient in this step."""
        return sum(p not in self.used for group in self.groups if not group.is_used for p in group.trained())

    def trained(self) -> list[tuple[Any, bool]]:
        """Return all parameters that are trained in units, each with whether it got a gradient; alike on replicas."""
        return [(p.sharded_param, p in self.used) for group in self.groups for p in group.trained()]

    def freed(self, nodes: Iterable[Any]) -> list[late_gathers.FreedParameter]:
        """Return the parameters in a graph whose gathered copy is freed, and that no hook gathers for its backward."""
        return late_gathers.freed_parameters(self.groups, nodes)

    def gather_again(self, freed: Iterable[late_gathers.FreedParameter]) -> None:
        """Gather units until the backward that begins now has ended, after which they are reduced and resharded.

        Memory: those units, unsharded. Collectives: an all-gather each, and a reduce-scatter where that is a step's.
        """
        for group in dict.fromkeys(each.group for each in freed):
            group.unshard()
            group.wait_for_unshard()
            group.is_held = True
        if not self.is_trained and self.left is not None:
            self.left()  # they stay gathered, as after a forward

    def settle(self, trained: Sequence[Any]) -> None:
        """Record which parameters of a unit that is about to be reduced were not used."""
        used = [p in self.used for p in trained]
        found = self.idle if self.agree is None else self.unused
        used = used if self.agree is None else list(self.agree(used))
        found.update(p.sharded_param for p, is_used in zip(trained, used, strict=True) if not is_used)

    @property
    def are_held(self) -> bool:
        """Whether any unit stays gathered until a backward has ended."""
        return any(group.is_held for group in self.groups)

    def release(self) -> None:
        """Let units that are held be resharded; a backward that was to use them fails."""
        for group in self.groups:
            group.is_held = False

    def complete(self, *, is_left: bool = False) -> None:
        """Reduce and reshard what is held, or `is_left` with gradients, after a backward no unit began: a penalty."""
        for state in self.states if is_left or self.are_held else ():
            if state._is_root:
                state._root_post_backward_final_callback()

    def enter(self, state: Any, unit: Any, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a function that reads parameters of a unit, outside of the unit's forward.

        With gradients the unit stays gathered until the backward has ended, and is reduced then: no hook says when the
        last of its parameters has its gradient.
        """
        import torch

        is_first = state._state_ctx.iter_forward_root is None
        args, kwargs = state._pre_forward(unit, args, kwargs)
        if torch.is_grad_enabled():
            for group in state.watched:
                group.is_held = True
        output = state._post_forward(unit, args, call(*args, **kwargs))
        if is_first and state is self.root and self.left is not None:
            self.left()
        return output

    def take_turns(self, group: Any) -> None:
        """Reduce replicas in one order on all ranks: those that are ready, or were never called on this rank."""
        # One that was called, in whatever step, may get gradients from a graph that the loop has kept.
        if not self._due:
            self._due = [g for g in self.groups if g.takes_turns and g.trained()]
            for each in self._due:
                each.is_ready = False
        if group not in self._due:  # a second time in one backward
            group.reduce()
            return
        group.is_ready = True
        while self._due and (self._due[-1].is_ready or not self._due[-1].has_run):
            self._due.pop().reduce()

    def end_turns(self) -> None:
        """Reduce the replicas that were called in this step, and not in the forward of the backward that has ended."""
        while self._due:
            (group := self._due.pop()).reduce()
            group.finalize_backward()


@functools.cache
def _watched_state(cls: Any) -> Any:
    class WatchedState(late_gathers.MarkedOutputs, cls):
        """A state that knows its groups when a backward ends."""

        def _lazy_init(self) -> None:
            self.units.entered()
            try:
                for group in self.watched:  # every forward begins here
                    group.places.verify(self.units.passed)
            except BaseException:
                for group in self.watched[:1]:  # else the next one would not begin
                    self._training_state = type(group._training_state).IDLE
                raise
            root = self.units.root
            if self._is_root is None and root is not self and root is not None:
                root._lazy_init()  # a loop may call a unit before the model; torch takes the first for the root
            super()._lazy_init()

        def _post_forward(self, module: Any, inputs: Any, output: Any) -> Any:
            units, is_first = self.units, self._state_ctx.iter_forward_root is self
            output = super()._post_forward(module, inputs, output)
            # Without a root unit every unit is the first, inside of the model's own forward.
            if is_first and units.root is not None and self is not units.root and units.left is not None:
                units.left()
            return output

        def _pre_backward(self, grad: Any) -> Any:
            import torch

            self.units.builds_graph = torch.is_grad_enabled()
            return super()._pre_backward(grad)

        def _root_post_backward_final_callback(self) -> None:
            states = self._state_ctx.all_states
            groups = [group for state in states for group in getattr(state, "watched", ())]
            units = self.units
            if units.builds_graph or (not units.is_trained and units.are_held):
                units.builds_graph = self._state_ctx.post_backward_final_callback_queued = False
                _hold(states, groups)
                return
            for group in groups:
                group.num_hooks, group.is_final = 0, True
                if group.is_held:
                    group.is_held, group._training_state = False, type(group._training_state).IDLE
            try:
                super()._root_post_backward_final_callback()
                units.end_turns()
            finally:
                for group in groups:
                    group.is_final = False
                    group._training_state = type(group._training_state).IDLE  # one may have waited for its turn

    WatchedState.__name__ = WatchedState.__qualname__ = cls.__name__
    return WatchedState


def _hold(states: Sequence[Any], groups: Sequence[Any]) -> None:
    """Keep units gathered after a backward that another one follows on the graph that it has built, or left.

    Nodes of that graph have saved the gathered parameters, and no hook gathers them again.
    """
    for group in groups:
        group.is_held = True
    for each in (*states, *groups):  # the others are in a forward, around this backward
        if each._training_state.name != "FORWARD":
            each._training_state = type(each._training_state).IDLE


@functools.cache
def _watched_group(cls: Any) -> Any:
    return type(cls.__name__, (UnseenGathers, EarlyGroup, _WatchedGroup, OneRankGroup, cls), {})


_Group: Any = object  # FSDP2's, whose module is not imported here


class _WatchedGroup(_Group):
    """A group whose parameters without a gradient take part with zeros."""

    reduce_grads: bool

    def watch(self, units: Units, index: int, entries: Entries, places: Places) -> None:
        self._units, self._index, self._entries, self.places = units, index, entries, places
        self.is_held = False
        self.is_gathered = getattr(self.mesh_info, "shard_mesh_size", 1) > 1
        self.takes_turns = not self.is_gathered
        self.is_ready = self.is_final = self.has_run = self.is_used = False
        self.num_hooks = 0
        self.earlier: dict[Any, Any] = {}
        self.versions: dict[Any, tuple[int, int]] = {}
        self.gathered_versions: list[tuple[int, int]] = []

    def write_back(self) -> None:
        if self.is_unsharded:
            write_back(self, self.versions, self._units.written)

    def reshard(self) -> None:
        if not self.is_held:
            super().reshard()

    def _to_unsharded(self) -> None:
        self._entries.open()
        super()._to_unsharded()
        self.versions, self.gathered_versions = versions_of(self), late_gathers.shard_versions(self)

    def _to_sharded(self) -> None:
        self.write_back()
        super()._to_sharded()
        self._entries.shut()

    def _to_sharded_post_forward(self) -> None:
        self.write_back()
        super()._to_sharded_post_forward()
        self._entries.shut()

    def unshard(self, async_op: bool = False) -> None:
        if self.is_gathered and self._all_gather_result is None and not self.is_unsharded:
            self._units.send(2 * self._index)
        with outside_transforms():
            super().unshard(async_op)

    def begin_gather(self) -> None:
        with outside_transforms():
            super().unshard(True)

    def wait_for_unshard(self) -> None:
        with outside_transforms():
            super().wait_for_unshard()

    def _register_post_backward_hook(self, args: Any, kwargs: Any) -> Any:
        import torch

        if not torch.is_grad_enabled():
            return args, kwargs
        self.has_run = True
        given = super()._register_post_backward_hook(args, kwargs)
        self.num_hooks += given[0] is not args or given[1] is not kwargs
        return given

    def post_backward(self, *unused: Any) -> None:
        if self.is_held or self._units.builds_graph:
            return
        self.num_hooks -= 1
        if not self.reduce_grads:
            self.accumulate()
            return
        trained = self.trained()
        there = [p for p in trained if hasattr(p, "_unsharded_param") and gradient_of(p) is not None]
        self._units.used.update(there)
        self.is_used = self.is_used or len(there) == len(trained)
        # Of a unit that is called several times gradients are there after the last of them, the first in order,
        # beside those of earlier micro-batches.
        has_new = any(gradient_version(p) != self.earlier.get(p) for p in there)
        if there and not has_new and self.num_hooks > 0:
            self.reduce_grads = False
            self.accumulate()
            self.reduce_grads = True
        elif not trained or not (there or self.num_hooks <= 0):
            super().post_backward(*unused)
        elif self.takes_turns:
            self._units.take_turns(self)
        else:
            self.reduce()

    def accumulate(self) -> None:
        super().post_backward()
        self.earlier = {p: gradient_version(p) for p in self.trained() if hasattr(p, "_unsharded_param")}

    def trained(self) -> list[Any]:
        return [p for p in self.fsdp_params if p.sharded_param.requires_grad]

    def reduce(self) -> None:
        self.earlier.clear()
        if self.takes_turns and not all(hasattr(p, "_unsharded_param") for p in self.fsdp_params):
            self.unshard()  # of replicas: nothing is sent
            self.wait_for_unshard()
        if fill_gradients(shard_gradients(self)):
            self._units.send(2 * self._index + 1)
            self._units.settle(self.trained())
        super().post_backward()
