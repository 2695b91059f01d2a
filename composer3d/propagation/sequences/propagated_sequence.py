"""A model whose activations are sharded along the sequence: its forwards, each of which can be entered by itself."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from composer3d import torch_compat
from composer3d.propagation.captured_forward import CAPTURED, Graphs, captured_forward, repeatable
from composer3d.propagation.decision_cache import Memory
from composer3d.propagation.functions.random_functions import eagerly
from composer3d.propagation.functions.view_shapes import Placed
from composer3d.propagation.module_calls import activation_of, replaced
from composer3d.propagation.sequences.attention_call import SequenceRules
from composer3d.propagation.sequences.gradient_hooks import GradientHooks, passed_on
from composer3d.propagation.sequences.late_hooks import LateHooks
from composer3d.propagation.sequences.lost_marks import LostMarks
from composer3d.propagation.sequences.outside_values import OutsideValues
from composer3d.propagation.sequences.position_draws import SequenceDraws
from composer3d.propagation.sequences.recomputed_functions import propagated_again
from composer3d.propagation.sequences.rowwise_modules import with_own_hooks
from composer3d.propagation.sequences.sequence_begins import Begins
from composer3d.propagation.sequences.sequence_mode import SequencePropagation
from composer3d.propagation.shards import (
    SEQUENCE,
    PropagationError,
    ShardSpec,
    attach,
    interned,
    mark,
    restated,
    shadow_of,
    spec_of,
    specs_in,
    strip,
    unmark,
)
from composer3d.torch_compat import forward_hooks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["PropagatedSequence", "Sharded"]

# So many kinds of batches have their decisions kept.
MOST_FORMS = 16
# Of each tensor among a call's arguments, in order: the dim along which it is sharded, or None.
Sharded = tuple[int | None, ...]


class PropagatedSequence:
    """A model whose forwards are replaced, keeping their names.

    The root marks its inputs. A block marks what it takes by what it took in the dry run, where the marks are lost:
    a later stage of a pipeline receives it, or it is recomputed when nothing around it is at work any more.

    Args:
        degree: Ranks along the axis.
        rules: Of the plugin.
        blocks: What the repeated blocks are given, by FQN.
        inputs: Returns the dims along which a call's arguments are sharded.
        begins: Returns whether a block shards an activation that it is given whole, as the sequence of an image's
            patches begins inside of the model, or was gathered before.
        lengths: Global lengths that do not divide, as the dry run met them.
        has_flex: Whether the code calls FlexAttention, whose calls are to be taken over then.
        rowwise: FQNs of modules that do the same with every position, whatever their code: it sees local shards.
        position_free: Those of them that are known to; what they return without positions depends on none.
        mesh: Of one dim, the axis; None in a dry run on meta.
        axis: Its name.
        form: Returns what the rules of a forward depend on beside its tensors.
        draws_of: Gives what draws for a sharded sequence the numbers of its positions; None in a dry run on meta.

    Attributes:
        returned: Called with each tensor that the root returns, and its mark or None; returns what takes its place.
        gradients: Calls hooks on gradients.
    """

    def __init__(
        self,
        *,
        degree: int,
        rules: SequenceRules,
        blocks: Mapping[str, Sharded],
        inputs: Callable[[tuple[Any, ...], Mapping[str, Any]], Mapping[int | str, int]],
        begins: Begins | None = None,
        lengths: Collection[int] = (),
        has_flex: bool = True,
        rowwise: Collection[str] = (),
        position_free: Collection[str] = (),
        mesh: DeviceMesh | None = None,
        axis: str = "cp",
        form: Callable[[], Hashable] = lambda: None,
        draws_of: SequenceDraws | None = None,
    ) -> None:
        self._degree, self._rules, self._mesh, self._axis = degree, rules, mesh, axis
        self._blocks, self._inputs, self._begins = blocks, inputs, begins
        # Global lengths of uneven shards, by a rank's own length.
        self._lengths = {rules.local_length(length): length for length in lengths}
        self._local_sizes, self._whole_sizes = set[int](), set[int]()  # of what was marked
        self._lost = LostMarks(
            blocks,
            axis=axis,
            mark=functools.partial(self.mark, is_inside=True),
            is_whole=self.is_whole,
            local_sizes=lambda: self.local_sizes,
        )
        self._memories: dict[Hashable, Memory] = {}
        self._is_alone = False
        self._has_flex = has_flex
        self._graphs: Graphs | None = None
        self._form, self._keeps_marks, self._draws_of = form, False, draws_of
        self._at_work: SequencePropagation | None = None
        self._rowwise, self._position_free = frozenset(rowwise), frozenset(position_free)
        # Of blocks at which a sequence begins, lengths of the shards that their hooks made.
        self._begun_sizes: dict[str, set[int]] = {}
        self.returned: Callable[[Tensor, ShardSpec | None], Tensor] = lambda output, spec: output
        self.gradients = GradientHooks(degree, rules=rules, mesh=mesh, axis=axis, mode=self.outside)
        self._late = LateHooks(degree, rules=rules, hooks=self.gradients, outside=self.outside)

    @property
    def is_captured(self) -> bool:
        """Whether blocks run as compiled graphs."""
        return self._graphs is not None

    @property
    def lengths(self) -> list[int]:
        """Global lengths of uneven shards that it met."""
        return list(self._lengths.values())

    @property
    def local_sizes(self) -> Collection[int]:
        """Return lengths of the shards that were marked, of inputs and inside."""
        return self._local_sizes

    def is_whole(self, size: int) -> bool:
        """Return whether a dim of a size has all positions of a sequence that was marked, and no shard's."""
        return size in self._whole_sizes - self._local_sizes

    def install(self, model: nn.Module) -> None:
        """Replace the forwards of a model, or of a part of it that keeps its FQNs.

        A sequence begins before other hooks of a block: those of an inner axis shard what this one left.
        """
        for module, fqn, forward in self.forwards(model):
            module.forward = forward
            if self._begins is not None and fqn in self._begins.blocks:
                begin = functools.partial(self._begin_before, self._begins, fqn)
                module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
            if fqn and not self._has_flex:
                setattr(forward, CAPTURED, functools.partial(self._captured, module, forward, fqn))
        held = dict(model.named_modules())
        for fqn in self._rowwise & held.keys():
            held[fqn].forward = self.passing(fqn, with_own_hooks(held[fqn], held[fqn].forward))
        self.gradients.follow(model, self._rowwise, lambda: self._at_work)
        self._late.know(model)

    def forwards(self, model: nn.Module) -> Iterator[tuple[nn.Module, str, Callable[..., Any]]]:
        """Yield the modules whose forwards are replaced, with their FQNs and other forwards."""
        inside = tuple(f"{fqn}." for fqn in self._rowwise)
        for fqn, module in model.named_modules():
            if fqn not in self._rowwise and not fqn.startswith(inside):
                # Hooks of the whole model see what its code sees.
                forward = module.forward if fqn else self._late.with_hooks(model, module.forward)
                yield module, fqn, self._around(forward, fqn)

    @contextlib.contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Let the whole model call its hooks itself, for a dry run."""
        try:
            with forward_hooks.calling(model):
                yield
        finally:
            forward_hooks.leave_hooks(model)

    def _around(self, forward: Callable[..., Any], fqn: str) -> Callable[..., Any]:
        @functools.wraps(forward)
        def propagating(*args: Any, **kwargs: Any) -> Any:
            if not fqn and self._at_work is None:
                self._late.look()
                args, kwargs = self._marked_inputs(args, kwargs)
            elif fqn in self._blocks:
                args, kwargs = self._lost.marked_again(fqn, args, kwargs, is_inside=self._at_work is not None)
            if self._begins is not None and fqn in self._begins.blocks:
                args, kwargs = self._begun(self._begins, fqn, args, kwargs)
            if self._at_work is not None:
                return forward(*args, **kwargs)
            if not specs_in(args, kwargs, axis=self._axis) and (fqn or self._begins is None):
                if not self._lost.was_whole(fqn, args, kwargs):
                    return forward(*args, **kwargs)
            output = self._propagate(forward, fqn, args, kwargs)
            if fqn and (fqn not in self._blocks or self._keeps_marks):
                return output
            return self._unmarked(output, is_root=not fqn)

        return eagerly(propagating)

    def _captured(
        self,
        module: nn.Module,
        forward: Callable[..., Any],
        fqn: str,
        compiled: Callable[[Any], Callable[..., Any]],
        *,
        recomputes: bool,
    ) -> Callable[..., Any]:
        """Return a forward of a block that runs compiled graphs of what its propagation does."""
        if self._graphs is None:
            self._graphs = Graphs(
                compiled,
                recomputes=recomputes,
                axis=self._axis,
                around=lambda: (self._form(), self._at_work is not None),
            )
        return captured_forward(module, forward, self._graphs, fqn=fqn, alone=self._alone)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Propagate inside as if nothing were at work, without decisions of other calls, which hold their tensors."""
        at_work = self._at_work
        self._at_work, self._is_alone, self._keeps_marks = None, True, at_work is not None
        try:
            yield
        finally:
            self._at_work, self._is_alone, self._keeps_marks = at_work, False, False

    def _memory(self) -> Memory | None:
        """Return the decisions of earlier forwards in which rules were the same."""
        if self._is_alone:
            return None
        form = self._form()
        if form not in self._memories:
            if len(self._memories) >= MOST_FORMS:
                self._memories.clear()
            self._memories[form] = Memory(self._axis)
        return self._memories[form]

    def _unmarked(self, output: Any, *, is_root: bool) -> Any:
        """Remove marks from what a forward returns, in place; of what is replaced they stay: hooks may have kept it."""
        leaves = [leaf for leaf in torch_compat.tree_leaves(output) if isinstance(leaf, Tensor)]
        specs = [spec_of(leaf, self._axis) for leaf in leaves]
        if not is_root:
            for pair in zip(leaves, specs, strict=True):
                passed_on(*pair)
            return output
        results = {}
        for leaf, spec in zip(leaves, specs, strict=True):
            unmark(leaf, self._axis)
            results[id(leaf)] = given = self.returned(leaf, spec)
            if spec is not None and given is not leaf:
                attach(leaf, spec)
            self.gradients.pass_output(leaf, None if given is leaf else given, spec)
        if all(results[id(leaf)] is leaf for leaf in leaves):
            return output
        return torch_compat.tree_map(lambda leaf: results.get(id(leaf), leaf), output)

    def _propagate(self, forward: Callable[..., Any], fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        whats: dict[str, Any] = {"rules": self._rules, "mesh": self._mesh, "axis": self._axis}
        mode = SequencePropagation(
            self._degree, fqn, **whats, memory=self._memory(), draws_of=self._draws_of, hooks=self.gradients
        )
        self._at_work = mode
        flexible = torch_compat.taken_flex_calls(mode.attend_flexibly) if self._has_flex else contextlib.nullcontext()
        try:
            with flexible, mode, torch_compat.recomputed.replaced_recomputations(self._recomputed):
                return forward(*args, **kwargs)
        finally:
            self._at_work = None

    def _recomputed(self, function: Any, given: Sequence[Any]) -> Any:
        return propagated_again(
            function,
            given,
            axis=self._axis,
            is_at_work=lambda: self._at_work is not None,
            propagate=lambda run, args, kwargs: self._propagate(run, "what is recomputed", args, kwargs),
        )

    def outside(
        self, padded: Mapping[int, int], refused: str = "", *, hook: str = "", gathers: bool = False
    ) -> OutsideValues:
        """Return the mode in which code outside of the model computes with shards, or a hook, which draws as it."""
        return OutsideValues(
            self._degree,
            rules=self._rules,
            mesh=self._mesh,
            axis=self._axis,
            padded=padded,
            refused=refused,
            where=hook or "the loss",
            is_alike=not (hook or refused),
            gathers=gathers,
            draws_of=self._draws_of if hook else None,
            hooks=self.gradients,
        )

    # ---- marks -------------------------------------------------------------------------------------------------------

    def mark(self, x: Tensor, dim: int, *, is_inside: bool = False) -> Tensor:
        """Return a local shard with its mark; inside of the model of any length, which need not divide."""
        with torch_compat.without_torch_functions():
            view, size = x.view_as(x), x.shape[dim]
            length = self._lengths.get(size, size * self._degree) if is_inside else size * self._degree
            self._local_sizes, self._whole_sizes = self._local_sizes | {size}, self._whole_sizes | {length}
            whole = Placed(dim=dim, parts=(length,))
            mark(view, placed=whole, degree=self._degree, sources=frozenset({SEQUENCE}), axis=self._axis)
            if is_inside:
                passed_on(x, spec_of(view, self._axis))
        return view

    def _marked_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dims = self._inputs(args, kwargs)
        given = tuple(self.mark(x, dims[at]) if at in dims else x for at, x in enumerate(args))
        return given, {name: self.mark(x, dims[name]) if name in dims else x for name, x in kwargs.items()}

    def _begin_before(
        self, begins: Begins, fqn: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given, options = self._begun(begins, fqn, args, kwargs, is_hook=True)
        key = activation_of(given, options)
        before = None if key is None else (args[key] if isinstance(key, int) else kwargs[key])
        x = None if key is None else (given[key] if isinstance(key, int) else options[key])
        if x is not None and x is not before:
            self._begun_sizes.setdefault(fqn, set()).add(strip(x).shape[begins.dim])
        return given, options

    def _begun(
        self, begins: Begins, fqn: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_hook: bool = False
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a block with its activation sharded, if it is whole.

        A forward that is recomputed without its hooks is given what they made, which may have lost its mark.
        """
        key = activation_of(args, kwargs)
        x = None if key is None else args[key] if isinstance(key, int) else kwargs[key]
        if key is None or x is None or spec_of(x, self._axis) is not None or not begins.is_sequence(x):
            return args, kwargs

        def shard(x_BSD: Tensor) -> Tensor:
            with torch_compat.without_torch_functions():
                length = x_BSD.shape[begins.dim]
                if not is_hook and length in self._begun_sizes.get(fqn, ()):
                    return self.mark(x_BSD, begins.dim, is_inside=True)
                index = self._rules.index(length, x_BSD.device)
                if length % self._degree:
                    self._lengths[len(index)] = length
                share = x_BSD.index_select(begins.dim, index)
                placed = Placed(dim=begins.dim, parts=(length,))
                mark(share, placed=placed, degree=self._degree, sources=frozenset({SEQUENCE}), axis=self._axis)
            return share

        return replaced(args, kwargs, key, shard)

    # ---- rowwise modules ---------------------------------------------------------------------------------------------

    def passing(self, fqn: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the forward of a rowwise module that works on local shards, and marks its results as its input is.

        Of what it is given whole, nothing is sharded inside: experts compute rows of other ranks, of any number.

        Args:
            fqn: Of the module.
            forward: Its.
        """

        @functools.wraps(forward)
        def passed(*args: Any, **kwargs: Any) -> Any:
            specs, mode = specs_in(args, kwargs, axis=self._axis), self._at_work
            spec = specs[0] if specs else None
            if mode is None:
                output = forward(*args, **kwargs)
            else:
                mode.pauses.append((spec, fqn))
                try:
                    output = forward(*args, **kwargs)
                finally:
                    mode.pauses.pop()
            if spec is not None:
                with torch_compat.without_torch_functions():
                    for leaf in torch_compat.tree_leaves(output):
                        if isinstance(leaf, Tensor):
                            self._keep(leaf, spec, fqn)
            return output

        return eagerly(repeatable(passed))

    def _keep(self, leaf: Tensor, spec: Any, fqn: str) -> None:
        dim = spec.placed.dim
        if leaf.ndim <= dim:
            if fqn not in self._position_free:
                raise PropagationError(f'"{fqn}" is to do the same with every position, and returns {list(leaf.shape)}')
            return
        shape = [1] * leaf.ndim
        shape[dim] = spec.shadow.shape[dim]
        shadow = shadow_of(shape, leaf.dtype)
        restated(attach(leaf, interned(replace(spec, shadow=shadow))))
