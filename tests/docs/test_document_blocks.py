"""Documents do what they say: files and commands in fenced blocks are executed, and links lead somewhere."""

from __future__ import annotations

import doctest
import re
import runpy
from collections import Counter

import pytest
import torch
from support.documents import DOCUMENTS, ROOT, anchors, blocks, files, links, read
from support.huggingface import make

from composer3d.errors import ManifestError
from composer3d.manifest import load_manifest
from composer3d.runner import TABLES
from composer3d.testing import run_ranks

BLOCKS = {name: blocks(read(name)) for name in DOCUMENTS}
FILES = [name for document in DOCUMENTS for name in files(read(document))]
KINDS = {"sh", "console", "python", "toml", "diff", "text"}


def test_every_document_is_tested():
    found = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("*/**/README.md")}
    third_party = {name for name in found if name.startswith("tests/third_party/") or name.startswith(".")}
    assert found - third_party == set(DOCUMENTS) - {"README.md", "CONTRIBUTING.md"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_block_is_of_a_kind_that_is_tested(name):
    assert [block for block in BLOCKS[name] if block.language not in KINDS] == []
    assert [block.line for block in BLOCKS[name] if block.language == "python" and block.mark not in FILES] == []
    # What no test reads is the picture of README alone.
    assert all(name == "README.md" for block in BLOCKS[name] if block.language in ("sh", "diff", "text"))
    assert [block.line for block in BLOCKS[name] if block.language == "toml" and block.mark not in FILES] == []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_to_files_and_headings(name):
    for target, shown in links(read(name)).items():
        path, _, heading = target.partition("#")
        found = (ROOT / name).parent / path
        assert found.is_file(), f"[{shown}]({target})"
        assert not heading or heading in anchors(found.read_text()), f"[{shown}]({target})"


def test_no_file_stands_in_two_documents():
    assert [name for name, number in Counter(FILES).items() if number > 1] == []


def test_manifests_are_read(folder):
    manifests = [name for name in FILES if name.endswith(".toml") and name != "bad.toml"]
    assert sorted(manifests) == ["3d.toml", "embedded.toml", "full.toml", "hf.toml", "run.toml"]
    for name in manifests:
        # A loop of one's own has no use for the runner's tables.
        tables = None if name == "embedded.toml" else TABLES
        assert load_manifest(name, tables=tables).plugins, name
    with pytest.raises(ManifestError):
        load_manifest("bad.toml", tables=TABLES)


def test_the_embedded_manifest_is_that_of_the_benchmark(folder):
    assert (folder / "embedded.toml").read_text() == read("benchmarks/loops/embedded.toml")


@pytest.mark.parametrize(("name", "number"), [("README.md", 1), ("composer3d/cli/README.md", 5)])
def test_commands_print_what_is_shown(name, number, folder, composer3d):
    shown = "".join(block.text for block in BLOCKS[name] if block.language == "console")
    commands = re.findall(r"^\$ (.+)\n((?:(?!\$ ).*\n)*)", shown, re.MULTILINE)
    assert len(commands) == number
    checker = doctest.OutputChecker()
    for line, expected in commands:
        printed = composer3d(line)
        assert checker.check_output(expected, printed, doctest.ELLIPSIS), f"{line}\n{printed}"


def test_commands_are_shown_where_they_are_tested():
    shown = {name for name in DOCUMENTS for block in BLOCKS[name] if block.language == "console"}
    assert shown == {"README.md", "composer3d/cli/README.md"}


def test_the_full_manifest_is_good(folder, composer3d):
    printed = composer3d("composer3d check full.toml --world-size 4")
    assert printed.startswith("pp=1 x dp_replicate=2 x dp_shard=2 x cp=1 x tp=1 = 4 ranks on cpu\n")


def test_a_hugging_face_model_is_trained_and_exported(folder, composer3d):
    from transformers import AutoModelForCausalLM

    make("llama", folder / "tiny-llama", vocab_size=256)
    composer3d("composer3d run hf.toml --nproc-per-node 2")
    printed = composer3d("composer3d export runs/hf --to trained")
    assert printed.startswith("runs/hf/checkpoints/step-2 -> trained/model.safetensors: 21 tensors")
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in ("tiny-llama", "trained"))
    assert not torch.equal(before.lm_head.weight, after.lm_head.weight)


def test_the_verbs_are_functions(folder):
    names = runpy.run_path("verbs.py")
    assert names["found"].problems == ()
    assert 0 < names["peak"] < 2**30
    assert names["layouts"].ok


def test_an_import_in_python_is_as_shown(folder):
    names = runpy.run_path("imports.py")
    assert names["changed"] == {} and "zero = 3" in names["result"].manifest


def test_an_export_in_python_is_as_shown(folder):
    names = runpy.run_path("exports.py")
    assert {str(entry.verdict) for entry in names["result"].keys} == {"carried"}


def own_forward():
    names = runpy.run_path("own_forward.py")
    return float(names["loss"]), float(names["norm"])


def test_a_loop_with_its_own_forward(folder):
    torch_state = torch.get_rng_state()
    (loss, norm), other = run_ranks(own_forward, 2)
    assert (loss, norm) == other and 0 < loss < 5.4
    assert (folder / "checkpoints" / "10" / "state.json").is_file()
    assert torch.equal(torch_state, torch.get_rng_state())
