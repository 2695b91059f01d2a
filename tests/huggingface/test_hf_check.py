"""What `check` says of manifests with `hf`: without weights being read, and at the line at fault."""

from __future__ import annotations

import json
import os
import shutil

import pytest
from support.huggingface import make

from composer3d.huggingface import folder as folders
from composer3d.huggingface.files import WeightFiles

MANIFEST = """\
composer3d = 1
[run]
device = "cpu"
[mesh]
dp_shard = 2
[model]
hf = "tiny"
[data]
use = "synthetic"
seq_len = 16
vocab_size = 64
[train]
steps = 2
global_batch = 4
[sharding.fsdp2]
"""

PLAN = """\
pp=1 x dp_replicate=1 x dp_shard=2 x cp=1 x tp=1 = 2 ranks on cpu
DATA         fsdp2                    model.layers.[0-1], (root)
in every step:
  BEFORE_MICROBATCH       fsdp2                    [sharding.fsdp2]
  OPTIMIZER               AdamW                    [optimizer]
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def edited(tiny, tmp_path, monkeypatch):
    """Write the manifest beside the model, with a piece of it replaced."""
    shutil.copytree(tiny, tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)

    def write(old="", new=""):
        assert MANIFEST.count(old) == 1 or not old
        (tmp_path / "run.toml").write_text(MANIFEST.replace(old, new) if old else MANIFEST)
        return tmp_path

    return write


def test_check_reads_no_weights(edited, command, monkeypatch):
    edited()

    def read(self, name, ranges):
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(WeightFiles, "read", read)
    assert command("check", "run.toml") == (0, PLAN, "")


def test_every_plugin_sees_the_model(edited, command):
    edited("[sharding.fsdp2]\n", "[sharding.fsdp2]\n[sharding.tensor_parallel]\n[scheduling.activation_checkpoint]\n")
    code, out, err = command("check", "run.toml", "--set", "mesh.tp=2", "--set", "mesh.pp=2", "--json")
    assert (code, err) == (2, "")
    assert [problem["key"] for problem in json.loads(out)["problems"]] == ["pp"]
    code, out, err = command("check", "run.toml", "--set", "mesh.tp=2", "--json")
    plan = {row["name"]: row["fqns"] for row in json.loads(out)["plan"]}
    assert (code, err) == (0, "")
    assert plan["tensor_parallel.colwise"][0] == "model.layers.0.self_attn.q_proj"
    assert plan["activation_checkpoint"] == ["model.layers.0", "model.layers.1"]


PROBLEMS = {
    "no folder": (
        'hf = "tiny"',
        'hf = "tinny"',
        'run.toml:7:1: [model] there is no folder "tinny" beside the manifest, and no model of that name in the '
        'Hugging Face cache; did you mean "tiny"?',
    ),
    "no name": (
        'hf = "tiny"',
        'hf = "some/model"',
        'run.toml:7:1: [model] there is no folder "some/model" beside the manifest, and no model of that name in the '
        "Hugging Face cache; nothing is downloaded; hf download some/model does that",
    ),
    "both": (
        'hf = "tiny"',
        'hf = "tiny"\nuse = "composer3d.models:llama"',
        "run.toml:8:1: [model] use and hf are two models; remove one of them",
    ),
    "dtype": (
        'hf = "tiny"',
        'hf = "tiny"\ndtype = "bf16"',
        'run.toml:8:1: [model] dtype = "bf16" is not one of "auto", "float32", "bfloat16", "float16", "float64"; did '
        'you mean "bfloat16"?',
    ),
    "key without hf": (
        'hf = "tiny"',
        'use = "composer3d.models:llama"\ndtype = "bfloat16"',
        "run.toml:8:1: [model] dtype is for hf; remove it, or name a folder with hf",
    ),
    "attention": (
        'hf = "tiny"',
        'hf = "tiny"\nattn_implementation = "spda"',
        'run.toml:8:1: [model] attn_implementation = "spda" cannot be used: ',
    ),
    "override": (
        'hf = "tiny"',
        'hf = "tiny"\nargs.num_hiden_layers = 1',
        'run.toml:8:1: [model] the configuration of LlamaConfig has no "num_hiden_layers"; did you mean '
        '"num_hidden_layers"?',
    ),
    "fewer layers than weights": (
        'hf = "tiny"',
        'hf = "tiny"\nargs.num_hidden_layers = 1',
        'run.toml:7:1: [model] FOLDER/tiny holds "model.layers.1.input_layernorm.weight" (and 8 more), for which '
        'LlamaForCausalLM has no place; did you mean "model.layers.0.input_layernorm.weight"?',
    ),
    "tokens": (
        "vocab_size = 64",
        "vocab_size = 65",
        "run.toml:7:1: [model] the model has 64 tokens, and the data have 65; set data.vocab_size",
    ),
    "length": (
        "seq_len = 16",
        "seq_len = 65",
        "run.toml:10:1: [data] seq_len = 65 is above the model's max_position_embeddings, 64; lower it, or set "
        "model.args.max_position_embeddings",
    ),
    "loss": (
        'hf = "tiny"\n',
        "",
        'run.toml:13:1: [train] loss = "model" is computed by the model, whose forward has no argument '
        "targets, labels, target, label",
    ),
    "no tokenizer": (
        'use = "synthetic"\nseq_len = 16\nvocab_size = 64',
        'use = "python_docs"\nseq_len = 16\ntokenizer = "bep"',
        'run.toml:11:1: [data] there is no "bep"; did you mean "bpe"?',
    ),
    "tokenizer": (
        'use = "synthetic"\nseq_len = 16\nvocab_size = 64',
        'use = "python_docs"\nseq_len = 16\ntokenizer = "tiny"',
        'run.toml:11:1: [data] the folder "tiny" holds no tokenizer.json; one of: bpe, bytes',
    ),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_problems_are_told_with_their_line(name, edited, command):
    old, new, message = PROBLEMS[name]
    folder = edited(old, new)
    if name == "loss":
        text = (folder / "run.toml").read_text()
        (folder / "run.toml").write_text(
            text.replace("steps = 2", 'loss = "model"\nsteps = 2').replace("[train]", "\n[train]")
        )
    code, out, err = command("check", "run.toml")
    assert (code, out) == (2, "")
    assert err.splitlines()[0].startswith(message.replace("FOLDER", str(folder)))
    assert err.splitlines()[-1] == "1 problem"


def test_a_folder_without_configuration(edited, command):
    (edited() / "tiny" / "config.json").unlink()
    assert command("check", "run.toml") == (
        2,
        "",
        'run.toml:7:1: [model] the folder "tiny" holds no config.json; name a folder that save_pretrained wrote\n'
        "1 problem\n",
    )


def test_a_folder_without_weights_is_for_init(edited, command):
    folder = edited('hf = "tiny"', 'hf = "tiny"\nweights = "pretrained"')
    (folder / "tiny" / "model.safetensors").unlink()
    assert command("check", "run.toml") == (
        2,
        "",
        f"run.toml:8:1: [model] {folder}/tiny holds no weights (model.safetensors, or model.safetensors.index.json); "
        'weights = "init" starts from the configuration alone\n1 problem\n',
    )
    assert command("check", "run.toml", "--set", "model.weights=init") == (0, PLAN, "")


def test_a_folder_that_is_no_causal_language_model(edited, command):
    folder = edited()
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (folder / "tiny" / "config.json").write_text(json.dumps(config))
    code, _, err = command("check", "run.toml")
    message = "run.toml:7:1: [model] transformers cannot make a causal language model of "
    assert (code, err[: len(message)]) == (2, message)


def test_code_in_a_folder_is_run_only_where_it_is_asked_for(edited, command):
    folder = edited()
    config = json.loads((folder / "tiny" / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}}
    (folder / "tiny" / "config.json").write_text(json.dumps(config))
    (folder / "tiny" / "own.py").write_text("raise SystemExit('this was run')\n")
    assert command("check", "run.toml") == (
        2,
        "",
        f"run.toml:7:1: [model] {folder}/tiny brings its own Python code, which is not run; read it, and set "
        "trust_remote_code = true\n1 problem\n",
    )


def test_without_the_extra(edited, command, monkeypatch):
    edited()
    monkeypatch.setattr(folders, "find_spec", lambda name: None)
    assert command("check", "run.toml") == (
        2,
        "",
        'run.toml:7:1: [model] Hugging Face models need the extra "hf"; pip install "composer3d[hf]"\n1 problem\n',
    )


def test_a_name_in_the_cache_is_its_newest_snapshot(tiny, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0123456789012345678901234567890123456789"
    shutil.copytree(tiny, snapshot)
    (tmp_path / "models--some--model" / "refs").mkdir()
    (tmp_path / "models--some--model" / "refs" / "main").write_text(snapshot.name)
    assert folders.find_folder("some/model", beside=tmp_path / "elsewhere").samefile(snapshot)


def test_the_schema_has_the_keys(command):
    code, out, _ = command("schema")
    schema = json.loads(out)
    table = schema["properties"]["model"]["properties"]
    assert code == 0
    assert {"hf", "weights", "dtype", "attn_implementation", "trust_remote_code"} <= table.keys()
    assert table["hf"]["description"].startswith("Instead of `use`: the folder of a Hugging Face")
    assert os.sep not in json.dumps(table["dtype"])
