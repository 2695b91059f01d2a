from __future__ import annotations

import itertools
import random

import pytest

from composer3d import OrderError, Phase, StepAction, StepPoint, Transform
from composer3d.transform import order, resolve


def transform(name, phase=Phase.DATA, **options):
    return Transform(
        name=name, phase=phase, select=lambda model, context: [""], apply=lambda model, fqns, context: fqns, **options
    )


def action(name, point=StepPoint.BEGIN, **options):
    return StepAction(name=name, point=point, run=lambda state: None, **options)


def names(items):
    return [item.name for item in items]


def refusal(function, *items):
    with pytest.raises(OrderError) as caught:
        function(items)
    return str(caught.value)


def test_phases_are_in_the_order_that_works():
    assert [phase.name for phase in Phase] == [
        "SPLIT",
        "CONVERT",
        "TENSOR",
        "RECOMPUTE",
        "COMPILE",
        "DATA",
        "COMMUNICATE",
        "MATERIALISE",
    ]


def test_phases_come_before_names():
    items = [transform(f"{9 - phase}", phase) for phase in Phase]
    assert names(order(reversed(items))) == ["9", "8", "7", "6", "5", "4", "3", "2"]


def test_points_come_before_names():
    items = [action(chr(ord("z") - point), point) for point in StepPoint]
    assert [item.point for item in order(sorted(items, key=lambda item: item.name))] == list(StepPoint)


def test_names_decide_where_nothing_else_does():
    assert names(order([transform("c"), transform("a"), transform("b")])) == ["a", "b", "c"]
    assert order([]) == ()


def test_after_and_before_decide_within_a_phase():
    assert names(order([transform("a", after=("c",)), transform("b"), transform("c")])) == ["b", "c", "a"]
    assert names(order([transform("a"), transform("b"), transform("c", before=("a",))])) == ["b", "c", "a"]
    assert names(order([action("a", after=("b",)), action("b", after=("c",)), action("c")])) == ["c", "b", "a"]


def test_constraints_on_absent_names_do_nothing():
    assert names(order([transform("b", after=("x",)), transform("a", before=("y",))])) == ["a", "b"]


def test_constraints_along_the_phases_hold_already():
    items = [transform("a", Phase.DATA, after=("z",)), transform("z", Phase.TENSOR, before=("a",))]
    assert names(order(items)) == ["z", "a"]


def test_constraints_against_the_phases_are_refused():
    early, late = transform("tp", Phase.TENSOR, after=("dp",)), transform("dp", Phase.DATA)
    assert refusal(order, early, late) == '"dp" cannot come before "tp": its phase is later'
    early, late = transform("tp", Phase.TENSOR), transform("dp", Phase.DATA, before=("tp",))
    assert refusal(order, early, late) == '"dp" cannot come before "tp": its phase is later'


def test_a_cycle_is_shown():
    a, b, c = transform("a", after=("c",)), transform("b", after=("a",)), transform("c", after=("b",))
    for items in itertools.permutations([a, b, c]):
        message = refusal(order, *items)
        start, *rest = message.removeprefix("these cannot be ordered: ").split(" -> ")
        assert start == rest[-1]
        # Read from left to right, the cycle says who comes before whom.
        follows = {'"a"': '"b"', '"b"': '"c"', '"c"': '"a"'}
        assert [follows[name] for name in [start, *rest[:-1]]] == rest
    assert refusal(order, transform("a", after=("a",))) == 'these cannot be ordered: "a" -> "a"'


def test_names_are_unique_over_all_phases():
    message = refusal(order, transform("fsdp", Phase.DATA), transform("fsdp", Phase.TENSOR))
    assert message == 'two plugins declare "fsdp"; names must differ'


def test_the_order_of_declaration_means_nothing():
    items = [
        transform("a", after=("d",)),
        transform("b", Phase.TENSOR),
        transform("c", before=("a",)),
        transform("d"),
        transform("e", Phase.COMPILE, before=("f",)),
        transform("f", Phase.COMPILE),
    ]
    results = {tuple(names(order(permutation))) for permutation in itertools.permutations(items)}
    assert results == {("b", "e", "f", "c", "d", "a")}


def test_any_graph_is_sorted_alike_from_any_permutation():
    generator = random.Random(0)
    for _ in range(30):
        ranked = [f"t{number}" for number in generator.sample(range(40), 12)]
        items = [
            transform(name, after=tuple(generator.sample(ranked[:position], generator.randint(0, min(3, position)))))
            for position, name in enumerate(ranked)
        ]
        expected = names(order(items))
        for item in items:
            assert all(expected.index(first) < expected.index(item.name) for first in item.after)
        for _ in range(5):
            generator.shuffle(items)
            assert names(order(items)) == expected


def test_resolve_orders():
    assert names(resolve([transform("b"), transform("a"), transform("t", Phase.TENSOR)])) == ["t", "a", "b"]


def test_requires_says_why():
    wants = transform("codec", requires={"ddp": "it hooks into its buckets"})
    message = '"codec" requires "ddp", which the manifest does not have: it hooks into its buckets'
    assert refusal(resolve, wants) == message
    assert names(resolve([wants, transform("ddp")])) == ["codec", "ddp"]


def test_conflicts_say_why_whoever_declares_them():
    one = transform("ddp", conflicts={"offload": "buckets stay on the device"})
    message = '"ddp" cannot be combined with "offload": buckets stay on the device'
    assert refusal(resolve, one, transform("offload")) == message
    assert refusal(resolve, transform("offload"), one) == message
    assert names(resolve([one])) == ["ddp"]
