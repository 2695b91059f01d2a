"""Traces kept on disk: found again where nothing that they depend on changed, and never trusted blindly."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from composer3d import plan
from composer3d.planning.tracing import kept_entries, trace_cache
from composer3d.planning.tracing.rank_tracer import Tracer

MODEL = """
from torch import nn


class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.head = nn.Linear(16, vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)
"""


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Return a manifest of a model of its own, with a folder for traces, and how often ranks were traced."""
    module = f"cached_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{module}.py").write_text(MODEL)
    path = tmp_path / "run.toml"
    path.write_text(
        f'composer3d = 1\n[mesh]\ndp_shard = 2\n[model]\nuse = "{module}:Model"\n[data]\nuse = "synthetic"\n'
        "vocab_size = 64\nseq_len = 8\n[train]\nsteps = 1\nglobal_batch = 4\n[sharding.fsdp2]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPOSER3D_TRACES", str(tmp_path / "kept"))
    traced = []
    original = Tracer.trace_all

    def counted(self, chosen):
        traced.append(chosen)
        return original(self, chosen)

    monkeypatch.setattr(Tracer, "trace_all", counted)
    return str(path), traced, tmp_path / f"{module}.py"


def entries(tmp_path):
    return sorted((tmp_path / "kept").glob("composer3d-traces-*/*.json"))


def test_another_question_of_the_same_step_needs_no_trace(asked, tmp_path, monkeypatch):
    path, traced, _ = asked
    plain = plan(path, hardware="h100").to_json()
    slower = plan(path, hardware="h100", what_if={"flops": 0.5}).to_json()
    assert len(traced) == len(entries(tmp_path)) == 1
    assert plan(path, hardware="h100").to_json() == plain
    monkeypatch.setenv("COMPOSER3D_TRACES", "off")
    assert plan(path, hardware="h100", what_if={"flops": 0.5}).to_json() == slower
    assert len(traced) == 2
    assert slower["time"]["step_s"]["value"] >= plain["time"]["step_s"]["value"]


def test_what_a_trace_depends_on_is_in_its_key(asked, tmp_path):
    path, traced, source = asked
    plan(path)
    plan(path, overrides=["train.microbatch=2"])
    plan(path, overrides=["data.seq_len=16"])
    plan(path, rank=1)
    plan(path, full=True)
    source.write_text(MODEL + "# the code of the model, or anything that it may call\n")
    plan(path)
    assert len(traced) == len(entries(tmp_path)) == 6


READING = """
import json, os, pathlib
import torch
from torch import nn

TIMES = int(os.environ.get("OWN_TIMES", "1"))


class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, vocab_size)
        self.options = json.loads(pathlib.Path("options.json").read_text())

    def forward(self, tokens):
        x = self.embed(tokens)
        for _ in range(TIMES * self.options["times"]):
            x = self.mix(x)
        return self.head(x)


def loss(output, targets):
    times = json.loads(pathlib.Path("options.json").read_text())["times"]
    return nn.functional.cross_entropy(times * output.flatten(0, 1), targets.flatten())
"""
# Prints how often it traced, and the operators of a rank.
ASKED = """
import json, sys
from composer3d import plan
from composer3d.planning.tracing.rank_tracer import Tracer
traced, original = [], Tracer.trace_all
def counted(self, chosen):
    traced.append(chosen)
    return original(self, chosen)
Tracer.trace_all = counted
found = plan("run.toml").plan
print(json.dumps([len(traced), sum(o.flops * o.count for s in found.ranks[0].trace.segments for o in s.operators)]))
"""


def test_a_model_that_was_built_otherwise_is_traced_anew(asked, tmp_path):
    path, traced, source = asked
    source.write_text(READING)
    numbers = []
    for times in (1, 1, 3, 3, 1):
        (tmp_path / "options.json").write_text(json.dumps({"times": times}))
        plan(path)
        numbers.append(len(traced))
    assert numbers == [1, 1, 2, 2, 2]


def test_a_model_that_was_built_otherwise_is_traced_anew_in_any_process(asked, tmp_path):
    _, _, source = asked
    source.write_text(READING)

    def ask(times, **environment):
        (tmp_path / "options.json").write_text(json.dumps({"times": times}))
        printed = subprocess.run(
            [sys.executable, "-c", ASKED], env=os.environ | environment, stdout=subprocess.PIPE, check=True
        ).stdout
        traced, flops = json.loads(printed)
        return traced, flops

    first, again = ask(1), ask(1)
    assert (first[0], again) == (1, (0, first[1]))
    longer = ask(3)
    assert longer[0] == 1 and longer[1] > first[1]
    assert ask(1, OWN_TIMES="3") == (1, longer[1])
    assert ask(3) == (0, longer[1])
    assert len(entries(tmp_path)) == 3


REPLACING = """
TIMES, relu = json.loads(pathlib.Path("options.json").read_text())["times"], torch.Tensor.relu


def several(self):
    for _ in range(TIMES):
        self = relu(self) @ torch.eye(16)
    return self


torch.Tensor.relu = several
"""


REPEATABLE = """
torch.use_deterministic_algorithms(json.loads(pathlib.Path("options.json").read_text())["times"] > 1)
"""
LONGER = "(layer(layer(x)) if torch.are_deterministic_algorithms_enabled() else layer(x))"


@pytest.mark.parametrize(("call", "definition"), [("layer(x).relu()", REPLACING), (LONGER, REPEATABLE)])
def test_what_a_models_file_changes_of_torch_is_in_the_digest(asked, tmp_path, call, definition):
    """Methods of tensors that it replaces, and whether it wants deterministic algorithms alone."""
    _, _, source = asked
    source.write_text("import json, pathlib\nimport torch\n" + MODEL.replace("layer(x)", call) + definition)
    found = []
    for times in (1, 3, 1):
        (tmp_path / "options.json").write_text(json.dumps({"times": times}))
        found.append(
            json.loads(subprocess.run([sys.executable, "-c", ASKED], stdout=subprocess.PIPE, check=True).stdout)
        )
    (first, once), (other, thrice), (again, last) = found
    assert (first, other, again, last) == (1, 1, 0, once) and thrice > once


DEFINED = """
TIMES = json.loads(pathlib.Path("options.json").read_text())["times"]


def several(x):
    for _ in range(TIMES):
        x = x.relu() @ torch.eye(16)
    return x


library = torch.library.Library("NAME", "DEF")
library.define("several(Tensor x) -> Tensor")
library.impl("several", several, "CompositeImplicitAutograd")
"""
CUSTOM = """
ROWS = json.loads(pathlib.Path("options.json").read_text())["times"]


@torch.library.custom_op("NAME::several", mutates_args=())
def several(x: torch.Tensor) -> torch.Tensor:
    return x.repeat(ROWS, *(1 for _ in x.shape[1:]))


@several.register_fake
def several_fake(x):
    return torch.empty((ROWS * x.shape[0], *x.shape[1:]))


several.register_autograd(lambda ctx, grad: grad.unflatten(0, (ROWS, -1)).sum(0))
"""
REPLACED = DEFINED.replace('"NAME", "DEF"', '"aten", "IMPL"').replace(
    'library.define("several(Tensor x) -> Tensor")', ""
)
REPLACED = REPLACED.replace('"several", several', '"selu", several').replace("relu()", "sin()")


@pytest.mark.parametrize(
    ("call", "definition", "is_kept"),
    [
        ("torch.ops.NAME.several(layer(x))", DEFINED, False),
        ("HANDLE(layer(x))", DEFINED + "HANDLE = torch.ops.NAME.several.default", False),
        ("HANDLE(layer(x))", DEFINED + "HANDLE = torch.ops.NAME.several", False),
        ("torch.selu(layer(x))", REPLACED, False),
        ("torch.ops.NAME.several(layer(x))", CUSTOM, True),
        ("several(layer(x))", CUSTOM, True),
    ],
)
def test_operators_that_a_models_file_defines_are_in_the_digest_or_nothing_is_kept(
    asked, tmp_path, call, definition, is_kept
):
    """A library's functions are kept in C++ alone, those of a custom operator can be read."""
    _, _, source = asked
    definition, call = definition.replace("NAME", source.stem), call.replace("NAME", source.stem)
    model = MODEL.replace("x + layer(x)", f"x + {call}[: len(x)]")
    source.write_text("import json, pathlib\nimport torch\n" + model + definition)
    found = []
    for times in (1, 3, 1):
        (tmp_path / "options.json").write_text(json.dumps({"times": times}))
        found.append(
            json.loads(subprocess.run([sys.executable, "-c", ASKED], stdout=subprocess.PIPE, check=True).stdout)
        )
    assert [traced for traced, _ in found] == [1, 1, 0 if is_kept else 1]
    assert found[0][1] == found[2][1]
    assert is_kept or found[1][1] > found[0][1]
    assert len(entries(tmp_path)) == (2 if is_kept else 0)


def test_nothing_is_kept_where_a_step_may_read_files(asked, tmp_path, caplog):
    path, traced, source = asked
    source.write_text(READING)
    (tmp_path / "options.json").write_text('{"times": 1}')
    with caplog.at_level("INFO", logger=trace_cache.__name__):
        for _ in range(2):
            plan(path, overrides=[f'train.loss="{source.stem}:loss"'])
    assert len(traced) == 2 and entries(tmp_path) == []
    assert f"traces are not kept: {source.stem}.loss may read files, by read_text" in caplog.text


def test_what_is_not_what_was_written_is_made_anew(asked, tmp_path, caplog):
    path, traced, _ = asked
    before = plan(path).to_json()
    (entry,) = entries(tmp_path)
    whole = entry.read_bytes()
    foreign = json.dumps([{"rank": 0}]).encode()
    for content, told in [
        (whole[:-9], "is not what was written there"),
        (whole.replace(b'"peak":', b'"peak":1', 1), "is not what was written there"),
        (kept_entries._digest(entry.name, foreign) + b"\n" + foreign, "holds another type of entry"),
    ]:
        entry.write_bytes(content)
        caplog.clear()
        assert plan(path).to_json() == before
        assert told in caplog.text
        assert entry.read_bytes() == whole
    assert len(traced) == 4


def test_a_folder_that_others_may_read_is_not_used(asked, tmp_path, caplog):
    path, traced, _ = asked
    plan(path)
    (folder,) = (tmp_path / "kept").iterdir()
    folder.chmod(0o755)
    with caplog.at_level("INFO", logger=kept_entries.__name__):
        plan(path)
    assert len(traced) == 2
    assert "traces are not kept: " in caplog.text
