"""JSON as DeepSpeed reads it, and files that are none."""

from __future__ import annotations

import time

import pytest

from composer3d.importing.leaves import UnreadableSource
from composer3d.importing.relaxed_json import read_json


def read(text):
    return {key: (leaf.value, leaf.line) for key, leaf in read_json(text, "ds.json").leaves.items()}


def test_comments_bare_words_and_commas():
    text = """{ // one
  # two
  /* three
     lines */
  bare: text without quotes, to its end
  "quoted": "a\\u0041\\n", 'single': 'x',
  zero: { stage: 3, "sizes": [1, 2.5, 5e8,], empty: {} }
  long: '''a
b'''
  flag: true  # a comment behind
  none: null,
}"""
    assert read(text) == {
        "bare": ("text without quotes, to its end", 5),
        "quoted": ("aA\n", 6),
        "single": ("x", 6),
        "zero.stage": (3, 7),
        "zero.sizes": ([1, 2.5, 5e8], 7),
        "zero.empty": ({}, 7),
        "long": ("a\nb", 8),
        "flag": (True, 10),
        "none": (None, 11),
    }


def test_braces_around_a_file_may_be_missing():
    assert read("a: 1\nb: {c: 2}\n") == {"a": (1, 1), "b.c": (2, 2)}


def test_tables_in_a_list_are_its_value():
    assert read('{"a": [{"b": 1, "c": {"d": 2}}, 3]}') == {"a": ([{"b": 1, "c.d": 2}, 3], 1)}


def test_a_key_that_stands_twice_is_a_problem():
    (problem,) = read_json('{"a": 1,\n "a": 2}', "ds.json").problems
    assert str(problem).startswith("ds.json:2:2: ") and "a stands twice, in line 1 too" in str(problem)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1', 'ds.json:1:8: "}" is missing at the end'),
        ("[1]", "ds.json:1:1: is a list, and a configuration is a table"),
        ('{"a": }', "ds.json:1:7: a value is missing"),
        ('{"a" 1}', 'ds.json:1:6: ":" is missing behind the key "a"'),
        ('{"a": "b\n}', "ds.json:1:7: a text has no closing quote on its line"),
        ('{"a": 1} x', "ds.json:1:10: 'x' stands behind the end of the table"),
        ('{"a": /* }', "ds.json:1:7: a comment is not closed"),
        ('{"fp16": {\n"enabled": CONFIG_FP16_ENABLED,\n}}', "ds.json:2:12: is a template: CONFIG_FP16_ENABLED stands"),
        ('{"lr": 1e999}', "ds.json:1:2: lr holds a number that is not finite or too large"),
        ('{"lr": ' + "9" * 5000 + "}", "ds.json:1:8: a number has too many digits"),
        ('{"a": ' * 40 + "1" + "}" * 40, "ds.json:1:194: keys are nested deeper than 32 levels"),
        ('{"a": ' + "[" * 5000, "values are nested deeper than 32 levels"),
        ("{" + ",".join(f'"k{n}": 1' for n in range(10_001)) + "}", "there are more than 10000 keys"),
    ],
)
def test_what_is_no_configuration_is_told_with_its_line(text, message):
    before = time.process_time()
    with pytest.raises(UnreadableSource) as caught:
        read_json(text, "ds.json")
    assert message in str(caught.value)
    assert time.process_time() - before < 20
