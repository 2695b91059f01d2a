"""Costs of a decoder's layouts in closed form, for searches in milliseconds, and the lint's findings."""

from __future__ import annotations

from decoder_traces import peak_bytes, static_traces

from composer3d.planning.costs.allocator import reserved_bytes
from composer3d.planning.costs.step_time import segment_time
from composer3d.planning.formulas.lint import lint
from composer3d.registry import Catalogue

ZERO_BUBBLE = 0.2  # of 1F1B's


class DecoderCosts:
    """Costs of a model as the search queries them."""

    def __init__(self, shape, hardware):
        self.shape, self.hardware, self.num_blocks = shape, hardware, shape.num_layers

    def can(self, setup):
        sizes = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.ffn)
        return all(size % setup.tp == 0 for size in sizes)

    def peak_bytes(self, setup):
        return peak_bytes(self.shape, setup)

    def step_s(self, setup):
        totals, after = [], 0.0
        for trace in static_traces(self.shape, setup):
            times = [(each.kind, each.count * segment_time(each, self.hardware).total_s) for each in trace.segments]
            totals.append(sum(seconds for kind, seconds in times if kind in ("forward", "backward")))
            after = max(after, sum(seconds for kind, seconds in times if kind not in ("forward", "backward")))
        ramp = (setup.pp - 1) / setup.stages_per_rank / setup.num_microbatches
        return max(totals) * (1 + ramp * (ZERO_BUBBLE if "Zero" in setup.schedule else 1)) + after


def advice_on(shape, setup, hardware, **options):
    """Return the lint's findings on a decoder's layout."""
    trace = max(static_traces(shape, setup), key=lambda trace: trace.memory.peak)
    return lint(
        trace,
        setup,
        hardware,
        num_parameters=shape.num_parameters,
        num_layers=shape.num_layers,
        total_bytes=reserved_bytes(trace.memory.peak, hardware.device),
        **{"offered": Catalogue.installed().offering, **options},
    )
