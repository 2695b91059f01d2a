"""README.md does what it says: commands, files and loops are executed, tables compared with what they describe."""

from __future__ import annotations

import argparse
import difflib
import doctest
import inspect
import json
import re
import runpy
import subprocess
import sys
import tomllib

import harness
import layout_matrix
import plugin_matrix
import pytest
import torch
from support.documents import ROOT, blocks, code, files, read, table
from support.huggingface import make

from composer3d.cli import build_parser, main
from composer3d.errors import ManifestError
from composer3d.hookspecs import HookSpecs
from composer3d.manifest import load_manifest, mesh_table
from composer3d.manifest.descriptions import fields
from composer3d.processes.forking import limit_ranks
from composer3d.registry import FAMILIES, Catalogue, info_of
from composer3d.runner import TABLES
from composer3d.testing import run_ranks

README = read("README.md")
BLOCKS = blocks(README)
FILES = files(README)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with the files of README.md and some text; what is imported from it is forgotten afterwards."""
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "text.txt").write_text(read("LICENSE"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def composer3d(capfd):
    """Run a command line of README.md; return what it writes, messages before results."""

    def run(line):
        program, *arguments = line.split()
        assert program == "composer3d"
        with limit_ranks(2):
            main(arguments)
        told = capfd.readouterr()
        return told.err + told.out

    return run


# ---- set-up ----------------------------------------------------------------------------------------------------------


def test_there_are_two_set_up_commands_of_one_line():
    first, second = (block for block in BLOCKS if block.language == "sh")
    for block in (first, second):
        assert block.text.count("\n") == 1
        assert block.text.startswith("python3 -m venv .venv && .venv/bin/pip install -q -c tests/constraints.txt ")
        assert set(re.findall(r"(?<=&& )\.venv/bin/(\w+)", block.text)) <= {"pip", "composer3d", "pytest"}
    assert first.text.endswith(" . && .venv/bin/composer3d run quickstart\n")
    assert (second.mark, second.text.count(" .venv/bin/pytest")) == ("test command", 1)
    assert (ROOT / "tests/constraints.txt").is_file()
    project = tomllib.loads(read("pyproject.toml"))["project"]
    assert set(re.findall(r'-e "\.\[(\w+)\]"', second.text)) <= project["optional-dependencies"].keys()
    assert project["scripts"].keys() == {"composer3d"}


def test_ci_finds_the_test_command():
    extract = re.search(r"^command=\$\((awk .*? README\.md)\)$", read(".ci/run"), re.DOTALL | re.MULTILINE)
    done = subprocess.run(["bash", "-c", extract[1]], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [done.stdout] == [block.text for block in BLOCKS if block.mark == "test command"]


# ---- blocks ----------------------------------------------------------------------------------------------------------


def test_every_block_is_of_a_kind_that_is_tested():
    kinds = {"sh", "console", "python", "toml", "diff"}
    assert [block for block in BLOCKS if block.language not in kinds] == []
    assert [block.line for block in BLOCKS if block.language == "python" and block.mark not in FILES] == []


def test_manifests_are_read(folder):
    manifests = [name for name in FILES if name.endswith(".toml") and name != "bad.toml"]
    assert len(manifests) == 5
    for name in manifests:
        # A loop of one's own has no use for the runner's tables.
        tables = None if name == "embedded.toml" else TABLES
        assert load_manifest(name, tables=tables).plugins, name
    with pytest.raises(ManifestError):
        load_manifest("bad.toml", tables=TABLES)


def test_other_toml_is_that_of_a_package():
    (block,) = (block for block in BLOCKS if block.language == "toml" and block.mark is None)
    points = tomllib.loads(block.text)["project"]["entry-points"]["composer3d"]
    assert points == {"peak_memory": "peak_memory:PeakMemory"} and "peak_memory.py" in FILES


def test_commands_print_what_is_shown(folder, composer3d):
    shown = "".join(block.text for block in BLOCKS if block.language == "console")
    commands = re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE)
    assert len(commands) == 5
    checker = doctest.OutputChecker()
    for line, expected in commands:
        told = composer3d(line)
        assert checker.check_output(expected, told, doctest.ELLIPSIS), f"{line}\n{told}"


def test_the_full_manifest_is_good(folder, composer3d):
    told = composer3d("composer3d check full.toml --world-size 4")
    assert told.startswith("pp=1 x dp_replicate=2 x dp_shard=2 x cp=1 x tp=1 = 4 ranks on cpu\n")


def test_a_hugging_face_model_is_trained_and_exported(folder, composer3d):
    from transformers import AutoModelForCausalLM

    make("llama", folder / "tiny-llama", vocab_size=256)
    composer3d("composer3d run hf.toml --nproc-per-node 2")
    told = composer3d("composer3d export runs/hf --to trained")
    assert told.startswith("runs/hf/checkpoints/step-2 -> trained/model.safetensors: 21 tensors")
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in ("tiny-llama", "trained"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)


def test_the_plugin_measures(folder, composer3d):
    composer3d("composer3d run watched.toml --nproc-per-node 2 --set train.steps=2")
    rows = [json.loads(line) for line in (folder / "runs" / "watched" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["peak_memory_mib"] > 50 for row in rows)


def own_forward():
    names = runpy.run_path("own_forward.py")
    return float(names["loss"]), float(names["norm"])


def test_a_loop_with_its_own_forward(folder):
    torch_state = torch.get_rng_state()
    (loss, norm), other = run_ranks(own_forward, 2)
    assert (loss, norm) == other and 0 < loss < 5.4
    assert (folder / "checkpoints" / "10" / "state.json").is_file()
    assert torch.equal(torch_state, torch.get_rng_state())


def test_the_loop_is_changed_by_what_is_shown():
    before, after = (read(f"benchmarks/loops/{name}.py").splitlines() for name in ("one_device", "embedded"))
    difference = list(difflib.unified_diff(before, after, n=2, lineterm=""))[3:]
    (block,) = (block for block in BLOCKS if block.language == "diff")
    assert block.text.splitlines() == difference
    added, deleted = (sum(line.startswith(sign) for line in difference) for sign in "+-")
    assert f"counts {added} lines added, {deleted} of them in\nplace of others" in README and added <= 9
    assert FILES["embedded.toml"] == read("benchmarks/loops/embedded.toml")


# ---- tables ----------------------------------------------------------------------------------------------------------


def test_hooks():
    rows = table(README, "family", "hook", "gives")
    signatures = {
        name: ", ".join(list(inspect.signature(function).parameters)[1:])
        for name, function in vars(HookSpecs).items()
        if name.startswith("composer3d_")
    }
    assert [code(row[1])[0] for row in rows] == [f"{name}({arguments})" for name, arguments in signatures.items()]
    assert [code(row[1])[0].partition("(")[0] for row in rows if row[2].startswith("query: ")] == [
        name for name, function in vars(HookSpecs).items() if (function.__doc__ or "").startswith("Query: ")
    ]
    assert list(dict.fromkeys(row[0] for row in rows)) == [*FAMILIES, "life cycle"]


def test_plugins():
    catalogue = Catalogue.installed()
    built_in = tomllib.loads(read("pyproject.toml"))["project"]["entry-points"]["composer3d"]
    rows = table(README, "plugin", "family", "does", "memory a rank", "collectives a step", "options")
    assert sorted(code(row[0])[0] for row in rows) == sorted(built_in)
    for name, family, does, memory, collectives, options in rows:
        cls = catalogue.load(code(name)[0])
        assert info_of(cls).family == family
        assert code(options) == list(fields(cls)), name
        assert does and memory and collectives, name


def test_tables_of_a_manifest():
    rows = {code(row[0])[0].strip("[]"): sorted(code(row[1])) for row in table(README, "table", "keys", "about")}
    rows.pop("family.name")
    assert rows == {name: sorted(fields(cls)) for name, cls in {**TABLES, "mesh": mesh_table(())}.items()}


def subcommands():
    (action,) = (a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return action.choices


def test_commands():
    rows = table(README, "command", "does")
    found = {code(name)[0].split()[0]: (code(name)[0].split()[1:], does) for name, does in rows}
    parsers = subcommands()
    assert list(found) == list(parsers)
    for name, (arguments, does) in found.items():
        usage = " ".join(parsers[name].format_usage().split())
        for word in [*arguments, *re.findall(r"--[a-z-]+", does)]:
            assert word in usage, (name, word)


def test_commands_that_are_not_there_yet_are_not_there():
    (line,) = re.findall(r"^- The commands? (.*)\.$", README, re.MULTILINE)
    assert not set(code(line)) & set(subcommands())


def test_exit_codes():
    epilog = " ".join(build_parser().epilog.split())
    rows = table(README, "code", "meaning")
    assert [number for number, _ in rows] == re.findall(r"\b(\d) ", epilog)
    for number, meaning in rows:
        assert f"{number} {meaning.partition(';')[0]}" in epilog


@pytest.mark.parametrize("headings", [("guarantee", "proof"), ("refused", "reason", "test")])
def test_proofs_are_there(headings):
    for row in table(README, *headings):
        named = code(row[-1])
        assert named, row
        for name in named:
            path, _, function = name.partition("::")
            assert (ROOT / path).is_file(), name
            assert not function or f"\ndef {function}(" in read(path), name


# ---- figures ---------------------------------------------------------------------------------------------------------


def results(name):
    return json.loads(read(f"benchmarks/results/{name}.json"))


def test_figures_are_those_measured():
    step, *dimensions = results("step_time")["rows"]
    hooks, engine = results("hook_overhead")["rows"]
    (guard,) = results("guard_cost")["rows"]
    (offload,) = results("offload")["rows"]
    telemetry = {row["name"]: row for row in results("telemetry")["rows"]}["phase"]
    commands = {row["name"]: row for row in results("quickstart")["rows"]}
    quickstart, check = commands["quickstart"], commands["check, CPU beyond import torch"]
    *layouts, large = results("layout_time")["rows"]
    assert len(layouts) == 4 and large["name"] == "check"
    assert all(row["cpu_s"] <= row["budget_s"] for row in [*layouts, large])

    def compared(ratio, control, row=step):
        return f"{row[ratio]:.3f} (control {row[control]:.3f})"

    shown = {row[0]: row[1] for row in table(README, "figure", "measured", "limit", "command")}
    assert shown == {
        "median step time over hand-written FSDP2": compared("ratio", "control"),
        "process CPU time a step over hand-written FSDP2": compared("cpu_ratio", "cpu_control"),
        "peak resident memory over hand-written FSDP2": f"{step['rss_ratio']:.3f}",
        "largest difference of losses": f"{step['loss_abs']:.1e}",
        "lines added or changed to embed": str(step["lines"]),
        **{
            f"median step time over torch's own calls, {row['name']}": compared("ratio", "control", row)
            for row in dimensions
        },
        **{
            f"process CPU time a step of it, {row['name']}": compared("cpu_ratio", "cpu_control", row)
            for row in dimensions
        },
        **{f"largest difference of losses, {row['name']}": f"{row['loss_abs']:.1e}" for row in dimensions},
        "what hooks of 5 plugins add to a step": f"{hooks['us']:.0f} microseconds",
        "the rest of a step's bookkeeping": f"{engine['us']:.0f} microseconds",
        "what the step guard adds to the count's all-reduce": (
            f"{guard['us']:.0f} microseconds of CPU time, {guard['percent']:.3f} % of 100 ms"
        ),
        "CPU time of `opentelemetry` a step, default detail": (
            f"{telemetry['file_us']:.0f} microseconds to files, {telemetry['otlp_us']:.0f} as OTLP"
        ),
        "bandwidth of optimizer state on disk, 100 million parameters, over a probe of the disk": (
            f"{offload['ratio']:.2f} ({offload['mib_per_s']} MiB/s and {offload['probe_mib_per_s']})"
        ),
        "`composer3d run quickstart`, whole": f"{quickstart['seconds']:.0f} s",
        "last loss over first loss of it": f"{quickstart['loss_ratio']:.2f} ({quickstart['steps']} steps)",
        "first step of 8 ranks": f"{commands['first step, 8 ranks']['seconds']:.1f} s",
        "`composer3d check quickstart`, CPU beyond `import torch`": f"{check['seconds']:.2f} s",
        "80 blocks of Llama-3-70B laid out on one of 512 ranks, CPU": f"{max(row['cpu_s'] for row in layouts):.1f} s",
        "`composer3d check` of it, CPU": f"{large['cpu_s']:.1f} s",
        **{
            f"`composer3d plan` of {row['name']}, whole": f"{row['seconds']:.1f} s (slowest {row['slowest_s']:.1f} s)"
            for row in results("plan_time")["rows"]
        },
    }


def test_the_summaries_of_the_matrices_are_those_of_their_runs():
    layouts, plugins = results("layout_matrix"), results("plugin_matrix")
    assert harness.with_marked(README, "layouts", layout_matrix.summary(layouts)) == README
    assert harness.with_marked(README, "plugins", plugin_matrix.summary(plugins)) == README
    assert [README.count(f"<!-- {name} -->") for name in ("layouts", "plugins")] == [1, 1]
    # They are whole, and nothing failed.
    assert [row["cell"] for row in layouts["cells"]] == [str(cell) for cell in layout_matrix.cells()]
    assert layouts["summary"]["failed"] == plugins["summary"]["failed"] == plugins["summary"]["left"] == 0


def test_what_a_run_of_the_layouts_says():
    rows = [
        {"cell": "a", "outcome": "proven", "detail": "", "largest": {"loss": 1.5e-16, "gradients": 2e-14}},
        {"cell": "b", "outcome": "refused", "detail": "too few", "largest": {}},
    ]
    stated = {"date": "2026-01-02", "machine": "2 cores", "python": "3.11.7", "torch": "2.13.0"}
    told = layout_matrix.summary(layout_matrix.report(rows, stated, 600.0))
    assert told == (
        "Of 2 layouts 1 are proven, 1 refused as they must be (1 for too few), 0 failed.\n"
        "Largest relative differences from one device: loss 1.5e-16, gradients 2.0e-14.\n"
        "Run on 2026-01-02 in 10 minutes: 2 cores; Python 3.11.7, torch 2.13.0.\n"
    )


@pytest.mark.parametrize(
    "name",
    ["step_time", "hook_overhead", "guard_cost", "telemetry", "offload", "quickstart", "layout_time", "plan_time"],
)
def test_results_state_their_conditions(name):
    found = results(name)["conditions"]
    assert found.keys() >= {"date", "machine", "python", "torch", "load_1min_before"}
    line = f"{found['machine']}; Python {found['python']}, torch {found['torch']}"
    assert line in " ".join(README.split()) and found["date"] in README
