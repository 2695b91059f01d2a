from __future__ import annotations

import itertools
import logging
from pathlib import Path

import pytest
import torch
from support.models import Net, write_manifest
from torch import nn

import composer3d
from composer3d import ManifestError, TransformError, load_manifest
from composer3d.composition.preparing import prepare
from composer3d.testing import fake_world

GOLDEN = Path(__file__).parent.parent / "golden"
FAULTY = '[sharding.faulty]\nuse = "support.refused_plugins:Faulty"\n'


def prepared(text, model=Net, *, world_size=1, rank=0, device="cpu"):
    manifest = load_manifest(write_manifest(text))
    return prepare(model, manifest, world_size=world_size, rank=rank, device=torch.device(device), purpose="check")


def shown(problems):
    """Return problems without the folder of their manifest; line 1 is `composer3d = 1`."""
    return [str(problem).partition("run.toml:")[2] for problem in problems]


def problems(text, model=Net, **options):
    return shown(prepared(text, model, **options).problems)


def refused(text, model=Net, **options):
    with pytest.raises(ManifestError) as caught:
        prepared(text, model, **options)
    return shown(caught.value.problems)


def applied(text):
    """Compose on a rank that is alone, and return what is wrong, beside what names the plugin's table."""
    with fake_world(1), pytest.raises(TransformError) as caught:
        composer3d.compose(Net, write_manifest(text))
    return str(caught.value)


# ---- the plan --------------------------------------------------------------------------------------------------------

TABLES = (
    "[sharding.fsdp2]\n",
    "[precision.mixed]\n",
    "[scheduling.activation_checkpoint]\n",
    '[scheduling.compile]\nbackend = "aot_eager"\n',
)


def test_the_plan_has_phases_names_and_modules():
    preparation = prepared("".join(TABLES), world_size=4)
    layers = ("layers.0", "layers.1", "layers.2")
    assert preparation.problems == []
    assert [(row.phase, row.name, row.fqns) for row in preparation.plan] == [
        ("RECOMPUTE", "activation_checkpoint", layers),
        ("COMPILE", "compile", layers),
        ("DATA", "fsdp2", (*layers, "")),
    ]
    assert str(preparation.plan[2]) == (
        "DATA         fsdp2                    layers.0, layers.1, layers.2, ... 4 in all"
    )
    assert preparation.context.degrees["dp_shard"] == 4


def test_the_order_of_tables_means_nothing():
    plans, descriptions = set(), set()
    with fake_world(8, rank=3):
        for tables in itertools.permutations(TABLES):
            run = composer3d.compose(Net, write_manifest("".join(tables)), purpose="plan")
            plans.add(run.plan)
            descriptions.add(run.describe())
    assert len(plans) == len(descriptions) == 1


@pytest.mark.parametrize(
    ("world_size", "mesh"), [(8, ""), (64, "[mesh]\ndp_replicate = 8\n"), (512, "[mesh]\ndp_replicate = 16\n")]
)
def test_golden_descriptions(world_size, mesh):
    # What is composed is read by people: a change of this text is a change of behaviour, to be made on purpose.
    with fake_world(world_size, rank=world_size - 1):
        model = lambda: Net(dim=8, num_layers=6)  # noqa: E731
        described = composer3d.compose(model, write_manifest(mesh + "".join(TABLES)), purpose="plan").describe()
    assert described + "\n" == (GOLDEN / f"describe_{world_size}.txt").read_text()


def test_every_rank_has_the_same_plan():
    plans = {prepared("".join(TABLES), world_size=16, rank=rank).plan for rank in range(16)}
    assert len(plans) == 1


def test_preparing_needs_neither_a_process_group_nor_weights():
    preparation = prepared("[sharding.fsdp2]\n", world_size=512, rank=511)
    assert not torch.distributed.is_initialized()
    assert all(parameter.is_meta for parameter in preparation.model.parameters())
    assert preparation.context.coordinates["dp_shard"] == 511
    assert prepared("[mesh]\ndp_shard = 3\n[sharding.fsdp2]\n", world_size=None).context.world_size == 3


# ---- degrees and owners ----------------------------------------------------------------------------------------------


def test_degrees_that_do_not_fit_are_at_the_line_of_the_mesh():
    assert refused("[sharding.fsdp2]\n[mesh]\ndp_shard = 3\n", world_size=4) == [
        "3:2: [mesh] dp_shard=3, but the world has 4 ranks"
    ]


def test_axes_without_an_owner():
    text = "[mesh]\npp = 2\ntp = 2\ncp = 1\n[sharding.fsdp2]\n"
    assert refused(text, world_size=4) == [
        '3:1: [mesh] pp = 2, but no plugin of this manifest owns the axis "pp"; write [scheduling.pipeline], which '
        "owns pp",
        '4:1: [mesh] tp = 2, but no plugin of this manifest owns the axis "tp"; write [sharding.tensor_parallel], '
        "which owns tp",
    ]
    assert problems("[mesh]\npp = 1\n[sharding.fsdp2]\n") == []


def test_an_axis_with_two_owners():
    text = '[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n[sharding.rival]\nuse = "support.refused_plugins:Rival"\n'
    (problem,) = refused(text, world_size=2)
    assert problem.startswith("2:2: [mesh] [sharding.fsdp2] (")
    assert "run.toml:4) and [sharding.rival] (" in problem
    assert problem.endswith('run.toml:5) both own the axis "dp_shard"; remove one of them')


def test_an_axis_that_a_plugin_brings():
    text = '[mesh]\nsite = 2\n[sharding.fsdp2]\n[communication.sites]\nuse = "support.refused_plugins:Sites"\n'
    preparation = prepared(text, world_size=8, rank=5)
    assert preparation.problems == []
    assert dict(preparation.context.coordinates) == {
        "site": 1,
        "pp": 0,
        "dp_replicate": 0,
        "dp_shard": 1,
        "cp": 0,
        "tp": 0,
        "ep": 0,
    }


def test_the_edge_of_a_node_is_a_warning():
    text = "[mesh]\ntp = 4\ngpus_per_node = 2\n[sharding.fsdp2]\n[sharding.tensor]\n"
    text += 'use = "support.refused_plugins:Tensor"\n'
    preparation = prepared(text, world_size=8)
    assert shown(preparation.problems) == ["3:1: warning: [mesh] tp = 4 reaches over the edge of a node of 2 GPUs"]
    assert [problem.severity for problem in preparation.problems] == ["warning"]
    assert preparation.plan
    assert problems(text.replace("gpus_per_node = 2", "gpus_per_node = 4"), world_size=8) == []


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (
            {"sparse": True},
            'error: [model] "0" has sparse=True, and its gradient is a sparse tensor, which ranks do not reduce; write '
            "sparse=False",
        ),
        (
            {"max_norm": 1.0},
            'error: [model] "0" has max_norm=1, by which its forward writes into the rows that a batch has: each rank '
            "into those of its own samples, so that ranks would hold different weights; write max_norm=None, and "
            "divide the rows by their norms in the forward, or all weights after each step",
        ),
        (
            {"scale_grad_by_freq": True},
            'warning: [model] "0" has scale_grad_by_freq=True, and divides the gradient of a row by how often the row '
            "is in its forward: each rank counts its own samples, so that gradients are others than one device's, as "
            "they are in micro-batches; write scale_grad_by_freq=False",
        ),
    ],
    ids=["sparse", "max_norm", "scale_grad_by_freq"],
)
def test_embeddings_that_ranks_with_samples_of_their_own_compute_otherwise(options, found):
    def factory():
        return nn.Sequential(nn.Embedding(8, 4, **options), nn.Linear(4, 8))

    for text in ("[sharding.fsdp2]\n", "[sharding.ddp]\n"):
        (problem,) = problems(text, factory, world_size=2)
        assert problem.partition(" ")[2].removeprefix("error: ") == found.removeprefix("error: ")
        assert problems(text, factory) == []


def test_composing_logs_warnings_once(caplog):
    text = '[mesh]\ntp = 4\ngpus_per_node = 2\n[sharding.tensor]\nuse = "support.refused_plugins:Tensor"\n'
    for rank in (0, 3):
        with fake_world(4, rank=rank), caplog.at_level(logging.WARNING, "composer3d"):
            composer3d.compose(Net, write_manifest(text))
    assert shown([record.getMessage() for record in caplog.records]) == [
        "3:1: warning: [mesh] tp = 4 reaches over the edge of a node of 2 GPUs"
    ]


# ---- plugins that refuse ---------------------------------------------------------------------------------------------


def test_all_problems_at_once_with_their_lines():
    text = (
        '[model]\nblocks = "leyers.*"\n'
        "[sharding.fsdp2]\nzero = 2\nreshard_after_forward = true\n"
        '[scheduling.activation_checkpoint]\nsave = ["aten.mm"]\n'
        '[precision.gpu]\nuse = "support.refused_plugins:OnlyGpu"\n'
        '[communication.refuses]\nuse = "support.refused_plugins:Refuses"\n'
    )
    with fake_world(1), pytest.raises(ManifestError) as caught:
        composer3d.compose(Net, write_manifest(text), device="cpu")
    assert shown(caught.value.problems) == [
        '3:1: [model] the pattern "leyers.*" matches nothing in the model; did you mean "layers.*"?',
        "4:11: [sharding.fsdp2] reshard_after_forward is zero = 3's choice, and zero is 2; leave one of them out",
        '7:13: [scheduling.activation_checkpoint] save has no effect with mode = "full"; write mode = "selective"',
        "9:12: [precision.gpu] gpu works on cuda and xpu, and this run is on cpu",
        "11:16: [communication.refuses] not today (run); try tomorrow",
    ]


def test_a_plugin_for_other_devices():
    text = '[precision.gpu]\nuse = "support.refused_plugins:OnlyGpu"\n'
    assert problems(text) == ["2:12: [precision.gpu] gpu works on cuda and xpu, and this run is on cpu"]
    assert problems(text, device="cuda") == []


@pytest.mark.parametrize(
    ("text", "place", "pattern"),
    [
        ('[sharding.fsdp2]\nzero = 3\nunits = ["layers.*", "norn"]\n', "4:1: [sharding.fsdp2]", "norn"),
        ('[scheduling.activation_checkpoint]\nunits = ["leyers.*"]\n', "3:1:", "leyers.*"),
        ('[scheduling.compile]\nbackend = "aot_eager"\nunits = ["leyers.*"]\n', "4:1:", "leyers.*"),
        (
            FAULTY + '[sharding.faulty.styles]\n"layers.0" = "a"\n"norn" = "b"\n',
            "6:1: [sharding.faulty.styles]",
            "norn",
        ),
        (FAULTY + 'styles = { "layers.0" = "a", "norn" = "b" }\n', "4:30: [sharding.faulty.styles]", "norn"),
    ],
)
def test_a_pattern_that_matches_nothing_is_at_its_key(text, place, pattern):
    (problem,) = problems(text)
    assert problem.startswith(place)
    assert f'the pattern "{pattern}" matches nothing in the model; ' in problem


def test_a_default_pattern_that_matches_nothing_is_at_its_table():
    (problem,) = problems(FAULTY, lambda: nn.Sequential(nn.Linear(2, 2)))
    assert problem == '2:11: [sharding.faulty] the pattern "layers.*" matches nothing in the model; the model has 0'


def test_a_model_without_blocks():
    assert problems("[scheduling.activation_checkpoint]\n", lambda: nn.Sequential(nn.Linear(2, 2))) == [
        "2:13: [scheduling.activation_checkpoint] the model has no single list of equal blocks; name the repeated "
        'blocks, for example [model] blocks = "layers.*"'
    ]


def test_a_factory_that_reads_values_is_at_the_model():
    def reads():
        model = Net()
        model.out.weight.detach().sum().item()
        return model

    (problem,) = refused('[model]\nblocks = "layers.*"\n[sharding.fsdp2]\n', reads)
    assert problem.startswith("2:2: [model] ")
    assert "test_preparing.py" in problem


# ---- transforms that go wrong ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "place", "message"),
    [
        ('fault = "selects_nothing"', "3:11: [sharding.faulty]", "faulty selects no module, so it would do nothing"),
        ('fault = "selects_none"', "3:11: [sharding.faulty]", "faulty selects no module, so it would do nothing"),
        (
            'fault = "selects_foreign"',
            "3:11: [sharding.faulty]",
            'faulty selects "layers.9", which the model does not have',
        ),
        (
            'requires = ["other"]',
            "3:11: [sharding.faulty]",
            '"faulty" requires "other", which the manifest does not have: it cannot stand alone',
        ),
        ('name = "fsdp2"', "2:11: [sharding.fsdp2]", 'two plugins declare "fsdp2"; names must differ'),
        (
            'conflicts = ["fsdp2"]',
            "3:11: [sharding.faulty]",
            '"faulty" cannot be combined with "fsdp2": they do not go together',
        ),
        ('after = ["fsdp2"]', "2:11: [sharding.fsdp2]", '"fsdp2" cannot come before "faulty": its phase is later'),
        ('after = ["faulty"]', "3:11: [sharding.faulty]", 'these cannot be ordered: "faulty" -> "faulty"'),
    ],
)
def test_what_a_transform_declares_is_checked(options, place, message):
    # At the table of the transform that the message quotes first.
    (problem,) = problems(f"[sharding.fsdp2]\n{FAULTY}{options}\n")
    assert problem == f"{place} {message}"


def test_an_axis_that_nobody_adds_is_owned_by_nobody():
    assert refused('[sharding.owner]\nuse = "support.refused_plugins:OwnerOfNothing"\n') == [
        '2:11: [sharding.owner] owner owns "dp_shards", which is no axis of the mesh, and none that a plugin of this '
        'manifest adds; did you mean "dp_shard"?'
    ]


def test_a_transform_that_may_be_empty_is_left_out_where_it_is():
    text = f'{FAULTY}fault = "selects_nothing"\nmay_be_empty = {{}}\n'
    found = prepared(text.format("true"))
    assert (found.problems, found.selected) == ([], [])
    assert problems(text.format("false")) == [
        "2:11: [sharding.faulty] faulty selects no module, so it would do nothing"
    ]


def test_a_cycle_of_two_plugins_is_at_one_of_them():
    second = FAULTY.replace("sharding.faulty", "sharding.other")
    text = f'{FAULTY}name = "a"\nafter = ["b"]\n{second}name = "b"\nafter = ["a"]\n'
    (problem,) = problems(text)
    assert problem in (
        '2:11: [sharding.faulty] these cannot be ordered: "a" -> "b" -> "a"',
        '6:11: [sharding.other] these cannot be ordered: "b" -> "a" -> "b"',
    )


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("touches_less", 'faulty selected 3 modules and did not touch "layers.0"'),
        ("touches_none", 'faulty selected 3 modules and did not touch "layers.0"'),
        ("touches_more", 'faulty touched "norm", which it had not selected'),
        ("renames", 'faulty renamed or dropped "layers.1.down.bias"; FQNs must stay'),
        ("drops", 'faulty renamed or dropped "layers.1.up.bias"; FQNs must stay'),
        ("adds", 'faulty added "layers.1.scale"; only transforms in phase CONVERT add parameters'),
    ],
)
def test_what_a_transform_does_is_checked(fault, message):
    place, _, told = applied(f'{FAULTY}fault = "{fault}"\n').partition("run.toml:2): ")
    assert place.startswith("[sharding.faulty] (") and told == message


def test_transforms_of_the_last_phase_are_checked_too():
    message = 'faulty renamed or dropped "layers.1.up.bias"; FQNs must stay'
    assert applied(f'{FAULTY}fault = "drops"\nphase = "MATERIALISE"\n').endswith(f"run.toml:2): {message}")


def test_conversions_may_add_parameters():
    with fake_world(1):
        run = composer3d.compose(Net(), write_manifest(f'{FAULTY}fault = "adds"\nphase = "CONVERT"\n'))
    assert "layers.1.scale" in dict(run.named_parameters())


def test_dtypes_that_nobody_asks_for():
    message = applied('[precision.unheard]\nuse = "support.refused_plugins:Unheard"\n')
    assert message.startswith("[precision.unheard] (")
    assert message.endswith("run.toml:2) gives dtypes, but no plugin of this manifest applies them")


class Dictionaries(torch.nn.Module):
    """Blocks that are dictionaries of modules, which nobody calls."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleDict({"norm": torch.nn.LayerNorm(4), "mlp": torch.nn.Linear(4, 4)}) for _ in range(2)
        )

    def forward(self, x):
        for block in self.blocks:
            x = block["mlp"](block["norm"](x))
        return x


def test_units_of_blocks_that_nobody_calls_are_their_entries(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("composer3d = 1\n[sharding.fsdp2]\n")
    with fake_world(2):
        run = composer3d.compose(Dictionaries, path, loss_fn=lambda output, _: output.sum())
        (row,) = run.plan
        assert row.fqns == ("blocks.0.norm", "blocks.0.mlp", "blocks.1.norm", "blocks.1.mlp", "")
        run.close()


def test_what_wraps_blocks_that_nobody_calls_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("composer3d = 1\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n")
    with fake_world(2), pytest.raises(composer3d.ManifestError) as caught:
        composer3d.compose(Dictionaries, path, loss_fn=lambda output, _: output.sum())
    assert 'activation_checkpoint selected "blocks.0", which has no forward, so it would do nothing' in str(
        caught.value
    )
