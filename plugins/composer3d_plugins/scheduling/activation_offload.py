"""Activation offloading: saved activations wait for the backward in host memory."""

from __future__ import annotations

import functools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import Field

from composer3d import HostMemory, Metric, Phase, RunContext, Transform, hookimpl, plugin, select_fqns, torch_compat

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MIB = 2**20
log = logging.getLogger(__name__)


@plugin(family="scheduling")
class ActivationOffload:
    """Copy what a block's forward saves for its backward to host memory, and bring it back before it is needed.

    What is saved is copied as whole storages, each once, whatever number of views of it is saved, so that a backward
    finds the same values with the same strides. Copies run on streams of their own beside the computation; when the
    backward of a unit begins, the units before it are already on their way back. On a machine without accelerator host
    and device are the same memory: everything is copied all the same. Parameters and buffers stay, and tensors of
    classes that torch.distributed.tensor does not have. Of a recomputed unit its inputs are offloaded.
    Memory: on the device the saved activations of the unit at work and of `prefetch` more, and tensors below min_mib;
        the others in host memory, pinned where there is an accelerator.
    Collectives: none.

    Source: Rhu et al., vDNN: Virtualized Deep Neural Networks for Scalable, Memory-Efficient Neural Network Design,
    arXiv:1602.08124.

    Args:
        units: Patterns of the modules whose activations are offloaded; default: the model's blocks.
        min_mib: Smaller storages stay on the device, MiB.
        prefetch: So many units are brought back ahead of the one whose backward runs.
    """

    units: tuple[str, ...] | None = None
    min_mib: float = Field(default=1.0, ge=0)
    prefetch: int = Field(default=1, ge=0)

    @hookimpl
    def composer3d_reschedule(self, context: RunContext) -> Transform:
        """Wrap the forwards of the chosen units, outside of their recomputation."""
        reason = "the compiler decides itself what a block keeps for its backward, and cannot trace copies to the host"
        return Transform(
            name="activation_offload",
            phase=Phase.RECOMPUTE,
            select=self._select,
            apply=self._apply,
            after=("activation_checkpoint",),
            conflicts={"compile": reason},
        )

    def _select(self, model: nn.Module, context: RunContext) -> list[str]:
        patterns = (context.blocks,) if self.units is None else self.units
        return [fqn for pattern in patterns for fqn in select_fqns(pattern, context.fqns)]

    def _apply(self, model: nn.Module, fqns: Sequence[str], context: RunContext) -> list[str]:
        transfers: Transfers = HostTransfers(context.stash(HostMemory))
        if context.device.type == "cuda":
            transfers = StreamTransfers(context.device, ahead=self.prefetch)
        # Logged once for all ranks, of the run: verify may have made the model smaller.
        is_told = context.rank == 0 and context.purpose == "run"
        made = Traffic(transfers, min_bytes=int(self.min_mib * MIB), is_told=is_told)
        traffic: Traffic = context.state.setdefault(self, made)
        model.register_forward_pre_hook(lambda *_: traffic.begin())
        for fqn in fqns:
            unit: Any = model.get_submodule(fqn)
            unit.forward = _offloading(unit, unit.forward, model, traffic, fqn=fqn, prefetch=self.prefetch)
        return list(fqns)

    @hookimpl
    def composer3d_measure(self, context: RunContext, step: int) -> list[Metric]:
        """Measure bytes copied since the last report, and the peak in host memory."""
        traffic: Traffic | None = context.state.get(self)
        out, back, peak = traffic.take() if traffic is not None else (0, 0, 0)
        return [
            Metric(name="activation_offload_out_bytes", value=out, reduction="sum"),
            Metric(name="activation_offload_back_bytes", value=back, reduction="sum"),
            Metric(name="activation_offload_host_bytes", value=peak, reduction="max"),
        ]


class Traffic:
    """Offloading state of one rank: bytes in each direction, and the unit that ran last.

    Args:
        transfers: Between device and host.
        min_bytes: Least size of an offloaded storage.
        is_told: Whether to warn if nothing is offloaded.

    Attributes:
        last: The run of a unit that came last in this forward.
        host_bytes: In host memory now.
    """

    def __init__(self, transfers: Transfers, *, min_bytes: int, is_told: bool) -> None:
        self.transfers, self.min_bytes = transfers, min_bytes
        self.last: Run | None = None
        self._largest_left, self._is_known = 0, not is_told
        self.host_bytes = self._out = self._back = self._peak = 0

    def begin(self) -> None:
        """Begin a forward of the model, and warn once if earlier ones saved activations, none of them offloaded."""
        self.last = None
        if not self._is_known and self._largest_left:
            self._is_known = True
            log.warning(
                "activation_offload moves nothing: the largest storage that was saved has %.3g MiB, less than "
                "min_mib = %g",
                self._largest_left / MIB,
                self.min_bytes / MIB,
            )

    def travels(self, num_bytes: int) -> bool:
        """Return whether a storage is large enough."""
        if num_bytes >= max(self.min_bytes, 1):
            return True
        self._largest_left = max(self._largest_left, num_bytes)
        return False

    def went(self, num_bytes: int) -> None:
        """Count bytes to the host."""
        self._is_known, self._out = True, self._out + num_bytes
        self.host_bytes += num_bytes
        self._peak = max(self._peak, self.host_bytes)

    def came(self, num_bytes: int) -> None:
        """Count bytes from the host."""
        self._back += num_bytes

    def dropped(self, num_bytes: int) -> None:
        """Count bytes that the host no longer holds."""
        self.host_bytes -= num_bytes

    def take(self) -> tuple[int, int, int]:
        """Return bytes to the host and from it, and the peak there, and reset the counts."""
        found = self._out, self._back, self._peak
        self._out, self._back, self._peak = 0, 0, self.host_bytes
        return found


class Run:
    """One forward of one unit.

    Args:
        fqn: The unit.
        before: The run that came before it in the same forward of the model, whose backward comes after.
    """

    def __init__(self, fqn: str, before: Run | None) -> None:
        self.fqn, self.before = fqn, before
        self.storages: list[weakref.ref[Away]] = []  # which go with the graph that needs them

    def fetch(self, ahead: int) -> None:
        """Start copying saved storages back, of this run and of `ahead` runs before it."""
        run: Run | None = self
        for _ in range(ahead + 1):
            if run is None:
                return
            for reference in run.storages:
                away = reference()
                if away is not None:
                    away.fetch()
            run = run.before


class Away:
    """One storage in host memory.

    Args:
        storage: As bytes, on the device.
        run: That saved it.
        traffic: Of the rank.
    """

    def __init__(self, storage: Tensor, run: Run, traffic: Traffic) -> None:
        self._run, self._traffic = run, traffic
        self._num_bytes = storage.numel()
        self._num_views = 0
        self._here: Tensor | None = None
        self._host = traffic.transfers.store(run.fqn, storage)
        traffic.went(self._num_bytes)
        run.storages.append(weakref.ref(self))
        weakref.finalize(self, traffic.dropped, self._num_bytes)

    def saved(self) -> None:
        """Count a view that is saved."""
        self._num_views += 1

    def fetch(self) -> None:
        """Start copying it back, if it is still needed and not on its way."""
        if self._here is None and self._num_views > 0:
            self._here = self._traffic.transfers.fetch(self._run.fqn, self._host)
            self._traffic.came(self._num_bytes)

    def take(self, prefetch: int) -> Tensor:
        """Return it on the device; after its last view only the caller holds it there."""
        self._num_views = max(self._num_views, 1)
        self._run.fetch(prefetch)
        here = self._here
        assert here is not None, "its run was fetched"
        self._traffic.transfers.wait(self._run.fqn, here)
        self._num_views -= 1
        if self._num_views == 0:
            self._here = None
        return here


def _offloading(
    unit: nn.Module, forward: Callable[..., Any], model: nn.Module, traffic: Traffic, *, fqn: str, prefetch: int
) -> Callable[..., Any]:
    import torch
    from torch.distributed.tensor import DTensor

    @functools.wraps(forward)
    def offloading(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        run = traffic.last = Run(fqn, traffic.last)
        # Until the unit is done its saved storages are kept, so that none is taken for another at the same address.
        known: dict[tuple[int, int], tuple[Away, Tensor]] = {}
        held = (torch_compat.local_of(each) for each in (*unit.parameters(), *model.buffers()))
        stay = set(map(torch_compat.storage_key, held))

        def pack(tensor: Tensor) -> Any:
            with torch_compat.without_torch_functions():  # a propagation shows sizes of more than this rank has
                return sent(tensor)

        def sent(tensor: Tensor) -> Any:
            if type(tensor) is not DTensor and not _is_plain(tensor) or tensor.is_sparse:
                return tensor
            local = torch_compat.local_of(tensor.detach())
            storage = local.untyped_storage()
            if not _is_plain(local) or (traffic.transfers.is_device and local.device.type == "cpu"):
                return tensor
            key = torch_compat.storage_key(local), tensor._version
            if key[0] in stay or not traffic.travels(storage.nbytes()):
                return tensor
            if key not in known:
                known[key] = Away(_as_bytes(local), run, traffic), local
            known[key][0].saved()
            return _Saved(known[key][0], tensor, local)

        def unpack(saved: Any) -> Any:
            return saved.restored(prefetch) if isinstance(saved, _Saved) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = forward(*args, **kwargs)
        known.clear()
        return result

    return offloading


class _Saved:
    """A tensor that a backward needs, as a view of a storage that is away."""

    def __init__(self, away: Away, tensor: Tensor, local: Tensor) -> None:
        import torch
        from torch.distributed.tensor import DTensor

        self._away = away
        self._view = local.dtype, local.storage_offset(), local.shape, local.stride()
        self._like = (
            torch_compat.with_local(tensor, torch.empty_like(local, device="meta"))
            if isinstance(tensor, DTensor)
            else None
        )

    def restored(self, prefetch: int) -> Any:
        """Return it on the device."""
        import torch

        here = self._away.take(prefetch)
        dtype, offset, shape, stride = self._view
        local = torch.empty(0, dtype=dtype, device=here.device).set_(here.untyped_storage(), offset, shape, stride)
        return local if self._like is None else torch_compat.with_local(self._like, local)


class HostTransfers:
    """Transfers without an accelerator: every copy is made at once, so that tests can check their order.

    Attributes:
        log: (what, unit) of the latest that happened.
        is_device: Whether there is other memory than the host's.
    """

    is_device = False

    def __init__(self, host: HostMemory) -> None:
        self._host = host
        self.log: deque[tuple[str, str]] = deque(maxlen=1000)

    def store(self, unit: str, storage: Tensor) -> Tensor:
        """Copy a storage to the host."""
        self.log.append(("store", unit))
        with self._host.allocating(), self._host.copying():
            return storage.clone()

    def fetch(self, unit: str, host: Tensor) -> Tensor:
        """Copy it back."""
        self.log.append(("fetch", unit))
        with self._host.copying():
            return host.clone()

    def wait(self, unit: str, here: Tensor) -> None:
        """Nothing is under way."""
        self.log.append(("wait", unit))


class StreamTransfers:
    """Pinned host memory, and a stream for each direction beside the one that computes.

    The host runs ahead of the device. So what goes out is kept until the computing stream, which will use its memory
    again, waits for the copy; a copy back waits for the computation under way when it is requested, which no longer
    uses the memory that it takes. Both are bounded in the order of the streams.

    Args:
        device: Of all streams.
        ahead: So many units before the one at work may be on their way to the host.

    Attributes:
        is_device: Whether there is other memory than the host's.
    """

    is_device = True

    def __init__(self, device: torch.device, ahead: int) -> None:
        import torch
        from torch.utils.weak import WeakTensorKeyDictionary

        self._device, self._ahead = device, ahead
        self._out, self._back = torch.cuda.Stream(device), torch.cuda.Stream(device)
        # By identity: tensors that are compared with == are compared element by element.
        self._stored, self._arrived = WeakTensorKeyDictionary(), WeakTensorKeyDictionary()
        self._leaving: deque[tuple[str, list[tuple[torch.cuda.Event, Tensor]]]] = deque()

    def store(self, unit: str, storage: Tensor) -> Tensor:
        """Begin to copy a storage to the host, once what computes it is done."""
        import torch

        current = torch.cuda.current_stream(self._device)
        if not self._leaving or self._leaving[-1][0] != unit:
            self._leaving.append((unit, []))
        while len(self._leaving) > 1 + self._ahead:
            for event, _ in self._leaving.popleft()[1]:
                current.wait_event(event)
        host = torch.empty(storage.shape, dtype=storage.dtype, pin_memory=True)
        self._out.wait_stream(current)
        with torch.cuda.stream(self._out):
            host.copy_(storage, non_blocking=True)
            event = self._stored[host] = self._out.record_event()
        self._leaving[-1][1].append((event, storage))
        return host

    def fetch(self, unit: str, host: Tensor) -> Tensor:
        """Begin to copy it back."""
        import torch

        for _, leaving in self._leaving:
            for _, storage in leaving:  # a backward has begun, which need not wait for what left last
                storage.record_stream(self._out)
        self._leaving.clear()
        self._back.wait_stream(torch.cuda.current_stream(self._device))
        self._back.wait_event(self._stored[host])
        with torch.cuda.stream(self._back):
            here = host.to(self._device, non_blocking=True)
            self._arrived[here] = self._back.record_event()
        return here

    def wait(self, unit: str, here: Tensor) -> None:
        """Let the computing stream wait for it."""
        import torch

        torch.cuda.current_stream(self._device).wait_event(self._arrived[here])


Transfers = HostTransfers | StreamTransfers


def _is_plain(tensor: Any) -> bool:
    import torch

    return type(tensor) is torch.Tensor or hasattr(tensor, "fake_mode")  # those of a plan


def _as_bytes(local: Tensor) -> Tensor:
    import torch

    return torch.empty(0, dtype=torch.uint8, device=local.device).set_(local.untyped_storage())
