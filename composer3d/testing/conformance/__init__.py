"""Conformance of plugins: a suite that a plugin's author parametrises with the plugin's options.

It answers ten headings, each with a named verdict where it does not hold: effect, numerics, collectives, state,
refusals, order, plan, purpose, overhead, and the matrix beside the other installed plugins.
"""

from __future__ import annotations

from composer3d.testing.conformance.conformance_case import Conformance
from composer3d.testing.conformance.headings import NonConformance
from composer3d.testing.conformance.refused_options import accepted_options
from composer3d.testing.conformance.suite import (
    HEADINGS,
    ConformanceCheck,
    Finding,
    conformance_checks,
    run_conformance,
)

__all__ = [
    "HEADINGS",
    "Conformance",
    "ConformanceCheck",
    "Finding",
    "NonConformance",
    "accepted_options",
    "conformance_checks",
    "run_conformance",
]
