"""Frozen base model of adapters: selected layers, and digests that identify its weights in a checkpoint."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from composer3d import CheckpointError
from composer3d_plugins.precision.qlora.nf4 import Format
from composer3d_plugins.precision.qlora.stacked_adapters import StackedAdapter

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Chosen", "digest"]

logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class Chosen:
    """State of a run's adapters and base model.

    Attributes:
        quantised: Format of every quantised weight, by the layer's FQN.
        adapted: FQNs of the layers with adapters.
        stacked: Adapters of modules with stacked weights, by FQN.
        scale: Factor of the adapters' product.
        quantize: The plugin's option `quantize`.
        waiting: Quantised weights of a model that was passed with values, until they are placed.
        digests: Digests of frozen parameters as loaded, by FQN.
    """

    quantised: dict[str, Format]
    adapted: tuple[str, ...]
    stacked: dict[str, StackedAdapter] = field(default_factory=dict)
    scale: float
    quantize: str
    waiting: dict[str, Tensor] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)

    def stacked_form(self, parameter: str) -> Format | None:
        """Return the format of a stacked weight; None if it is not quantised, and for other parameters."""
        for fqn, adapter in self.stacked.items():
            if parameter.startswith(f"{fqn}.") and parameter.removeprefix(f"{fqn}.") in adapter.forms:
                return adapter.forms[parameter.removeprefix(f"{fqn}.")]
        return None

    def state_dict(self) -> Mapping[str, Any]:
        """Return the digests, scale and quantisation that a run which loads the adapters must match."""
        return {"digests": dict(self.digests), "scale": self.scale, "quantize": self.quantize}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Validate a checkpoint against this run; another quantisation of the same base model is only logged."""
        for fqn, known in state["digests"].items():
            if self.digests.get(fqn, known) != known:
                raise CheckpointError(
                    f'the checkpoint\'s adapters were trained on another "{fqn}" than this run starts from'
                )
        if state["scale"] != self.scale:
            raise CheckpointError(
                f"the checkpoint's adapters count alpha / rank = {state['scale']:g}, and here they would count "
                f"{self.scale:g}; write alpha = {state['scale']:g} * rank in [precision.qlora]"
            )
        if state["quantize"] != self.quantize:
            logger.warning(
                'adapters that were trained beside weights with quantize = "%s" go on beside quantize = "%s"',
                state["quantize"],
                self.quantize,
            )


def digest(tensor: Tensor) -> str:
    """Return a digest of a parameter, from at most some thousands of its elements."""
    import torch

    flat = tensor.reshape(-1)
    sample = flat[:: max(1, flat.numel() // 4096)].detach().to(device="cpu", dtype=torch.float32).contiguous()
    described = f"{tuple(tensor.shape)}".encode()
    return hashlib.blake2b(sample.view(torch.uint8).numpy().tobytes() + described, digest_size=8).hexdigest()
