"""`schema` and `init`."""

from __future__ import annotations

import json
import re
import shlex

from composer3d.examples import shipped_examples
from composer3d.manifest import shipped


def test_the_schema_knows_tables_and_installed_plugins(command):
    code, out, err = command("schema")
    schema = json.loads(out)
    assert (code, err) == (0, "")
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert schema["properties"].keys() >= {"composer3d", "run", "mesh", "model", "data", "train", "optimizer"}
    assert schema["properties"]["sharding"]["properties"].keys() >= {"fsdp2", "ddp"}
    assert "zero" in json.dumps(schema["$defs"])


def test_a_command_to_copy_is_one_where_a_folder_has_spaces(folder, command):
    target = folder / "two words" / "run.toml"
    target.parent.mkdir()
    code, out, _ = command("init", "quickstart", "--to", str(target))
    assert code == 0 and shlex.split(out.partition("next: ")[2]) == ["composer3d", "check", str(target)]


def test_init_copies_a_shipped_manifest_that_then_is_good(folder, command):
    assert command("init", "quickstart") == (
        0,
        "wrote quickstart.toml, and composer3d.schema.json for editors; next: composer3d check quickstart.toml\n",
        "",
    )
    assert (folder / "quickstart.toml").read_text() == (
        "#:schema composer3d.schema.json\n" + shipped()["quickstart"].read_text()
    )
    assert command("check", "quickstart.toml")[0] == 0


def test_init_never_overwrites(folder, command):
    before = (folder / "run.toml").read_text()
    told = "run.toml exists and is not overwritten; name another file with --to FILE\n"
    assert command("init", "quickstart", "--to", "run.toml") == (2, "", told)
    assert (folder / "run.toml").read_text() == before


def test_init_refuses_what_is_not_there(folder, command):
    told = 'there is no shipped manifest or example "quikstart"; did you mean "quickstart"?\n'
    assert command("init", "quikstart") == (2, "", told)
    assert command("init", "quickstart", "--to", "no/such/folder.toml") == (
        2,
        "",
        "no/such/folder.toml cannot be written: no such file or directory\n",
    )
    code, _, err = command("init", "--to", "x.toml")
    assert code == 2 and err.startswith("--to x.toml needs the NAME of a shipped manifest or example; one of: ")


def test_init_alone_lists_what_is_shipped(command):
    code, out, _ = command("init")
    assert code == 0
    manifests, examples = out.split("\n\n")
    assert {line.split()[0] for line in manifests.splitlines()[1:]} == set(shipped())
    assert {line.split()[0] for line in examples.splitlines()[1:]} == set(shipped_examples())
    assert re.search(r"^quickstart +A small Llama on the text that ships inside Python itself", out, re.MULTILINE)
