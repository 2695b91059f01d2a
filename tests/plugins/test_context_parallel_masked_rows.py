"""Mixtures of experts that read and write rows by masks and indices, over a sharded sequence, beside one device."""

from __future__ import annotations

import functools

import pytest
from support.masked_mixtures import WAYS, Language
from support.sequence_steps import context, padded_batch, sequence_steps

from composer3d.testing import run_ranks

TENSOR = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true\n"
EXPERTS = context(mesh="ep = 2", more='[sharding.expert_parallel]\nexperts = ["layers.*.mixture.experts"]\n')
LAYOUTS = {
    "experts": EXPERTS,
    "gather": context(),
    "ring": context("ring", more="balanced = false\n"),
    "tensor": TENSOR,
}


def assert_equal_to_one_device(ways, text, degree=2):
    work = [(functools.partial(Language, way), text, padded_batch) for way in ways]
    results = run_ranks(sequence_steps, degree, work, timeout_s=600)
    wrong = [(ways[at], *each[:3]) for found in results for at, each in enumerate(found) if not max(each[:2]) <= 1e-12]
    assert wrong == []


@pytest.mark.slow
@pytest.mark.parametrize("text", LAYOUTS.values(), ids=LAYOUTS)
def test_every_way_of_writing_rows_equals_one_device(text):
    assert_equal_to_one_device(WAYS, text)
