"""README.md stays short, sets up what it says, and shows the loop and the plugin that are run."""

from __future__ import annotations

import difflib
import json
import re
import subprocess
import tomllib

from support.documents import DOCUMENTS, ROOT, blocks, code, files, links, read, recorded, table

README = read("README.md")
BLOCKS = blocks(README)
FILES = files(README)
MAX_LINES, MAX_BYTES = 200, 10_000


def test_it_is_short():
    assert README.count("\n") <= MAX_LINES
    assert len(README.encode()) <= MAX_BYTES


def test_it_leads_to_every_other_document():
    assert links(README).keys() >= set(DOCUMENTS) - {"README.md"}


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


# ---- claims ----------------------------------------------------------------------------------------------------------


def test_claims_are_those_measured():
    layouts, step = recorded("layout_matrix"), recorded("step_time")["rows"][0]
    large = {row["name"]: row for row in recorded("plan_time")["rows"]}["Llama-3-405B on 16384 ranks"]
    counts = layouts["summary"]
    rows = table(README, "claim", "measured", "command")
    assert [row[1] for row in rows] == [
        f"of {len(layouts['cells'])} layouts {counts['proven']} proven, {counts['refused']} refused with a reason, "
        f"{counts['failed']} failed; in float64 gradients differ by at most {layouts['largest']['gradients']:.1e} "
        "of the largest",
        "peak memory, collectives and FLOPs are those of real ranks in 31 manifests; "
        f"{large['name']} in {large['seconds']:.1f} s on {recorded('plan_time')['conditions']['date']}",
        f"{step['ratio']:.3f} of hand-written FSDP2's step time (that against itself: {step['control']:.3f}); "
        f"{step['lines']} changed lines in a loop",
    ]
    for row in rows:
        script = code(row[2])[0].split()[1]
        assert (ROOT / script).is_file(), script


# ---- the three users -------------------------------------------------------------------------------------------------


def test_the_defaults_of_batches_are_those_stated():
    from composer3d.runner.data.data_table import DataTable
    from composer3d.runner.objective.batch_size import BatchSize
    from composer3d.runner.runner_tables import TrainTable

    text = " ".join(README.split())
    train = TrainTable(steps=1)
    assert f"the tokens of a sequence (default {DataTable().seq_len})" in text
    assert f"the sequences of one forward on a rank (default {train.microbatch})" in text
    assert BatchSize(train, degree=4).largest == train.microbatch * 4
    assert "(default `microbatch` x data-parallel degree: one micro-batch" in text


def test_the_loop_is_changed_by_what_is_shown():
    before, after = (read(f"benchmarks/loops/{name}.py").splitlines() for name in ("one_device", "embedded"))
    difference = list(difflib.unified_diff(before, after, n=2, lineterm=""))[3:]
    (block,) = (block for block in BLOCKS if block.language == "diff")
    assert block.text.splitlines() == difference
    added, deleted = (sum(line.startswith(sign) for line in difference) for sign in "+-")
    assert f"by {added} added lines, {deleted} of them in place of others" in README and added <= 9


def test_the_plugin_measures(folder, composer3d):
    (setting,) = re.findall(r"`(profiling\.peak_memory = .*?)`", README)
    (folder / "watched.toml").write_text(f'composer3d = 1\nextends = "run.toml"\n{setting}\n')
    composer3d("composer3d run watched.toml --nproc-per-node 2 --set train.steps=2")
    rows = [json.loads(line) for line in (folder / "runs" / "watched" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["peak_memory_mib"] > 50 for row in rows)
