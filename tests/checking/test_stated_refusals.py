from __future__ import annotations

import sys
from importlib.metadata import entry_points

import pytest

from composer3d.checking.stated_refusals import Refusal, stated_refusals

SOURCE = """
from composer3d import ComposerError, Transform
from composer3d.errors import PluginError

WHY = "both make " + "the optimizer"

class Refusing:
    def configure(self, degree, kind):
        if degree > 1:
            raise PluginError(f"degree = {degree} does not divide {kind!r}", hint="write degree = 1")
        if kind:
            reason = "a reason"
            raise PluginError(reason)
        if self.other:
            raise ValueError("of python's own")
        raise PluginError(self.text())

    def shard(self, reason_of):
        kind = "stated elsewhere"
        return Transform(
            name="x",
            conflicts={"first": WHY, **({"second": reason_of} if self.other else {})},
            requires=dict.fromkeys(("third", "fourth"), "it gathers"),
        )
"""


@pytest.fixture
def refusing(tmp_path, monkeypatch):
    (tmp_path / "refusing_plugin.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield __import__("refusing_plugin").Refusing
    del sys.modules["refusing_plugin"]


def test_messages_hints_and_names_are_read_in_the_order_of_the_source(refusing):
    assert stated_refusals(refusing) == [
        Refusal(message="degree = ... does not divide ...", hint="write degree = 1"),
        Refusal(message="a reason"),
        Refusal(message='cannot be combined with "first": both make the optimizer'),
        Refusal(message='cannot be combined with "second": ...'),
        Refusal(message='needs "third": it gathers'),
        Refusal(message='needs "fourth": it gathers'),
    ]


@pytest.mark.parametrize("point", entry_points(group="composer3d"), ids=lambda point: point.name)
def test_sources_of_installed_plugins_are_read(point):
    found = stated_refusals(point.load())
    assert len(found) == len(set(found))
    assert all(refusal.message.strip(". ") for refusal in found)
