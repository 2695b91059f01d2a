"""`composer3d check`: the plan, all problems at once with their lines, warnings, and the view of any rank."""

from __future__ import annotations

import gc

import pytest
from support.cli_reports import report

from composer3d.checking.check import collected_rarely
from composer3d.manifest import shipped

PLAN = """\
pp=1 x dp_replicate=1 x dp_shard=2 x cp=1 x tp=1 = 2 ranks on cpu
DATA         fsdp2                    layers.[0-2], (root)
in every step:
  BEFORE_MICROBATCH       fsdp2                    [sharding.fsdp2]
  OPTIMIZER               AdamW                    [optimizer]
"""


def test_a_good_manifest_gives_its_plan(folder, command):
    assert command("check", "run.toml") == (0, PLAN, "")
    assert command("check", "run.toml", "--world-size", "2") == (0, PLAN, "")


def test_the_view_of_a_rank(folder, command):
    code, out, _ = command("check", "run.toml", "--rank", "1")
    assert (code, out.splitlines()[1]) == (0, "rank 1: pp=0, dp_replicate=0, dp_shard=1, cp=0, tp=0, ep=0")
    assert command("check", "run.toml", "--rank", "2") == (2, "", "--rank 2: it is not in a world of 2 ranks\n")


def test_cycles_are_looked_for_seldom_and_as_before_afterwards():
    before = gc.get_threshold()
    with pytest.raises(KeyError), collected_rarely():
        assert gc.get_threshold()[0] > 100 * before[0]
        raise KeyError
    assert gc.get_threshold() == before


LARGE = ("--world-size", "512", "--rank", "300", *(f"--set={t}" for t in ("mesh.pp=4", "mesh.tp=8")))


@pytest.fixture
def three_dimensions(folder):
    """A manifest of the library's own plugins along pp, dp_shard and tp, on nodes of eight GPUs."""
    (folder / "large.toml").write_text(
        """\
composer3d = 1
[mesh]
dp_shard = -1
gpus_per_node = 8
[model]
use = "composer3d.models:llama"
args = { dim = 64, num_heads = 16, num_layers = 8 }
[data]
use = "synthetic"
seq_len = 64
[train]
steps = 1
global_batch = 64
[sharding.fsdp2]
[sharding.tensor_parallel]
[scheduling.pipeline]
"""
    )


def test_the_groups_of_any_rank_of_512(three_dimensions, command):
    code, out, err = command("check", "large.toml", *LARGE)
    assert (code, err) == (0, "")
    assert out.splitlines()[:5] == [
        "pp=4 x dp_replicate=1 x dp_shard=16 x cp=1 x tp=8 = 512 ranks on cpu",
        "rank 300: pp=2, dp_replicate=0, dp_shard=5, cp=0, tp=4, ep=0",
        "pp           is of 4 ranks: 44-428 by 128",
        "dp_shard     is of 16 ranks: 260-380 by 8",
        "tp           is of 8 ranks: 296-303",
    ]
    code, told = report(command, "large.toml", *LARGE)
    assert (code, told["coordinates"]["dp_shard"]) == (0, 5)
    assert told["groups"] == {
        "pp": [44, 172, 300, 428],
        "dp_replicate": [300],
        "dp_shard": list(range(260, 384, 8)),
        "cp": [300],
        "tp": list(range(296, 304)),
        "ep": [300],
    }


def test_tensor_parallelism_that_leaves_a_node_is_warned_of(three_dimensions, command):
    code, _, err = command("check", "large.toml", *LARGE[:2], "--set", "mesh.tp=16")
    assert (code, err) == (
        0,
        "--set mesh.tp=16: warning: [mesh] tp = 16 reaches over the edge of a node of 8 GPUs\n1 warning\n",
    )


def test_the_report_for_programs(folder, command):
    assert report(command, "run.toml") == (
        0,
        {
            "composer3d": 1,
            "ok": True,
            "problems": [],
            "first_forward": "tried",
            "plan": [{"phase": "DATA", "name": "fsdp2", "fqns": ["layers.0", "layers.1", "layers.2", ""]}],
            "step": [
                {"point": "BEFORE_MICROBATCH", "name": "fsdp2", "plugin": "[sharding.fsdp2]"},
                {"point": "OPTIMIZER", "name": "AdamW", "plugin": "[optimizer]"},
            ],
            "world_size": 2,
            "degrees": {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 1, "ep": 1},
            "coordinates": {"pp": 0, "dp_replicate": 0, "dp_shard": 0, "cp": 0, "tp": 0, "ep": 0},
            "groups": {"pp": [0], "dp_replicate": [0], "dp_shard": [0, 1], "cp": [0], "tp": [0], "ep": [0]},
        },
    )


def test_a_problem_for_programs(edited, command):
    edited("[sharding.fsdp2]", "[sharding.fsdp2]\nzeero = 3")
    code, told = report(command, "run.toml")
    assert (code, told["ok"]) == (2, False)
    assert told["problems"] == [
        {
            "severity": "error",
            "file": "run.toml",
            "line": 16,
            "column": 1,
            "table": "sharding.fsdp2",
            "key": "zeero",
            "message": 'unknown key "zeero"',
            "hint": 'did you mean "zero"?',
        }
    ]


def test_a_manifest_that_cannot_be_read_is_reported_to_programs_too(folder, command):
    (folder / "run.toml").write_text("composer3d = 1\n[mesh\n")
    code, told = report(command, "run.toml")
    assert (code, told["ok"], told["world_size"], told["degrees"], told["plan"]) == (2, False, None, {}, [])
    assert [(problem["line"], problem["column"]) for problem in told["problems"]] == [(2, 6)]


def test_problems_of_all_stages_are_found_at_once(folder, command):
    (folder / "bad.toml").write_text(
        """\
composer3d = 1
[mesh]
dp_shard = 2
tp = 3
[model]
use = "composer3d.models:llama"
[trian]
steps = 3
[sharding.fsdp2]
zeero = 3
[sharding.ddpp]
[profiling.fsdp2]
[data]
use = "txt.txt"
[optimizer]
use = "torch.optim:Adamm"
"""
    )
    assert command("check", "bad.toml", "--world-size", "2") == (
        2,
        "",
        """\
bad.toml:2:2: [mesh] dp_shard=2 x tp=3 = 6, but the world has 2 ranks
bad.toml:7:2: [trian] unknown table "trian"; did you mean "train"?
bad.toml:10:1: [sharding.fsdp2] unknown key "zeero"; did you mean "zero"?
bad.toml:11:11: [sharding.ddpp] no plugin "ddpp" is installed; did you mean "ddp"?
bad.toml:12:12: [profiling.fsdp2] "fsdp2" is a sharding plugin, not a profiling one; write [sharding.fsdp2]
bad.toml:14:1: [data] use = "txt.txt": there is no "txt.txt" beside the manifest; did you mean "text.txt"?
bad.toml:16:1: [optimizer] module "torch.optim" has no "Adamm"; did you mean "Adam"?
7 problems
""",
    )


def test_the_model_is_looked_at_although_keys_and_world_are_wrong(edited, command):
    edited("[sharding.fsdp2]", '[sharding.fsdp2]\nzeero = 3\n[scheduling.activation_checkpoint]\nblocks = ["x.*"]\n')
    code, _, err = command("check", "run.toml", "--world-size", "3")
    assert code == 2
    assert [line.partition(" ")[0] for line in err.splitlines()[:-1]] == [
        "run.toml:4:2:",
        "run.toml:16:1:",
        "run.toml:18:1:",
    ]


@pytest.fixture
def crossing(folder):
    """A manifest whose tensor parallelism leaves a node: a warning, and nothing else."""
    (folder / "cli_plugins.py").write_text(
        "from composer3d import plugin\n\n\n@plugin(family='sharding', owns=('tp',))\nclass TensorParallel:\n    pass\n"
    )
    text = (folder / "run.toml").read_text()
    text = text.replace("dp_shard = 2", "dp_shard = 2\ntp = 4\ngpus_per_node = 2")
    (folder / "run.toml").write_text(text + '[sharding.tensors]\nuse = "cli_plugins:TensorParallel"\n')


WARNING = "run.toml:6:1: warning: [mesh] tp = 4 reaches over the edge of a node of 2 GPUs\n1 warning\n"


def test_a_warning_is_told_with_the_plan(crossing, command):
    plan = PLAN.replace("tp=1 = 2", "tp=4 = 8")
    assert command("check", "run.toml") == (0, plan, WARNING)


def test_a_warning_is_an_error_when_strict(crossing, command):
    assert command("check", "run.toml", "--strict") == (2, "", WARNING)
    code, told = report(command, "run.toml", "--strict")
    assert (code, told["ok"], told["problems"][0]["severity"]) == (2, False, "warning")


def test_the_command_line_overrides_the_manifest(folder, command):
    code, out, _ = command("check", "run.toml", "--set", "mesh.dp_shard=4", "--set", "model.args.num_layers=2")
    assert (code, out.splitlines()[:2]) == (
        0,
        [
            "pp=1 x dp_replicate=1 x dp_shard=4 x cp=1 x tp=1 = 4 ranks on cpu",
            "DATA         fsdp2                    layers.[0-1], (root)",
        ],
    )
    assert command("check", "run.toml", "--set", "train.stepz=1") == (
        2,
        "",
        '--set train.stepz=1: [train] unknown key "stepz"; did you mean "steps"?\n1 problem\n',
    )


def test_a_manifest_for_other_machines_is_checked_here(folder, command):
    code, out, _ = command("check", "run.toml", "--set", "run.device=cuda")
    assert (code, out.splitlines()[0].endswith("2 ranks on cuda")) == (0, True)


def test_checking_writes_nothing(folder, command):
    before = {path.name for path in folder.iterdir()}
    assert command("check", "run.toml")[0] == 0
    assert {path.name for path in folder.iterdir()} - before <= {"__pycache__"}


def test_a_factory_that_reads_data_is_built_on_the_host(folder, edited, command):
    (folder / "cli_readers.py").write_text(
        "import torch\nfrom cli_models import build\n\n\n"
        "def reads(vocab_size):\n    return build(dim=int(torch.ones(8).sum()), vocab_size=vocab_size)\n"
    )
    edited('use = "cli_models:build"', 'use = "cli_readers:reads"')
    code, _, err = command("check", "run.toml")
    assert code == 2 and 'set [model] build = "host"' in err
    assert command("check", "run.toml", "--set", "model.build=host") == (0, PLAN, "")


def test_shipped_manifests_are_good(command):
    assert "quickstart" in shipped()
    for name in shipped():
        code, _, err = command("check", name, "--strict")
        assert (code, err) == (0, ""), name
