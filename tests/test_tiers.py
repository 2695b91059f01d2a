"""Fast and slow tests: every guarantee keeps a fast one, and the parts of days are all of the slow."""

from __future__ import annotations

import ast
import re

import pytest
from support.daily_part import NUM_PARTS, header, is_of_day
from support.documents import read
from support.tiers import COLLECTED, TESTS, is_chosen, read_choice, split

CHOICE = read_choice()
# Nothing of these is for every day: a GPU, an agent that takes its time to notice.
WITHOUT_FAST = {
    "plugins/test_offload_gpu.py",
    "jobs/test_slurm_cluster.py",
    "jobs/test_ray_cluster.py",
    "benchmarks/test_gpu.py",
    "diagnostics/test_doctor_torchrun.py",
}


@pytest.fixture
def collected(request):
    return request.config.stash[COLLECTED]


def test_a_case_is_chosen_by_itself_or_with_its_test():
    choice = {"a/test_b.py": {"test_c": "all", "test_d": ["x", "y[0]"], "test_e": {"all_but": ["z"]}}}
    nodes = {
        "test_c": True,
        "test_c[x]": True,
        "test_d[x]": True,
        "test_d[y[0]]": True,
        "test_d[z]": False,
        "test_e[z]": False,
        "test_e[x]": True,
        "test_f": False,
    }
    assert {node: is_chosen(choice, f"tests/a/test_b.py::{node}") for node in nodes} == nodes
    assert not is_chosen(choice, "tests/a/test_c.py::test_c")


def test_what_is_chosen_is_there(collected):
    for file, tests in CHOICE.items():
        defined = {
            node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)
        }
        assert tests.keys() <= defined, file
        for test, cases in tests.items():
            there = collected.cases.get((file, test), set())
            named = set() if cases == "all" else set(cases["all_but"] if isinstance(cases, dict) else cases)
            assert len(there) <= 1 or named <= there, (file, test, named - there)


def test_every_guarantee_has_a_fast_test(collected):
    for row in re.findall(r"^\| .* \|$", read("tests/README.md"), re.MULTILINE):
        proofs = [split(node)[:2] for node in re.findall(r"`(tests/[^`]*::[^`]*)`", row)]
        known = [proof for proof in proofs if proof[0] in collected.files]
        assert len(known) < len(proofs) or not proofs or collected.fast.intersection(known), row


def test_every_file_has_a_fast_test_or_guarantees_that_have_one_elsewhere(collected):
    whole = {file for file in collected.files if len({test for name, test in collected.cases if name == file}) > 1}
    named = {split(node)[0] for node in re.findall(r"`(tests/[^`]*::[^`]*)`", read("tests/README.md"))}
    assert whole - {file for file, _ in collected.fast} <= WITHOUT_FAST | named


def test_the_parts_of_days_in_a_row_are_every_test_once():
    scopes = [f"tests/test_a.py::test_b[{number}]" for number in range(1000)]
    parts = [[scope for scope in scopes if is_of_day(scope, day)] for day in range(739_000, 739_000 + NUM_PARTS)]
    assert sorted(scope for part in parts for scope in part) == sorted(scopes)
    assert min(map(len, parts)) > 1000 / NUM_PARTS / 2
    assert parts[0] == [scope for scope in scopes if is_of_day(scope, 739_000 + NUM_PARTS)]


def test_the_part_is_named():
    assert (
        header(739_000)
        == f"slow tests: part {739_000 % NUM_PARTS + 1} of {NUM_PARTS}, that of COMPOSER3D_MATRIX_PART=739000"
    )
