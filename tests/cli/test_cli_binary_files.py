"""Files that a command is given and that are no text: a sentence with the file, and exit code 2."""

from __future__ import annotations

import pytest

BYTES = b'name = "\xff\xfe"\n'
DEEP = b"a = " + b"[" * 5000 + b"]" * 5000
NO_TEXT = "is not UTF-8: byte 0xff"


@pytest.mark.parametrize("content", [BYTES, DEEP, b"a = " + b"9" * 5000], ids=["bytes", "deep", "digits"])
def test_hardware_that_is_no_toml_is_named(content, folder, command):
    (folder / "own.toml").write_bytes(content)
    told = f"own.toml: {NO_TEXT}\n" if content is BYTES else "own.toml: is not TOML: "
    for words in (("plan", "run.toml"), ("suggest", "run.toml", "--world-size", "2")):
        code, out, err = command(*words, "--hardware", "own.toml")
        assert (code, out) == (2, "") and err.startswith(told) and err.count("\n") == 1, err


@pytest.mark.parametrize("words", [("check",), ("plan",), ("plan", "quickstart", "--diff"), ("schedule",)])
def test_a_manifest_that_is_no_text_is_named(words, folder, command):
    (folder / "own.toml").write_bytes(BYTES)
    code, out, err = command(*words, "own.toml")
    assert (code, out) == (2, "") and err.startswith("own.toml") and "UTF-8" in err and "Traceback" not in err, err


def test_a_manifest_beside_which_a_plugin_is_tested_is_named(folder, command):
    (folder / "own.toml").write_bytes(BYTES)
    told = f"--beside own.toml {NO_TEXT}\n"
    assert command("plugins", "fsdp2", "--conformance", "--beside", "own.toml") == (2, "", told)
