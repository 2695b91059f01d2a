"""The day's part of `benchmarks/fuzz_manifests.py`: manifests that are nearly right, through the whole of `check`."""

from __future__ import annotations

import fuzz_manifests
import fuzz_mutations
import pytest
from support.daily_part import PART

NUM_CASES = 12


def test_the_days_manifests_end_as_problems_with_their_lines(tmp_path):
    first = PART % 1000 * NUM_CASES
    found = fuzz_manifests.fuzz(range(first, first + NUM_CASES), seed=1, folder=tmp_path, report=lambda line: None)
    assert not found


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (b"composer3d = 1\ntrain.steps = 1\nprofiling.own.use = 'user_plugins:Raises'\n", None),
        (b"composer3d = 1\nmodel = 'user_faulty:build'\ntrain.steps = 1\n", "exit code 9"),
    ],
)
def test_what_is_wrong_is_seen(tmp_path, monkeypatch, text, fault):
    """The oracle itself: a command that ends otherwise than it should is a fault."""
    fuzz_mutations.make_folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    if fault:
        monkeypatch.setattr(fuzz_manifests, "composer3d", lambda arguments: 9)
    found, _ = fuzz_manifests.faults_of(tmp_path, fuzz_mutations.Case(text=text))
    assert (fault in found) if fault else found == []


def test_cases_are_a_function_of_seed_and_number():
    schema = fuzz_mutations.schema_of_all()
    cases = [fuzz_mutations.make_case(1, index, schema) for index in range(20)]
    assert cases == [fuzz_mutations.make_case(1, index, schema) for index in range(20)]
    assert len({case.text for case in cases}) == 20
    assert cases != [fuzz_mutations.make_case(2, index, schema) for index in range(20)]
