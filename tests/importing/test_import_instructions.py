"""Instruction data of axolotl, TRL, LLaMA-Factory and Automodel, and documents of Megatron-LM, as manifests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tomli
from support.imported import manifest_of, translated, verdicts_of

from composer3d.importing import import_config

AXOLOTL = """base_model: folder/of/a/model
datasets:
  - path: chats.jsonl
    type: chat_template
    field_messages: talk
    message_property_mappings: {role: who, content: said}
chat_template: chatml
sequence_len: 64
sample_packing: true
excess_length_strategy: truncate
micro_batch_size: 1
max_steps: 5
"""
TEXTS = "train_on_inputs: true\ndatasets:\n  - path: texts.jsonl\n    type: completion"


def imported(tmp_path, name, text, **options):
    """Import beside a file of chats; return the manifest and what check said."""
    talk = [{"who": "human", "said": "a"}, {"who": "gpt", "said": "b"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"talk": talk}) + "\n")
    (tmp_path / name).write_text(text)
    result = import_config(tmp_path / name, name=str(tmp_path / "run.toml"), **options)
    assert result.ok, result.problems
    return tomli.loads(result.manifest), {entry.key: str(entry.verdict) for entry in result.keys}


def test_axolotls_chats_are_carried_and_pass_check(tmp_path):
    manifest, verdicts = imported(tmp_path, "config.yaml", AXOLOTL, model="composer3d.models:llama")
    assert manifest["data"] == {
        "seq_len": 64,
        "use": "chats.jsonl",
        "evaluation_fraction": 0.0,
        "documents": {"positions": "positions", "numbers": "documents"},
        "chat": {
            "messages": "talk",
            "role": "who",
            "content": "said",
            "trained": "assistant",
            "template": "chatml",
            "packing": True,
            "too_long": "truncate",
        },
    }
    for key in ("datasets", "chat_template", "sample_packing", "excess_length_strategy"):
        assert verdicts[key] == "carried"


@pytest.mark.parametrize(
    ("change", "key", "verdict", "path", "value"),
    [
        (("type: chat_template", "type: alpaca"), "datasets", "changed", "trained", "assistant"),
        (("path: chats.jsonl", "path: someone/chats"), "datasets", "missing", "packing", True),
        (("type: chat_template", "type: completion\n    field: content"), "datasets", "changed", "trained", "all"),
        (("field_messages: talk", "roles: {user: [human]}"), "datasets", "changed", "trained", "assistant"),
        (("chat_template: chatml", "chat_template: gemma"), "chat_template", "missing", "template", None),
        (("chat_template: chatml", "train_on_inputs: true"), "train_on_inputs", "changed", "trained", "all"),
        (
            ("datasets:\n  - path: chats.jsonl\n    type: chat_template", TEXTS),
            *("train_on_inputs", "carried", "trained", "all"),
        ),
        (("excess_length_strategy: truncate\n", ""), "sequence_len", "carried", "too_long", "drop"),
    ],
)
def test_single_keys_of_chats(tmp_path, change, key, verdict, path, value):
    translation = translated(tmp_path, "config.yaml", AXOLOTL.replace(*change))
    assert verdicts_of(translation)[key] == verdict
    assert manifest_of(translation)["data"]["chat"].get(path) == value


def test_data_on_a_hub_is_to_be_filled_in(tmp_path):
    text = AXOLOTL.replace("path: chats.jsonl", "path: someone/chats")
    manifest, _ = imported(tmp_path, "config.yaml", text, model="composer3d.models:llama")
    assert manifest["data"]["use"] == "FILL_IN:data"


def test_rows_that_are_not_packed_are_padded(tmp_path):
    manifest = manifest_of(translated(tmp_path, "config.yaml", AXOLOTL.replace("packing: true", "packing: false")))
    assert manifest["data"]["padding"] == "longest" and "packing" not in manifest["data"]["chat"]


@pytest.mark.parametrize(
    ("keys", "data"),
    [
        (
            "max_length: 128\npacking: true\nassistant_only_loss: true\n",
            {"seq_len": 128, "evaluation_fraction": 0.0, "chat": {"trained": "assistant", "packing": True}},
        ),
        (
            "packing: false\nmax_length: 128\n",
            {"seq_len": 128, "evaluation_fraction": 0.0, "padding": "longest", "chat": {"trained": "all"}},
        ),
        (
            "cutoff_len: 32\ntemplate: qwen\nmask_history: true\npacking: true\nneat_packing: true\n",
            {"seq_len": 32, "evaluation_fraction": 0.0, "chat": {"trained": "last", "packing": True}},
        ),
    ],
    ids=["trl", "trl's defaults", "llama-factory"],
)
def test_files_of_the_trainers_arguments(tmp_path, keys, data):
    text = f"output_dir: out\nper_device_train_batch_size: 2\nlearning_rate: 1.0e-5\nmax_steps: 3\n{keys}"
    translation = translated(tmp_path, "args.yaml", text, system="trainer", data="chats.jsonl", world_size=1)
    data["chat"]["too_long"] = "truncate"
    assert manifest_of(translation)["data"] == {"use": "chats.jsonl", **data}
    unjudged = [key for key in keys.split() if key.endswith(":") and key[:-1] not in verdicts_of(translation)]
    assert unjudged == []


AUTOMODEL = """recipe: TrainFinetuneRecipeForNextTokenPrediction
step_scheduler: {global_batch_size: 8, local_batch_size: 1, max_steps: 5}
model:
  _target_: nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained
  pretrained_model_name_or_path: folder/of/a/model
distributed: {strategy: fsdp2}
dataset: {_target_: nemo_automodel.components.datasets.llm.ChatDataset, path_or_dataset_id: chats.jsonl, seq_length: 64}
packed_sequence: {packed_sequence_size: 128}
optimizer: {_target_: torch.optim.AdamW, lr: 1.0e-5}
"""


def test_chats_of_automodel(tmp_path):
    translation = translated(tmp_path, "recipe.yaml", AUTOMODEL)
    data = manifest_of(translation)["data"]
    assert data["use"] == "chats.jsonl" and data["seq_len"] == 128
    assert data["chat"] == {"trained": "assistant", "too_long": "truncate", "packing": True}
    assert verdicts_of(translation)["packed_sequence.packed_sequence_size"] == "carried"


MEGATRON = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 1 --train-iters 5"
)
RESET = "--reset-position-ids --reset-attention-mask --eod-mask-loss"


@pytest.mark.parametrize(
    ("flags", "options", "documents", "verdict"),
    [
        (
            f"{RESET} --tokenizer-type GPT2BPETokenizer",
            {},
            {"end": 50256, "positions": "positions", "numbers": "documents", "loss_after_end": False},
            "carried",
        ),
        (
            f"{RESET} --tokenizer-type NullTokenizer --vocab-size 99",
            {"model": "folder"},
            {"end": 98, "positions": "position_ids", "loss_after_end": False},
            "carried",
        ),
        (
            f"{RESET} --tokenizer-type NullTokenizer --vocab-size 99",
            {"version": "0.17"},
            {"end": 99, "positions": "positions", "numbers": "documents", "loss_after_end": False},
            "carried",
        ),
        (
            f"{RESET} --tokenizer-type TikTokenizer --tokenizer-model vocab.json",
            {},
            {"end": 2, "positions": "positions", "numbers": "documents", "loss_after_end": False},
            "carried",
        ),
        (f"{RESET} --tokenizer-type HuggingFaceTokenizer", {}, None, "missing"),
        ("--reset-position-ids --tokenizer-type GPT2BPETokenizer", {"model": "folder"}, None, "missing"),
    ],
)
def test_documents_inside_of_megatrons_sequences(tmp_path, flags, options, documents, verdict):
    text = f"python pretrain_gpt.py {MEGATRON} {flags} --data-path corpus_text_document\n"
    translation = translated(tmp_path, "train.sh", text, **options)
    assert manifest_of(translation)["data"].get("documents") == documents
    assert verdicts_of(translation)["reset_position_ids"] == verdict


def test_documents_of_neox(tmp_path):
    text = Path(__file__).with_name("test_import_finetuning.py").read_text().partition('NEOX = """')[2]
    text = text.partition('"""')[0]
    keys = '"reset_attention_mask": true, "tokenizer_type": "GPT2BPETokenizer", '
    translation = translated(tmp_path, "neox.yml", text.replace("{", "{" + keys, 1))
    assert manifest_of(translation)["data"]["documents"] == {"end": 50256, "numbers": "documents"}


def sentencepiece_model(*pieces, end=None):
    """Return a model of sentencepiece: pieces with their kinds, and the name that its trainer gave the end."""

    def field(number, content):
        return bytes([number << 3 & 127 | 2 | 128, number >> 4, len(content)]) + content

    made = b"".join(
        field(1, field(1, name.encode()) + b"\x15\x00\x00\x80\x3f" + bytes([3 << 3, kind])) for name, kind in pieces
    )
    return made + (b"" if end is None else field(2, bytes([40 << 3 & 127 | 128, 2, 0]) + field(47, end.encode())))


WORD, UNKNOWN, CONTROL = 1, 2, 3
PIECES = (("<unk>", UNKNOWN), ("<s>", CONTROL), ("a", WORD), ("</s>", CONTROL), ("<end>", CONTROL))


@pytest.mark.parametrize(
    ("kind", "files", "end"),
    [
        ("Llama2Tokenizer", {"tok": sentencepiece_model(*PIECES)}, 3),
        ("Llama2Tokenizer", {"tok": sentencepiece_model(*PIECES, end="<end>")}, 4),
        ("Llama2Tokenizer", {"tok": sentencepiece_model(("</s>", WORD))}, None),
        ("GPTSentencePieceTokenizer", {"tok": b"\x0a\xff\xff"}, None),
        ("SentencePieceTokenizer", {"tok": sentencepiece_model(*PIECES)}, 3),
        ("SentencePieceTokenizer --legacy-tokenizer", {"tok": sentencepiece_model(*PIECES)}, 7),
        ("SentencePieceTokenizer --legacy-tokenizer", {"tok": sentencepiece_model(("<SEP>", WORD), *PIECES)}, 7),
        ("SentencePieceTokenizer --legacy-tokenizer", {"tok": sentencepiece_model(("<EOD>", CONTROL), *PIECES)}, 0),
        ("SentencePieceTokenizer --tokenizer-sentencepiece-legacy", {"tok": sentencepiece_model(*PIECES)}, None),
        ("SentencePieceTokenizer --legacy-tokenizer", {"tok": b"\x0a\xff\xff"}, None),
        (
            "HuggingFaceTokenizer",
            {
                "tok/tokenizer_config.json": {"eos_token": {"content": "<|end|>"}},
                "tok/tokenizer.json": {"added_tokens": [{"id": 128001, "content": "<|end|>"}], "model": {"vocab": {}}},
            },
            128001,
        ),
        (
            "HuggingFaceTokenizer",
            {
                "tok/tokenizer_config.json": {"eos_token": "</s>"},
                "tok/tokenizer.json": {"model": {"vocab": {"</s>": 2}}},
            },
            2,
        ),
        (
            "HuggingFaceTokenizer",
            {"tok/tokenizer_config.json": {"eos_token": "z", "added_tokens_decoder": {"7": {"content": "z"}}}},
            7,
        ),
        ("HuggingFaceTokenizer", {"tok/tokenizer_config.json": {}, "tok/tokenizer.json": {"added_tokens": []}}, None),
        ("HuggingFaceTokenizer", {}, None),
    ],
)
def test_ends_of_documents_are_read_from_a_tokenizers_files(tmp_path, kind, files, end):
    for name, content in files.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    flags = f"{MEGATRON} {RESET} --tokenizer-type {kind} --tokenizer-model tok"
    text = f"python pretrain_gpt.py {flags} --data-path corpus_text_document\n"
    translation = translated(tmp_path, "train.sh", text)
    assert manifest_of(translation)["data"].get("documents", {}).get("end") == end
    assert verdicts_of(translation)["reset_position_ids"] == ("missing" if end is None else "carried")


@pytest.mark.parametrize(("version", "end"), [("core_v0.14.0", 7), ("0.15.0", 3), (None, 3)])
def test_sentencepiece_ends_documents_by_a_token_of_its_own_before_0_15(tmp_path, version, end):
    (tmp_path / "tok").write_bytes(sentencepiece_model(*PIECES))
    flags = f"{MEGATRON} {RESET} --tokenizer-type SentencePieceTokenizer --tokenizer-model tok"
    text = f"python pretrain_gpt.py {flags} --data-path corpus_text_document\n"
    assert manifest_of(translated(tmp_path, "train.sh", text, version=version))["data"]["documents"]["end"] == end


def test_a_tokenizer_is_not_missing_where_data_is_tokens(tmp_path):
    flags = f"{MEGATRON} --tokenizer-type GPT2BPETokenizer --vocab-file v.json --merge-file m.txt"
    for more, verdict in (("", "meaningless"), (RESET, "derived")):
        text = f"python pretrain_gpt.py {flags} {more} --data-path corpus_text_document\n"
        found = verdicts_of(translated(tmp_path, "train.sh", text))
        assert {found[key] for key in ("tokenizer_type", "vocab_file", "merge_file")} == {verdict}
    found = verdicts_of(translated(tmp_path, "train.sh", f"python pretrain_gpt.py {flags}\n"))
    assert found["tokenizer_type"] == "missing"
