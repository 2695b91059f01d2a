from __future__ import annotations

import pytest

from composer3d.composition.closing import close_all


def failing(text, called):
    def close():
        called.append(text)
        raise RuntimeError(text)

    return close


def test_one_that_fails_keeps_none_of_the_others_from_closing():
    called = []
    with pytest.raises(RuntimeError, match="second"):
        close_all([failing("first", called), failing("second", called), lambda: called.append("third")])
    assert called == ["first", "second", "third"]


def test_what_ended_the_run_is_not_hidden_by_what_fails_after_it():
    called, error = [], ValueError("the batch is bad")
    close_all([failing("first", called), lambda: called.append("second")], error=error)
    assert called == ["first", "second"]
    assert error.__notes__ == ["closing failed too: RuntimeError: first"]
