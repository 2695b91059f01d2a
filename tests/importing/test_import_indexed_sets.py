"""Indexed data sets and blends of Megatron-LM and GPT-NeoX."""

from __future__ import annotations

import json

import pytest
from support.imported import manifest_of, translated, verdicts_of

FLAGS = "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --lr 1e-3 --train-iters 5 "
BLEND = [{"use": "a/x", "weight": 0.3}, {"use": "b", "weight": 0.7}]


@pytest.mark.parametrize(
    ("flags", "data"),
    [
        ("--data-path corpus_text_document", {"use": "corpus_text_document", "evaluation_fraction": 0.031}),
        ("--data-path corpus --split 949,50,1", {"use": "corpus", "evaluation_fraction": 0.051}),
        ("--data-path corpus --split 100,0,0", {"use": "corpus", "evaluation_fraction": 0.0}),
        ("--data-path 0.3 a/x 0.7 b --split 98,2,0", {"blend": BLEND, "evaluation_fraction": 0.02}),
        ("--data-path a b", {"blend": [{"use": "a"}, {"use": "b"}], "evaluation_fraction": 0.031}),
        ("--data-path 1 a 0 b 2 c", {"blend": [{"use": "a", "weight": 1.0}, {"use": "c", "weight": 2.0}]}),
        ("--train-data-path 0.3 a/x 0.7 b", {"blend": BLEND, "evaluation_fraction": 0.0}),
    ],
)
def test_megatrons_data_sets(tmp_path, flags, data):
    translation = translated(tmp_path, "flags.txt", FLAGS + flags, system="megatron")
    found = manifest_of(translation)["data"]
    assert {key: found[key] for key in data} == data
    assert ("use" in found) != ("blend" in found)  # and nothing is to be filled in
    key = "train_data_path" if "train-data" in flags else "data_path"
    assert verdicts_of(translation)[key] == "carried"
    assert verdicts_of(translation).get("split", "derived") == "derived"


def test_sets_of_evaluation_and_unknown_prefixes_are_named(tmp_path):
    flags = FLAGS + "--train-data-path a --valid-data-path b --split 9,1,0"
    verdicts = verdicts_of(translated(tmp_path, "flags.txt", flags, system="megatron"))
    assert verdicts["valid_data_path"] == "missing" and verdicts["split"] == "ignored-there"
    script = "#!/bin/bash\ntorchrun pretrain_gpt.py " + FLAGS + "--data-path $DATA_PATH\n"
    translation = translated(tmp_path, "train.sh", script)
    assert manifest_of(translation)["data"]["use"] == "FILL_IN:data"
    assert verdicts_of(translation)["data_path"] == "missing"


NEOX = {"train_micro_batch_size_per_gpu": 1, "num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}


@pytest.mark.parametrize(
    ("keys", "data"),
    [
        ({"data_path": "corpus", "data_impl": "mmap"}, {"use": "corpus", "evaluation_fraction": 0.031}),
        (
            {"train_data_paths": ["a/x", "b"], "train_data_weights": [0.3, 0.7]},
            {"blend": BLEND, "evaluation_fraction": 0.0},
        ),
        (
            {"train_data_paths": ["a", "b"]},
            {"blend": [{"use": "a", "weight": 1.0}, {"use": "b", "weight": 1.0}], "evaluation_fraction": 0.0},
        ),
    ],
)
def test_neoxs_data_sets(tmp_path, keys, data):
    translation = translated(tmp_path, "neox.yml", json.dumps({**NEOX, **keys}), system="neox")
    found = manifest_of(translation)["data"]
    assert {key: found[key] for key in data} == data
    assert ("use" in found) != ("blend" in found)
    told = {verdicts_of(translation)[key] for key in keys}
    assert told <= {"carried", "equal"}


def test_a_key_that_the_system_has_is_not_taken_for_a_misspelt_batch_size(tmp_path):
    text = json.dumps({"num_layers": 2, "train_data_paths": ["a", "b"]})
    assert verdicts_of(translated(tmp_path, "neox.yml", text, system="neox"))["train_data_paths"] == "carried"
