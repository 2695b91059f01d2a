"""`composer3d schedule`: text, SVG, JSON, and what it refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

ONE_F_ONE_B = """\
rank 0 |F0-F1-......B0----F2-B1----F3-B2----...B3----|
rank 1 |...F0-B0----F1-B1----F2-B2----F3-B3----......|
F forward, B backward, . idle
step 15, of which 12 computing
bubble 20.0% of the step, 25.0% of the ideal step without waiting
micro-batches in flight at most, by rank: 2, 1
"""


@pytest.fixture
def manifest(folder):
    """Write a manifest with a pipeline, and lines added at its end."""
    path = folder / "run.toml"
    base = path.read_text()

    def make(*lines):
        text = base.replace("dp_shard = 2", "pp = 2").replace("[sharding.fsdp2]", "[scheduling.pipeline]")
        path.write_text(text + "\n".join(lines))
        return "run.toml"

    return make


def test_text(command, manifest):
    assert command("schedule", manifest()) == (0, ONE_F_ONE_B, "")


def test_a_traced_split(command, manifest):
    assert command("schedule", manifest('split = "tracer"')) == (0, ONE_F_ONE_B, "")
    code, out, _ = command("check", "run.toml")
    assert code == 0
    assert out.splitlines()[1].split()[:2] == ["SPLIT", "pipeline"]


def test_data_parallel_ranks_share_the_batch(command, manifest):
    code, out, _ = command("schedule", manifest("[sharding.fsdp2]"), "--world-size", "4")
    assert code == 0
    assert out.startswith("rank 0 |F0-F1-......B0----...B1----|\n")


def test_stages_of_a_rank(command, manifest):
    code, out, _ = command("schedule", manifest('schedule = "ZBVZeroBubble"'), "--set", "model.args.num_layers=4")
    rows = out.splitlines()
    assert code == 0
    assert rows[0].startswith("rank 0 |F0-F1-F2-f0-i0-w0-")
    assert rows[2] == (
        "F forward, I backward of inputs, W backward of weights, . idle; small letters: the rank's further stages"
    )


def test_json(command, manifest):
    code, out, _ = command(
        "schedule", manifest(), "--json", "--microbatches", "6", "--transfer-cost", "0.5", "--backward-cost", "1"
    )
    report = json.loads(out)
    assert code == 0
    assert {key: report[key] for key in ("composer3d", "microbatches", "stages_per_rank", "in_flight")} == {
        "composer3d": 1,
        "microbatches": 6,
        "stages_per_rank": 1,
        "in_flight": [2.0, 1.0],
    }
    assert report["costs"] == {"forward": 1.0, "backward": 1.0, "weight": 1.0, "transfer": 0.5}
    assert report["ranks"][1][0] == {"kind": "F", "stage": 1, "microbatch": 0, "start": 1.5, "end": 2.5}
    idle = sum(report["total"] - sum(cell["end"] - cell["start"] for cell in rank) for rank in report["ranks"])
    assert report["bubble"]["share"] == pytest.approx(idle / (2 * report["total"]))
    assert report["bubble"]["relative"] == pytest.approx(idle / (2 * report["total"] - idle))


def test_svg(command, manifest, folder):
    code, _, _ = command("schedule", manifest(), "--svg", "picture.svg")
    root = ElementTree.parse(folder / "picture.svg").getroot()
    space = "{http://www.w3.org/2000/svg}"
    assert code == 0
    titles = [title.text for title in root.iter(f"{space}title")]
    assert len(titles) == 2 * 2 * 4
    assert titles[0] == "forward of micro-batch 0, stage 0, 0 to 1"
    texts = [text.text for text in root.iter(f"{space}text")]
    assert texts[0] == "run.toml: 2 ranks, 4 micro-batches"
    assert "bubble 20.0% of the step, 25.0% of the ideal step without waiting" in texts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--microbatches", "1"],
            "there are 1 micro-batches, and 1F1B needs at least as many micro-batches as stages, 2",
        ),
        (["--forward-cost", "-1"], "the forward cost is -1, which is no time that a forward takes"),
        (["--svg", "nowhere/picture.svg"], "nowhere/picture.svg: cannot be written: No such file or directory"),
    ],
)
def test_refusals(command, manifest, arguments, message):
    assert command("schedule", manifest(), *arguments) == (2, "", f"{message}\n")


def test_a_manifest_without_a_pipeline(command, folder):
    message = "run.toml: there is no pipeline to draw: no axis of stages above 1\n"
    assert command("schedule", "run.toml") == (2, "", message)


def test_a_wrong_manifest(command, manifest):
    code, out, err = command("schedule", manifest('schedule = "1f1b"'))
    assert (code, out) == (2, "")
    assert '"1F1B"' in err
