"""A reduce-scatter and a codec of one's own: both conform."""

from __future__ import annotations

import pytest

from composer3d.testing import assert_codec_conforms

EXAMPLE = ("plugin-communication", "wire_plugin", "OrderedSums")


def test_it_does_something(effect):
    assert effect(*EXAMPLE) == "changes collectives"


def test_its_codec_conforms(copied):
    copied("plugin-communication")
    from wire_plugin import Halves

    assert_codec_conforms(Halves())


@pytest.mark.slow
def test_it_conforms(conforms):
    conforms(*EXAMPLE)
