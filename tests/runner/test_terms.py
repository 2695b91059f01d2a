"""Which machine serves a run: of two that take each other for lost, one goes on."""

from __future__ import annotations

import threading

import pytest

from composer3d.runner.launching.seat import Fenced, Seat
from composer3d.runner.launching.terms import Term, Terms


def term(number, node, **members):
    return Term(
        number=number, node=node, name=f"host-{node}", members={int(key[1:]): value for key, value in members.items()}
    )


@pytest.fixture
def terms(tmp_path):
    return Terms(tmp_path)


def test_a_term_is_claimed_by_one_of_many(terms):
    start, won = threading.Barrier(8), []

    def claim(node):
        start.wait()
        if terms.claim(term(1, node, n0="a")):
            won.append(node)

    threads = [threading.Thread(target=claim, args=(node,)) for node in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert terms.after(0) == term(1, won[0], n0="a")
    assert terms.after(1) is None


def test_a_machine_that_serves_is_fenced_where_another_one_has_claimed_the_next_term(terms):
    first = term(1, 0, n0="a", n1="b")
    assert terms.claim(first) and terms.claim(term(2, 1, n1="b"))
    for act in (lambda seat: seat.left(1), lambda seat: seat.admit(1, "c"), Seat.check):
        with pytest.raises(Fenced) as caught:
            act(Seat(terms, first))
        assert str(caught.value) == "node 1 (host-1) serves the run since term 2"


def test_a_machine_that_serves_goes_on_without_another_one_in_a_term_of_its_own(terms):
    first = term(1, 0, n0="a")
    terms.claim(first)
    seat = Seat(terms, first)
    assert seat.admit(1, "b") == {"node": 0, "term": 2}
    assert seat.admit(1, "b") == {"node": 0, "term": 2}
    seat.check()
    seat.left(1)
    seat.left(1)
    assert terms.after(2) == seat.term == term(3, 0, n0="a")


def test_one_that_was_stopped_until_the_run_was_over_cannot_go_on(tmp_path):
    folder = tmp_path / "terms"
    folder.mkdir()
    terms, first = Terms(folder), term(1, 0, n0="a", n1="b")
    terms.claim(first)
    (folder / "term-1").unlink()
    folder.rmdir()
    for act in (lambda seat: seat.left(1), Seat.check):
        with pytest.raises(Fenced) as caught:
            act(Seat(terms, first))
        assert str(caught.value) == "the run has ended, or was begun again"


def test_a_term_whose_maker_died_before_it_wrote_counts_on_nobody(terms):
    (terms.folder / "term-1").touch()
    assert terms.after(0) == Term(number=1, node=-1, name="unknown", members={})
