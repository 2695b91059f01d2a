from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AfterValidator, Field, ValidationError
from pydantic_core import PydanticCustomError

from composer3d.errors import MeshError
from composer3d.manifest import (
    CORE_TABLES,
    MeshTable,
    ModelTable,
    TrainTable,
    inspect_manifest,
    mesh_table,
    read_text,
    table,
    validate,
)


class Reduction(enum.Enum):
    SUM = "sum"
    MEAN = "mean"


@table
class Warmup:
    """Warmup.

    Args:
        steps: How long.
    """

    steps: int
    shape: Literal["linear", "cosine"] = "linear"


def even(value: int) -> int:
    if value % 2:
        raise ValueError("an even number is needed")
    return value


def lower(value: str) -> str:
    if value != value.lower():
        raise PydanticCustomError("not_lower", "small letters are needed")
    return value


@table
class Example:
    """An example of every kind of key.

    Args:
        steps: Optimizer steps
            to run.
        pattern (str): Is no key.

    Errors:
        steps: Not a description.
    """

    steps: int = Field(gt=0)
    lr: float = Field(default=1.0, ge=0.0, lt=10.0)
    name: str = "x"
    flag: bool = False
    schedule: Literal["1F1B", "GPipe"] = "1F1B"
    zero: Literal[1, 2, 3] = 3
    reduction: Reduction = Reduction.SUM
    units: tuple[str, ...] = ()
    betas: tuple[float, float] = (0.9, 0.95)
    sizes: list[int] = Field(default_factory=list, min_length=1, max_length=3)
    tags: frozenset[str] = frozenset()
    plan: Literal["auto"] | dict[str, Literal["colwise", "rowwise"]] = "auto"
    limits: dict[str, float] = Field(default_factory=dict)
    dtypes: Mapping[Literal["param", "reduce"], str] = Field(default_factory=dict)
    every: int | Literal["epoch"] | None = None
    degree: Annotated[int, Field(ge=1)] | Literal[-1] | None = None
    mixed: str | list[int] | Warmup = "x"
    warmup: Warmup | None = None
    stages: tuple[Warmup, ...] = ()
    folder: Path = Path("runs")
    match: re.Pattern[str] | None = None
    pairs: Annotated[int, AfterValidator(even)] = 0
    small: Annotated[str, AfterValidator(lower)] = ""
    chunk: int = Field(default=8, multiple_of=8, le=64)
    ratio: float = Field(default=0.5, allow_inf_nan=False)
    word: str = Field(default="ab", min_length=2, max_length=3, pattern="^[a-z]+$")
    from_: int = Field(default=0, alias="from", description="Where to begin.")
    args: dict[str, Any] = Field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.steps == 13:
            raise ValueError("13 steps bring bad luck")


def outcome(text: str, cls: Any = Example, name: str = "train", **keywords: Any) -> tuple[Any, list[str]]:
    document = read_text(f"composer3d = 1\n[{name}]\n{text}", "run.toml", **keywords)
    instance, problems = validate(document, name.split("."), cls, document.get(name.split(".")))
    assert (instance is None) == bool(problems)
    return instance, [str(problem) for problem in problems]


@table
class Waiting:
    """A duration.

    Args:
        timeout_s: In seconds.
    """

    timeout_s: float = 1.0


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("30 min", "; write 1800: it is in seconds"),
        ("5ms", "; write 0.005: it is in seconds"),
        ("1.5 Hours", "; write 5400: it is in seconds"),
        ("10s", "; write 10: it is in seconds"),
        ("10 parsec", ""),
    ],
)
def test_a_duration_with_a_unit_is_told_in_seconds(text, hint):
    _, (problem,) = outcome(f'timeout_s = "{text}"', Waiting, "run")
    assert problem == f'run.toml:3:1: [run] run.timeout_s must be a number, not the string "{text}"{hint}'


def test_good_values_arrive_as_their_types():
    instance, problems = outcome(
        'steps = 2\nlr = 1\nunits = ["a"]\nbetas = [0, 1]\ntags = ["a"]\nreduction = "mean"\nfolder = "a/b"\n'
        'match = "a+"\nwarmup.steps = 3\nstages = [{steps = 1}, {steps = 2}]\ndegree = -1\nfrom = 5\n'
        'plan = {"layers.*" = "colwise"}\nevery = "epoch"\nmixed = [1]\nargs = {dim = 1, deep = [{x = inf}], n = nan}\n'
    )
    assert problems == []
    assert (instance.steps, instance.lr, instance.units, instance.betas) == (2, 1.0, ("a",), (0.0, 1.0))
    assert type(instance.lr) is float and type(instance.betas[0]) is float
    assert (instance.tags, instance.reduction, instance.folder) == (frozenset({"a"}), Reduction.MEAN, Path("a/b"))
    assert instance.match == re.compile("a+")
    assert (instance.warmup, instance.stages) == (Warmup(steps=3), (Warmup(steps=1), Warmup(steps=2)))
    assert (instance.degree, instance.from_, instance.every, instance.mixed) == (-1, 5, "epoch", [1])
    assert instance.plan == {"layers.*": "colwise"}
    assert instance.args["deep"] == [{"x": math.inf}] and math.isnan(instance.args["n"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('lr = "x"', '3:1: [train] train.lr must be a number, not the string "x"'),
        ("lr = true", "3:1: [train] train.lr must be a number, not true"),
        ("name = 3", "3:1: [train] train.name must be a string, not the integer 3"),
        ("name = 2020-01-01", "3:1: [train] train.name must not be a date or time; put it in quotes"),
        ("args.a = [07:32:00]", "3:11: [train.args.a] train.args.a[0] must not be a date or time; put it in quotes"),
        ("flag = 1", "3:1: [train] train.flag must be true or false, not the integer 1"),
        ('flag = "true"', '3:1: [train] train.flag must be true or false, not the string "true"'),
        ('schedule = "1f1b"', '3:1: [train] schedule = "1f1b" is not one of "1F1B", "GPipe"; did you mean "1F1B"?'),
        ('schedule = "zigzag"', '3:1: [train] schedule = "zigzag" is not one of "1F1B", "GPipe"'),
        ("schedule = []", '3:1: [train] train.schedule must be "1F1B" or "GPipe", not a list'),
        ("zero = 5", "3:1: [train] zero = 5 is not one of 1, 2, 3"),
        ('zero = "3"', '3:1: [train] zero = "3" is not one of 1, 2, 3'),
        ('reduction = "Sum"', '3:1: [train] reduction = "Sum" is not one of "sum", "mean"; did you mean "sum"?'),
        ('units = "a"', '3:1: [train] train.units must be a list of strings, not the string "a"'),
        ('units = ["a", 1]', "3:15: [train.units] train.units[1] must be a string, not the integer 1"),
        ("units = {}", "3:1: [train] train.units must be a list of strings, not a table"),
        ("betas = [1]", "3:1: [train] train.betas must be a list of 2 numbers, not of 1"),
        ("betas = []", "3:1: [train] train.betas must be a list of 2 numbers, not of 0"),
        ("betas = [1, 2, 3]", "3:1: [train] train.betas must be a list of 2 numbers, not of 3"),
        ('betas = [1, "x"]', '3:13: [train.betas] train.betas[1] must be a number, not the string "x"'),
        ("sizes = []", "3:1: [train] train.sizes must have at least 1 item, not 0"),
        ("sizes = [1, 2, 3, 4]", "3:1: [train] train.sizes must have at most 3 items, not 4"),
        ("sizes = [1.0]", "3:10: [train.sizes] train.sizes[0] must be an integer, not the number 1.0"),
        ("plan = 3", '3:1: [train] train.plan must be "auto" or a table, not the integer 3'),
        (
            'plan = "Auto"',
            '3:1: [train] train.plan must be "auto" or a table, not the string "Auto"; did you mean "auto"?',
        ),
        (
            'plan."a.*" = "colwize"',
            '3:6: [train.plan] "a.*" = "colwize" is not one of "colwise", "rowwise"; did you mean "colwise"?',
        ),
        ("limits = 1", "3:1: [train] train.limits must be a table, not the integer 1"),
        ('limits.x = "y"', '3:8: [train.limits] train.limits.x must be a number, not the string "y"'),
        ('dtypes.parm = "bf16"', '3:8: [train.dtypes] unknown key "parm"; did you mean "param"?'),
        ("every = 1.5", '3:1: [train] train.every must be an integer or "epoch", not the number 1.5'),
        (
            'every = "epok"',
            '3:1: [train] train.every must be an integer or "epoch", not the string "epok"; did you mean "epoch"?',
        ),
        ("degree = 0", "3:1: [train] train.degree must be -1 or an integer of at least 1, not the integer 0"),
        ("mixed = [1, true]", "3:13: [train.mixed] train.mixed[1] must be an integer, not true"),
        ("mixed = 1", "3:1: [train] train.mixed must be a string, a list of integers or a table, not the integer 1"),
        ("mixed.step = 1\nmixed.steps = 1", '3:7: [train.mixed] unknown key "step"; did you mean "steps"?'),
        ("warmup = 5", "3:1: [train] train.warmup must be a table, not the integer 5"),
        ("warmup = {}", '3:1: [train.warmup] needs the key "steps"; How long'),
        (
            "stages = [{steps = 1}, {steps = '2'}]",
            '3:25: [train.stages[1]] train.stages[1].steps must be an integer, not the string "2"; write 2, without '
            "quotes",
        ),
        ("folder = 1", "3:1: [train] train.folder must be a path, not the integer 1"),
        ('match = "("', '3:1: [train] train.match must be a regular expression, not the string "("'),
        ("pairs = 3", "3:1: [train] train.pairs: an even number is needed"),
        ('small = "X"', "3:1: [train] train.small: small letters are needed"),
        ("lr = -0.5", "3:1: [train] train.lr must be at least 0.0, not -0.5"),
        ("lr = 10", "3:1: [train] train.lr must be less than 10.0, not 10"),
        ("chunk = 12", "3:1: [train] train.chunk must be a multiple of 8, not 12"),
        ("chunk = 72", "3:1: [train] train.chunk must be at most 64, not 72"),
        ("ratio = nan", "3:1: [train] train.ratio must be a finite number, not nan"),
        ('word = "a"', "3:1: [train] train.word must have at least 2 characters, not 1"),
        ('word = "abcd"', "3:1: [train] train.word must have at most 3 characters, not 4"),
        ('word = "A1"', '3:1: [train] train.word must match the pattern ^[a-z]+$, not "A1"'),
        ('from = "x"', '3:1: [train] train.from must be an integer, not the string "x"'),
        ("stepps = 1", '3:1: [train] unknown key "stepps"; did you mean "steps"?'),
        ("form = 1", '3:1: [train] unknown key "form"; did you mean "from"?'),
    ],
)
def test_a_wrong_key_is_said_in_one_sentence(line, message):
    assert outcome(f"{line}\nsteps = 1") == (None, [f"run.toml:{message}"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('steps = "x"', '3:1: [train] train.steps must be an integer, not the string "x"'),
        ("steps = 1.0", "3:1: [train] train.steps must be an integer, not the number 1.0"),
        ("steps = true", "3:1: [train] train.steps must be an integer, not true"),
        ("steps = []", "3:1: [train] train.steps must be an integer, not a list"),
        ("steps = {}", "3:1: [train] train.steps must be an integer, not a table"),
        ("steps = 0", "3:1: [train] train.steps must be greater than 0, not 0"),
        ("", '2:2: [train] needs the key "steps"; Optimizer steps to run'),
        ("steps = 13", "2:2: [train] 13 steps bring bad luck"),
    ],
)
def test_a_required_key(line, message):
    assert outcome(line) == (None, [f"run.toml:{message}"])


def test_all_problems_come_at_once_and_none_twice():
    _, problems = outcome('lr = "x"\nzeero = 1\nbetas = []\nwarmup = {stepz = 1}\nname = 2020-01-01\n')
    assert problems == [
        "run.toml:7:1: [train] train.name must not be a date or time; put it in quotes",
        'run.toml:2:2: [train] needs the key "steps"; Optimizer steps to run',
        'run.toml:3:1: [train] train.lr must be a number, not the string "x"',
        "run.toml:5:1: [train] train.betas must be a list of 2 numbers, not of 0",
        'run.toml:6:1: [train.warmup] needs the key "steps"; How long',
        'run.toml:6:11: [train.warmup] unknown key "stepz"; did you mean "steps"?',
        'run.toml:4:1: [train] unknown key "zeero"; did you mean "zero"?',
    ]


def test_problems_carry_table_and_key():
    document = read_text("composer3d = 1\n[sharding.fsdp2]\nzeero = 3\n", "run.toml")
    _, problems = validate(document, ("sharding", "fsdp2"), Warmup, document.get(("sharding", "fsdp2")))
    assert [(problem.table, problem.key, problem.line) for problem in problems] == [
        ("sharding.fsdp2", "steps", 2),
        ("sharding.fsdp2", "zeero", 3),
    ]


def test_an_override_is_named_as_the_place():
    assert outcome("steps = 1", overrides=["train.steps=abc", "train.lrr=1"])[1] == [
        '--set train.steps=abc: [train] train.steps must be an integer, not the string "abc"',
        '--set train.lrr=1: [train] unknown key "lrr"; did you mean "lr"?',
    ]


_KEYS = "its keys are microbatch, global_batch, accumulate, seed, random_numbers: write train.microbatch = ..."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train = 5", f"run.toml:2:1: train must be a table, not the integer 5; {_KEYS}"),
        ('train = "x"', f'run.toml:2:1: train must be a table, not the string "x"; {_KEYS}'),
        ("[[train]]", f"run.toml:2:3: train must be a table, not a list; {_KEYS}"),
        (
            "train = false",
            "run.toml:2:1: train = false removes an inherited table, and there is none; remove this line",
        ),
    ],
)
def test_a_table_must_be_a_table(text, message):
    document = read_text(f"composer3d = 1\n{text}\n", "run.toml")
    instance, problems = validate(document, ("train",), TrainTable, document.tables["train"])
    assert instance is None
    assert [str(problem) for problem in problems] == [message]


def test_long_strings_are_cut():
    message = outcome(f'steps = "{"x" * 100}"')[1][0]
    assert message.endswith(f'not the string "{"x" * 57}..."')


def test_tables_are_frozen_and_strict_in_python_too():
    warmup = Warmup(steps=1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        warmup.steps = 2
    with pytest.raises(ValidationError):
        Warmup(steps="1")
    with pytest.raises(ValidationError):
        Warmup(1)


def test_the_mesh_takes_degrees_and_one_more_key():
    assert CORE_TABLES == {"mesh": MeshTable, "model": ModelTable, "train": TrainTable}
    instance, _ = outcome("pp = 2\ndp_shard = -1\ngpus_per_node = 8", MeshTable, "mesh")
    assert instance == MeshTable(pp=2, dp_shard=-1, gpus_per_node=8)
    assert (instance.tp, instance.cp, instance.ep, instance.dp_replicate) == (None,) * 4
    end = "must be -1 or an integer of at least 1, not"
    for value, got in (("0", "the integer 0"), ("-2", "the integer -2"), ("2.0", "the number 2.0"), ("true", "true")):
        assert outcome(f"tp = {value}", MeshTable, "mesh")[1] == [f"run.toml:3:1: [mesh] mesh.tp {end} {got}"]
    assert outcome("gpus_per_node = 0", MeshTable, "mesh")[1] == [
        "run.toml:3:1: [mesh] mesh.gpus_per_node must be at least 1, not 0"
    ]
    assert outcome("dp_shrad = 2", MeshTable, "mesh")[1] == [
        'run.toml:3:1: [mesh] unknown key "dp_shrad"; did you mean "dp_shard"?'
    ]


def test_plugins_add_axes():
    cls = mesh_table(("vp", "island"))
    instance, problems = outcome("tp = 2\nisland = 3", cls, "mesh")
    assert (problems, instance.tp, instance.island, instance.vp) == ([], 2, 3, None)
    assert isinstance(instance, MeshTable)
    assert outcome("vp = 0", cls, "mesh")[1] == [
        "run.toml:3:1: [mesh] mesh.vp must be -1 or an integer of at least 1, not the integer 0"
    ]
    assert mesh_table(()) is MeshTable


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        (("tp",), 'the axis "tp" is declared twice'),
        (("x", "x"), 'the axis "x" is declared twice'),
        (("a-b",), 'the axis "a-b" cannot be a key of [mesh]; use letters, digits and underscores'),
    ],
)
def test_axes_that_cannot_be(axes, message):
    with pytest.raises(MeshError, match=f"^{re.escape(message)}$"):
        mesh_table(axes)


def test_the_step_has_defaults_and_bounds():
    assert outcome("", TrainTable)[0] == TrainTable(microbatch=None, global_batch=None, seed=0)
    assert outcome("microbatch = 0\nglobal_batch = 0\nseed = -1", TrainTable)[1] == [
        "run.toml:3:1: [train] train.microbatch must be at least 1, not 0",
        "run.toml:4:1: [train] train.global_batch must be at least 1, not 0",
        "run.toml:5:1: [train] train.seed must be at least 0, not -1",
    ]


def test_a_list_of_wrong_items_is_told_by_its_first_few_and_beside_what_equals_a_literal_of_another_type():
    text = "composer3d = 1\n[sharding.fsdp2]\nzero = true\nzero_stage = 3\n"
    found = inspect_manifest(read_text(text + f"forward_prefetch = -1\nignored = {[1] * 3000}\n"))
    told = [problem.message for problem in found.problems]
    assert 'unknown key "zero_stage"' in told and "zero = true is not one of 1, 2, 3" in told
    assert "sharding.fsdp2.forward_prefetch must be at least 0, not -1" in told
    listed = [message for message in told if "ignored" in message]
    assert len(listed) == 6 and listed[-1] == "sharding.fsdp2.ignored has 2995 more such faults"
    assert [plugin.name for plugin in found.manifest.plugins] == ["fsdp2"]  # without its wrong keys
