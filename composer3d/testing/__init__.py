"""The plugin author's kit: ranks as processes, fake process groups, collectives counted, gradients compared.

Every plugin answers four questions with it. Numerics: `assert_parity`, or `run_ranks` and `assert_gradients_equal`.
Collectives: `count_collectives`, exact, because a plugin that silently does nothing passes every comparison of numbers.
State: `gather_full`. Refusals: `pytest.raises` around `run_ranks` or inside `fake_world`. A codec on the wire:
`assert_codec_conforms`. Which combinations with others to try: `pairwise`. All of it with a plugin's own options, and
six headings more: `conformance_checks`.
"""

from __future__ import annotations

from composer3d.observation import Collective, Collectives, count_collectives
from composer3d.processes import fake_world
from composer3d.step import full, gather_full
from composer3d.testing.codec_conformance import assert_codec_conforms
from composer3d.testing.combining import Combined, Refused, combine
from composer3d.testing.conformance import Conformance, conformance_checks, run_conformance
from composer3d.testing.covering import pairwise
from composer3d.testing.parity import assert_gradients_equal
from composer3d.testing.plugin_options import Options, Row, installed_options, owners_of
from composer3d.testing.ranks import run_ranks
from composer3d.testing.verifying import Parity, assert_parity

__all__ = [
    "Collective",
    "Collectives",
    "Combined",
    "Conformance",
    "Options",
    "Parity",
    "Refused",
    "Row",
    "assert_codec_conforms",
    "assert_gradients_equal",
    "assert_parity",
    "combine",
    "conformance_checks",
    "count_collectives",
    "fake_world",
    "full",
    "gather_full",
    "installed_options",
    "owners_of",
    "pairwise",
    "run_conformance",
    "run_ranks",
]
