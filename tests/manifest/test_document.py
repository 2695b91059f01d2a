from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

import composer3d
from composer3d.errors import ManifestError
from composer3d.manifest import Place, read, read_text, shipped
from composer3d.manifest import sources as sources_module

FORMAT = "composer3d = 1\n"


def refusal(function, *arguments, **keywords):
    with pytest.raises(ManifestError) as caught:
        function(*arguments, **keywords)
    return str(caught.value)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def shipped_folder(tmp_path, monkeypatch):
    folder = tmp_path / "shipped"
    folder.mkdir()
    monkeypatch.setattr(sources_module, "shipped_folder", lambda: folder)
    return folder


def test_the_smallest_manifest():
    document = read_text(
        'composer3d = 1\nmodel = "my_model:build"\ndata = "corpus/"\ntrain.steps = 200\nsharding.fsdp2 = {}\n'
    )
    assert document.tables == {
        "model": {"use": "my_model:build"},
        "data": {"use": "corpus/"},
        "train": {"steps": 200},
        "sharding": {"fsdp2": {}},
    }
    assert document.place(("model", "use")) == Place("<text>", 2, 1)
    assert document.place(("train", "steps")) == Place("<text>", 4, 7)


def test_strings_stand_for_tables_with_use():
    document = read_text(FORMAT + 'optimizer = "adamw"\nlr_schedule = "cosine"\nmesh = "x"\n')
    assert document.tables == {"optimizer": {"use": "adamw"}, "lr_schedule": {"use": "cosine"}, "mesh": "x"}


def test_a_file_knows_where_it_is(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "run.v2.toml").write_text(FORMAT)
    document = read("sub/run.v2.toml")
    assert (document.file, document.path, document.stem) == ("sub/run.v2.toml", Path("sub/run.v2.toml"), "run.v2")
    assert document.folder == folder / "sub"


def test_text_counts_from_the_working_folder(folder):
    document = read_text(FORMAT)
    assert (document.file, document.path, document.stem, document.folder) == ("<text>", None, "text", folder)


def test_places_and_values():
    document = read_text(FORMAT + "[a]\nb = [1, {c = 2}]\n")
    assert document.get(("a", "b", 1, "c")) == 2
    assert document.get(("a", "b", 2)) is None
    assert document.get(("a", "x", "y"), 5) == 5
    assert document.get(()) == document.tables
    assert document.place(("a", "b", 1, "c", "d")) == Place("<text>", 3, 10)
    assert document.place(("x",)) == Place("<text>", 1, 1)


def test_problems_have_place_table_and_key():
    document = read_text(FORMAT + '[sharding.fsdp2]\nzeero = 3\nplan."layers.*".x = 1\n', "run.toml")
    problem = document.problem(("sharding", "fsdp2", "zeero"), 'unknown key "zeero"', hint='did you mean "zero"?')
    assert str(problem) == 'run.toml:3:1: [sharding.fsdp2] unknown key "zeero"; did you mean "zero"?'
    assert (problem.table, problem.key) == ("sharding.fsdp2", "zeero")
    inner = document.problem(("sharding", "fsdp2", "plan", "layers.*", "x"), "is wrong", severity="warning")
    assert str(inner) == 'run.toml:4:17: warning: [sharding.fsdp2.plan."layers.*"] is wrong'
    whole = document.problem(("sharding", "fsdp2"), "needs a GPU", whole_table=True)
    assert str(whole) == "run.toml:2:11: [sharding.fsdp2] needs a GPU"
    assert (whole.table, whole.key) == ("sharding.fsdp2", None)
    assert str(document.problem((), "is empty")) == "run.toml:1:1: is empty"


def test_bases_merge(folder):
    model = '[model]\nuse = "a:b"\nblocks = "layers.*"\n[model.args]\ndim = 1\ndepth = 2\n'
    (folder / "base.toml").write_text(FORMAT + model + "[train]\nsteps = 1\n[x.y.z]\nk = 1\n")
    (folder / "run.toml").write_text(
        FORMAT + 'extends = "base.toml"\nmodel = "c:d"\ntrain.seed = 5\n[x.y]\nz = false\nw = false\n'
    )
    document = read("run.toml")
    assert document.tables == {
        "model": {"use": "c:d", "blocks": "layers.*", "args": {"dim": 1, "depth": 2}},
        "train": {"steps": 1, "seed": 5},
        "x": {"y": {"w": False}},
    }
    assert document.place(("model", "use")) == Place("run.toml", 3, 1)
    assert document.place(("model", "blocks")) == Place("base.toml", 4, 1)
    assert document.place(("model", "args", "dim")) == Place("base.toml", 6, 1)
    assert document.place(("train", "steps")) == Place("base.toml", 9, 1)
    assert document.place(("train", "seed")) == Place("run.toml", 4, 7)
    assert (document.file, document.stem) == ("run.toml", "run")


def test_a_replaced_value_forgets_the_places_inside_the_old_one(folder):
    (folder / "base.toml").write_text(FORMAT + "[t]\na = {b = 1}\nc = [1, 2]\n")
    (folder / "run.toml").write_text(FORMAT + 'extends = "base.toml"\nt.a = 5\nt.c = [3]\n')
    document = read("run.toml")
    assert document.tables == {"t": {"a": 5, "c": [3]}}
    assert document.place(("t", "a", "b")) == Place("run.toml", 3, 3)
    assert document.place(("t", "c", 1)) == Place("run.toml", 4, 3)


def test_bases_count_from_the_file_that_names_them(folder):
    (folder / "a" / "b").mkdir(parents=True)
    (folder / "top.toml").write_text(FORMAT + "t.x = 1\n")
    (folder / "a" / "middle.toml").write_text(FORMAT + 'extends = "../top.toml"\nt.y = 2\n')
    (folder / "a" / "b" / "run.toml").write_text(FORMAT + 'extends = "../middle.toml"\nt.z = 3\n')
    document = read("a/b/run.toml")
    assert document.tables == {"t": {"x": 1, "y": 2, "z": 3}}
    assert document.place(("t", "x")).file == "top.toml"
    assert document.place(("t", "y")).file == "a/middle.toml"
    assert read(folder / "a/b/run.toml").place(("t", "x")).file == str(folder / "top.toml")


def test_a_cycle_shows_its_chain(folder):
    for name, base in (("run", "a"), ("a", "b"), ("b", "./a")):
        (folder / f"{name}.toml").write_text(FORMAT + f'extends = "{base}.toml"\n')
    assert refusal(read, "run.toml") == "b.toml:2:1: extends forms a cycle: a.toml -> b.toml -> a.toml"
    (folder / "self.toml").write_text(FORMAT + 'extends = "self.toml"\n')
    assert refusal(read, "self.toml") == "self.toml:2:1: extends forms a cycle: self.toml -> self.toml"


def test_a_missing_base_is_a_problem_at_its_line(folder, shipped_folder):
    (folder / "base.toml").write_text(FORMAT)
    (folder / "run.toml").write_text(FORMAT + '\nextends = "bse.toml"\n')
    assert refusal(read, "run.toml") == (
        'run.toml:3:1: there is no file "bse.toml" and no shipped manifest of that name; did you mean "base.toml"?'
    )
    (folder / "run.toml").write_text(FORMAT + "extends = 5\n")
    assert refusal(read, "run.toml") == "run.toml:2:1: extends = 5 is not a string; write a path or a shipped name"


def test_shipped_manifests_are_found_by_name(folder, shipped_folder):
    (shipped_folder / "quickstart.toml").write_text(FORMAT + 'extends = "small"\nt.x = 1\n')
    (shipped_folder / "small.toml").write_text(FORMAT + "t.y = 2\n")
    (folder / "small").write_text("a file of the user that no shipped manifest may see")
    (folder / "quickstart").mkdir()
    document = read("quickstart")
    assert document.tables == {"t": {"y": 2, "x": 1}}
    assert (document.file, document.stem, document.folder) == ("quickstart", "quickstart", folder)
    assert document.path == shipped_folder / "quickstart.toml"
    assert document.place(("t", "y")) == Place("small", 2, 3)
    (folder / "run.toml").write_text(FORMAT + 'extends = "quickstart"\nt.x = 5\n')
    assert read("run.toml").tables == {"t": {"y": 2, "x": 5}}
    assert list(shipped()) == ["quickstart", "small"]


def test_files_that_a_base_names_are_those_beside_it(folder):
    for name in ("base", "base/inner", "runs"):
        (folder / name).mkdir()
    for name in ("base/text.txt", "base/tokens.bin", "base/inner/own.txt", "runs/both.txt", "base/both.txt"):
        (folder / name).touch()
    (folder / "base" / "model").mkdir()
    (folder / "base" / "base.toml").write_text(
        FORMAT + 'data.use = "text.txt"\ndata.tokenizer = "bytes"\nmodel.hf = "model"\n'
        '[[data.blend]]\nuse = "tokens"\n[[data.blend]]\nuse = "both.txt"\n[[data.blend]]\nuse = "a:b"\n'
    )
    (folder / "base" / "inner" / "middle.toml").write_text(FORMAT + 'extends = "../base.toml"\n')
    (folder / "runs" / "run.toml").write_text(FORMAT + 'extends = "../base/inner/middle.toml"\n')
    found = read("runs/run.toml").tables
    assert found["data"]["use"] == "../base/text.txt" and found["data"]["tokenizer"] == "bytes"
    assert found["model"]["hf"] == "../base/model"
    assert [each["use"] for each in found["data"]["blend"]] == ["../base/tokens", "both.txt", "a:b"]
    (folder / "runs" / "own.toml").write_text(FORMAT + 'extends = "../base/base.toml"\ndata.use = "text.txt"\n')
    assert read("runs/own.toml").tables["data"]["use"] == "text.txt"


def test_a_shipped_manifest_extends_shipped_ones_only(folder, shipped_folder):
    (folder / "mine").write_text(FORMAT)
    (shipped_folder / "quickstart.toml").write_text(FORMAT + 'extends = "mine"\n')
    assert refusal(read, "quickstart") == (
        'quickstart:2:1: there is no file "mine" and no shipped manifest of that name; shipped manifests: quickstart'
    )


def test_every_shipped_file_has_a_name():
    files = (Path(composer3d.__file__).parent / "manifests").glob("*.toml")
    assert list(shipped()) == sorted(file.stem for file in files)


def test_a_missing_file_lists_shipped_names(folder, shipped_folder):
    (shipped_folder / "quickstart.toml").write_text(FORMAT)
    (shipped_folder / "small.toml").write_text(FORMAT)
    (folder / "run.toml").write_text(FORMAT)
    start = 'there is no file "{}" and no shipped manifest of that name; '
    end = "shipped manifests: quickstart, small"
    assert refusal(read, "runn.toml") == start.format("runn.toml") + f'did you mean "run.toml"? {end}'
    assert refusal(read, "quickstrt") == start.format("quickstrt") + f'did you mean "quickstart"? {end}'
    assert refusal(read, "zzz") == start.format("zzz") + end
    assert refusal(read, Path("zzz/other")) == start.format("zzz/other") + end
    assert refusal(read, "x" * 500) == start.format("x" * 500) + end


def test_unreadable_files(folder):
    (folder / "d.toml").mkdir()
    assert refusal(read, "d.toml") == "d.toml: cannot be read: it is a folder"
    (folder / "latin.toml").write_bytes(b"composer3d = 1\n# caf\xc3\xa9 \xe9\n")
    assert refusal(read, "latin.toml") == "latin.toml:2:8: is not UTF-8: byte 0xe9; save the file as UTF-8"


def test_a_byte_order_mark_is_no_part_of_the_text(folder):
    (folder / "run.toml").write_bytes(b"\xef\xbb\xbfcomposer3d = 1\r\nt.x = 1\r\n")
    assert read("run.toml").tables == {"t": {"x": 1}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a = 1\nb = = 2\n", "run.toml:2:5: not valid TOML: invalid value; the line reads: b = = 2"),
        (
            "[train.x]\n[train.x]\n",
            "run.toml:2:9: not valid TOML: cannot declare train.x twice; "
            "[train.x] stands on line 1; write its keys there",
        ),
        ('a = "x\n', "run.toml:1:7: not valid TOML: illegal character '\\n'; the line reads: a = \"x"),
        ("a = [1\n", "run.toml:2:1: not valid TOML: unclosed array; the line is empty"),
        ("a = " + "[" * 500, "run.toml:1:69: nested too deeply: a key of more than 64 parts"),
        ("x = 1\n a" + ".k" * 2000 + " = 1", "run.toml:2:2: nested too deeply: a key of more than 64 parts"),
    ],
)
def test_syntax_errors_show_line_and_text(text, message):
    assert refusal(read_text, text, "run.toml") == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[train]\nsteps = 1\n",
            "run.toml:1:1: the key composer3d is missing; it says which format the manifest has; "
            "this version reads composer3d = 1: make it the first line",
        ),
        (
            "# two\ncomposer3d = 2\n",
            "run.toml:2:1: composer3d = 2 is not a format that this version knows; this version reads composer3d = 1",
        ),
        (
            'composer3d = "1"\n',
            'run.toml:1:1: composer3d = "1" is not a format that this version knows; this version reads composer3d = 1',
        ),
        (
            "composer3d = true\n",
            "run.toml:1:1: composer3d = true is not a format that this version knows; "
            "this version reads composer3d = 1",
        ),
    ],
)
def test_the_format_is_stated(text, message):
    assert refusal(read_text, text, "run.toml") == message


def test_all_layers_are_checked_at_once(folder):
    (folder / "base.toml").write_text("[x]\n")
    (folder / "run.toml").write_text('composer3d = 3\nextends = "base.toml"\n')
    with pytest.raises(ManifestError) as caught:
        read("run.toml", ["=3", "train.steps"])
    assert [(problem.file, problem.line) for problem in caught.value.problems] == [
        ("--set =3", None),
        ("--set train.steps", None),
        ("base.toml", 1),
        ("run.toml", 1),
    ]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.steps=10", {"train": {"steps": 10, "lr": 1.0}}),
        ("train.lr = 3e-4", {"train": {"steps": 1, "lr": 3e-4}}),
        ("train.name=adamw", {"train": {"steps": 1, "lr": 1.0, "name": "adamw"}}),
        ('train.name="10"', {"train": {"steps": 1, "lr": 1.0, "name": "10"}}),
        ("train.name=a=b, c", {"train": {"steps": 1, "lr": 1.0, "name": "a=b, c"}}),
        ("train.name=1\nx=2", {"train": {"steps": 1, "lr": 1.0, "name": "1\nx=2"}}),
        ("train.names=[1, 'x']", {"train": {"steps": 1, "lr": 1.0, "names": [1, "x"]}}),
        ("train.flag=true", {"train": {"steps": 1, "lr": 1.0, "flag": True}}),
        ("train={seed = 1}", {"train": {"steps": 1, "lr": 1.0, "seed": 1}}),
        ("train=false", {}),
        ("train.lr=false", {"train": {"steps": 1, "lr": False}}),
        ('a."b.c".d=1', {"train": {"steps": 1, "lr": 1.0}, "a": {"b.c": {"d": 1}}}),
        ("model=m:f", {"train": {"steps": 1, "lr": 1.0}, "model": {"use": "m:f"}}),
    ],
)
def test_overrides(override, expected):
    document = read_text(FORMAT + "[train]\nsteps = 1\nlr = 1.0\n", overrides=[override])
    assert document.tables == expected


def test_the_later_override_wins_and_problems_name_it():
    overrides = ["train.steps=2", "train.steps=x", "a.b.c=1"]
    document = read_text(FORMAT + "[train]\nsteps = 1\n", overrides=overrides)
    assert document.tables == {"train": {"steps": "x"}, "a": {"b": {"c": 1}}}
    assert document.place(("train", "steps")) == Place("--set train.steps=x")
    assert document.place(("train", "seed")) == Place("<text>", 2, 2)
    assert document.place(("a", "b")) == Place("--set a.b.c=1")
    problem = document.problem(("train", "steps"), "is wrong")
    assert str(problem) == "--set train.steps=x: [train] is wrong"
    assert (problem.line, problem.column) == (None, None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.steps", "--set train.steps: has no value; write --set table.key=value"),
        ("train.steps=", "--set train.steps=: has no value; write --set table.key=value"),
        ("=5", "--set =5: does not start with a key; write --set table.key=value"),
        ("", "--set : does not start with a key; write --set table.key=value"),
        ("a..b=5", "--set a..b=5: does not start with a key; write --set table.key=value"),
        ("a b=5", "--set a b=5: has no value; write --set table.key=value"),
        ("composer3d=2", "--set composer3d=2: composer3d cannot be set here; write it in the manifest"),
        ("extends=x", "--set extends=x: extends cannot be set here; write it in the manifest"),
    ],
)
def test_malformed_overrides(override, message):
    assert refusal(read_text, FORMAT, overrides=[override]) == message


def test_the_resolved_manifest_reads_back_equal(folder):
    (folder / "base.toml").write_text(FORMAT + '[model]\nuse = "a:b"\n[sharding.fsdp2]\nzero = 3\n[profiling.x]\n')
    (folder / "run.toml").write_text(
        FORMAT + 'extends = "base.toml"\n"odd key" = {"a.b" = [1, {c = inf}]}\nprofiling.x = false\nt = 2020-01-01\n'
    )
    document = read("run.toml", ["sharding.fsdp2.zero=2", "x.y=false"])
    text = document.to_toml()
    assert text.startswith("composer3d = 1\n")
    assert tomli.loads(text) == {"composer3d": 1, **document.tables}
    again = read_text(text)
    assert again.tables == document.tables
    assert again.digest() == document.digest()


def test_the_digest_is_of_the_content_alone():
    first = read_text(FORMAT + "# c\n[a]\nx = 1\n[b]\ny = 1.0\nd = 2020-01-01\n")
    same = read_text(FORMAT + "[b]\nd = 2020-01-01\ny = 1\n[a]\nx = 1\n", "other", ["b.y=1.0"])
    assert first.digest() == same.digest()
    assert len(first.digest()) == 64
    for other in ("a.x=2", "b.y=1", 'b.d="2020-01-01"', "b.z=1", "a=false"):
        assert first.digest() != read_text(first.to_toml(), overrides=[other]).digest()


def test_manifests_are_read_without_torch():
    program = "import sys, composer3d.manifest as m; m.read_text('composer3d = 1'); sys.exit('torch' in sys.modules)"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    assert subprocess.run([sys.executable, "-c", program], env=environment, timeout=1200).returncode == 0


def test_a_link_that_leads_nowhere_says_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "self.toml").symlink_to("self.toml")
    (tmp_path / "gone.toml").symlink_to("there.toml")
    (tmp_path / "run.toml").write_text('composer3d = 1\nextends = "self.toml"\n')
    for name, told in {
        "self.toml": '"self.toml" is a symbolic link that leads round in a circle',
        "gone.toml": '"gone.toml" is a symbolic link that leads to "there.toml", which is not there',
        "run.toml": 'run.toml:2:1: "self.toml" is a symbolic link that leads round in a circle',
    }.items():
        with pytest.raises(ManifestError) as caught:
            read(name)
        assert str(caught.value) == told


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("x = True", "write true"),
        ("x = None", "TOML has no such value: leave the key out"),
        ("x = \u201ccpu\u201d", 'the line holds a curly quote (U+201C); write "'),
        ('x =\u00a0"cpu"', "the line holds a no-break space (U+00A0); write a space"),
        ("x = 1\nx = 2", "the key stands in the file twice; remove one of them"),
    ],
)
def test_what_other_formats_and_editors_make_of_toml_is_told(line, hint):
    with pytest.raises(ManifestError) as caught:
        read_text(f"composer3d = 1\n{line}\n")
    assert [problem.hint for problem in caught.value.problems] == [hint]
