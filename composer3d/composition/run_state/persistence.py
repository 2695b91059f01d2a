"""Checkpoint contents of a composition, and the key of every entry.

`model/<fqn>` parameters and persistent buffers, `optimizer/<fqn>/<name>`, `plugin/<plugin>/<name>/...`,
`attached/<name>/...`; whatever is no tensor goes into the checkpoint's JSON, as the first rank has it. Where ranks
train models of their own (axes of role INDEPENDENT), the tensors of all but the first are `independent/<index>/...`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer3d import checkpoint, initialisation
from composer3d.checkpoint.joint_failure import rank_of, together
from composer3d.composition.run_state.deferred_copies import DeferredCopies
from composer3d.composition.run_state.full_states import full, full_state_of
from composer3d.composition.run_state.nested_tensors import blank, take_out
from composer3d.errors import CheckpointError, StepError
from composer3d.initialisation.parameter_order import Order, StoredOrders
from composer3d.interfaces import Exports, Stateful
from composer3d.mesh import Role
from composer3d.processes.json_exchange import all_gather_json, broadcast_json
from composer3d.step.evaluation import reshard_units
from composer3d.step.gradients import local

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from composer3d.composition.assembling import Assembled

__all__ = ["Persistence"]

log = logging.getLogger(__name__)

FORMAT = 1
_APART = "independent/"  # keys of models that ranks train of their own, but for the first
_OTHER_GROUP = Path("the state of another group")  # as messages call it
_OTHER_STATES = "; the run that saved it had other plugins, or other options of theirs"


class Persistence:
    """Saves and loads one composition."""

    def __init__(self, assembled: Assembled) -> None:
        self._assembled = assembled
        self._attached: dict[str, Stateful] = {}
        self._saver: checkpoint.AsyncSaver | None = None
        self.copies = DeferredCopies(assembled)

    @property
    def attached(self) -> Mapping[str, Stateful]:
        """Stateful objects that the loop added, by name."""
        return self._attached

    def attach(self, name: str, stateful: Stateful) -> None:
        """Add a stateful object to the checkpoint; see `Composition.attach`."""
        if name in self._attached:
            raise StepError(f'"{name}" is attached already')
        self._attached[name] = stateful

    def save(
        self, path: Path, optimizer: torch.optim.Optimizer | None, *, asynchronous: bool, deferred: bool = False
    ) -> None:
        """Save everything; see `Composition.save`."""
        with _plain_state(optimizer, write=False):
            self._save(path, optimizer, asynchronous=asynchronous, deferred=deferred)

    def snapshot(self, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return a copy of what would be saved; see `Composition.snapshot`."""
        with _plain_state(optimizer, write=False):
            tensors, state = self._saved(optimizer)
            return {key: local(tensor).clone().cpu() for key, tensor in tensors.items()}, copy.deepcopy(state)

    @contextmanager
    def readable(self, optimizer: torch.optim.Optimizer | None) -> Iterator[tuple[dict[str, Tensor], dict[str, Any]]]:
        """Give what would be saved: this rank's own tensors, not copied, and the rest in JSON."""
        with _plain_state(optimizer, write=False):
            yield self._saved(optimizer)

    def fill(
        self,
        optimizer: torch.optim.Optimizer | None,
        state: Mapping[str, Any],
        known: Mapping[str, checkpoint.TensorInfo],
        read: Callable[[dict[str, Tensor]], None],
    ) -> None:
        """Take what another group's `readable` gave, rank by rank: its layout is this one's.

        Args:
            optimizer: Of the loop.
            state: The rest in JSON.
            known: Shapes and dtypes of the tensors.
            read: Fills tensors by their keys.
        """
        self.copies.settle()
        parameters, saved = self._parameters(), state.get("optimizer") or {}
        if optimizer is not None:
            checkpoint.match_optimizer_state(optimizer, parameters, saved)
        with _plain_state(optimizer, write=True):
            tensors: dict[str, Tensor] = self._model_tensors()
            if optimizer is not None:
                tensors |= checkpoint.optimizer_tensors(optimizer, parameters)[0]
            stateful, present = self._stateful(), dict[str, "Tensor"]()
            for prefix, thing in stateful.items():
                take_out(thing.state_dict(), prefix, present)
            filled = {name: blank(state["states"][name], name, _OTHER_GROUP, present, known) for name in stateful}
            for prefix, value in filled.items():
                take_out(value, prefix, tensors)
            read(tensors)
            if optimizer is not None:
                checkpoint.load_optimizer_json(optimizer, parameters, saved)
            for prefix, thing in stateful.items():
                _hand_over(thing, filled[prefix], prefix, _OTHER_GROUP)
        self._assembled.engine.own_steps.next = state.get("next_step", 0)

    def _saved(self, optimizer: torch.optim.Optimizer | None) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return what is saved: tensors by key, and the rest in JSON."""
        tensors: dict[str, Tensor] = self._model_tensors()
        state: dict[str, Any] = {"format": FORMAT, "states": {}, "next_step": self._assembled.engine.own_steps.next}
        if optimizer is not None:
            more, state["optimizer"] = checkpoint.optimizer_tensors(optimizer, self._parameters())
            tensors |= more
        stateful = self._stateful()
        state["dispensable"] = _dispensable(stateful)
        for prefix, thing in stateful.items():
            state["states"][prefix] = take_out(thing.state_dict(), prefix, tensors)
        return tensors, state

    def _save(self, path: Path, optimizer: torch.optim.Optimizer | None, *, asynchronous: bool, deferred: bool) -> None:
        tensors, state = self._saved(optimizer)
        steady = self.copies.steady(tensors, optimizer) if deferred else ()
        with self._assembled.context.span("checkpoint", action="save", asynchronous=asynchronous):
            tensors |= {key: _rewritten(tensor, order.model) for key, tensor, order in self._reordered(tensors)}
            tensors = {self._apart + key: tensor for key, tensor in tensors.items()}
            if asynchronous:
                self._saver = self._saver or checkpoint.AsyncSaver(self.copies.add(checkpoint.Staging()))
                self._saver.save(path, tensors=tensors, state=state, steady={self._apart + key for key in steady})
            else:
                self.wait()
                checkpoint.save(path, tensors=tensors, state=state)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Return the whole model's tensors; see `Composition.full_state_dict`."""
        return full_state_of(self._assembled.context, self._assembled.group)

    def load(self, source: Path, optimizer: torch.optim.Optimizer | None) -> None:
        """Load everything; see `Composition.load`. What one rank finds fault with ends the load on all of them."""
        self.wait()
        self.copies.settle()
        path = _found(source)
        state = together(None, path, lambda: checkpoint.validated_composition(path, checkpoint.read_state(path)))
        _refuse_other_states(path, state)
        tensors: dict[str, Tensor] = self._model_tensors()
        saved: Mapping[str, Any] = state.get("optimizer") or {}
        if optimizer is not None and not saved and not state.get("imported"):
            raise CheckpointError(f"{path}: holds no optimizer state, and this run has an optimizer")
        optimizer = optimizer if saved else None  # weights of another system are loaded without its state
        if optimizer is not None:
            checkpoint.match_optimizer_state(optimizer, self._parameters(), saved)
        with _plain_state(optimizer, write=True):
            self._fill(path, state, optimizer, tensors)
        self._assembled.engine.own_steps.next = state.get("next_step", 0)

    def _fill(
        self, path: Path, state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, tensors: dict[str, Tensor]
    ) -> None:
        """Read a checkpoint into the existing tensors and states."""
        saved: Mapping[str, Any] = state.get("optimizer") or {}
        if optimizer is not None:
            tensors |= checkpoint.optimizer_tensors(optimizer, self._parameters())[0]
        known = together(None, path, lambda: checkpoint.contents(path))
        left_behind, stateful, filled = together(None, path, lambda: self._states_to_fill(path, state, known))
        for prefix, value in filled.items():
            take_out(value, prefix, tensors)
        reordered = self._reordered(tensors)
        tensors |= {key: tensor.clone() for key, tensor, _ in reordered}
        left_behind += _dispensable(stateful)  # what they hold of other shards
        extra = [f"{prefix}/" for prefix in left_behind] + ([] if optimizer is not None else ["optimizer/"])

        def begin() -> None:
            self._assembled.engine.guard.half_loaded = str(path)

        with self._assembled.context.span("checkpoint", action="load"):
            apart = self._apart_in(path, known)
            extra = [*extra, *(apart + prefix for prefix in extra), _APART]
            checkpoint.load(
                path,
                tensors={apart + key: t for key, t in tensors.items()},
                allow_extra=extra,
                before_reading=begin,
            )
        for key, tensor, order in reordered:
            initialisation.place(tensor, order.stored(full(tensors[key])))

        def hand_over() -> None:
            if optimizer is not None:
                checkpoint.load_optimizer_json(optimizer, self._parameters(), saved)
            for prefix, thing in stateful.items():
                _hand_over(thing, filled[prefix], prefix, path)

        together(None, path, hand_over)

    def _states_to_fill(
        self, path: Path, state: Mapping[str, Any], known: Mapping[str, checkpoint.TensorInfo]
    ) -> tuple[list[str], dict[str, Stateful], dict[str, Any]]:
        """Return the saved states that nothing loads, what loads the others, and those with tensors to be filled."""
        stateful = self._stateful()
        left_behind = self._left_behind(path, stateful, state)
        stateful = {prefix: thing for prefix, thing in stateful.items() if prefix in state["states"]}
        present: dict[str, Tensor] = {}
        for prefix, thing in stateful.items():
            take_out(thing.state_dict(), prefix, present)
        filled = {prefix: blank(state["states"][prefix], prefix, path, present, known) for prefix in stateful}
        return left_behind, stateful, filled

    @functools.cached_property
    def _apart(self) -> str:
        """Prefix of the keys of this rank's tensors, where ranks train models of their own: the first one has none."""
        context = self._assembled.context
        index = context.layout.index(context.rank, Role.INDEPENDENT)
        return f"{_APART}{index}/" if index else ""

    def _apart_in(self, path: Path, known: Mapping[str, Any]) -> str:
        """Return the prefix of what this rank loads; a model that was not saved begins as the first one."""
        if any(key.startswith(self._apart) for key in known):
            return self._apart
        rank = self._assembled.context.rank
        log.warning("%s: holds no %s; rank %d begins from the first model", path, self._apart, rank)
        return ""

    def wait(self) -> None:
        """Return when no save is in flight."""
        if self._saver is not None:
            self._saver.wait()

    def close(self, error: BaseException | None = None) -> None:
        """Wait for a save in flight, and destroy the process group of saves.

        Args:
            error: Error that ended the run: a save in flight then gets a few seconds only, as it may wait for the
                failed rank.
        """
        if self._saver is not None:
            self._saver.close(at_most_s=None if error is None else checkpoint.AFTER_ERROR_S)

    def _parts(self) -> list[nn.Module]:
        return [part.module for part in self._assembled.context.parts]

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Return every parameter once, under its first name."""
        added = enumerate(self._assembled.engine.outside.parameters)
        return {**dict(self._assembled.context.named_parameters()), **{f"added.{n}": value for n, value in added}}

    def _model_tensors(self) -> dict[str, Tensor]:
        """Return parameters and persistent buffers, tied ones under the first name that the whole model has for them.

        A stage may hold only a later name of a tie; the checkpoint knows the tensor by its first.
        """
        reshard_units(
            self._assembled.context.parts
        )  # gathered parameters that a backward was to free have no storage of theirs
        first = {fqn: group[0] for group in self._assembled.context.ties for fqn in group}
        result: dict[str, Tensor] = {}
        for module in self._parts():
            parameters = dict(module.named_parameters())
            persistent = module.state_dict(keep_vars=True).keys()
            buffers = {fqn: b for fqn, b in module.named_buffers() if fqn in persistent}
            left_out = self._assembled.context.stash(Exports).merges
            for fqn, tensor in {**parameters, **buffers}.items():
                if fqn in left_out:
                    continue
                # Of several replicas on this rank the first one is the optimizer's; the others are filled from it.
                result.setdefault(f"model/{first.get(fqn, fqn)}", checkpoint.unwrapped(tensor.detach()))
        return result

    def _reordered(self, tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor, Order]]:
        """Return the tensors that are not kept in the model's order, in which checkpoints are written.

        Tensors under the FQN of such a parameter and of its length (optimizer state, averages) have its order.
        """
        orders = self._assembled.context.stash(StoredOrders).by_name
        found = []
        for key, tensor in tensors.items():
            order = next((orders[name] for name in key.split("/") if name in orders), None)
            if order is not None and tensor.ndim > order.dim and tensor.shape[order.dim] == order.size:
                found.append((key, tensor, order))
        return found

    def _stateful(self) -> dict[str, Stateful]:
        plugins = {
            f"plugin/{plugin}/{name}": stateful
            for plugin, states in self._assembled.states.items()
            for name, stateful in states.items()
        }
        return plugins | {f"attached/{name}": stateful for name, stateful in self._attached.items()}

    def _left_behind(self, path: Path, stateful: Mapping[str, Stateful], state: Mapping[str, Any]) -> list[str]:
        """Return the saved states that nothing loads; refuse states that either run cannot do without."""
        saved = set(state["states"])
        lacking, extra = sorted(stateful.keys() - saved), sorted(saved - stateful.keys())
        needed = [prefix for prefix in lacking if prefix not in _dispensable(stateful)]
        if needed and not state.get("imported"):
            raise CheckpointError(f'{path}: holds no state "{needed[0]}", which this run has{_OTHER_STATES}')
        needed = [prefix for prefix in extra if prefix not in state.get("dispensable", ())]
        if needed:
            raise CheckpointError(
                f'{path}: holds the state "{needed[0]}", which nothing in this run takes{_OTHER_STATES}'
            )
        if self._assembled.context.rank == 0:
            for prefix in lacking:
                log.warning('%s: holds no state "%s"; it begins anew', path, prefix)
            for prefix in extra:
                log.warning('%s: the state "%s" is left behind: nothing in this run takes it', path, prefix)
        return extra


def _found(source: Path) -> Path:
    """Return the checkpoint that a path means, as the first rank sees it: others may not see yet what is the newest.

    Collectives: a broadcast of a path.
    """

    def look() -> tuple[str | None, str]:
        try:
            return os.path.relpath(checkpoint.find_checkpoint(source), source), ""
        except (CheckpointError, ValueError) as error:
            return None, str(error)

    found, problem = broadcast_json(look() if rank_of(None) == 0 else None)
    if found is None:
        raise CheckpointError(problem)
    return source / found


def _refuse_other_states(path: Path, state: Mapping[str, Any]) -> None:
    """Raise on all ranks where they do not see one checkpoint: each would go on with another one's steps and rates.

    Collectives: one `all_gather_json`.
    """
    digests = all_gather_json(hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest())
    others = [rank for rank, each in enumerate(digests) if each != digests[0]]
    if others:
        raise CheckpointError(
            f"{path}: rank {others[0]} sees another state.json here than rank 0; all ranks must see one folder, or "
            "whole copies of it"
        )


def _hand_over(thing: Stateful, state: Any, prefix: str, path: Path) -> None:
    try:
        thing.load_state_dict(state)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f'{path}: the state "{prefix}" is not one that its owner takes: {what}') from error


def _dispensable(stateful: Mapping[str, Stateful]) -> list[str]:
    """Return the names of states with an attribute `is_dispensable` that is true: see `Stateful`."""
    return sorted(prefix for prefix, thing in stateful.items() if getattr(thing, "is_dispensable", False))


def _plain_state(optimizer: Any, *, write: bool) -> AbstractContextManager[None]:
    """Open a context in which an optimizer's state is plain tensors, sharded as their parameters are.

    An optimizer that keeps its state in another form, or elsewhere, has a method `plain_state(write=...)` that returns
    the context; with `write` it takes the values back at the end.
    """
    if not hasattr(optimizer, "plain_state"):
        return nullcontext()
    opened: AbstractContextManager[None] = optimizer.plain_state(write=write)
    return opened


def _rewritten(tensor: Tensor, rewrite: Callable[[Tensor], Tensor]) -> Tensor:
    """Return a tensor of the same placement with rewritten values. Collectives: an all-gather of one such tensor."""
    import torch

    result = torch.empty_like(tensor)
    initialisation.place(result, rewrite(full(tensor)))
    return result
