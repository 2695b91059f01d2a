"""Cases of a file that are selected: a common fixture computes no others."""

from __future__ import annotations

__all__ = ["selected"]


def selected(request, *names):
    """Return the values that the parameters of a file's tests have, where -m, -k and the like have left them.

    Args:
        request: Of the fixture.
        names: Parameters; of one the values are returned, of several tuples of them.
    """
    here = (item.callspec.params for item in request.session.items if item.path == request.path if _has(item, names))
    found = {tuple(params[name] for name in names) for params in here}
    return {value for (value,) in found} if len(names) == 1 else found


def _has(item, names):
    return hasattr(item, "callspec") and set(names) <= item.callspec.params.keys()
