"""Spans around what the core does not run itself: collectives of sharded units, and a loop's data and forward.

Nothing here is prepared, and nothing costs anything, where no plugin records spans.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from threading import get_ident
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d.hooks.blame import running
from composer3d.mesh import Role

if TYPE_CHECKING:
    from torch import nn

    from composer3d.context import RunContext
    from composer3d.hooks.blame import Turns
    from composer3d.interfaces import Stateful

Span = Callable[..., AbstractContextManager[None]]

__all__ = ["Acting", "waits", "watch_operators", "watch_own_forward", "watch_sharding"]

_END = object()


class Acting:
    """The plugin whose hook or step action runs now: collectives that it issues are in spans that name it.

    A recorder as well, which knows whether a collective is in a span of the plugin's own already. What it keeps is kept
    by thread.

    Args:
        is_watched: Whether any plugin records spans.

    Attributes:
        turns: By thread, who acts: empty while no plugin does, which is what steps ask dozens of times.
    """

    def __init__(self, *, is_watched: bool) -> None:
        self.is_watched = is_watched
        self.turns: Turns = {}
        self._open: dict[int, list[str]] = {}

    @property
    def noted(self) -> Turns | None:
        """The notes of who acts; None where no plugin records spans, and nothing has to know."""
        return self.turns if self.is_watched else None

    def begin(self, name: str, attributes: Mapping[str, Any]) -> bool:
        """Note a span that is opened while a plugin acts."""
        if (thread := get_ident()) not in self.turns:
            return False
        self._open.setdefault(thread, []).append(name)
        return True

    def end(self, token: bool) -> None:
        """Note that it is closed."""
        if token and (spans := self._open.get(get_ident())):
            spans.pop()

    def needs_span(self, op: str) -> bool:
        """Return whether a collective that is issued now is a plugin's, and in no span yet."""
        if not self.turns or self._name() is None:
            return False
        spans = self._open.get(get_ident())
        return not spans or spans[-1] != op

    def attributes(self) -> dict[str, str]:
        """Return what spans of collectives say of who issues them."""
        name = self._name() if self.turns else None
        return {} if name is None else {"plugin": name}

    def _name(self) -> str | None:
        """Return the name of the plugin that acts on this thread, by itself or in turn with others."""
        if (found := self.turns.get(get_ident())) is None:
            return None
        names, turn = found
        return names[running(turn, len(names))]

    def named(self, plugin: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a plugin's function, during whose calls the plugin acts."""
        if not self.is_watched:
            return function

        turns, own = self.turns, ((plugin,), iter(()))

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            thread = get_ident()
            before, turns[thread] = turns.get(thread), own
            try:
                return function(*args, **kwargs)
            finally:
                if before is None:
                    del turns[thread]
                else:
                    turns[thread] = before

        return call

    def states(self, states: Mapping[str, Mapping[str, Stateful]]) -> Mapping[str, Mapping[str, Stateful]]:
        """Return what plugins save with the rest, during whose saving and loading they act."""
        if not self.is_watched:
            return states
        return {
            plugin: {name: _ActingState(stateful, self, plugin) for name, stateful in kept.items()}
            for plugin, kept in states.items()
        }


class _ActingState:
    """A plugin's stateful object."""

    def __init__(self, stateful: Stateful, acting: Acting, plugin: str) -> None:
        self._stateful = stateful
        self.state_dict = acting.named(plugin, stateful.state_dict)
        self.load_state_dict = acting.named(plugin, stateful.load_state_dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stateful, name)


def waits(loader: Iterable[Any], context: RunContext) -> Iterator[Any]:
    """Yield a loader's batches, each waited for inside a span `data_wait`."""
    batches = iter(loader)
    while True:
        with context.span("data_wait"):
            batch = next(batches, _END)
        if batch is _END:
            return
        yield batch


def watch_own_forward(module: nn.Module, context: RunContext, is_own: Callable[[], bool]) -> None:
    """Open a span around forwards that a loop runs itself.

    Args:
        module: The whole model.
        context: Frozen.
        is_own: Whether a forward that begins now is the loop's.
    """
    if not context.has_recorders:
        return
    opened: list[Any] = []

    def before(*_: Any) -> None:
        if is_own():
            opened.append(context.span("forward"))
            opened[-1].__enter__()

    def after(*_: Any) -> None:
        if opened:
            opened.pop().__exit__(None, None, None)

    module.register_forward_pre_hook(torch_compat.uncompiled(before))
    module.register_forward_hook(torch_compat.uncompiled(after), always_call=True)


def watch_sharding(context: RunContext) -> None:
    """Open spans around the all-gathers, reduce-scatters and all-reduces of every unit that FSDP2 handles, and of every
    bucket that DistributedDataParallel reduces.

    They say `op`, the mesh `axis`, the `unit` and the payload's `bytes`. Where the backend returns before the transfer
    is done (NCCL), a recorder that wants device times takes them from events on the current stream, which inside the
    span is the one of the transfer. Buckets are waited for in a span `wait`, once a backward.

    Args:
        context: Frozen.
    """
    if not context.has_recorders:
        return
    for part in context.parts:
        torch_compat.watch_buckets(part.module, context.span)
        for name, module in part.module.named_modules():
            for group, all_gather, reduce_scatter in torch_compat.fsdp_groups(module):
                _watch_group(group, all_gather, reduce_scatter, unit=name or "(root)", span=context.span)


def watch_operators(context: RunContext, acting: Acting) -> Callable[[], None]:
    """Open spans around collectives that operators issue (DTensor's, under tensor parallelism), inside of compiled code
    too, and around those that a plugin issues itself while it acts; return what ends it.

    Each of an operator is two spans: one where it is issued, with its `bytes`, and `wait` where its result is needed,
    with its `op`. A plugin's own is one, where it is issued. All name the mesh `axis`, or the axes joined by `+` where
    a group goes along several, and the `plugin` whose hook or step action issues it.

    Args:
        context: Frozen.
        acting: Which plugin acts.
    """
    if not context.has_recorders:
        return lambda: None
    names: dict[str, str] = {}

    def span(name: str, group: Any, **attributes: Any) -> AbstractContextManager[None]:
        if (key := torch_compat.group_name(group)) not in names:
            names[key] = _axes_of(group, context)
        return context.span(name, axis=names[key], **acting.attributes(), **attributes)

    def of_operator(name: str, group: Any, **attributes: Any) -> AbstractContextManager[None]:
        return context.span(name, **attributes) if group is None else span(name, group, **attributes)

    ends = (
        torch_compat.watch_operator_collectives(span),
        torch_compat.watch_custom_operators(of_operator),
        torch_compat.watch_group_collectives(span, acting.needs_span),
    )

    def end() -> None:
        for each in ends:
            each()

    return end


def _axes_of(group: Any, context: RunContext) -> str:
    import torch.distributed as dist

    dim = torch_compat.mesh_dim(dist.group.WORLD if group is None else group)
    if dim is not None and dim in context.layout.names(Role.EXPERT):
        return dim
    first, *others = dist.get_process_group_ranks(group)
    crossed = {axis for rank in others for axis in context.layout.between(first, rank)}
    return "+".join(axis.name for axis in context.layout.dense_axes if axis.name in crossed)


def _watch_group(group: Any, all_gather: Any, reduce_scatter: Any, *, unit: str, span: Span) -> None:
    info = group.mesh_info
    names = info.mesh.mesh_dim_names or ()
    shard, replicate = getattr(info, "shard_mesh_dim", None), getattr(info, "replicate_mesh_dim", None)
    if shard is not None:
        for comm, op in ((all_gather, "all_gather"), (reduce_scatter, "reduce_scatter")):
            # It keeps a class of which torch asks whether it is one of its own; only calling it is wrapped. One that a
            # plugin gave may be that of several units, and frozen.
            own = copy.copy(comm)
            object.__setattr__(own, "__class__", _spanned(type(comm), op, span, {"axis": names[shard], "unit": unit}))
            torch_compat.replace_collective(group, op, own)
    if replicate is not None and info.mesh.size(replicate) > 1:
        group.post_backward = _spanned_reduce(group, span, {"axis": names[replicate], "unit": unit})


def _spanned(cls: Any, op: str, span: Span, attributes: dict[str, str]) -> Any:
    def call(self: Any, output_tensor: Any, input_tensor: Any, group: Any, *args: Any, **kwargs: Any) -> Any:
        name, num_bytes = op, (output_tensor if op == "all_gather" else input_tensor).nbytes
        if hasattr(self, "travelling"):
            name, num_bytes = self.travelling(output_tensor, input_tensor, group)
        with span(name, bytes=num_bytes, **attributes):
            return cls.__call__(self, output_tensor, input_tensor, group, *args, **kwargs)

    return type(cls.__name__, (cls,), {"__call__": call})


def _spanned_reduce(group: Any, span: Span, attributes: dict[str, str]) -> Any:
    reduce = group.post_backward

    def post_backward(*args: Any) -> None:
        if not (group.reduce_grads and group.all_reduce_grads):
            return reduce(*args)
        with span("all_reduce", bytes=_reduced_bytes(group), **attributes):
            return reduce(*args)

    return post_backward


def _reduced_bytes(group: Any) -> int:
    """Return the bytes of what a unit holds of its gradients, padded, as FSDP2 reduces them over replicas."""
    policy, trained = group.mp_policy, [each for each in group.fsdp_params if each.sharded_param.requires_grad]
    dtypes = [policy.reduce_dtype or policy.param_dtype or each.sharded_param.dtype for each in trained]
    sizes = [each.padded_sharded_param_size.numel() for each in trained]
    return sum(size * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=True))
