"""A plugin that writes down the spans it is given."""

from __future__ import annotations

from composer3d import hookimpl, plugin


class Seen:
    """(name, axis, unit or group) of every span."""

    def __init__(self):
        self.seen = []

    def begin(self, name, attributes):
        self.seen.append((name, attributes.get("axis"), attributes.get("unit") or attributes.get("group")))

    def end(self, token):
        assert token is None


@plugin(family="profiling")
class Names:
    """Remember the names of spans."""

    @hookimpl
    def composer3d_recorder(self, context):
        return context.state.setdefault(self, Seen())
