"""Adam and AdamW with quantised moments."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from composer3d import torch_compat
from composer3d_plugins.precision.low_bit_optimizer.moments import Format, dequantised, kept_above_zero, requantise_

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer

__all__ = ["low_bit"]

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def low_bit(cls: type[Optimizer], form: Format) -> Any:
    """Return a subclass of Adam or AdamW of the same name, whose moments are kept in a format.

    Args:
        cls: The requested class.
        form: Format of the moments.
    """
    from torch.optim import AdamW

    decays_weights = issubclass(cls, AdamW)
    base: Any = cls

    class LowBit(base):
        is_elementwise = True  # in blocks of a rank's own elements

        def step(self, closure: Any = None) -> None:
            """Step every parameter that has a gradient."""
            import torch

            assert closure is None, "the composition refuses closures"
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            state = self.state[parameter]
                            if not state:
                                _initialise(state, parameter, form, has_max=group["amsgrad"])
                            _update(parameter, state, group, decays_weights=decays_weights)

        def load_state_dict(self, state_dict: Any) -> None:
            """Refuse: torch would cast the state to the dtype of parameters."""
            raise NotImplementedError("composer3d saves and loads the state of this optimizer with run.save, run.load")

        @contextlib.contextmanager
        def plain_state(self, *, write: bool) -> Iterator[None]:
            """Convert the moments to float32 for a checkpoint; see `composer3d.checkpoint`."""
            with _plain_state(self.state, write=write):
                yield

    LowBit.__name__ = LowBit.__qualname__ = cls.__name__
    return LowBit


@contextlib.contextmanager
def _plain_state(states: Any, *, write: bool) -> Iterator[None]:
    kept: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for parameter, state in states.items():
            for name in MOMENTS:
                if name in state:
                    kept.append((state, name, state[name]))
                    state[name] = _like(parameter, dequantised(state[name]))
        yield
        if write:
            for state, name, moment in kept:
                values = torch_compat.local_of(state[name])
                requantise_(moment, values if name == "exp_avg" else kept_above_zero(moment, values))
    finally:
        for state, name, moment in kept:
            state[name] = moment


def _initialise(state: dict[str, Any], parameter: Tensor, form: Format, *, has_max: bool) -> None:
    import torch

    local = torch_compat.local_of(parameter)
    state["step"] = torch.tensor(0.0)
    state["exp_avg"] = form.zeros(local, signed=True)
    state["exp_avg_sq"] = form.zeros(local, signed=False)
    if has_max:
        state["max_exp_avg_sq"] = form.zeros(local, signed=False)


def _update(parameter: Any, state: dict[str, Any], group: dict[str, Any], *, decays_weights: bool) -> None:
    """Step this rank's shard of one parameter in float32.

    The operations are those of torchao, in order, but that no second moment above zero is rounded to zero.
    """
    import torch

    state["step"] += 1
    local, (beta1, beta2) = torch_compat.local_of(parameter), group["betas"]
    # Numbers of no dims, as torchao has them: in Python the rate would be rounded elsewhere.
    lr, step = torch.as_tensor(group["lr"], dtype=torch.float32), state["step"]
    values, grad = local.float(), torch_compat.local_of(parameter.grad).float()
    if decays_weights:
        values = values - lr * group["weight_decay"] * values
    else:
        grad = grad + group["weight_decay"] * values
    mean = dequantised(state["exp_avg"]).lerp(grad, 1 - beta1)
    square = dequantised(state["exp_avg_sq"]).lerp(grad.square(), 1 - beta2)
    state["exp_avg"].copy_(mean)
    state["exp_avg_sq"].copy_(kept_above_zero(state["exp_avg_sq"], square))
    if "max_exp_avg_sq" in state:
        square = torch.maximum(dequantised(state["max_exp_avg_sq"]), square)
        state["max_exp_avg_sq"].copy_(kept_above_zero(state["max_exp_avg_sq"], square))
    denominator = (square.sqrt() / (1 - beta2**step).sqrt()) + group["eps"]
    local.copy_(values - lr * (mean / (1 - beta1**step)) / denominator)


def _like(parameter: Any, local: torch.Tensor) -> Tensor:
    """Return a local tensor as a DTensor with the placements of its parameter, if that is one."""
    from torch.distributed.tensor import DTensor

    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
