"""The guide for authors of plugins names every example, hook, phase, point, role and claim, in their order."""

from __future__ import annotations

import re
import subprocess
import sys
import typing

from support.documents import code, files, read, table

from composer3d import Phase, Role, StepPoint
from composer3d.examples import shipped_examples
from composer3d.hookspecs import HookSpecs
from composer3d.registry import Claim

GUIDE = read("composer3d/examples/README.md")


def section(heading):
    return re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", GUIDE, re.MULTILINE | re.DOTALL)[1]


def pictured(heading):
    return "\n".join(line for line in section(heading).splitlines() if line.startswith("    "))


def test_every_example_is_listed():
    named = [name for row in table(GUIDE, "example", "shows") for name in code(row[0])]
    assert sorted(named) == sorted(shipped_examples())


def test_every_hook_is_in_the_order_of_calls():
    hooks = {name.removeprefix("composer3d_") for name in vars(HookSpecs) if name.startswith("composer3d_")}
    text = section("Hooks in the order of their calls")
    assert {hook for hook in hooks if not re.search(rf"\b{hook}\b", text)} == set()
    order = ["configure", "convert", "group_options", "split", "load_parameter", "schedule", "optimizer", "close"]
    places = [re.search(rf"\b{hook}\b", pictured("Hooks in the order of their calls")).start() for hook in order]
    assert places == sorted(places)


def test_phases_and_points_are_in_their_order():
    assert [code(row[0])[0] for row in table(GUIDE, "phase", "what belongs there")] == [phase.name for phase in Phase]
    found = re.findall(r"\b[A-Z]+(?:_[A-Z]+)*\b", pictured("Points of a step"))
    assert [name for name in found if name in StepPoint.__members__] == [point.name for point in StepPoint]


def test_every_role_and_claim_is_explained():
    rows = table(GUIDE, "role", "ranks along it have", "example")
    assert [code(row[0])[0] for row in rows] == [role.name for role in Role]
    assert {claim for claim in typing.get_args(Claim) if f"`{claim}`" not in section("Claims")} == set()


def test_two_ranks_run_inside_a_notebook(tmp_path):
    # As a kernel does: code that is no file, in a process with another thread.
    cells = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    cells += files(GUIDE)["notebook.py"] + "print(len(losses))\n"
    done = subprocess.run(
        [sys.executable, "-P", "-"], input=cells, cwd=tmp_path, capture_output=True, text=True, timeout=1200
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr
