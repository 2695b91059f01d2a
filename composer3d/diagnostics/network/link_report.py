"""Median links of every axis, and the links that are slow beside them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from composer3d.diagnostics.network.link_timing import Link

__all__ = ["AxisReport", "NetworkReport", "report_of"]

# Of the axis' median. Fewer links than that have no median that says anything.
SLOW_LATENCY, SLOW_BANDWIDTH, FEWEST = 3.0, 0.5, 3


@dataclass(frozen=True, kw_only=True)
class AxisReport:
    """Links of an axis.

    Args:
        axis: Its name.
        degree: Ranks of each of its groups.
        backend: Of its process groups.
        num_links: Pairs of ranks that were measured, in all groups.
        latency_s: Their median.
        bytes_per_s: Their median.
    """

    axis: str
    degree: int
    backend: str
    num_links: int
    latency_s: float
    bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class NetworkReport:
    """Answer of `doctor --network`.

    Args:
        axes: Those with several ranks, outermost first.
        slow: Links with three times the median latency of their axis, or half its bandwidth; the slowest first.
        hosts: Of the ranks.
    """

    axes: tuple[AxisReport, ...]
    slow: tuple[Link, ...]
    hosts: Mapping[int, str]

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints."""
        slow = [{**asdict(link), "slower": self._factor(link), "hosts": self._hosts_of(link)} for link in self.slow]
        return {"axes": [asdict(axis) for axis in self.axes], "slow": slow}

    def lines(self) -> list[str]:
        """Return the report as text."""
        found = []
        for axis in self.axes:
            links = "link" if axis.num_links == 1 else "links"
            found.append(
                f"{axis.axis} = {axis.degree} on {axis.backend}: {axis.latency_s * 1e6:.1f} us, "
                f"{axis.bytes_per_s / 1e9:.2f} GB/s, the medians of {axis.num_links} {links}"
            )
            if axis.num_links < FEWEST:
                found.append(f"  fewer than {FEWEST} links have no median by which one is slow")
        for link in self.slow:
            one, other = link.ranks
            places = " and ".join(dict.fromkeys(self._hosts_of(link)))
            found.append(
                f"slow: {link.axis}, rank {one} to rank {other} on {places}: {link.latency_s * 1e6:.1f} us, "
                f"{link.bytes_per_s / 1e9:.2f} GB/s, {self._factor(link):.1f} times slower than the median"
            )
        if not self.slow and any(axis.num_links >= FEWEST for axis in self.axes):
            found.append("no link is slow beside the others of its axis")
        return found

    def _factor(self, link: Link) -> float:
        (axis,) = [axis for axis in self.axes if axis.axis == link.axis]
        return factor_of(link, latency_s=axis.latency_s, bytes_per_s=axis.bytes_per_s)

    def _hosts_of(self, link: Link) -> list[str]:
        return [self.hosts[rank] for rank in link.ranks]


def factor_of(link: Link, *, latency_s: float, bytes_per_s: float) -> float:
    """Return how much slower a link is than medians: the larger of its latency's and its bandwidth's factor."""
    return max(link.latency_s / latency_s, bytes_per_s / link.bytes_per_s)


def report_of(
    links: Sequence[Link], *, degrees: Mapping[str, int], backends: Mapping[str, str], hosts: Mapping[int, str]
) -> NetworkReport:
    """Judge links, each against the median of its axis in the same measurement.

    Args:
        links: Of all ranks.
        degrees: Of the axes, in their order.
        backends: Of their process groups.
        hosts: By rank.
    """
    axes, slow = [], []
    for axis, degree in degrees.items():
        own = [link for link in links if link.axis == axis]
        if not own:
            continue
        latency_s = statistics.median(link.latency_s for link in own)
        bytes_per_s = statistics.median(link.bytes_per_s for link in own)
        axes.append(
            AxisReport(
                axis=axis,
                degree=degree,
                backend=backends[axis],
                num_links=len(own),
                latency_s=latency_s,
                bytes_per_s=bytes_per_s,
            )
        )
        if len(own) >= FEWEST:
            slow += [
                (factor_of(link, latency_s=latency_s, bytes_per_s=bytes_per_s), link)
                for link in own
                if link.latency_s > SLOW_LATENCY * latency_s or link.bytes_per_s < SLOW_BANDWIDTH * bytes_per_s
            ]
    slow.sort(key=lambda pair: (-pair[0], pair[1].ranks))
    return NetworkReport(axes=tuple(axes), slow=tuple(link for _, link in slow), hosts=hosts)
