"""`[train] loss` of a manifest: a name, a reference, or a table of one with its options."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, model_validator

from composer3d.errors import KeyFault, did_you_mean
from composer3d.manifest import table

__all__ = ["ELEMENTWISE", "LossTable"]

# By name, the function of torch.nn.functional.
ELEMENTWISE: Mapping[str, str] = MappingProxyType(
    {
        "mse": "mse_loss",
        "l1": "l1_loss",
        "smooth_l1": "smooth_l1_loss",
        "huber": "huber_loss",
        "binary_cross_entropy": "binary_cross_entropy_with_logits",
    }
)
_IGNORED = -100
_OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType({"smooth_l1": ("beta",), "huber": ("delta",)})
_NAMES = ("cross_entropy", *ELEMENTWISE, "model")


@table
class LossTable:
    """The loss of a run.

    Args:
        use: `cross_entropy` of logits; `mse`, `l1`, `smooth_l1`, `huber` or `binary_cross_entropy` (of logits), a mean
            over all elements; `model`, which the model returns; or `module:callable`.
        ignore_index: The target that carries no loss; default -100.
        label_smoothing: Of `cross_entropy`.
        class_dim: Of `cross_entropy`: the dim of the logits that holds the classes; default the last.
        reduction: Of `module:callable` and `model`, what their scalar is, where its last operation does not show it,
            as of `2 * cross_entropy(..., reduction="sum")`: `sum` over what the loss counts, or `mean`.
        args: Further arguments: `delta` of `huber`, `beta` of `smooth_l1`, those of `module:callable`.
    """

    use: str = Field(default="cross_entropy", min_length=1)
    ignore_index: int | None = None
    label_smoothing: float | None = Field(default=None, ge=0, lt=1)
    class_dim: int | None = None
    reduction: Literal["sum", "mean"] | None = None
    args: dict[str, Any] = Field(default_factory=dict)

    @property
    def ignored(self) -> int:
        """The target that carries no loss."""
        return _IGNORED if self.ignore_index is None else self.ignore_index

    @model_validator(mode="after")
    def _is_known(self) -> LossTable:
        """Refuse names that are none, and keys that would be ignored."""
        if ":" not in self.use:
            if self.use not in _NAMES:
                near = did_you_mean(self.use, _NAMES)
                raise KeyFault(
                    "use",
                    f'"{self.use}" is no loss: {", ".join(_NAMES)} or "module:callable"{f"; {near}" if near else ""}',
                )
            for key in self.args.keys() - set(_OPTIONS.get(self.use, ())):
                raise KeyFault("args", f'loss "{self.use}" takes no argument "{key}"')
        if self.use in ELEMENTWISE and self.ignore_index is not None:
            raise KeyFault(
                "ignore_index", f'ignore_index is for integers, and "{self.use}" counts every element; remove it'
            )
        if self.reduction is not None and self.use in ("cross_entropy", *ELEMENTWISE):
            raise KeyFault("reduction", f'"{self.use}" is a mean over what it counts; remove reduction')
        for key in ("label_smoothing", "class_dim"):
            if self.use != "cross_entropy" and getattr(self, key) is not None:
                raise KeyFault(key, f'{key} is for "cross_entropy", and this is "{self.use}"; remove it')
        return self
