from __future__ import annotations

import math
from enum import IntEnum

import pytest
import torch

from composer3d.checkpoint import read_state
from composer3d.checkpoint.checksums import Checksums
from composer3d.checkpoint.state_file import encode_state, write_state
from composer3d.errors import CheckpointError


class Level(IntEnum):
    HIGH = 1


def written(folder, text):
    (folder / ".metadata").touch()
    Checksums(folder=folder, files={"state.json": write_state(folder, text)}).write()
    return folder


def test_values_round_trip(tmp_path):
    state = {"a": [1, True, None, "x\n\u00e9"], "b": {"c": -0.0, "big": 2**70, "small": 5e-324, "third": 1 / 3}}
    infinite = {"up": math.inf, "down": -math.inf, "none": math.nan}
    back = read_state(written(tmp_path, encode_state({**state, "infinite": infinite, "pair": (0.9, 0.999)})))
    assert math.isnan(back["infinite"].pop("none"))
    assert back == {**state, "infinite": {"up": math.inf, "down": -math.inf}, "pair": [0.9, 0.999]}
    assert math.copysign(1, back["b"]["c"]) == -1


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"data": {"order": [1, {2}]}}, "state.data.order.1 is a set, which JSON cannot carry"),
        ({"rng": {"cpu": torch.zeros(2)}}, "state.rng.cpu is a Tensor, which JSON cannot carry"),
        ({"level": Level.HIGH}, "state.level is a Level, which JSON cannot carry"),
        ({"key": b"x"}, "state.key is a bytes, which JSON cannot carry"),
    ],
)
def test_what_json_cannot_carry_is_named_by_its_keys(state, text):
    with pytest.raises(CheckpointError) as caught:
        encode_state(state)
    advice = "; make it a string, number, bool, list or dict, or save it among the tensors"
    assert str(caught.value) == text + advice


def test_keys_are_strings():
    with pytest.raises(CheckpointError) as caught:
        encode_state({"a": {3: 1}})
    assert str(caught.value) == "state.a has the key 3, a int; JSON keys are strings"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '{"composer3d": 1, "st',
            "damaged: JSONDecodeError: Unterminated string starting at: line 1 column 19 (char 18)",
        ),
        ('{"state": {}}', 'damaged: it has no "composer3d"; it must be an object with "composer3d" and "state"'),
        ('{"composer3d": 3, "state": {}}', "written in format 3; this composer3d reads format 2"),
        ('{"composer3d": 2, "state": []}', "damaged: its state is a list, not an object"),
        ('{"composer3d": 2, "state": null}', "damaged: its state is a NoneType, not an object"),
        ("[1]", 'damaged: it is [1]; it must be an object with "composer3d" and "state"'),
        (
            "[" * 100_000,
            "damaged: RecursionError: maximum recursion depth exceeded while decoding a JSON array from a unicode "
            "string",
        ),
        (
            "\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
            "damaged: JSONDecodeError: Expecting value: line 1 column 1 (char 0)",
        ),
    ],
)
def test_damaged_state_is_named(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(CheckpointError) as caught:
        read_state(path)
    assert str(caught.value) == f"{path / 'state.json'}: {message}"
