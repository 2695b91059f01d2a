from __future__ import annotations

import random

import pytest
import tomli

from composer3d.manifest.positions import NestedTooDeeply, locate, split_key

DOCUMENTS = {
    "smallest": 'composer3d = 1\nmodel = "my_model:build"\ndata = "corpus/"\ntrain.steps = 200\nsharding.fsdp2 = {}\n',
    "headers": "[mesh]\npp = 2 # pp = 3\n\n  [ sharding . fsdp2 ]\n\tzero= 3\n[sharding.ddp]\n[sharding]\n",
    "header after use": "[a.b]\nx = 1\n[a]\ny = 2\n",
    "dotted": "a.b.c = 1\na . b . d = 2\n[t]\nx.y = 1\nx.z.w = 2\n",
    "quoted": '"a.b" = 1\n\'c d\'."e \\" = 1" = 2\n["x.y".\'z\']\n"\\u00e9" = 1\n"" = 0\n',
    "arrays of tables": "[[a]]\nx = 1\n[a.b]\ny = 1\n[[a.c]]\n[[a.c]]\nz = 1\n[[a]]\nx = 2\n[[a.c]]\nz.z = 3\n",
    "strings": 'a = "b = 1"\nc = \'d = "2"\'\ne = "#"\nf = "\\" g = 1 \\\\"\nh = 1\n',
    "multi-line strings": 'a = """\nb = 1\n[c]\n""" # d = 1\ne = \'\'\'\nf = 2\\\'\'\'\ng = """x\\""" h = 1"""\ni = 1',
    "quotes at the end": 'a = """x"""""\nb = \'\'\'y\'\'\'\'\'\nc = """"""\nd = \'\'\'\'\'\'\ne = """"x"""\n',
    "comments": "# a = 1\n#[b]\nc = 1 # = 2\n[d] # e = 1\n # f = 1\ng = [ # h\n 1, # ]\n # [\n]\n",
    "inline tables": "a = {b = 1, c.d = {e = [1, {f = 2}]}}\ng = { }\nh = {'i j'=1}\n",
    "multi-line inline tables": "a = { # x = 1\n  b = 1, # }\n\n  c.d = {\n    e = '}',\n  },\n}\nf = 1\n",
    "nested arrays": 'a = [[1, 2], [], [[3], {b = "]"}], """[\n""", 1.5,]\nb = [\n]\nc = [ "x" , 2 ]\n',
    "dates and numbers": "a = 1979-05-27 07:32:00\nb = [1979-05-27 07:32:00, 07:32:00]\nc = -1e+5\nd = [inf, 0xff]\n",
    "carriage returns": 'a = 1\r\n[b]\r\nc = """\r\nd = 1\r\n"""\r\ne = [\r\n 1,\r\n]\r\n',
    "keys like numbers": "1.2 = 3\n[4]\n-5 = 6\ntrue = false\ninf.nan = 1\n",
    "no line break at the end": "[a]\nb = {c = 1}",
    "other line separators": 'a = "\u2028" # \u0085\nb = 1\n',
    "empty": "",
}


def paths(document: object) -> set[tuple[str | int, ...]]:
    found: dict[tuple[str | int, ...], object] = {(): document}
    left = [()]
    while left:  # not recursive: documents are nested as deep as Python's stack
        path = left.pop()
        value = found[path]
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        inside = {(*path, key): item for key, item in items}
        found |= inside
        left += inside
    return found.keys() - {()}


def assert_located(text: str) -> None:
    positions = locate(text)
    assert set(positions) == paths(tomli.loads(text)), text
    lines = text.replace("\r\n", "\n").split("\n")
    for path, (line, column) in positions.items():
        here = lines[line - 1][column - 1 :]
        found = split_key(here)
        if isinstance(path[-1], str):
            assert found is not None and found[0][0] == path[-1], (text, path, here)
        else:
            assert here and here[0] not in " \t,#]}", (text, path, here)


@pytest.mark.parametrize("text", DOCUMENTS.values(), ids=DOCUMENTS.keys())
def test_every_key_is_where_its_name_stands(text):
    assert_located(text)


def random_value(generator: random.Random, depth: int) -> str:
    kinds = ["1", "-2.5", '"k = 1"', "'[x]'", '"""\na = 1\n"""', "'''\n[b]'''", "2020-01-01 10:00:00", "true"]
    if depth == 0 or generator.random() < 0.5:
        return generator.choice(kinds)
    blank = generator.choice(["", " ", "\n", " # c = 1\n"])
    comma = f",{blank}"
    if generator.random() < 0.5:
        items = [random_value(generator, depth - 1) for _ in range(generator.randrange(4))]
        return f"[{blank}{comma.join(items)}{blank}]"
    pairs = [f"{key} ={random_value(generator, depth - 1)}" for key in random_keys(generator)]
    return f"{{{blank}{comma.join(pairs)}{blank}}}"


def random_keys(generator: random.Random) -> list[str]:
    keys = ["a", "b-c", '"d.e"', "'f = 1'", "g.h", 'g . "#"', "1", '"\\u0041"']
    return generator.sample(keys, generator.randrange(5))


def random_document(generator: random.Random) -> str:
    sections = ["", *generator.sample(["[t]", "[ t.u ]", "[[v]]", "[v.w]", "[[v.x]]", "[[v]]", '["y z".t]'], 4)]
    text = ""
    for section in sections:
        text += f"{section} # {section}\n" if section else ""
        text += "".join(f"{key} = {random_value(generator, 3)}  \n" for key in random_keys(generator))
    return text


def test_random_documents_are_located():
    generator, num_valid = random.Random(0), 0
    for _ in range(2000):
        text = random_document(generator)
        try:
            tomli.loads(text)
        except tomli.TOMLDecodeError:
            continue
        num_valid += 1
        assert_located(text)
    assert num_valid > 1000


def test_broken_documents_end_the_scan():
    generator = random.Random(1)
    for _ in range(500):
        text = random_document(generator)
        cut = generator.randrange(len(text) + 1)
        text = text[:cut] + generator.choice(["", '"', "[", "}", "=", "'''", "\n"]) + text[cut + 1 :]
        num_lines = text.count("\n") + 1
        assert all(line <= num_lines for line, _ in locate(text).values())


def test_what_stands_before_a_fault_is_located():
    assert locate("a = 1\nb = [2\nc = ") == {("a",): (1, 1), ("b",): (2, 1), ("b", 0): (2, 6)}


def test_places_are_exact():
    text = '[a]\n  b.c = [10, { d = 1 }]\n[[e]]\n[[e]]\n"f" = 1\n'
    assert locate(text) == {
        ("a",): (1, 2),
        ("a", "b"): (2, 3),
        ("a", "b", "c"): (2, 5),
        ("a", "b", "c", 0): (2, 10),
        ("a", "b", "c", 1): (2, 14),
        ("a", "b", "c", 1, "d"): (2, 16),
        ("e",): (3, 3),
        ("e", 0): (3, 3),
        ("e", 1): (4, 3),
        ("e", 1, "f"): (5, 1),
    }


def test_nesting_has_an_end():
    text = "a = " + "[" * 64 + "]" * 64
    assert len(locate(text)) == 64
    assert set(locate(text)) == paths(tomli.loads(text))
    for deep in ("a = " + "[" * 400 + "]" * 400, ".".join("k" * 65) + " = 1", "[" + ".".join("k" * 70_000) + "]"):
        with pytest.raises(NestedTooDeeply, match="a key of more than 64 parts"):
            locate(deep)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("train.steps=10", (("train", "steps"), 11)),
        (' "a.b" . c =', (("a.b", "c"), 11)),
        ("=1", None),
        ("a.=1", None),
        ('"a', None),
        ("", None),
    ],
)
def test_split_key(text, found):
    assert split_key(text) == found
