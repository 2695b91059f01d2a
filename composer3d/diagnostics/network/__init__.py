"""Measurement of the links of every axis of a mesh, and the slow ones among them."""

from __future__ import annotations

from composer3d.diagnostics.network.link_report import NetworkReport, report_of
from composer3d.diagnostics.network.link_timing import Link, ping, time_links
from composer3d.diagnostics.network.probe import probe

__all__ = ["Link", "NetworkReport", "ping", "probe", "report_of", "time_links"]
