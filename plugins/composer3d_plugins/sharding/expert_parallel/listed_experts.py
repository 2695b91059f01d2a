"""Experts that are modules of a list, or of lists in a list, which a block's own code calls as it likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from composer3d import DataDependent, PluginError, listed_experts, propagation
from composer3d_plugins.sharding.expert_parallel.block_exchange import exchange_around
from composer3d_plugins.sharding.expert_parallel.call_sources import Caller
from composer3d_plugins.sharding.expert_parallel.expert_forms import ExpertForm, form_of
from composer3d_plugins.sharding.expert_parallel.rerun_state import BlockState
from composer3d_plugins.sharding.expert_parallel.token_exchange import Note

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["local_experts", "shard_listed"]


def local_experts(num_experts: int, *, degree: int, rank: int) -> range:
    """Return the indexes of the experts that a rank holds: consecutive ones."""
    local = num_experts // degree
    return range(rank * local, (rank + 1) * local)


def shard_listed(
    block: nn.Module,
    name: str,
    mesh: DeviceMesh,
    *,
    fqn: str,
    note: Note,
    dependent: DataDependent,
    names: Sequence[str] | None = None,
    peers: Any = None,
) -> None:
    """Leave this rank its experts of a list, and exchange rows around the block's forward.

    Of a list that several blocks call it is done for each of them. All lists of a block are exchanged at once.

    Args:
        block: Whose forward calls the experts with rows.
        name: Of the list, inside of the block; empty where the list itself has a forward.
        mesh: Of one dim, ep.
        fqn: Of the block, for messages.
        note: Called in every exchange, as `token_exchange.Note`.
        dependent: Of the run; learns which experts were run without rows.
        names: Of the experts in the list, before any are dropped; None reads them.
        peers: As of `block_exchange.exchange_around`.

    Memory: experts / ep; the block's activations twice. Collectives: as of `block_exchange.BlockExchange`.
    """
    experts: Any = block.get_submodule(name)
    names = [*listed_experts(experts)] if names is None else names  # those with parameters
    held = local_experts(len(names), degree=mesh.size(), rank=mesh.get_local_rank())
    forms: dict[int, ExpertForm] = {}
    known: dict[Any, ExpertForm] = {}
    for index in sorted(
        range(len(names)), key=lambda index: index not in held
    ):  # forms are asked after others are dropped
        expert = experts.get_submodule(names[index])
        if _has_parameters(expert):  # none are left of those that another block's exchange has dropped before
            forms[index] = form_of(expert, f"{fqn}.{name}".rstrip("."), known)
    for index, entry in enumerate(names):
        if index not in held:
            _drop_parameters(experts.get_submodule(entry), f"{fqn}.{name}".rstrip("."), fqn)
    for holder in {entry.rpartition(".")[0]: None for entry in names}:
        around: Any = experts.get_submodule(holder)
        if not hasattr(type(around), "running"):  # no other block calls them
            # Its own class, which code that asks for a list still takes for one; FQNs stay as they are.
            around.__class__ = _list_class(type(around))
    exchange = exchange_around(block, mesh, fqn=fqn, dependent=dependent, peers=peers)
    every = [forms.get(index, forms[held[0]]) for index in range(len(names))]
    exchange.add(_Listed(experts, names, held, fqn=name or fqn, note=note, dependent=dependent, forms=every))


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _drop_parameters(expert: nn.Module, of: str, block: str) -> None:
    has_any = False
    for module in expert.modules():
        for name, parameter in list(module._parameters.items()):
            has_any = has_any or parameter is not None
            module._parameters[name] = None
    if has_any:
        expert.forward = _elsewhere(of, block)


def _elsewhere(of: str, block: str) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        raise PluginError(
            f'expert_parallel: an expert of "{of}" is called from outside of the forward of "{block}", around which '
            "rows are exchanged, and another rank holds it; call it there, or leave it out of "
            "[sharding.expert_parallel] experts; where its forward has torch.utils.checkpoint recompute experts, let "
            "[scheduling.activation_checkpoint] recompute the block instead"
        )

    return forward


class _StandIn:
    """An expert as the block's code sees it: something that can be called, and nothing else."""

    def __init__(self, exchange: Caller, source: _Listed, number: int) -> None:
        self._exchange, self._source, self._number = exchange, source, number

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        import torch

        x = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(x, torch.Tensor) or x.ndim == 0:
            raise PluginError(
                f'expert_parallel: expert {self._number} of "{self._source.fqn}" is called with something else than '
                "one tensor of rows"
            )
        if x.ndim < 3 or self._source.is_rowwise:
            return self._exchange.called(self._source, self._number, x)
        return of_whole_samples(x, self._of_samples)

    def _of_samples(self, x: Tensor) -> Tensor:
        if x.is_meta:  # a propagation asks for sizes
            return x.new_empty(x.shape[0], *self._source.result(self._number, tuple(x.shape[1:])))
        return self._exchange.called(self._source, self._number, x)

    forward = __call__

    def __getitem__(self, key: Any) -> Any:
        return self.__getattr__(f"[{key}]")

    def __getattr__(self, name: str) -> Any:
        raise PluginError(
            f'expert_parallel: the forward of "{self._exchange.fqn}" reads "{name}" of an expert, which another rank '
            "may hold; experts of a list can be called with rows, and nothing else; or leave this list out of "
            "[sharding.expert_parallel] experts"
        )


def of_whole_samples(x: Tensor, called: Callable[[Tensor], Tensor]) -> Tensor:
    """Call an expert that relates positions; one that no propagation knows is given all of those that ranks share."""
    from torch.overrides import handle_torch_function, has_torch_function

    if has_torch_function((x,)):
        result: Tensor = handle_torch_function(of_whole_samples, (x,), x, called)
        return result
    return called(x)


def _list_class(cls: type) -> type:
    """Return a list's class with entries that stand for experts while the forward of a block around it runs."""

    def entries(self: Any) -> dict[str, Any]:
        return self._modules | self.running[-1] if self.running else self._modules

    class Experts(cls):
        # What stands for entries in the blocks whose code runs, innermost last.
        running: ClassVar[list[dict[str, Any]]] = []

        def __getitem__(self, key: Any) -> Any:
            if not self.running or isinstance(key, slice):
                return [*entries(self).values()][key] if isinstance(key, slice) else super().__getitem__(key)
            return entries(self)[key] if isinstance(key, str) else [*entries(self).values()][int(key)]

        def __iter__(self) -> Iterator[Any]:
            return iter(entries(self).values()) if hasattr(cls, "append") else super().__iter__()

        def values(self) -> Any:
            return entries(self).values()

        def items(self) -> Any:
            return entries(self).items()

    Experts.__name__ = Experts.__qualname__ = cls.__name__
    return Experts


class _Listed:
    """Experts of a list, as `call_sources.Source`; arguments as of `shard_listed`."""

    is_varied = True

    def __init__(
        self,
        experts: nn.Module,
        names: Sequence[str],
        held: range,
        *,
        fqn: str,
        note: Note,
        dependent: DataDependent,
        forms: Sequence[ExpertForm],
    ) -> None:
        self.fqn, self.total, self.note = fqn, len(names), note
        self.is_rowwise = all(form.is_rowwise for form in forms)
        self._experts, self._names, self._held, self._dependent, self._forms = experts, names, held, dependent, forms

    @contextmanager
    def running(self, exchange: Caller) -> Iterator[None]:
        """Let the block's code find what stands for the experts in their list."""
        holders: dict[str, dict[str, _StandIn]] = {}
        for number, name in enumerate(self._names):
            holder, _, entry = name.rpartition(".")
            holders.setdefault(holder, {})[entry] = _StandIn(exchange, self, number)
        lists: list[Any] = [type(self._experts.get_submodule(holder)) for holder in holders]
        for of_list, entries in zip(lists, holders.values(), strict=True):
            of_list.running.append(entries)
        try:
            yield
        finally:
            for of_list in lists:
                of_list.running.pop()

    def result(self, number: int, given: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of the result of a row, or of a sample, by its own."""
        return self._forms[number].result(given)

    def given(self) -> tuple[int, ...]:
        """Return the first width that the experts take, as far as a dry run knows."""
        return tuple([*self._forms[self._held[0]].widths][:1])

    def compute(self, rows: Sequence[Tensor], is_called: Sequence[bool]) -> list[Tensor]:
        """Run this rank's experts."""
        made, used = [], self._dependent.used
        for number, x, called in zip(self._held, rows, is_called, strict=True):
            expert = self._experts.get_submodule(self._names[number])
            used[expert] = used.get(expert, False) or called
            y: Tensor = expert(x) if x.shape[0] else _of_nobody(expert, x)
            if propagation.spec_of(y) is not None:
                raise PluginError(
                    f'expert_parallel: an expert of "{self.fqn}" relates positions of the sequence that '
                    "[sharding.tensor_parallel] sequence_parallel shards, and is given all of them; write "
                    "sequence_parallel = false, or leave this list out of [sharding.expert_parallel] experts"
                )
            made.append(y)
        return made


def _of_nobody(expert: nn.Module, x: Tensor) -> Tensor:
    """Return an expert's results of no rows.

    Rows that nobody sent keep the parameters in the graph, which data-parallel plugins reduce on all ranks, and the
    exchange before it, whose backward all ranks have to call. They leave nothing in its buffers and attributes; batch
    norm takes two at least.
    """
    import torch

    state = BlockState(expert)
    y: Tensor = expert(torch.cat([x, x.new_zeros(2, *x.shape[1:])]))[:0]
    state.restore()
    return y
