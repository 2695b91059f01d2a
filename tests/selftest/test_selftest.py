"""Self-tests: outcomes of items, the shipped covering set, reports without names, and exit codes."""

from __future__ import annotations

import getpass
import importlib
import json
import socket
import sys
import time
from pathlib import Path

import covering_set
import pytest
import tomli
from support.sockets import watched_listeners

from composer3d.cli import main
from composer3d.errors import PluginError
from composer3d.registry import Catalogue
from composer3d.selftest import SelfTest, SelfTestItem
from composer3d.selftest.machine_facts import machine_facts, scrubbed
from composer3d.selftest.proof_rows import ProofRow, proof_rows
from composer3d.selftest.step_ratio import ratio_of

SET = json.loads(covering_set.SHIPPED.read_text())
self_test = importlib.import_module("composer3d.selftest.self_test")
FAULTY = """composer3d = 1
model = { use = "composer3d.models:llama", args = { dim = 32, num_layers = 1, num_heads = 2 } }
data = { use = "synthetic", seq_len = 16, vocab_size = 64 }
train.steps = 1
run.device = "cpu"
"""


def row(manifest):
    return ProofRow(manifest=manifest, ranks=1, seconds=1.0, pairs=0.5, plugins=1, absent=())


def test_the_shipped_set_is_of_the_matrix_on_record():
    record = json.loads(covering_set.RESULT.read_text())["cells"]
    proven = {covering_set.manifest_of(covering_set.whole(cell["row"])) for cell in record}
    assert len(SET) == covering_set.NUM_ROWS
    assert {entry["manifest"] for entry in SET} <= proven
    shares = [entry["pairs"] for entry in SET]
    assert shares == sorted(shares) and shares[-1] > 0.95


def test_a_package_of_other_plugins_ships_rows_of_its_own(tmp_path, monkeypatch):
    package = tmp_path / "proven_elsewhere"
    package.mkdir()
    (package / "__init__.py").touch()
    entry = {"manifest": "composer3d = 1\n", "ranks": 1, "seconds": 1.0, "pairs": 1.0}
    (package / "covering_set.json").write_text(json.dumps([entry]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(Catalogue, "packages", lambda self: ("no_such_package", "proven_elsewhere", "tomli"))
    (row,) = proof_rows(device="cpu", max_ranks=1)
    assert tomli.loads(row.manifest) == {"composer3d": 1, "run": {"device": "cpu"}}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_rows_are_for_this_machine(device, monkeypatch):
    load = Catalogue.load

    def without_an_extra(catalogue, name):
        if name == "wandb":
            raise PluginError("wandb is not installed")
        return load(catalogue, name)

    monkeypatch.setattr(Catalogue, "load", without_an_extra)
    rows = proof_rows(device=device, max_ranks=2)
    assert {each.ranks for each in rows} == {1, 2}
    tables = [tomli.loads(each.manifest) for each in rows]
    assert {each["run"]["device"] for each in tables} == {device}
    assert not any("wandb" in each.get("profiling", {}) for each in tables)
    absent = [each.absent for each in rows]
    assert absent.count(("wandb",)) == sum("profiling.wandb" in each["manifest"] for each in SET if each["ranks"] < 3)


@pytest.mark.parametrize(
    ("what", "script", "outcome", "text"),
    [
        ("proof", "print('fast')", "holds", "fast"),
        ("proof", "import sys; print('other'); sys.exit(1)", "differs", "2 ranks\nother"),
        ("ratio", "raise ValueError('x')", "failed", "ValueError: x"),
        ("proof", "import time; time.sleep(60)", "cut off", "2 ranks"),
    ],
)
def test_outcomes_of_items(what, script, outcome, text):
    ends = time.monotonic() + (0.5 if "sleep" in script else 60)
    item = self_test._run(what, "cpu", "2 ranks", ["-c", script], ends, shows=True)
    assert item.outcome == outcome and text in item.text


def test_what_hangs_is_failed(monkeypatch):
    monkeypatch.setattr(self_test, "_ITEM_S", 0.3)
    item = self_test._run("proof", "cpu", "2 ranks", ["-c", "import time; time.sleep(60)"], time.monotonic() + 60)
    assert (item.outcome, item.text) == ("failed", "2 ranks: no answer in 0 s")


def item(what, outcome):
    return SelfTestItem(what=what, device="cpu", outcome=outcome, text="", seconds=1.0, pairs=0.25)


@pytest.mark.parametrize(
    ("items", "ok"),
    [
        ([item("proof", "holds"), item("network", "holds")], True),
        ([item("proof", "holds"), item("proof", "cut off")], True),
        ([item("network", "holds")], False),
        ([item("proof", "holds"), item("proof", "differs")], False),
        ([item("proof", "holds"), item("network", "failed")], False),
    ],
)
def test_what_is_good(items, ok):
    found = SelfTest(machine={}, items=tuple(items), left=3, absent=())
    assert found.ok is ok
    assert found.summary.endswith(", 3 more need more minutes")


def test_time_that_is_up_before_a_proof_is_told():
    found = SelfTest(machine={}, items=(item("network", "cut off"),), left=3, absent=())
    assert found.summary == "no composition was begun before time was up, 3 more need more minutes"


def test_links_are_measured_in_a_part_of_the_time(monkeypatch):
    left = []

    def measured(folder, device, ranks, until):
        left.append(until - time.monotonic())
        return item("network", "cut off")

    monkeypatch.setattr(self_test, "_network", measured)
    monkeypatch.setattr(self_test, "proof_rows", lambda **_: [])
    self_test.self_test(minutes=100.0)
    assert all(1700 < each <= 1800 for each in left) and left


def test_reports_have_no_names():
    told = scrubbed(f"{socket.gethostname()} {Path.home()}/x {getpass.getuser()} {Path.cwd()}/y 10.1.2.3 at line 4")
    for name in (socket.gethostname(), str(Path.home()), "10.1.2.3", str(Path.cwd())):
        assert name not in told.split()
    assert told.endswith("/y ADDRESS at line 4")
    assert "host" not in machine_facts()
    assert machine_facts(with_host=True)["host"] == socket.gethostname()


def test_ratios():
    rows = [{"step_s": step, "tokens": 100, "loss": loss, "peak_gib": 0.0} for step, loss in ((1, 2), (0.5, 2), (1, 2))]
    found = ratio_of(rows)
    assert (found["ratio"], found["control"], found["loss_apart"], found["tokens_per_s"]) == (2.0, 1.0, 0.0, 200.0)


def test_a_report_that_exists_is_not_overwritten(tmp_path, capsys):
    target = tmp_path / "report.json"
    target.write_text("mine")
    assert main(["selftest", "--output", str(target)]) == 2
    assert target.read_text() == "mine"
    assert "exists and is not overwritten" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("tables", "code"), [("", 0), (None, 1)])
def test_a_machine_is_proven_or_told_what_differs(tables, code, monkeypatch, capsys, tmp_path):
    wrong = '[communication.wrong]\nuse = "support.nonconforming_plugins:WrongGradients"\n'
    rows = [row(FAULTY + (wrong if tables is None else tables))]
    monkeypatch.setattr(self_test, "proof_rows", lambda **_: list(rows))
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(sys, "path", list(sys.path))
    report = tmp_path / "report.json"
    with watched_listeners() as addresses:
        assert main(["selftest", "--minutes", "5", "--output", str(report)]) == code
    assert addresses == {"127.0.0.1"}
    told = capsys.readouterr().out
    found = json.loads(report.read_text())
    assert found["ok"] is (code == 0)
    assert [(each["what"], each["outcome"]) for each in found["items"]] == [
        ("network", "holds"),
        ("proof", "holds" if code == 0 else "differs"),
    ]
    assert f"{1 - code} of 1 compositions proven" in told
    assert code == 0 or "gradients differ by more than" in told


@pytest.mark.slow
def test_a_step_is_that_of_a_hand_written_loop():
    items = [
        self_test._run(
            "ratio",
            "cpu",
            author,
            ["-m", "composer3d.selftest.step_ratio", author, "cpu"],
            time.monotonic() + 120,
            shows=True,
        )
        for author in ("hand", "composer3d", "hand")
    ]
    measured = [json.loads(each.text.splitlines()[-1]) for each in items]
    assert ratio_of(measured)["loss_apart"] == 0.0


def test_what_the_extra_of_a_plugins_name_asks_for_and_is_not_there_is_lacking(tmp_path, monkeypatch):
    described = tmp_path / "graphs-1.0.dist-info"
    described.mkdir()
    (described / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: graphs\nVersion: 1.0\nRequires-Dist: torch>=2\nProvides-Extra: graphs\n"
        'Requires-Dist: pluggy>=1; extra == "graphs"\nRequires-Dist: not-anywhere>=1.2 ; extra == "graphs"\n'
        'Requires-Dist: nowhere; extra == "another"\n'
    )
    (described / "entry_points.txt").write_text("[composer3d]\ngraphs = graphs:Graphs\nplain = graphs:Plain\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    catalogue = Catalogue.installed()
    assert (catalogue.lacks("graphs"), catalogue.lacks("plain")) == (("not-anywhere",), ())
