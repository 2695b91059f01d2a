"""`composer3d verify`: proven, refuted, refused; what it reduces; its JSON."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile

import pytest

from composer3d.cli import main
from composer3d.processes.forking import limit_ranks
from composer3d.step.optimizers.optimizer_in_backward import BackwardStepper
from composer3d.verification.manifest_run import read_manifest
from composer3d.verification.shrink import reduce_sizes


@pytest.fixture
def verify(folder, capfd):
    """Run the command while no other test has ranks."""

    def run(*arguments):
        with limit_ranks(4):
            code = main(["verify", "run.toml", *arguments])
        told = capfd.readouterr()
        return code, told.out, told.err

    return run


def test_a_right_manifest_is_proven(folder, verify):
    code, out, err = verify("--json", "--set", "precision.mixed.param_dtype=bfloat16", "--set", "ema.decay=0.9")
    report = json.loads(out)
    assert (code, err) == (0, "")
    assert report["ok"] and report["composer3d"] == 1 and report["steps"] == 2
    assert (report["world_size"], report["degrees"]["dp_shard"]) == (2, 2)
    assert report["failures"] == report["diagnosis"] == report["reduced"] == []
    assert report["notes"] == ["in float64 without mixed, whose dtypes the second pass has"]
    assert report["loss"]["abs"] <= 1e-12 and report["gradients"]["max_rel"] <= 1e-12
    assert report["parameters"]["max_rel"] <= 1e-12 and report["grad_norm"]["rel"] <= 1e-12
    assert {row["fqn"] for row in report["gradients"]["worst"]} >= {"embedding.weight", "head.bias", "layers.2.bias"}
    assert report["gradients"]["worst"][0].keys() == {"fqn", "rel", "placement"}
    # Four units, and per rank two micro-batches of one sequence; the step's own agreements, two and the norm.
    assert [(row["op"], row["axis"], row["count"], row["expected"]) for row in report["collectives"]] == [
        ("all_gather", "dp_shard", 14, 14),
        ("all_reduce", "dp_shard", 3, 3),
        ("reduce_scatter", "dp_shard", 8, 8),
    ]
    own = report["own_dtype"]["gradients"]["max_rel"]
    limit = report["tolerance"]["own"]["gradients"]
    assert 0.0 <= own <= limit and limit > 1e-3  # bfloat16 rounds as much


STEPPER = ["optimizer.in_backward=true", "train.grad_clip=inf", "train.microbatch=2"]
STEPPER = ["--json", "--steps", "1", *(word for key in STEPPER for word in ("--set", key))]


def test_an_optimizer_in_the_backward_is_proven_by_its_ordinary_step(folder, verify):
    code, out, err = verify(*STEPPER)
    report = json.loads(out)
    assert (code, err, report["failures"]) == (0, "", [])
    assert report["notes"] == [
        "optimizer.in_backward, which frees the gradients that are compared, is used in the step after the load"
    ]


def test_a_step_in_the_backward_that_is_another_one_is_found(folder, verify, monkeypatch):
    step = BackwardStepper._step_alone

    def doubled(self, parameter):
        parameter.grad.mul_(2.0)
        step(self, parameter)

    monkeypatch.setattr(BackwardStepper, "_step_alone", doubled)
    code, out, _ = verify(*STEPPER, "--set", "optimizer.use=sgd")
    report = json.loads(out)
    assert code == 1
    assert "values are not those of the run that was saved in the step after a load" in report["failures"][0]
    assert "it stepped in the backward, and the other run after it" in report["diagnosis"][0]


def test_nothing_stays_behind_whether_the_ranks_end_or_one_is_killed(folder, verify, tmp_path, monkeypatch):
    left = tmp_path / "scratch"
    left.mkdir()
    # Where temporary folders are made, in this process and in the ranks that are forked from it.
    monkeypatch.setattr(tempfile, "tempdir", str(left))
    assert verify("--steps", "1")[0] == 0
    locks = [path for path in left.iterdir() if path.name.startswith("composer3d-ranks-")]
    assert [*left.iterdir()] == locks
    (folder / "deadly.py").write_text(
        "import os, signal\n"
        "from composer3d import StepAction, StepPoint, hookimpl, plugin\n"
        "@plugin(family='communication')\n"
        "class Deadly:\n"
        "    @hookimpl\n"
        "    def composer3d_step_actions(self, context):\n"
        "        return StepAction(name='deadly', point=StepPoint.GRADIENTS_REDUCED, run=self.run)\n"
        "    def run(self, state):\n"
        "        if state.context.rank == 1:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    code, _, err = verify("--steps", "1", "--set", "communication.deadly.use=deadly:Deadly")
    assert code == 3 and "SIGKILL" in err
    assert [*left.iterdir()] == locks


def test_a_wrong_plugin_is_refuted(folder, verify):
    (folder / "wrong.py").write_text(
        "from composer3d import StepAction, StepPoint, hookimpl, plugin\n"
        "@plugin(family='communication')\n"
        "class Twice:\n"
        "    @hookimpl\n"
        "    def composer3d_step_actions(self, context):\n"
        "        return StepAction(name='twice', point=StepPoint.GRADIENTS_REDUCED, run=self.run)\n"
        "    def run(self, state):\n"
        "        for part in state.parts:\n"
        "            for p in part.module.parameters():\n"
        "                p.grad.mul_(2)\n"
    )
    code, out, err = verify("--steps", "1", "--set", "communication.twice.use=wrong:Twice")
    assert (code, err) == (1, "")
    lines = out.splitlines()
    assert lines[-1] == "not proven"
    assert "differs: 9 of 9 gradients differ by more than 1e-12 (in float64)" in lines
    assert any(
        line.startswith("likely: all gradients are 2 times the right ones; that is dp_shard = 2") for line in lines
    )


def test_buffers_that_the_run_does_not_average_are_refuted(folder, verify):
    models = folder / "cli_models.py"
    models.write_text(models.read_text().replace("nn.Linear(dim, vocab_size)", "Head(dim, vocab_size)") + HEAD)
    code, out, _ = verify("--steps", "1", "--set", "train.microbatch=2", "--set", "train.sync_buffers=false")
    assert code == 1
    assert "likely: the buffers head.norm.running_mean, head.norm.running_var are not synchronised over dp_shard" in out
    assert verify("--steps", "1", "--set", "train.microbatch=2")[0] == 0


HEAD = """

class Head(nn.Linear):
    def __init__(self, dim, vocab_size):
        super().__init__(dim, vocab_size)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x):
        return super().forward(self.norm(x.transpose(1, 2)).transpose(1, 2))
"""


def test_a_large_world_is_reduced(folder, verify):
    code, out, err = verify(
        *("--steps", "1", "--max-blocks", "2", "--max-ranks", "4", "--max-dim", "8"),
        *("--set", "mesh.dp_shard=16", "--set", "mesh.dp_replicate=32", "--set", "train.global_batch=2048"),
        *("--set", "model.args.dim=64"),
    )
    assert (code, err) == (0, "")
    assert out.splitlines()[:6] == [
        "reduced: dp_replicate: 32 -> 2 ranks",
        "reduced: dp_shard: 16 -> 2 ranks",
        "reduced: train.global_batch: 2048 -> 8 sequences",
        "reduced: data.seq_len: 16 -> 8",
        "reduced: model.args.dim: 64 -> 8",
        "reduced: blocks: 3 -> 2",
    ]
    assert "pp=1 x dp_replicate=2 x dp_shard=2 x cp=1 x tp=1 = 4 ranks, 1 steps, against one device" in out
    assert "layers.1.weight" in out and "layers.2.weight" not in out


def test_a_wrong_manifest_is_refused_before_ranks_start(folder, verify):
    code, out, err = verify("--set", "sharding.fsdp2.zeero=3")
    assert (code, out) == (2, "")
    assert err.startswith('--set sharding.fsdp2.zeero=3: [sharding.fsdp2] unknown key "zeero"; did you mean "zero"?')


def test_sizes_are_halved_and_heads_stay_wide(folder):
    sizes = ("dim=8192", "num_layers=80", "num_heads=64", "num_kv_heads=8", "ffn_dim=28672", "vocab_size=128256")
    overrides = [f"model.args.{size}" for size in sizes]
    overrides += ["model.use=composer3d.models:llama", "data.use=synthetic", "data.vocab_size=128256"]
    manifest = read_manifest("run.toml", [*overrides, "data.seq_len=4096"])
    assert reduce_sizes(manifest, 64, {"tp": 4}) == {
        "data.seq_len": (4096, 64),
        "data.vocab_size": (128256, 512),
        "model.args.dim": (8192, 64),
        "model.args.num_heads": (64, 8),
        "model.args.num_kv_heads": (8, 4),
        "model.args.ffn_dim": (28672, 56),
        "model.args.vocab_size": (128256, 512),
    }


def test_a_collective_of_one_rank_alone_ends_within_the_timeout_and_is_named(folder, verify):
    (folder / "lonely.py").write_text(
        "import torch\n"
        "import torch.distributed as dist\n"
        "from composer3d import StepAction, StepPoint, hookimpl, plugin\n"
        "@plugin(family='communication')\n"
        "class Lonely:\n"
        "    @hookimpl\n"
        "    def composer3d_step_actions(self, context):\n"
        "        return StepAction(name='lonely', point=StepPoint.GRADIENTS_REDUCED, run=self.run)\n"
        "    def run(self, state):\n"
        "        if state.context.rank == 1:\n"
        "            dist.all_reduce(torch.ones(3))\n"
    )
    code, out, _ = verify("--steps", "1", "--set", "communication.lonely.use=lonely:Lonely", "--set", "run.timeout_s=5")
    assert code == 1
    assert "rank 1 (dp_shard 1) ran all_reduce of [3] (lonely, lonely.py:11 in run), while rank 0 ran all_" in out


def test_what_all_ranks_warn_of_is_shown_once(folder):
    models = folder / "cli_models.py"
    text = models.read_text().replace("nn.Linear(dim, vocab_size)", "Warning_(dim, vocab_size)")
    models.write_text(text + WARNING)
    # As a command: what a test is told of as an error would end the ranks.
    with limit_ranks(2):
        command = [sys.executable, "-m", "composer3d", "verify", "run.toml", "--steps", "1"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert told.returncode == 0, told.stderr
    for warning in ("made as 0", "made as 1", "UserWarning: forward of a kind", "a library says so"):
        assert told.stderr.count(warning) == 1, told.stderr


WARNING = """

import logging
import warnings


class Warning_(nn.Linear):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        for number in range(2):
            logging.getLogger("some.library").warning("made as %d", number)

    def forward(self, x):
        warnings.warn("forward of a kind", UserWarning)
        logging.getLogger("some.library").warning("a library says so")
        return super().forward(x)
"""


def test_an_open_degree_is_proven_on_two_ranks_and_the_world_is_named(folder, verify):
    code, out, err = verify("--steps", "1", "--set", "mesh.dp_shard=-1")
    assert (code, err) == (0, "")
    assert "dp_shard=2 x cp=1 x tp=1 = 2 ranks, 1 steps" in out
    assert "note: dp_shard = 2, which the manifest leaves open; --world-size N proves the world of" in out
    code, out, err = verify("--steps", "1", "--set", "mesh.dp_shard=-1", "--world-size", "3")
    assert code == 2 and "does not divide into micro-batches of 1 on 3 data-parallel ranks" in err


def test_the_proof_of_one_rank_says_that_no_average_is_proven(folder, verify):
    code, out, _ = verify("--steps", "1", "--set", "mesh.dp_shard=-1", "--max-ranks", "1")
    assert code == 0
    assert "note: dp_shard = 1, though the manifest leaves it open (1 ranks are the most here): no average" in out
