from __future__ import annotations

import json

import pytest

from composer3d import load_manifest
from composer3d.errors import ComposerError
from composer3d.mesh import AXES, resolve
from composer3d.runner import TABLES
from composer3d.verification.shrink import reduce_degrees, shrink


def layout(**degrees):
    stated = {axis.name: degrees.get(axis.name, 1) for axis in AXES}
    return resolve(stated, axes=AXES, world_size=None, default=None)


@pytest.mark.parametrize(
    ("degrees", "max_ranks", "expected"),
    [
        ({"dp_shard": 2}, 8, {"dp_shard": 2}),
        ({"dp_shard": 64, "tp": 8}, 8, {"dp_shard": 2, "tp": 4}),
        ({"dp_shard": 64, "tp": 8}, 4, {"dp_shard": 2, "tp": 2}),
        ({"pp": 3, "dp_shard": 5}, 8, {"pp": 3, "dp_shard": 2}),
        (
            {"pp": 8, "dp_replicate": 4, "dp_shard": 16, "tp": 8},
            16,
            dict.fromkeys(("pp", "dp_replicate", "dp_shard", "tp"), 2),
        ),
    ],
)
def test_every_axis_stays_above_one(degrees, max_ranks, expected):
    assert reduce_degrees(layout(**degrees), max_ranks) == expected


def test_four_axes_do_not_fit_eight_ranks():
    with pytest.raises(ComposerError) as caught:
        reduce_degrees(layout(pp=8, dp_replicate=4, dp_shard=16, tp=8), 8)
    assert str(caught.value) == (
        "max_ranks=8: pp, dp_replicate, dp_shard, tp are all above 1, so the smallest world of this shape has 16 "
        "ranks; allow as many, or set one of the axes to 1 by overrides, and verify several times"
    )


def reduced(tmp_path, text, max_dim):
    path = tmp_path / "run.toml"
    path.write_text("composer3d = 1\n" + text + "\n[train]\nsteps = 1\n")
    manifest = load_manifest(path, tables=TABLES)
    return dict(override.split("=") for override in shrink(manifest, layout(), max_ranks=8, max_dim=max_dim).overrides)


LLAMA = """
[model]
use = "composer3d.models:llama"
args = {{ dim = {dim}, num_heads = {heads}, num_kv_heads = {heads}, vocab_size = 128256 }}
[data]
use = "{data}"
seq_len = 32
"""


def test_a_vocabulary_of_made_up_tokens_is_reduced_where_only_the_model_states_it(tmp_path):
    assert reduced(tmp_path, LLAMA.format(dim=64, heads=4, data="synthetic"), 64)["model.args.vocab_size"] == "512"
    assert "model.args.vocab_size" not in reduced(tmp_path, LLAMA.format(dim=64, heads=4, data="python_docs"), 64)


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        ("vocab_size = 49152", "vocab_size = 49152", {"model.args.vocab_size": "1024", "data.vocab_size": "1024"}),
        # What does not divide still does not: 50257 is 1105 and 128 times 384.
        ("vocab_size = 50304", "vocab_size = 50257", {"model.args.vocab_size": "1152", "data.vocab_size": "1105"}),
        ("vocab_size = 4096", "vocab_size = 4096", {}),
        ("vocab_size = 49152", "", {"model.args.vocab_size": "1024"}),
        ("vocab_size = 49152", "vocab_size = 2048", {}),
    ],
)
def test_a_large_vocabulary_of_made_up_tokens_is_reduced(tmp_path, model, data, expected):
    text = f'[model]\nuse = "composer3d.models:llama"\nargs = {{ {model} }}\n[data]\nuse = "synthetic"\n{data}\n'
    assert reduced(tmp_path, text, None) == expected


@pytest.mark.parametrize("max_dim", [None, 64])
def test_a_model_that_is_not_named_is_the_default_one(tmp_path, max_dim):
    named, data = '[model]\nuse = "composer3d.models:llama"\n', '[data]\nuse = "synthetic"\nvocab_size = 32000\n'
    found = reduced(tmp_path, data, max_dim)
    assert "data.vocab_size" in found
    assert found == reduced(tmp_path, named + data, max_dim)


def test_a_vocabulary_of_real_tokens_stays(tmp_path):
    assert reduced(tmp_path, LLAMA.format(dim=64, heads=4, data="python_docs"), None) == {}


def test_heads_still_divide_the_width(tmp_path):
    found = reduced(tmp_path, LLAMA.format(dim=112, heads=14, data="synthetic"), 28)
    assert (found["model.args.dim"], found["model.args.num_heads"]) == ("28", "7")


def test_sizes_of_a_configuration_are_reduced_and_its_weights_made_anew(tmp_path):
    (tmp_path / "folder").mkdir()
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000}
    others = {"model_type": "llama", "num_hidden_layers": 40, "bos_token_id": 128, "max_position_embeddings": 4096}
    (tmp_path / "folder" / "config.json").write_text(json.dumps(sizes | others))
    found = reduced(tmp_path, '[model]\nhf = "folder"\n[data]\nuse = "synthetic"\nseq_len = 16\n', 32)
    assert {key: value for key, value in found.items() if key.startswith("model.")} == {
        "model.args.hidden_size": "32",
        "model.args.num_attention_heads": "4",
        "model.args.num_key_value_heads": "1",
        "model.args.vocab_size": "512",
        "model.weights": "init",
    }
