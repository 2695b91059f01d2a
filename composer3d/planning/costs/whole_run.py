"""A whole run from the time of a step: days, money, energy, and what failures cost.

Source: John Young, A first order approximation to the optimum checkpoint interval, 1974, with John Daly's correction
for a save that takes long, 2006: between the end of a save of C seconds and the next one lie sqrt(2 C M) - C seconds,
where failures are M seconds apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from composer3d.errors import ArgumentError
from composer3d.planning.costs.figure import Figure

__all__ = ["Failures", "Questions", "Reliability", "Training", "reliability", "training"]

_SECONDS_A_DAY = 86400
_WATTS_A_MEGAWATT = 1e6


@dataclass(frozen=True, kw_only=True)
class Failures:
    """Failures that a run may have.

    Args:
        hours: Of one device between two failures that end the run.
        storage: Bytes a second that all ranks together write to where checkpoints lie.
        restart_s: Seconds from a failure to the first step after it: ranks started, a checkpoint read.
    """

    hours: float
    storage: float
    restart_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Questions:
    """Questions about the time of a step.

    Args:
        num_units: Tokens that it is to see, or samples where those are the unit; None leaves the run out.
        price: Of one device for an hour; None leaves the cost out.
        currency: Of the price, as it is written before a number.
        failures: That are to be expected; None leaves them out.
        what_if: Factors by which parts of the cluster are faster, or wait longer; none leaves it as it is.
    """

    num_units: float | None = None
    price: float | None = None
    currency: str = "$"
    failures: Failures | None = None
    what_if: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Training:
    """Time, money and energy of a whole run.

    Args:
        num_steps: Optimizer steps that the tokens make, rounded up.
        days: Of wall clock, without interruptions.
        device_hours: Of all devices.
        cost: In the currency of the price; None without one.
        currency: Of the price.
        energy_mwh: Megawatt hours of the devices at their rated power, without hosts, network and cooling; None where
            the hardware file says no power.
        interrupted: The same with failures; None where none were asked for.
    """

    num_steps: int
    days: Figure
    device_hours: Figure
    cost: Figure | None
    currency: str
    energy_mwh: Figure | None
    interrupted: Training | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "num_steps": self.num_steps,
            "days": self.days.to_json(),
            "device_hours": self.device_hours.to_json(),
            "cost": None if self.cost is None else self.cost.to_json(),
            "currency": self.currency,
            "energy_mwh": None if self.energy_mwh is None else self.energy_mwh.to_json(),
            **({} if self.interrupted is None else {"with_failures": self.interrupted.to_json()}),
        }

    def interrupted_by(self, goodput: Figure) -> Training:
        """Return this run with the same one, of the same steps, of whose time so large a part is kept."""
        factor = 1 / goodput.value

        def longer(figure: Figure | None) -> Any:
            return None if figure is None else figure.scaled(factor)

        times = {name: longer(getattr(self, name)) for name in ("days", "device_hours", "cost", "energy_mwh")}
        return replace(self, interrupted=replace(self, **times))


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Costs of failures.

    Args:
        checkpoint_bytes: Parameters and optimizer state, once.
        save_s: Seconds of a save that the run waits for.
        failure_s: Seconds between two failures of the whole world.
        interval_s: Between two saves, where least is lost.
        interval_steps: The same in steps, at least 1.
        goodput: Part of the time that goes into steps which are kept.
    """

    checkpoint_bytes: int
    save_s: float
    failure_s: float
    interval_s: float
    interval_steps: int
    goodput: Figure

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        return {
            "checkpoint_bytes": self.checkpoint_bytes,
            "save_s": self.save_s,
            "failure_s": self.failure_s,
            "interval_s": self.interval_s,
            "interval_steps": self.interval_steps,
            "goodput": self.goodput.to_json(),
        }


def training(step_s: Figure, asked: Questions, *, units: int, world_size: int, power_w: float = 0.0) -> Training:
    """Return what a whole run takes.

    Args:
        step_s: Seconds of a step.
        asked: With the number of tokens or samples.
        units: Tokens or samples of one step.
        world_size: Devices that are paid for.
        power_w: Rated watts of a device; 0 where they are not known.
    """
    assert asked.num_units is not None, "a run without a length has no end"
    num_steps = math.ceil(asked.num_units / units)
    seconds = step_s.scaled(num_steps)
    hours = seconds.scaled(world_size / 3600)
    return Training(
        num_steps=num_steps,
        days=seconds.scaled(1 / _SECONDS_A_DAY),
        device_hours=hours,
        cost=None if asked.price is None else hours.scaled(asked.price),
        currency=asked.currency,
        energy_mwh=hours.scaled(power_w / _WATTS_A_MEGAWATT) if power_w else None,
    )


def reliability(step_s: Figure, failures: Failures, *, checkpoint_bytes: int, world_size: int) -> Reliability:
    """Return what failures cost a run that saves as often as loses least.

    A save takes bytes over bandwidth while the run waits; a failure loses half an interval and a restart.

    Args:
        step_s: Seconds of a step.
        failures: To be expected.
        checkpoint_bytes: Of one save.
        world_size: Devices, each of which may fail.

    Raises:
        ArgumentError: The world fails before it has saved and restarted: nothing is kept.
    """
    save_s = checkpoint_bytes / failures.storage
    failure_s = failures.hours * 3600 / world_size
    interval_s = max(math.sqrt(2 * save_s * failure_s) - save_s, step_s.value)
    lost = save_s / (interval_s + save_s) + (interval_s / 2 + failures.restart_s) / failure_s
    if lost >= 1:
        remedy = "{restart} fewer seconds" if failures.restart_s >= failure_s / 2 else "{storage} more bandwidth"
        raise ArgumentError(
            "failures",
            f"{world_size} devices fail every {failure_s:.0f} s, and a save of {checkpoint_bytes / 1e9:.3g} GB takes "
            f"{save_s:.0f} s, a restart {failures.restart_s:.0f} s: nothing would be kept; give {{failures}} more "
            f"hours, or {remedy}",
        )
    good = 1 - lost
    return Reliability(
        checkpoint_bytes=checkpoint_bytes,
        save_s=save_s,
        failure_s=failure_s,
        interval_s=interval_s,
        interval_steps=max(1, round(interval_s / step_s.value)),
        # Failures come in any order and saves take longer than bandwidth says: half of what is lost, to twice of it.
        goodput=Figure(value=good, known="modelled", low=max(0.0, 1 - 2 * lost), high=1 - lost / 2),
    )
