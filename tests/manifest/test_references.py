from __future__ import annotations

import itertools
import re
import sys

import pytest

from composer3d.errors import ReferenceFailure
from composer3d.manifest import read, resolve_reference

NUMBERS = itertools.count()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
        del sys.modules[name]


def refusal(reference, folder):
    with pytest.raises(ReferenceFailure) as caught:
        resolve_reference(reference, folder)
    error = caught.value
    assert str(error) == error.message + (f"; {error.hint}" if error.hint else "")
    return str(error)


def test_objects_of_the_manifest_folder_and_of_installed_packages(folder):
    (folder / "ref_model.py").write_text("import ref_parts\ndef build(): return ref_parts.SIZE\nclass A:\n  b = 5\n")
    (folder / "ref_parts.py").write_text("SIZE = 3\n")
    assert resolve_reference("ref_model:build", folder)() == 3
    assert resolve_reference("ref_model:A.b", folder) == 5
    assert resolve_reference("collections.abc:Sequence.__name__", folder) == "Sequence"
    assert sys.path[-1] == str(folder)
    assert sys.path.count(str(folder)) == 1


def test_modules_of_a_manifest_that_is_extended_come_after_ones_own(folder):
    for name, module in (("base", "ref_base"), ("base", "ref_both"), ("own", "ref_both")):
        (folder / name).mkdir(exist_ok=True)
        (folder / name / f"{module}.py").write_text(f"NAME = {name!r}\n")
    (folder / "base" / "run.toml").write_text("composer3d = 1\n")
    (folder / "own" / "run.toml").write_text('composer3d = 1\nextends = "../base/run.toml"\n')
    found = read(folder / "own" / "run.toml")
    assert resolve_reference("ref_base:NAME", found.folder) == "base"
    assert resolve_reference("ref_both:NAME", found.folder) == "own"


@pytest.mark.parametrize(
    "reference", ["ref_model", "", ":build", "ref_model:", ".x:y", "a-b:c", "a:b:c", "a:b c", "a.py:b"]
)
def test_what_is_no_reference(folder, reference):
    if reference == "a.py:b":
        assert refusal(reference, folder) == 'there is no module "a"'
        return
    assert refusal(reference, folder) == (
        f'"{reference}" is not a reference; write "module:name", for example "my_model:build"'
    )


def test_a_module_that_is_not_there(folder):
    (folder / "ref_model.py").write_text("")
    (folder / "ref_pack").mkdir()
    (folder / "ref_pack" / "__init__.py").write_text("")
    (folder / "ref_pack" / "inner.py").write_text("")
    assert refusal("ref_modle:build", folder) == 'there is no module "ref_modle"; did you mean "ref_model"?'
    assert refusal("zzz:build", folder) == 'there is no module "zzz"; one of: ref_model, ref_pack'
    assert refusal("ref_pack.iner:x", folder) == 'there is no module "ref_pack.iner"; did you mean "inner"?'
    (folder / "ref_link.py").symlink_to("/nowhere/ref_link.py")
    assert refusal("ref_link:build", folder) == (
        'there is no module "ref_link"; ref_link.py is a link to /nowhere/ref_link.py, which is not there'
    )
    assert refusal("ref_model.x:y", folder) == 'there is no module "ref_model.x"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n1 / 0\n", "ref_bad.py:2: ZeroDivisionError: division by zero"),
        ("import json\njson.loads('{')\n", "ref_bad.py:2: JSONDecodeError: "),
        ("import ref_other\n", "ref_other.py:3: RuntimeError"),
        ("import not_there_at_all\n", "ref_bad.py:1: ModuleNotFoundError: No module named 'not_there_at_all'"),
        ("x = 1\ndef f(:\n", "ref_bad.py:2: SyntaxError: invalid syntax"),
        ("import sys\n\nsys.exit(3)\n", "ref_bad.py:3: SystemExit: 3"),
    ],
)
def test_a_module_that_fails_shows_the_users_line(folder, text, message):
    (folder / "ref_bad.py").write_text(text)
    (folder / "ref_other.py").write_text("def f():\n  pass\nraise RuntimeError\n")
    start = 'the module "ref_bad" fails when imported, at '
    said = refusal("ref_bad:build", folder)
    assert said == start + message or (message.endswith(": ") and said.startswith(start + message))


def test_a_name_that_is_not_there(folder):
    (folder / "ref_model.py").write_text(
        "import os\n_private = 1\ndef build(): pass\nclass Llama:\n  def make(self): pass\n"
    )
    assert refusal("ref_model:biuld", folder) == 'module "ref_model" has no "biuld"; did you mean "build"?'
    assert refusal("ref_model:zzz", folder) == 'module "ref_model" has no "zzz"; one of: Llama, build'
    assert refusal("ref_model:Llama.mke", folder) == '"ref_model.Llama" has no "mke"; did you mean "make"?'
    (folder / "ref_stated.py").write_text("__all__ = ['a']\na = b = 1\n")
    assert refusal("ref_stated:zzz", folder) == 'module "ref_stated" has no "zzz"; one of: a'


def test_another_module_of_the_same_name_is_not_taken(folder):
    name = "ref_twice"
    for sub in ("first", "second"):
        (folder / sub).mkdir()
        (folder / sub / f"{name}.py").write_text(f"x = '{sub}'\n")
    assert resolve_reference(f"{name}:x", folder / "first") == "first"
    assert resolve_reference(f"{name}:x", folder / "first") == "first"
    assert refusal(f"{name}:x", folder / "second") == (
        f'the module "{name}" was imported from {folder}/first/{name}.py, not from the folder of the manifest; '
        f"rename {name}.py"
    )
    (folder / "second" / "sys.py").write_text("")
    assert re.fullmatch(
        'the module "sys" was imported from Python itself, not from the folder of the manifest; rename sys.py',
        refusal("sys:path", folder / "second"),
    )
