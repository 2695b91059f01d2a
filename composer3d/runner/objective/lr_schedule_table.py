"""`[lr_schedule]` of a manifest: the shape of the warm-up, of the fall after it, and where both end."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal

from pydantic import Field, model_validator

from composer3d.errors import KeyFault, did_you_mean
from composer3d.manifest import table

__all__ = ["FALLS", "LRScheduleTable"]

FALLS = ("cosine", "linear", "wsd", "polynomial", "sqrt", "exponential")
_NAMES = (*FALLS, "inverse_sqrt", "constant")
# Which schedules a key is for; None is a callable.
_OWNERS: Mapping[str, tuple[str | None, ...]] = MappingProxyType(
    {
        "decay": FALLS,
        "decay_end": FALLS,
        "min_ratio": (*FALLS, "inverse_sqrt"),
        "power": ("polynomial",),
        "cycles": ("cosine",),
        "timescale": ("inverse_sqrt",),
        "unit": (*FALLS, "inverse_sqrt", "constant"),
        "args": (None,),
    }
)


@table
class LRScheduleTable:
    """The learning rate over the run, as a multiple of the optimizer's `lr`.

    Args:
        use: `cosine`, `linear`, `wsd` (warmup, stable, a linear decay), `polynomial` (`power`), `sqrt` (1 - sqrt of
            what is done), `exponential` (2 * 0.5 ^ done - 1), `inverse_sqrt`, `constant`, or `module:callable`, which
            is called with (step, steps) and `args` and returns the multiple; default `cosine`.
        name: Another name for `use`.
        warmup: Steps, or a fraction of the run, in which the rate rises to `lr`; default 0.05, and 0 for `constant` and
            for a callable.
        warmup_start: The multiple in the first step, from which the rate rises to reach `lr` in the step after the
            warm-up; default the rate rises by equal parts from `lr` / `warmup`, and reaches `lr` in its last step.
        warmup_shape: How it rises: `linear`, `log`, `cosine`, `sqrt`, `quadratic`; the others than `linear` rise from
            `warmup_start`, by default 0, and `log` reaches `lr` in the warm-up's last step.
        warmup_delay: Steps by which the warm-up comes later, at its first rate until then, and for which the fall does
            not wait; default 0.
        decay: Steps, or a fraction of the run, in which the rate falls, having stayed at `lr` until then; default all
            that `warmup` leaves, and 0.2 for `wsd`.
        decay_end: The step in which the rate has fallen to `min_ratio`, where it stays, or a fraction of the run; may
            lie after the run. Default the run's end.
        min_ratio: What is left of the rate at the end; default 0.1, and 0 for `inverse_sqrt`, which never falls below.
        power: Of `polynomial`: of what is left to do; default 1.
        cycles: Of `cosine`: how many times it falls, each time from `lr` on; default 1.
        timescale: Of `inverse_sqrt`: steps after which 1 / sqrt(2) is left; default the warm-up's, or 10000 without.
        unit: What `warmup`, `decay`, `decay_end` and `timescale` count, by default steps: with `samples` those of all
            steps before, so that the rate follows the data while `train.batch_ramp` grows, and rises from
            `warmup_start`, by default 0.
        args: Further arguments of a callable, by name.
    """

    use: str | None = None
    name: str | None = None
    warmup: int | float | None = Field(default=None, ge=0)
    warmup_start: float | None = Field(default=None, ge=0, le=1)
    warmup_shape: Literal["linear", "log", "cosine", "sqrt", "quadratic"] = "linear"
    warmup_delay: int = Field(default=0, ge=0)
    decay: int | float | None = Field(default=None, ge=0)
    decay_end: int | float | None = Field(default=None, ge=0)
    min_ratio: float | None = Field(default=None, ge=0, le=1)
    power: float | None = Field(default=None, gt=0)
    cycles: int | None = Field(default=None, ge=1)
    timescale: int | None = Field(default=None, ge=1)
    unit: Literal["samples"] | None = None
    args: dict[str, Any] | None = None

    @property
    def kind(self) -> str:
        """The schedule's name or reference."""
        return self.use or self.name or "cosine"

    @model_validator(mode="after")
    def _keys_belong_to_the_schedule(self) -> LRScheduleTable:
        """Refuse keys that would be ignored."""
        if self.use is not None and self.name is not None:
            raise KeyFault("name", "use and name are two names for one key; remove one of them")
        is_own = ":" in self.kind
        if self.kind not in _NAMES and not is_own:
            named = next((name for name in _NAMES if name in self.kind.lower()), None)
            hint = f'write "{named}"' if named else did_you_mean(self.kind, _NAMES)
            said = f'"{self.kind}" is not {", ".join(_NAMES)} or "module:callable"'
            raise KeyFault("use", f"{said}; {hint}" if hint else said)
        for key, owners in _OWNERS.items():
            if getattr(self, key) is not None and (None if is_own else self.kind) not in owners:
                allowed = ", ".join(owner or "a callable" for owner in owners)
                raise KeyFault(key, f'{key} is for {allowed}, and this is "{self.kind}"')
        for key in ("warmup", "decay", "decay_end"):
            value = getattr(self, key)
            if isinstance(value, float) and value > 1:
                raise KeyFault(
                    key,
                    f"{key} = {value} is neither a number of {self.unit or 'steps'} (an integer) nor a fraction of the "
                    "run",
                )
        if self.unit is not None and self.warmup_delay:
            raise KeyFault("warmup_delay", "warmup_delay counts steps, and this schedule counts samples")
        rises = self.warmup != 0 if self.kind != "constant" and not is_own else bool(self.warmup)
        if not rises and (self.warmup_start is not None or self.warmup_shape != "linear" or self.warmup_delay):
            raise KeyFault("warmup", "warmup_start, warmup_shape and warmup_delay are of a warm-up, and there is none")
        return self
