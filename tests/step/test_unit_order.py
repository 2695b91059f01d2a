"""The order of units that ranks agree on through the store."""

from __future__ import annotations

import threading

import torch.distributed as dist

from composer3d.observation.rank_questions import RankQuestions
from composer3d.step.units.unit_order import UnitOrder


def order(store, rank):
    questions = RankQuestions(store=store, prefix="a", rank=rank)
    return questions, lambda: UnitOrder(
        questions=questions, layout=None, rank=rank, ranks=(0, 1), describe=str, timeout_s=30.0
    )


def test_a_rank_that_is_asked_before_it_has_an_order_is_waited_for():
    store, asked = dist.HashStore(), []
    questions, make = order(store, 1)

    def late():
        while store.add("a/questions", 0) < 1:
            pass
        while not store.check(["a/answer/1/1"]):
            questions.answer()
        asked.append(store.get("a/answer/1/1"))
        made = make()
        made.begin(1)
        made.passes(0)

    other = threading.Thread(target=late, daemon=True)
    other.start()
    first = order(store, 0)[1]()
    first.begin(1)
    first.passes(0)
    other.join(30.0)
    assert asked == [b"null"] and not other.is_alive()
