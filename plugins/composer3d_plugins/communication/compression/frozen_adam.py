"""Adam whose second moment is frozen after a warm-up, for gradients that are then compressed to signs: 1-bit Adam."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from composer3d import PluginError

__all__ = ["FrozenAdamW", "refuse_moving_variance"]

_USE = "composer3d_plugins.communication.compression.frozen_adam:FrozenAdamW"


class FrozenAdamW(torch.optim.Optimizer):
    """AdamW that no longer changes its second moment, nor the correction of its bias, after `freeze_step` steps.

    Until then it is torch's AdamW. An element whose second moment is zero by then, as of an embedding that no sample
    has used, stands still: nothing says how large its steps are to be.

    Source: Hanlin Tang et al., 1-bit Adam, arXiv:2102.02888, algorithm 1, which compresses the momentum: here gradients
    are, of which the momentum is a sum.

    Args:
        params: Parameters, or groups of them.
        freeze_step: Steps of the warm-up, 1 at least.
        lr: Learning rate.
        betas: Of the first and the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled.

    Memory: two moments of each parameter.
    """

    freeze_option = "freeze_step"
    is_elementwise = True

    def __init__(
        self,
        params: Any,
        *,
        freeze_step: int,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if freeze_step < 1:
            raise ValueError(
                f"freeze_step = {freeze_step}: a second moment of no step divides by zero; write 1 at least"
            )
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "freeze_step": freeze_step}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        step, (beta1, beta2) = int(state["step"].item()), group["betas"]
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        if step <= group["freeze_step"]:
            state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction = 1 - beta2 ** min(step, group["freeze_step"])
        denominator = (state["exp_avg_sq"].sqrt() / math.sqrt(correction)).add_(group["eps"])
        if step > group["freeze_step"]:
            denominator = denominator.masked_fill(state["exp_avg_sq"] == 0, math.inf)
        parameter.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / (1 - beta1**step))


def refuse_moving_variance(cls: type[Any], groups: Sequence[Mapping[str, Any]], *, start_step: int) -> None:
    """Raise where an optimizer divides signs by a second moment that goes on with them.

    The squares of signs of one block are all alike: a second moment of them says nothing of its elements, and Adam's
    steps would be those of momentum alone.

    Args:
        cls: Of the optimizer; one with a second moment names in `freeze_option` the option that ends its changes.
        groups: Of parameters, with all options.
        start_step: First step whose gradients are signs.
    """
    if issubclass(cls, torch.optim.SGD):  # no second moment
        return
    option = getattr(cls, "freeze_option", None)
    write = f'write [optimizer] use = "{_USE}" with freeze_step = {max(start_step, 1)}'
    if start_step < 1 and option is not None:
        raise PluginError(
            f'gradients = "onebit" from the first step on, and {cls.__name__} has no second moment yet',
            hint="write start_step, for example a tenth of the run's steps, and freeze_step alike",
        )
    if option is None:
        raise PluginError(
            f'gradients = "onebit" needs an optimizer whose second moment stands still, and {cls.__name__} is not '
            "known as one: squares of signs are all alike, and a moment of them says nothing",
            hint=f"{write}, or SGD, which has none",
        )
    late = [group[option] for group in groups if group[option] > start_step]
    if late:
        raise PluginError(
            f'gradients = "onebit" from step {start_step} on, and the second moment of {cls.__name__} stands still '
            f"after {late[0]} steps: in between it would go on with signs",
            hint=f"write {option} = {start_step}",
        )
