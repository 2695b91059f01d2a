"""States of another form than a writer writes, with digests that fit: errors that say what and where."""

from __future__ import annotations

import copy
import json
import random

import pytest
import torch
from support.daily_part import PART
from support.damaged_checkpoints import reseal
from support.models import Net, composed

from composer3d import ComposerError
from composer3d.checkpoint import validated_run
from composer3d.errors import CheckpointError
from composer3d.testing import run_ranks

ROUNDS = 40
OTHERS = ([], None, {}, "text", 2**40, -1, 1.5, True, [[2**40], "float32"], {"__tensor__": [[2**40], "float32"]})


def start():
    torch.manual_seed(0)
    run = composed('[profiling.counting]\nuse = "support.plugins:Counting"\n', Net())
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
    run.attach("scheduler", torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)))
    run.attach("memory", Memory())
    return run


class Memory:
    def __init__(self):
        self.values = {"mean": torch.zeros(3), "seen": [1, torch.ones(2)]}

    def state_dict(self):
        return self.values

    def load_state_dict(self, state):
        self.values = {"mean": state["mean"] + 0, "seen": [state["seen"][0] + 1, state["seen"][1] * 1]}


def places(value, place=()):
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*place, key))


def changed(content, place, other):
    content = copy.deepcopy(content)
    *path, last = place
    node = content
    for key in path:
        node = node[key]
    node[last] = other
    return content


def attempt(path, content):
    """Return the error of a load, None where it went well."""
    (path / "state.json").write_text(json.dumps(content))
    reseal(path, "state.json")
    run = start()
    try:
        run.load(path)
    except ComposerError as error:
        return str(error)
    finally:
        run.close()
    return None


def save_one(path):
    run = start()
    run.save(path)
    run.close()
    return json.loads((path / "state.json").read_text())


def random_changes(path):
    content = save_one(path)
    assert attempt(path, content) is None
    chance, refused = random.Random(PART), 0
    every = [place for place in places(content["state"], ("state",)) if len(place) > 1]
    for _ in range(ROUNDS):
        place, other = chance.choice(every), chance.choice(OTHERS)
        error = attempt(path, changed(content, place, other))
        assert error is None or str(path) in error or "optimizer" in error, (place, other, error)
        refused += error is not None
    return refused


def test_a_state_with_any_other_value_is_taken_or_refused_by_name(tmp_path):
    assert run_ranks(random_changes, 1, tmp_path / "step-1")[0] > ROUNDS // 4


def stated_changes(path):
    content = save_one(path)
    tensor = ("state", "states", "attached/memory", "mean")
    changes = [
        (("state", "states"), []),
        (("state", "states"), None),
        (("state", "optimizer", "groups"), None),
        (("state", "optimizer", "groups", 0, "parameters"), [3]),
        (("state", "optimizer", "groups", 0, "hyperparameters", "lr"), None),
        (tensor, {"__tensor__": [[2**40], "float32"]}),
        (tensor, [1]),
        (("state", "states", "attached/memory"), None),
    ]
    others = [[1, 2], None, 3, {"composer3d": 1}]
    return [*(attempt(path, changed(content, *each)) for each in changes), *(attempt(path, each) for each in others)]


def test_what_is_wrong_is_named(tmp_path):
    path = tmp_path / "step-1"
    state = f"{path / 'state.json'}: state"
    told = "; composer3d did not write this"
    assert run_ranks(stated_changes, 1, path)[0] == [
        f"{state}.states: Input should be a valid dictionary{told}",
        f"{state}.states: Input should be a valid dictionary{told}",
        f"{state}.optimizer.groups: Input should be a valid list{told}",
        f"{state}.optimizer.groups.0.parameters.0: Input should be a valid string{told}",
        f"{path}: the optimizer's lr is 0.1, and the checkpoint has None; what was read before it is loaded: steps and "
        "saves are refused until run.load succeeds",
        f"{path}: \"attached/memory/mean\" is a tensor [[1099511627776], 'float32'], and the checkpoint "
        "holds one of [3] in float32",
        f"{path}: of another model or optimizer: the checkpoint also holds attached/memory/mean",
        f"{path}: of another model or optimizer: the checkpoint also holds attached/memory/mean; the checkpoint also "
        "holds attached/memory/seen/1",
        *(
            f'{path / "state.json"}: damaged: it {what}; it must be an object with "composer3d" and "state"'
            for what in ("is [1, 2]", "is null", "is 3", 'has no "state"')
        ),
    ]


@pytest.mark.parametrize(
    ("run", "text"),
    [
        ([], "states.attached/run: Input should be a valid dictionary or instance of _Run"),
        (
            {"steps": -1, "sequences": 0, "tokens": 0, "record": {}},
            "states.attached/run.steps: Input should be",
        ),
        (
            {"steps": "1", "sequences": 0, "tokens": 0, "record": {}},
            "states.attached/run.steps: Input should be",
        ),
        ({"steps": 1, "sequences": 0, "tokens": 0}, "states.attached/run.record: Field required"),
        ({"steps": 1, "sequences": 0, "tokens": 0, "record": None}, "states.attached/run.record: Input should be"),
    ],
)
def test_what_a_run_wrote_is_validated(tmp_path, run, text):
    with pytest.raises(CheckpointError) as caught:
        validated_run(tmp_path, {"states": {"attached/run": run}})
    assert str(caught.value).startswith(f"{tmp_path / 'state.json'}: state.{text}")
    assert validated_run(tmp_path, {}) is None
