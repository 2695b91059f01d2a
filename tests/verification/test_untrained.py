"""Parameters that nothing trains, found among the gradients of one device."""

from __future__ import annotations

import torch

from composer3d.verification.evidence.module_outputs import Output
from composer3d.verification.evidence.untrained import notes_of_untrained, untrained

ONE = torch.ones(2)
ZERO = 0.0 * ONE
KNOWN = {"a.weight": ONE, "k.weight": ONE, "e.weight": ZERO}
STEPS = [
    KNOWN | {"k.bias": ZERO, "router.weight": ZERO, "lora.a": ZERO},
    KNOWN | {"k.bias": 1e-18 * ONE, "router.weight": 1e-18 * ONE, "lora.a": ONE},
]
TRAINED = ["a.weight", "k.weight", "k.bias", "router.weight", "e.weight", "lora.a", "detached.weight"]


def output(num_rows):
    return Output(shape=(num_rows, 2), total=0.0, size=0.0, powers=(0.0,), sizes=(0.0,))


def test_a_bias_of_keys_and_an_adapter_that_begins_as_zeros_are_none():
    assert untrained(TRAINED, STEPS) == ("router.weight", "e.weight", "detached.weight")


def test_zeros_of_a_single_step_say_nothing():
    assert untrained(TRAINED, STEPS[:1]) == ("detached.weight",)


def test_experts_that_no_token_chose_are_not_named():
    outputs = [{"router": [output(3)], "e": [output(0)], "detached": [output(0), output(1)]}]
    (note,) = notes_of_untrained(untrained(TRAINED, STEPS), outputs)
    assert note.startswith("no gradient reaches router.weight, detached.weight, on one device either, so that nothing ")
    assert not list(notes_of_untrained(("e.weight",), outputs))
