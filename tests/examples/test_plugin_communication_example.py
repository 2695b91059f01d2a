"""A reduce-scatter and a codec of one's own: both conform."""

from __future__ import annotations

import re

import pytest

import composer3d
from composer3d.testing import assert_codec_conforms

EXAMPLE = ("plugin-communication", "wire_plugin", "OrderedSums")


def test_it_does_something(effect):
    assert effect(*EXAMPLE) == "changes collectives"


def test_its_codec_conforms(copied):
    copied("plugin-communication")
    from wire_plugin import Halves

    assert_codec_conforms(Halves())


def test_its_codec_needs_no_plugin(copied):
    """The lines that the manifest shows, in the place of its plugin's table."""
    path = copied("plugin-communication") / "run.toml"
    before, _, lines = path.read_text().partition("[communication.ordered_sums]")
    path.write_text(before + "".join(f"{line[2:]}\n" for line in lines.splitlines() if re.match(r"# (\[|grad)", line)))
    found = composer3d.check(path)
    assert found.ok and "Halves" in path.read_text(), found.problems


@pytest.mark.slow
def test_it_conforms(conforms):
    conforms(*EXAMPLE)
