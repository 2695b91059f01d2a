"""Copies of tensors in host memory, of one moment, some of them made while training goes on."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from composer3d.errors import CheckpointError

__all__ = ["Staging"]


class Staging:
    """Host memory for copies of one set of tensors after another.

    What the caller calls steady, tensors that nobody writes to until `settle`, a thread copies; the rest is copied in
    the call. Whether they are steady is tried: the first copy is made in the call, and compared with the tensors at the
    first `settle`. Where they differ, as with a forward that renormalises its weights, all later ones are made in the
    call too. Copies from a GPU go into pinned memory, those of a thread on a stream of their own.

    Memory: one copy of the tensors, kept for the next: new memory is given page by page, which takes several times as
    long as the copy.
    """

    def __init__(self) -> None:
        self._copies: dict[str, Tensor] = {}
        self._steady: dict[str, Tensor] = {}  # until they are settled
        self._versions: dict[str, int] = {}
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._is_tried, self._defers = False, True

    def take(self, tensors: Mapping[str, Tensor], *, steady: Collection[str] = ()) -> dict[str, Tensor]:
        """Return copies, DTensors with their placements, that hold their values once `wait` has returned.

        Args:
            tensors: Plain tensors and DTensors by key. The copies of the call before are overwritten.
            steady: Keys of those that nobody writes to until `settle`.

        """
        self.settle()
        self._thread = None
        with torch.no_grad():
            own = {key: _local(tensor.detach()) for key, tensor in tensors.items()}
            self._reserve(own)
            self._steady = {key: own[key] for key in steady if self._defers}
            self._versions = {key: _version(each) for key, each in self._steady.items()}
            later = self._steady.keys() if self._is_tried else ()
            _copy([(self._copies[key], each) for key, each in own.items() if key not in later])
            if later:
                arguments = self._steady, _reached(self._steady.values())
                self._thread = threading.Thread(target=self._copy_later, args=arguments, name="composer3d-copy")
                self._thread.start()
        return {key: _placed(self._copies[key], tensor) for key, tensor in tensors.items()}

    def wait(self) -> None:
        """Return when the copies are complete.

        Raises:
            CheckpointError: A steady tensor was written to, and the copy is of no moment.
        """
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def settle(self) -> None:
        """Return when steady tensors may be written to; called before they are, and before another copy."""
        steady, self._steady = self._steady, {}
        if steady and self._thread is not None:
            self._thread.join()
            self._defers = self._defers and self._written(steady) is None
        elif steady:
            self._is_tried = True
            self._defers = all(torch.equal(_bytes(self._copies[key]), _bytes(each)) for key, each in steady.items())

    def _copy_later(self, steady: Mapping[str, Tensor], reached: Mapping[torch.device, torch.cuda.Event]) -> None:
        try:
            with torch.no_grad():
                _copy([(self._copies[key], each) for key, each in steady.items()], after=reached)
            written = self._written(steady)
            if written is not None:
                raise CheckpointError(
                    f'"{written}" was written to between the save and the optimizer\'s step; write '
                    "checkpoint.asynchronous = false"
                )
        except BaseException as error:
            self._error = error

    def _written(self, steady: Mapping[str, Tensor]) -> str | None:
        """Return the first tensor that torch has counted a write to; writes through `.data` it does not count."""
        return next((key for key, each in steady.items() if _version(each) != self._versions[key]), None)

    def _reserve(self, own: Mapping[str, Tensor]) -> None:
        """Have a copy of the right form for every tensor."""
        if self._copies.keys() == own.keys():
            if all(_form(self._copies[key]) == _form(each) for key, each in own.items()):
                return
        self._copies = {}  # the old ones are freed first
        for key, each in own.items():
            self._copies[key] = torch.empty_like(each, device="cpu", pin_memory=each.device.type == "cuda")


def _local(tensor: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor

    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _placed(copy: Tensor, tensor: Tensor) -> Tensor:
    """Return the copy of a tensor's shard, placed as the tensor is."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return copy
    mesh, placements, stride = tensor.device_mesh, tensor.placements, tensor.stride()
    return DTensor.from_local(copy, mesh, placements, run_check=False, shape=tensor.shape, stride=stride)


def _form(tensor: Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    """Return what a tensor and its copy have in common; a copy has no gaps."""
    return tensor.shape, torch.empty_like(tensor, device="meta").stride(), tensor.dtype


def _bytes(tensor: Tensor) -> Tensor:
    """Return a tensor's bytes on the CPU, which NaNs of equal bits have equal."""
    return tensor.cpu().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _devices(tensors: Iterable[Tensor]) -> set[torch.device]:
    return {each.device for each in tensors if each.device.type == "cuda"}


def _reached(tensors: Iterable[Tensor]) -> dict[torch.device, torch.cuda.Event]:
    """Return the place of each GPU's current stream."""
    return {device: torch.cuda.current_stream(device).record_event() for device in _devices(tensors)}


def _copy(
    pairs: Sequence[tuple[Tensor, Tensor]], *, after: Mapping[torch.device, torch.cuda.Event] | None = None
) -> None:
    """Copy second tensors into first ones, in host memory, and wait for the GPUs that do.

    Args:
        pairs: Of the same forms.
        after: Events that streams of this thread's own wait for; None copies on the current streams.
    """
    with ExitStack() as entered:
        for device, event in (after or {}).items():
            stream = torch.cuda.Stream(device)
            stream.wait_event(event)
            entered.enter_context(torch.cuda.stream(stream))
        for to, come in pairs:
            to.copy_(come, non_blocking=True)
        for device in _devices(come for _, come in pairs):
            torch.cuda.current_stream(device).synchronize()
