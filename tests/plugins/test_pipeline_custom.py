"""Schedules from CSV files."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from support.models import Net, composed, mine, padded, seeded
from support.pipeline_models import Spans, assert_equal_to_one_device, pipelined_step
from support.temporary_folders import session_folder

import composer3d
from composer3d import ManifestError
from composer3d.cli import main
from composer3d.testing import run_ranks

# Backwards in reverse order, and on the last stage in halves, the gradients of weights at the end.
REVERSED = """\
0F0,0F1,0F2,0F3,,,,0B3,0B2,0B1,0B0
,1F0,1F1,1F2,1F3,1I3,1I2,1W3,1I1,1I0,1W2,1W1,1W0
"""
# Two stages a rank in a V, the pair on rank 1 written as overlapped.
VEE = """\
0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1
1F0,2F0,1F1,2F1,2B0,"(1B0;2B1)OVERLAP_F_B",1B1
"""


def written(text, more=""):
    """Return a manifest's text with the path of a schedule's file; every rank writes its own."""
    path = session_folder() / "own.csv"
    path.write_text(text)
    return f'[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "{path}"\n{more}'


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "num_microbatches"), [(REVERSED, 4), (VEE, 2)])
@pytest.mark.parametrize("tied", [False, True])
def test_gradients_equal_one_device(schedule, num_microbatches, tied):
    step = partial(pipelined_step, microbatch=12 // num_microbatches)
    assert_equal_to_one_device(run_ranks(step, 2, written(schedule), Net, {"num_layers": 4, "tied": tied}))


@pytest.mark.parametrize(("schedule", "num_microbatches"), [(REVERSED, 4), (VEE, 2)])
def test_gradients_with_sharding(schedule, num_microbatches):
    text = written(schedule, "[sharding.fsdp2]\n")
    step = partial(pipelined_step, microbatch=6 // num_microbatches, batch=partial(padded, 12))
    if num_microbatches == 4:
        step = partial(pipelined_step, microbatch=2, batch=partial(padded, 16))
    assert_equal_to_one_device(run_ranks(step, 4, text, Net, {"num_layers": 4}))


def executed(text):
    tokens, targets = padded(4)
    run = composed(
        text + '[profiling.watching]\nuse = "support.pipeline_models:Watching"\n[train]\nmicrobatch = 1\n',
        seeded(num_layers=4),
    )
    with run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
    (spans,) = [value for value in run.context.state.values() if isinstance(value, Spans)]
    run.close()
    return ",".join(f"{stage}{kind}{index}" for stage, kind, index in spans.actions)


def test_the_file_is_what_runs():
    rows = [",".join(cell for cell in row.split(",") if cell) for row in REVERSED.splitlines()]
    assert run_ranks(executed, 2, written(REVERSED)) == rows


# ---- the schedule command --------------------------------------------------------------------------------------------


def test_it_is_found_beside_the_manifest_and_drawn(tmp_path, capsys):
    (tmp_path / "own.csv").write_text(REVERSED)
    (tmp_path / "run.toml").write_text(
        """
composer3d = 1
data = { use = "synthetic", seq_len = 8, vocab_size = 16 }
model.args = { dim = 8, num_layers = 2, num_heads = 2 }
train = { steps = 1, global_batch = 4, microbatch = 1 }
mesh.pp = 2
scheduling.pipeline.schedule = "own.csv"
"""
    )
    assert main(["schedule", str(tmp_path / "run.toml"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    drawn = [[f"{cell['stage']}{cell['kind']}{cell['microbatch']}" for cell in rank] for rank in report["ranks"]]
    assert drawn == [[cell for cell in row.split(",") if cell] for row in REVERSED.splitlines()]
    assert report["in_flight"] == [4, 4]


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("0F0,0B0\n", 'schedule = "own.csv" has 1 rows, and pp = 2 wants a row for each rank'),
        (
            "0F0,0B0\n1F0,1X0\n",
            'own.csv:2: cell 2 is "1X0", which is no action; <stage>F<micro-batch>, or B, I or W, such as 0F3',
        ),
        ("0F0,0B0\n1F0,0B0\n", "own.csv:2: stage 0 is on rank 0 already"),
        ("0F0,0B0\n2F0,2B0\n", 'schedule = "own.csv" has the stage 2 and not the stage 1'),
        ("0F0,0B0\n1B0,1F0\n", "own.csv:2: 1B0 comes before 1F0"),
        ("0F0,0B0,0B0\n1F0,1B0\n", "own.csv:1: 0B0 comes after 0B0, and there is nothing left to do"),
        ("0F0,0B0\n1F0,1I0\n", "own.csv:2: 1W0 is missing"),
        ("0F0,0F1,0B0,0B1\n1F0,1B0\n", "own.csv:2: 1F1 is missing"),
        (",\n1F0,1B0\n", "own.csv:1: this rank does nothing"),
        (
            "0F0,0B0,2F0,2B0\n1F0,1B0\n",
            'schedule = "own.csv" gives ranks 1 to 2 stages; all have equally many',
        ),
        (
            "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n",
            "own.csv:1: 0B0 waits for ever for what other ranks do later",
        ),
    ],
)
def test_a_file_that_cannot_run(schedule, message):
    for found in run_ranks(refusal, 2, schedule):
        assert found.partition("[scheduling.pipeline] ")[2] == message


def refusal(schedule, more=""):
    folder = session_folder()
    if schedule is not None:
        (folder / "own.csv").write_text(schedule)
    (folder / "run.toml").write_text(
        f'composer3d = 1\n[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "own.csv"\n{more}'
    )
    with pytest.raises(ManifestError) as caught:
        composer3d.compose(seeded(num_layers=4), folder / "run.toml")
    return str(caught.value).replace(str(folder), "FOLDER")


def test_what_does_not_fit_the_file():
    (missing, *_) = run_ranks(refusal, 2, None)
    assert missing.endswith(
        'schedule = "own.csv" cannot be read: No such file or directory; it is looked for at FOLDER/own.csv'
    )
    (stages, *_) = run_ranks(refusal, 2, VEE, "stages_per_rank = 3\n")
    assert stages.endswith("own.csv has 2 stages a rank, not 3")
    (number, *_) = run_ranks(refusal, 2, VEE, "[train]\nglobal_batch = 4\nmicrobatch = 1\n")
    assert number.endswith(
        "[train] global_batch = 4 over 1 data-parallel ranks makes 4 micro-batches of 1, and own.csv is made for 2 of "
        "them"
    )


def test_a_name_that_is_no_schedule():
    (message,) = run_ranks(misnamed, 1)
    assert 'did you mean "1F1B"' in message


def misnamed():
    with pytest.raises(ManifestError) as caught:
        composed('[scheduling.pipeline]\nschedule = "1F1Bx"\n', torch.nn.Linear(1, 1))
    return str(caught.value)
