"""A digest of what was built is that of every process, and another where anything changed that code may read."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time

import pytest

from composer3d.planning.tracing.built_state import BuiltState, UnreadableStateError

HELPER = """
WIDTH = 5
TABLE = {"depth": [1, 2]}
"""
# What it builds, and how each of its changes changes that; no code of the model's names the changes.
EXAMPLE = """
import collections, dataclasses, enum, functools, os, pathlib, re, sys, types
import numpy as np
import torch
from torch import nn
import torch.nn.functional as F
import built_helper
from built_helper import TABLE

DEPTH = int(os.environ.get("BUILT_DEPTH", "1"))

class Kind(enum.Enum):
    WIDE = 1
    NARROW = 2

@dataclasses.dataclass
class Options:
    scale: float = 1.0
    sizes: list = dataclasses.field(default_factory=lambda: [1, 2])

class Config:
    def __init__(self):
        self.hidden, self.options, self.owner = 4, Options(), None

class Slotted:
    __slots__ = ("first", "second")
    def __init__(self):
        self.first = 1

class Names(dict):
    pass

def double(x):
    return 2 * x

def triple(x):
    return 3 * x

def scaled(x, factor=2):
    return x * factor

def closed(factor):
    return lambda x: x * factor

act = double

class Layer(nn.Module):
    __slots__ = ("width",)
    kinds = ("a", "b")

    def __init__(self, config):
        super().__init__()
        self.config, self.number, self.kind = config, 3, Kind.WIDE
        self.linear = nn.Linear(4, 4)
        self.names = {"a": {"b": [1, {"deep": 2}]}}
        self.slots, self.partial, self.closure = Slotted(), functools.partial(scaled, factor=4), closed(5)
        self.table, self.mask = np.arange(6.0), torch.arange(4, device="cpu")
        self.act, self._rate, self.seen = (lambda x: x + 1), 0.5, {"x", "y", ("z", 1)}
        self.sub, self.order = Names(a=1), collections.OrderedDict(a=1, b=2)
        self.path, self.pattern = pathlib.Path("a/b"), re.compile("a+")
        self.choices = nn.ModuleDict({"one": nn.Identity(), "two": nn.Dropout(0.1)})

    @property
    def rate(self):
        return self._rate

    def forward(self, x):
        for _ in range(DEPTH * built_helper.WIDTH * len(TABLE["depth"])):
            x = act(F.gelu(self.linear(x)))
        return scaled(self.inner(x))

    def inner(self, x):
        return x * self.rate

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        config = Config()
        config.owner = self
        self.layers = nn.ModuleList(Layer(config) for _ in range(3))
        self.layers[0].register_forward_hook(noted)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

def noted(module, args, output):
    return output * 2

def _patched(self, x):
    return x * 7

def _set(name, value):
    return lambda space, model: setattr(model.layers[1], name, value)

def _global(name, value):
    return lambda space, model: space.__setitem__(name, value)

CHANGES = {
    "a number": _set("number", 4),
    "a number's type": _set("number", 3.0),
    "an attribute more": _set("other", 1),
    "a nested dict": lambda space, model: model.layers[1].names["a"]["b"][1].update(deep=3),
    "a dict's order": lambda space, model: model.layers[1].order.move_to_end("a"),
    "a config's field": lambda space, model: setattr(model.layers[0].config, "hidden", 5),
    "a dataclass' field": lambda space, model: model.layers[0].config.options.sizes.append(3),
    "another config of equal values": lambda space, model: setattr(model.layers[1], "config", Config()),
    "a global": _global("DEPTH", 2),
    "a global of an imported module": lambda space, model: setattr(built_helper, "WIDTH", 6),
    "what a global of an imported module holds": lambda space, model: built_helper.TABLE["depth"].append(3),
    "a global that is a function": _global("act", triple),
    "a library's function": lambda space, model: setattr(F, "gelu", triple),
    "a closure's cell": _set("closure", closed(6)),
    "a default argument": lambda space, model: setattr(scaled, "__defaults__", (3,)),
    "a partial's argument": _set("partial", functools.partial(scaled, factor=5)),
    "a class' attribute": lambda space, model: setattr(Layer, "kinds", ("a", "c")),
    "a library's class": lambda space, model: setattr(nn.Linear, "forward", _patched),
    "what a library's code calls": lambda space, model: setattr(sys.modules[nn.Linear.__module__], "init", Config),
    "a property of a library's class": lambda space, model: setattr(nn.Linear, "wide", property(triple)),
    "a slot of a module": lambda space, model: setattr(model.layers[1], "width", 2),
    "what a property returns": _set("_rate", 0.25),
    "a slot": lambda space, model: setattr(model.layers[1].slots, "first", 2),
    "a slot that was unset": lambda space, model: setattr(model.layers[1].slots, "second", None),
    "a lambda": _set("act", lambda x: x + 2),
    "an enum": _set("kind", Kind.NARROW),
    "an array": lambda space, model: model.layers[1].table.__setitem__(0, 9),
    "an array's dtype": lambda space, model: setattr(model.layers[1], "table", model.layers[1].table.astype("f4")),
    "a tensor": lambda space, model: model.layers[1].mask.__setitem__(0, 9),
    "a hook": lambda space, model: model.layers[1].register_forward_pre_hook(lambda module, args: None),
    "a hook's place": lambda space, model: model.layers[1].register_forward_hook(noted),
    "a hook on a parameter": lambda space, model: model.layers[1].linear.weight.register_hook(lambda grad: grad),
    "an attribute of a parameter": lambda space, model: setattr(model.layers[1].linear.weight, "role", "wide"),
    "a method of a class": lambda space, model: setattr(Layer, "inner", _patched),
    "a method of an object": lambda space, model: setattr(
        model.layers[1], "inner", types.MethodType(_patched, model.layers[1])),
    "a set": lambda space, model: model.layers[1].seen.add("w"),
    "a subclass of dict": lambda space, model: model.layers[1].sub.update(a=2),
    "a path": _set("path", pathlib.Path("a/c")),
    "a pattern": _set("pattern", re.compile("a+", re.I)),
    "a probability of a module of torch": lambda space, model: setattr(model.layers[1].choices["two"], "p", 0.2),
    "the order of modules": lambda space, model: (
        model.layers[1].choices.update({"one": model.layers[1].choices.pop("one")})),
    "the mode": lambda space, model: model.layers[1].eval(),
    "what is trained": lambda space, model: model.layers[1].linear.weight.requires_grad_(False),
    "a dtype": lambda space, model: model.layers[1].linear.to(torch.float64),
}

def build():
    with torch.device("meta"):
        return Model()
"""
SCRIPT = """
import json, sys
sys.path.insert(0, "")
import built_example
from composer3d.planning.tracing.built_state import BuiltState
state = BuiltState()
state.add(built_example.build())
print(json.dumps(state.digest()))
"""


@pytest.fixture
def example(tmp_path, monkeypatch):
    """Return a function that imports the example, with its helper, as a new process does; undone after the test."""
    for name, text in (("built_helper", HELPER), ("built_example", EXAMPLE)):
        (tmp_path / f"{name}.py").write_text(text)

    def imported():
        for name in ("built_helper", "built_example"):
            spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            spec.loader.exec_module(module)
        return module

    monkeypatch.setattr(imported, "folder", tmp_path, raising=False)
    return imported


def digest(*values):
    state = BuiltState()
    for value in values:
        state.add(value)
    return state.digest()


def test_another_process_has_the_digest_of_this_one(example):
    here = digest(example().build())
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        printed = subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=example.folder, env=environment, stdout=subprocess.PIPE, check=True
        ).stdout
        assert json.loads(printed) == here


def test_all_that_code_may_read_is_in_the_digest(example, monkeypatch):
    from torch import nn
    from torch.nn import functional

    before, found = digest(example().build()), {}
    for name in example().CHANGES:
        with monkeypatch.context() as patched:
            # What a change patches of torch is undone.
            patched.setattr(functional, "gelu", functional.gelu)
            patched.setattr(nn.Linear, "forward", nn.Linear.forward)
            patched.setattr(nn.Linear, "wide", None, raising=False)
            patched.setattr(nn.modules.linear, "init", nn.init)
            patched.delattr(nn.Linear, "wide")
            module = example()
            model = module.build()
            assert digest(model) == before, name
            module.CHANGES[name](vars(module), model)
            found[name] = digest(model)
    assert digest(model) == found[name]
    assert [name for name, value in found.items() if value == before] == []
    assert len({*found.values()}) == len(found) > 35
    monkeypatch.setenv("BUILT_DEPTH", "2")  # when the file is imported
    assert digest(example().build()) == found["a global"]


UNREADABLE = {
    "a generator": "number for number in range(3)",
    "an open file": "open(os.devnull)",
    "an object of C": "memoryview(b'1')",
    "a large tensor": "torch.empty(2**29, dtype=torch.uint8, device='cpu')",
}


@pytest.mark.parametrize("expression", UNREADABLE.values(), ids=UNREADABLE)
def test_what_cannot_be_read_by_value_is_named(example, expression):
    module = example()
    model = module.build()
    value = eval(f"({expression})", vars(module))
    model.layers[2].kept = {"inside": [value]}
    with pytest.raises(UnreadableStateError, match="_modules.*layers.*_modules.*2.*kept: inside: "):
        digest(model)
    getattr(value, "close", str)()


CALLED = """
import json, os, pathlib
from torch import nn

def read():
    return json.loads(pathlib.Path("x.json").read_text())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.options = read() if False else self.taken()
        self.depth = int(os.environ.get("DEPTH", "1"))
    def taken(self):
        with open(os.devnull) as file:
            return file.read()
    def first(self, x):
        return x
    def forward(self, x):
        return self.first(x)
"""


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("return x", None),
        ("return x * read()", "read may read files, by read_text"),
        ("return self.taken()", "Model.taken may read files, by open"),
        ("return getattr(self, 'tak' + 'en')()", "Model.taken may read files, by open"),
        ("import never_loaded; return x", None),  # whatever is installed, it fails
        ("return eval('1')", "Model.first may read files, by eval"),
        ("return self.eval()", None),
        ("return type(self)().forward(x)", "may read files"),
        ("return Model().forward(x)", "may read files"),
    ],
)
def test_files_that_a_step_may_read_are_found_and_those_of_a_constructor_are_none(monkeypatch, tmp_path, line, told):
    (tmp_path / "built_called.py").write_text(CALLED.replace("        return x\n", f"        {line}\n"))
    spec = importlib.util.spec_from_file_location("built_called", tmp_path / "built_called.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "built_called", module)
    spec.loader.exec_module(module)
    if told is None:
        assert digest(module.Model()) == digest(module.Model())
        return
    with pytest.raises(UnreadableStateError, match=told):
        digest(module.Model())


def test_the_environment_counts_where_a_step_may_read_it(monkeypatch):
    def reads():
        return os.environ.get("BUILT_STATE")

    def reads_nothing():
        return 1

    before = digest(reads), digest(reads_nothing)
    monkeypatch.setenv("BUILT_STATE", "1")
    assert digest(reads) != before[0]
    assert digest(reads_nothing) == before[1]


def test_objects_that_hold_each_other_come_to_an_end():
    one, other = [], {}
    one.append(other)
    other["one"] = one
    nested = (1, 2)
    for _ in range(60):
        nested = (nested, nested)
    same = [[]]
    same.append(same[0])
    assert digest(one) != digest(other)
    assert digest(nested) == digest(nested)
    assert digest(same) != digest([[], []])


def test_a_model_of_eighty_blocks_is_read_in_a_moment():
    import torch

    from composer3d.models import llama

    with torch.device("meta"):
        model = llama(vocab_size=64, dim=64, num_layers=80, num_heads=4)
    digest(model)
    taken = []
    for _ in range(3):
        start = time.process_time()
        digest(model)
        taken.append(time.process_time() - start)
    assert min(taken) < 0.1
