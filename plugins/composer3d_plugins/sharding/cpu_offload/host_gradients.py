"""Gradients in host memory while a backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from composer3d import PluginError, Role, RunContext, StepState
from composer3d_plugins.sharding.cpu_offload.transfers import Transfers

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["HostGradients", "refuse_foreign"]


class HostGradients:
    """Copies every gradient to the host once it is accumulated, and all of them back when they are needed.

    Gradients of later micro-batches are added on the device, in autograd's order.

    Args:
        parameters: Their gradients are offloaded.
        transfers: Copies between host and device.

    Attributes:
        host_bytes: Bytes in host memory now.
        peak_bytes: Most bytes in host memory so far.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], transfers: Transfers) -> None:
        self._parameters = list(parameters)
        self._transfers = transfers
        self._hosts: dict[nn.Parameter, Tensor] = {}
        self._held: dict[nn.Parameter, int] = {}
        self.host_bytes = self.peak_bytes = 0
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._leave)

    def sweep(self, state: StepState) -> None:
        """Copy gradients that no autograd hook saw: of schedules that compute weight gradients separately."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                self._leave(parameter)

    def bring_back(self, state: StepState) -> None:
        """Set all of them as `grad` again, on the device."""
        fetched = [
            (parameter, self._transfers.fetch(index, [self._hosts[parameter]])[0])
            for index, parameter in enumerate(self._held)
        ]
        for index, (parameter, here) in enumerate(fetched):
            self._transfers.wait(index)
            parameter.grad = here if parameter.grad is None else here.add_(parameter.grad)
        self._transfers.finish()
        self._held.clear()
        self.host_bytes = 0

    def _leave(self, parameter: nn.Parameter) -> None:
        grad: Any = parameter.grad
        if parameter in self._held:
            index = self._held[parameter]
            (here,) = self._transfers.fetch(index, [self._hosts[parameter]])
            self._transfers.wait(index)
            grad = here.add_(grad)
        else:
            index = self._held[parameter] = len(self._held)
            if parameter not in self._hosts:
                self._hosts[parameter] = self._transfers.allocate(grad)
            self.host_bytes += grad.numel() * grad.element_size()
            self.peak_bytes = max(self.peak_bytes, self.host_bytes)
        self._transfers.store(index, [(self._hosts[parameter], grad)])
        parameter.grad = None


def refuse_foreign(context: RunContext, parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse replicated parameters whose gradients a plugin reduces on the device."""
    from torch.distributed.tensor import DTensor

    if context.layout.degree(Role.BATCH, Role.SEQUENCE) == 1:
        return
    for fqn, parameter in parameters.items():
        if not isinstance(parameter, DTensor):
            raise PluginError(
                f'the gradient of "{fqn}" is reduced over ranks where it lies, so it cannot be in host memory before',
                hint="name other parameters, or let fsdp2 or ddp's units reduce it",
            )
