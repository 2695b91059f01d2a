"""Experts that are modules of a list, or of lists in a list, which a block's own code calls as it likes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

from composer3d import DataDependent, PluginError, listed_experts
from composer3d_plugins.sharding.expert_parallel.block_exchange import exchange_around
from composer3d_plugins.sharding.expert_parallel.call_sources import Caller
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
    widths = _widths(
        experts.get_submodule(names[0] if _has_parameters(experts.get_submodule(names[0])) else names[held[0]])
    )
    for index, entry in enumerate(names):
        if index not in held:
            _drop_parameters(experts.get_submodule(entry), f"{fqn}.{name}".rstrip("."), fqn)
    for holder in {entry.rpartition(".")[0]: None for entry in names}:
        around: Any = experts.get_submodule(holder)
        if not hasattr(type(around), "running"):  # no other block calls them
            # Its own class, which code that asks for a list still takes for one; FQNs stay as they are.
            around.__class__ = _list_class(type(around))
    exchange = exchange_around(block, mesh, fqn=fqn, dependent=dependent, peers=peers)
    exchange.add(_Listed(experts, names, held, fqn=name or fqn, note=note, dependent=dependent, widths=widths))


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _widths(expert: nn.Module) -> dict[int, int]:
    """Return how wide an expert's results are, by the width of rows: what it does on meta with those it may take."""
    import torch

    tensors = {**dict(expert.named_parameters()), **dict(expert.named_buffers())}
    state = {name: tensor.detach().to("meta") for name, tensor in tensors.items()}
    dtypes = [parameter.dtype for parameter in expert.parameters() if parameter.is_floating_point()]
    found: dict[int, int] = {}
    for width in dict.fromkeys(size for parameter in expert.parameters() for size in parameter.shape):
        rows = torch.empty(2, width, dtype=dtypes[0] if dtypes else None, device="meta")
        try:
            with torch.no_grad():
                made = torch.func.functional_call(expert, state, (rows,))
        except Exception:  # another width, or code that does not run on meta: its rows are taken to stay as wide
            continue
        if isinstance(made, torch.Tensor) and made.ndim == 2:
            found[width] = made.shape[1]
    return found


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
            "[sharding.expert_parallel] experts"
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
        widths: dict[int, int],
    ) -> None:
        self.fqn, self.total, self.note = fqn, len(names), note
        self._experts, self._names, self._held, self._dependent, self._widths = experts, names, held, dependent, widths

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

    def width(self, number: int, given: int) -> int:
        """Return the elements of a row of results."""
        return self._widths.get(given, given)

    def width_given(self) -> int:
        """Return the first width that the experts take, as far as a dry run knows."""
        return next(iter(self._widths), 0)

    def compute(self, rows: Sequence[Tensor], is_called: Sequence[bool]) -> list[Tensor]:
        """Run this rank's experts."""
        import torch

        made, used = [], self._dependent.used
        for number, x_RD, called in zip(self._held, rows, is_called, strict=True):
            expert = self._experts.get_submodule(self._names[number])
            used[expert] = used.get(expert, False) or called
            # A row that nobody sent keeps the parameters in the graph, which data-parallel plugins reduce on all ranks,
            # and the exchange before it, whose backward all ranks have to call.
            given = x_RD if x_RD.shape[0] else torch.cat([x_RD, x_RD.new_zeros(1, x_RD.shape[1])])
            made.append(expert(given)[: x_RD.shape[0]])
        return made
