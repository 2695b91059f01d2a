"""Every kind of bad input that `check` can see, with the whole of what the user is told."""

from __future__ import annotations

import sys

import numpy as np
import pytest

OWNER = "write [sharding.tensor_parallel], which owns tp"
OPTIONS = (
    "backward_prefetch, delay_all_reduce, forward_prefetch, gather_early, ignored, overlap_optimizer, "
    "reshard_after_forward, reshard_root, unit_classes, unit_numel, units, zero"
)

CASES = {
    "unknown key": (
        ("steps = 2", "steps = 2\nstep = 3"),
        '14:1: [train] unknown key "step"; did you mean "steps"?',
    ),
    "unknown key, like nothing": (
        ("[sharding.fsdp2]", "[sharding.fsdp2]\ncontiguous = true"),
        f'16:1: [sharding.fsdp2] unknown key "contiguous"; one of: {OPTIONS}',
    ),
    "unknown table": (
        ("[train]", "[trian]"),
        '12:2: [trian] unknown table "trian"; did you mean "train"?',
    ),
    "unknown family": (
        ("[sharding.fsdp2]", "[shardin.fsdp2]"),
        '15:2: [shardin] unknown table "shardin"; did you mean "sharding"?',
    ),
    "unknown plugin": (
        ("[sharding.fsdp2]", "[sharding.fspd2]"),
        '15:11: [sharding.fspd2] no plugin "fspd2" is installed; did you mean "fsdp2"?',
    ),
    "an option of a plugin as a table": (
        ("[sharding.fsdp2]", "[sharding.sequence_parallel]"),
        '15:11: [sharding.sequence_parallel] no plugin "sequence_parallel" is installed; it is a key of '
        "[sharding.tensor_parallel]; write sequence_parallel there",
    ),
    "a plugin of another family": (
        ("[sharding.fsdp2]", "[scheduling.fsdp2]"),
        '15:13: [scheduling.fsdp2] "fsdp2" is a sharding plugin, not a scheduling one; write [sharding.fsdp2]',
    ),
    "a class that is no plugin": (
        ("[sharding.fsdp2]", '[sharding.fsdp2]\nuse = "cli_models:Model"'),
        '15:11: [sharding.fsdp2] "cli_models:Model" is not a plugin; decorate the class with @composer3d.plugin',
    ),
    "wrong type": (
        ("steps = 2", 'steps = "two"'),
        '13:1: [train] train.steps must be an integer, not the string "two"',
    ),
    "wrong value": (
        ("[sharding.fsdp2]", "[sharding.fsdp2]\nzero = 5"),
        "16:1: [sharding.fsdp2] zero = 5 is not one of 1, 2, 3",
    ),
    "missing key": (
        ("steps = 2\n", ""),
        '12:2: [train] needs the key "steps"; Optimizer steps of the whole run',
    ),
    "degrees": (
        ("dp_shard = 2", "dp_shard = 2\ndp_replicate = 3"),
        "4:2: [mesh] dp_replicate=3 x dp_shard=2 = 6, but the world has 2 ranks",
    ),
    "two open degrees": (
        ("dp_shard = 2", "dp_shard = -1\ndp_replicate = -1"),
        "4:2: [mesh] only one axis may be -1, not dp_replicate and dp_shard",
    ),
    "an axis that nobody owns": (
        ("dp_shard = 2", "tp = 2"),
        f'5:1: [mesh] tp = 2, but no plugin of this manifest owns the axis "tp"; {OWNER}',
    ),
    "an axis that two own": (
        ("[sharding.fsdp2]", "[sharding.fsdp2]\n[sharding.ddp]"),
        "4:2: [mesh] [sharding.ddp] (run.toml:16) and [sharding.fsdp2] (run.toml:15) both own the axis "
        '"dp_replicate"; remove one of them',
    ),
    "a pattern of a plugin": (
        ("[sharding.fsdp2]", '[sharding.fsdp2]\nunits = ["blocks.*"]'),
        '16:1: [sharding.fsdp2] the pattern "blocks.*" matches nothing in the model; the model has embedding, layers, '
        "layers.0, layers.1, layers.2, head",
    ),
    "the pattern of the blocks": (
        ('"layers.*"', '"layer.*"'),
        '8:1: [model] the pattern "layer.*" matches nothing in the model; did you mean "layers.*"?',
    ),
    "a pattern of frozen": (
        ("steps = 2", 'steps = 2\nfrozen = ["embd"]'),
        '14:1: [train] the pattern "embd" matches nothing in the model; did you mean "embedding"?',
    ),
    "a group that finds nothing": (
        ("", '[[optimizer.groups]]\nmatch = "^nothing"\n'),
        '17:1: [optimizer.groups[0]] match = "^nothing" finds no parameter of the model; it is a regular expression; '
        "the model has embedding.weight, layers.0.weight, layers.0.bias, layers.1.weight, layers.1.bias, "
        "layers.2.weight, layers.2.bias, head.weight",
    ),
    "a module that is not there": (
        ("cli_models:build", "cli_modles:build"),
        '7:1: [model] there is no module "cli_modles"; did you mean "cli_models"?',
    ),
    "a factory that is not there": (
        ("cli_models:build", "cli_models:biuld"),
        '7:1: [model] module "cli_models" has no "biuld"; did you mean "build"?',
    ),
    "a module that fails": (
        ("cli_models:build", "cli_broken:build"),
        '7:1: [model] the module "cli_broken" fails when imported, at cli_broken.py:1: ModuleNotFoundError: No module '
        "named 'absent_library'",
    ),
    "no reference": (
        ("cli_models:build", "cli_models"),
        '7:1: [model] "cli_models" is not a reference; write "module:name", for example "my_model:build"',
    ),
    "no factory": (
        ("cli_models:build", "cli_models:number"),
        '7:1: [model] "cli_models:number" cannot be called: it is of type int; name a class or a function',
    ),
    "an argument that the factory does not take": (
        ('"layers.*"', '"layers.*"\n[model.args]\ndims = 8'),
        '10:1: [model.args] cli_models:build takes no argument "dims"; did you mean "dim"?',
    ),
    "an argument that the factory needs": (
        ('use = "text.txt"', 'use = "tokens.npy"'),
        '7:1: [model] cli_models:build needs the argument "vocab_size"; write model.args.vocab_size = ...',
    ),
    "a vocabulary that is too small": (
        ('"layers.*"', '"layers.*"\nargs.vocab_size = 100'),
        "9:6: [model.args] vocab_size = 100 is below that of the data, 256",
    ),
    "data that are not there": (
        ("text.txt", "txet.txt"),
        '10:1: [data] use = "txet.txt": there is no "txet.txt" beside the manifest; did you mean "text.txt"?',
    ),
    "empty data": (
        ("text.txt", "empty.txt"),
        '10:1: [data] use = "empty.txt" is empty; give text',
    ),
    "data shorter than one sequence": (
        ("text.txt", "short.txt"),
        '10:1: [data] use = "short.txt" is shorter than one sequence: it has 9 tokens, and seq_len = 16 needs 17 (the '
        "last target is one token further); give more data, or set seq_len to at most 8",
    ),
    "a folder shorter than one sequence": (
        ("text.txt", "texts"),
        '10:1: [data] use = "texts" is shorter than one sequence: it has 10 tokens, and seq_len = 16 needs 17 (the '
        "last target is one token further); give more data, or set seq_len to at most 9",
    ),
    "data that are no text": (
        ("text.txt", "binary.txt"),
        '10:1: [data] use = "binary.txt": binary.txt is binary (at byte 2); convert it to UTF-8 text, take it out, or '
        "give tokens as .npy or .bin",
    ),
    "a data set that is not there": (
        ('"layers.*"\n[data]\nuse = "text.txt"', '"layers.*"\nargs.vocab_size = 9\n[data]\nuse = "cli_models:Rows"'),
        '11:1: [data] module "cli_models" has no "Rows"; one of: Layer, Model, build, number',
    ),
    "a batch that does not divide": (
        ("global_batch = 4", "global_batch = 6\nmicrobatch = 2"),
        "14:1: [train] a global batch of 6 sequences does not divide into micro-batches of 2 on 2 data-parallel ranks "
        "(2 x 2 = 4); use 4 or 8",
    ),
    "an optimizer that is none": (
        ("", '[optimizer]\nuse = "cli_models:Model"\n'),
        '17:1: [optimizer] "cli_models:Model" is not a torch.optim.Optimizer',
    ),
    "a schedule that is not there": (
        ("", '[lr_schedule]\nuse = "cli_models:number_"\n'),
        '17:1: [lr_schedule] module "cli_models" has no "number_"; did you mean "number"?',
    ),
    "an option that does not fit the degrees": (
        ("[sharding.fsdp2]", "[sharding.fsdp2]\nreshard_after_forward = 3"),
        "15:11: [sharding.fsdp2] reshard_after_forward = 3 does not divide dp_shard = 2 into groups of at least 2",
    ),
    "a base that is not there": (
        ("composer3d = 1", 'composer3d = 1\nextends = "quikstart"'),
        '2:1: there is no file "quikstart" and no shipped manifest of that name; did you mean "quickstart"? shipped '
        "manifests: ",
    ),
    "no TOML": (
        ("[train]", "[train"),
        "12:7: not valid TOML: expected ']' at the end of a table declaration; the line reads: [train",
    ),
}


@pytest.fixture
def files(folder):
    (folder / "cli_broken.py").write_text("import absent_library\n")
    (folder / "empty.txt").touch()
    (folder / "short.txt").write_text("too short")
    (folder / "texts").mkdir()
    (folder / "texts" / "a.txt").write_text("a" * 5)
    (folder / "texts" / "b.txt").write_text("bcd")
    (folder / "binary.txt").write_bytes(b"\x20\x00\xff" * 100)
    np.save(folder / "tokens.npy", np.arange(100, dtype=np.uint16))


@pytest.mark.parametrize(("edit", "told"), CASES.values(), ids=CASES)
def test_bad_input(edit, told, files, edited, command):
    edited(*edit)
    code, out, err = command("check", "run.toml", "--world-size", "2")
    first, _, rest = err.partition("\n")
    # The names of shipped manifests, where they are listed, are not what is tested.
    if told.endswith("manifests: "):
        first = first[: first.index("manifests: ") + len("manifests: ")]
    assert (code, out, first, rest) == (2, "", f"run.toml:{told}", "1 problem\n")


def test_a_factory_that_fails_is_told_with_its_line(folder, command):
    _, _, err = command("check", "run.toml", "--set", "model.args.dim=7")
    place = f"{folder}/cli_models.py:25"
    assert err == f"run.toml:7:1: [model] {place}: the factory raised ValueError: dim = 7 is odd\n1 problem\n"


def test_a_plugin_whose_extra_is_not_installed(folder, command, monkeypatch):
    packages = folder / "packages"
    (packages / "needy-1.0.dist-info").mkdir(parents=True)
    (packages / "needy-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: needy\nVersion: 1.0\n")
    (packages / "needy-1.0.dist-info" / "entry_points.txt").write_text(
        "[composer3d]\nneedy = cli_needy:Needy [graphs]\n"
    )
    (packages / "cli_needy.py").write_text("import absent_library\n")
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    with (folder / "run.toml").open("a") as file:
        file.write("[profiling.needy]\n")
    why = 'the plugin "needy" cannot be imported: No module named \'absent_library\'; pip install "needy[graphs]"'
    assert command("check", "run.toml") == (2, "", f"run.toml:16:12: [profiling.needy] {why}\n1 problem\n")
    code, out, err = command("plugins")
    assert (code, err) == (0, f"needy: {why}\n")
    assert "needy                  cannot be imported, see below" in out


def test_a_checkpoint_to_resume_from_that_is_not_there(folder, command):
    assert command("run", "run.toml", "--resume", "elsewhere") == (
        2,
        "",
        "--resume elsewhere: elsewhere: there is no checkpoint here\n1 problem\n",
    )


def test_a_manifest_that_is_not_there(folder, command):
    for name in ("check", "run"):
        code, out, err = command(name, "rnu.toml")
        assert (code, out) == (2, "")
        assert err.startswith(
            'there is no file "rnu.toml" and no shipped manifest of that name; did you mean "run.toml"? shipped '
        )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("doctor", "9" * 5000), f'argument RUN: "{"9" * 40}..." is longer than a path can be'),
        (
            ("import", "a.json", "--output", "a" * 300),
            f'argument --output: "{"a" * 40}..." is longer than a path can be',
        ),
        (("timeline", "a\0b"), "argument RUN: a path holds no character NUL"),
        (("plan", "run.toml", "--memory", "-5GiB"), '"-5GiB" is not a size; write for example 5GiB or 500MB'),
        (("plan", "run.toml", "--tokens", "-2e9"), '"-2e9" is not a number above 0, such as 2000 or 2e3'),
        (("plan", "run.toml", "--storage", "9" * 400), f'"{"9" * 400}" is not a size; write for example 5GiB or 500MB'),
    ],
)
def test_arguments_that_are_none(arguments, told, command):
    code, _, err = command(*arguments)
    assert code == 2 and err.strip().endswith(told)
