"""YAML with the line of every key, and files that multiply or nest."""

from __future__ import annotations

import time

import pytest

from composer3d.importing.leaves import UnreadableSource
from composer3d.importing.yaml_leaves import read_yaml

yaml = pytest.importorskip("yaml")


def read(text):
    return {key: (leaf.value, leaf.line) for key, leaf in read_yaml(text, "a.yaml").leaves.items()}


def test_values_are_those_of_safe_load():
    text = """a: no
b: 1e-5
c: 1.0e-5
d: [1, {e: 2}]
f:
  g: &anchor {h: 0x10, i: ~}
  j: *anchor
  k: {<<: *anchor, h: 2}
l: 2024-01-01
m: {}
NO: "text"
"""
    assert read(text) == {
        "a": (False, 1),
        "b": ("1e-5", 2),
        "c": (1e-5, 3),
        "d": ([1, {"e": 2}], 4),
        "f.g.h": (16, 6),
        "f.g.i": (None, 6),
        "f.j.h": (16, 6),
        "f.j.i": (None, 6),
        "f.k.i": (None, 6),
        "f.k.h": (2, 8),
        "l": ("2024-01-01", 9),
        "m": ({}, 10),
        "false": ("text", 11),
    }
    loaded = yaml.safe_load(text)
    assert loaded["f"]["k"] == {"h": 2, "i": None} and loaded["b"] == "1e-5" and loaded["d"] == [1, {"e": 2}]


def test_a_key_that_stands_twice_counts_the_last_time():
    tree = read_yaml("a: 1\na: 2\n", "a.yaml")
    assert tree.leaves["a"].value == 2
    (problem,) = tree.problems
    assert (problem.severity, problem.line) == ("warning", 2)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (BOMB, "a.yaml:5:5: there are more than 10000 keys"),
        ("a: " + "[" * 2000, "keys are nested deeper than 32 levels"),
        ("".join(" " * n + "a:\n" for n in range(50)), "keys are nested deeper than 32 levels"),
        ("a: !!python/object/apply:os.system [touch x]\n", ""),
        ("a: !!python/name:os.system x\n", "is a tag that nothing safe is made of"),
        ("a: *b\n", "*b names no anchor"),
        ("a: b: c\n", "a.yaml:1:5: is not valid YAML"),
        ("a: 1\n---\na: 2\n", "a.yaml:2:1: holds a second document"),
        ("- a\n", "a.yaml:1:1: is no table of keys"),
        ("? [a]\n: b\n", "a.yaml:1:3: a key is a table or a list"),
        ("a: " + "9" * 5000, "is no value"),
        ("a: .inf\n", "a holds a number that is not finite"),
        ("a: \x01\n", "is not valid YAML"),
    ],
)
def test_hostile_files_are_told_with_their_line(text, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = time.process_time()
    if said:
        with pytest.raises(UnreadableSource) as caught:
            read_yaml(text, "a.yaml")
        assert said in str(caught.value)
    else:  # a list with a tag: its items are read, and nothing is made of them
        assert read(text) == {"a": (["touch x"], 1)}
        assert list(tmp_path.iterdir()) == []
    assert time.process_time() - before < 20
