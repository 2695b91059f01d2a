"""Parts of a node that its ranks share: the host's memory, and a drive."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from composer3d.planning.hardware.typed_quantities import CONFIG, Bandwidth, Part

__all__ = ["ASSUMED_DRIVE", "ASSUMED_MEMORY", "Drive", "RandomAccess"]

_ASSUMED = "assumed"
_DEVICES = 8  # for so many devices of a node there is one of what is assumed


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class RandomAccess:
    """Memory of a host.

    Args:
        name: Of the technology.
        bandwidth: Bytes a second that processors read and write in it.
        per: Owner of the bandwidth: a `device`, or a whole `node`, whose ranks share it.
        efficiency: The part of it that long loops reach.
        source: Of the figures.
    """

    name: str
    bandwidth: Bandwidth
    per: Literal["device", "node"]
    efficiency: Part = 0.8
    source: str = Field(min_length=1)

    @property
    def is_assumed(self) -> bool:
        """Whether no file states it."""
        return self.source == _ASSUMED

    @property
    def reached(self) -> float:
        """Bytes a second that long loops read and write."""
        return self.bandwidth * self.efficiency

    def of_one_rank(self, num_ranks: int) -> RandomAccess:
        """Return one rank's part, where so many are on a node."""
        parts = _parts(num_ranks, per=self.per, is_assumed=self.is_assumed)
        return replace(self, bandwidth=self.bandwidth / parts, per="device")


@dataclass(frozen=True, kw_only=True, config=CONFIG)
class Drive:
    """Drive, or several as one, that the ranks of a node write to.

    Args:
        name: Of the technology.
        read: Bytes a second that long requests read.
        write: Bytes a second that long requests write.
        per: Owner of the bandwidths: a `device`, or a whole `node`, whose ranks share them.
        source: Of the figures.
    """

    name: str
    read: Bandwidth
    write: Bandwidth
    per: Literal["device", "node"]
    source: str = Field(min_length=1)

    @property
    def is_assumed(self) -> bool:
        """Whether no file states it."""
        return self.source == _ASSUMED

    def of_one_rank(self, num_ranks: int) -> Drive:
        """Return one rank's part, where so many are on a node."""
        parts = _parts(num_ranks, per=self.per, is_assumed=self.is_assumed)
        return replace(self, read=self.read / parts, write=self.write / parts, per="device")


def _parts(num_ranks: int, *, per: str, is_assumed: bool) -> int:
    return 1 if per == "device" else min(num_ranks, _DEVICES) if is_assumed else num_ranks


# Two processors of eight channels of DDR5-4800, as in DGX H100, and one drive as data centres have it. Both are assumed
# where a hardware file says nothing of them, and plans that depend on them say so.
ASSUMED_MEMORY = RandomAccess(name="16 channels of DDR5-4800", bandwidth=614.4e9, per="node", source=_ASSUMED)
ASSUMED_DRIVE = Drive(name="one NVMe drive of PCIe 4.0 x4", read=6.5e9, write=4e9, per="node", source=_ASSUMED)
