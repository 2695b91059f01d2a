"""Data sets of axolotl: chats, their templates, masks of prompts, packing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composer3d.importing.instruction_data import HUB_NOTE, carry_file, carry_packing, carry_template, messages_of
from composer3d.importing.translation import Translation

__all__ = ["instructions"]

_CHATS, _ALPACA, _TEXT = ("chat_template", "sharegpt"), ("alpaca",), ("completion",)
# Keys of a data set that are read; `ds_type` and `name` are those of a hub, or told by the file.
_READ = frozenset(
    "data_files ds_type field field_messages message_field_content message_field_role message_property_mappings name "
    "path roles_to_train shards split train_on_eos type".split()
)
_HEADERS = "the words of every turn and the token that ends it are trained there; here the template's headers, too"
_ADDED = "tokens that are added to the tokenizer's"


def instructions(translation: Translation) -> None:
    """Carry files of chats with their template, mask and packing; names on a hub are to be filled in."""
    t = translation
    t.state("sequence_len", "data.seq_len", t.integer("sequence_len", 512, least=1) or 512)
    share = t.number("val_set_size", 0.0) or 0.0
    if 0 < share < 1:
        t.carry("val_set_size", "data.evaluation_fraction", float(share))
    t.judge("val_set_size", "missing" if share else "equal", "a number of samples: data.evaluation_fraction is a share")
    found = t.get("datasets")
    sets = [each for each in found if isinstance(each, Mapping)] if isinstance(found, list) else []
    kinds = {str(each.get("type") or "chat_template").partition(".")[0].partition(":")[0] for each in sets}
    if sets and len(kinds) == 1 and kinds <= {*_CHATS, *_ALPACA, *_TEXT}:
        _chats(t, sets, next(iter(kinds)))
    note = f"instruction data of a kind of its own, {HUB_NOTE}"
    for block in ("datasets", "pretraining_dataset", "test_datasets", "chat_template", "chat_template_jinja"):
        for leaf in t.tree.below(block):
            taken = t.options.data is not None
            t.judge(leaf.key, "meaningless" if leaf.value is None else "derived" if taken else "missing", note)
    for key in ("sample_packing", "train_on_inputs", "excess_length_strategy"):
        t.judge(key, "missing" if t.get(key) else "meaningless", note)
    t.judge("eval_sample_packing", "meaningless", "evaluation is packed as training is")
    for leaf in t.tree.below("special_tokens"):
        t.judge(leaf.key, "missing" if leaf.value else "meaningless", _ADDED)
    for key in ("tokens", "added_tokens_overrides", "eot_tokens", "resize_token_embeddings_to_32x"):
        t.judge_block(key, "missing" if t.get(key) else "meaningless", _ADDED)


def _chats(t: Translation, sets: list[Mapping[str, Any]], kind: str) -> None:
    verdict, note = _differences(sets, kind)
    if not carry_file(t, "datasets", [_path(each) for each in sets], verdict=verdict, note=note):
        t.put("data.use", "FILL_IN:data", "datasets", reason="to be saved as JSON lines")
    names = {name: str(each[f"field_{name}"]) for each in sets for name in ("messages",) if each.get(f"field_{name}")}
    for each in sets:
        names |= messages_of(each.get("message_property_mappings"))
        names |= {
            name: str(each[f"message_field_{name}"])
            for name in ("role", "content")
            if each.get(f"message_field_{name}")
        }
    for name, value in names.items():
        t.put(f"data.chat.{name}", value, reason="from datasets")
    everything = t.flag("train_on_inputs") or kind in _TEXT
    t.put("data.chat.trained", "all" if everything else "assistant", "train_on_inputs")
    if t.flag("train_on_inputs") and kind in _CHATS:
        t.judge("train_on_inputs", "changed", _HEADERS, to="data.chat.trained")
    t.judge("train_on_inputs", "carried", to="data.chat.trained")
    if "chat_template_jinja" in t and t.get("chat_template_jinja"):
        carry_template(t, "chat_template_jinja")
    carry_template(t, "chat_template", default=("tokenizer_default", "tokenizer_default_fallback_chatml", "jinja"))
    carry_packing(t, "sample_packing")
    long = "truncate" if t.text("excess_length_strategy", "drop") == "truncate" else "drop"
    t.state("excess_length_strategy", "data.chat.too_long", long)
    if not t.number("val_set_size", 0.0):
        t.put("data.evaluation_fraction", 0.0, reason="val_set_size is 0")


def _path(each: Mapping[str, Any]) -> str:
    """Return the file of a data set: its path, or the file that a reader of files is given."""
    files = each.get("data_files")
    first = files[0] if isinstance(files, list) and len(files) == 1 else files
    return str(first if isinstance(first, str) else each.get("path"))


def _differences(sets: list[Mapping[str, Any]], kind: str) -> tuple[str, str]:
    """Return the verdict of data sets, and what differs."""
    turns = [each for each in sets if str(each.get("train_on_eos", "turn")) not in ("turn", "all")]
    roles = [
        each for each in sets if each.get("roles_to_train") not in (None, ["assistant"], ["gpt"], ["assistant", "gpt"])
    ]
    if roles or turns:
        return (
            "changed",
            "the assistant's turns are trained with the token that ends each; data.chat.trained has others",
        )
    if kind in _TEXT and any(each.get("field", "text") != "text" for each in sets):
        return "changed", 'the text of a row is under the key "text" here: rename the one that field names'
    if others := sorted({key for each in sets for key, value in each.items() if value is not None} - _READ):
        return "changed", f"not read here: {', '.join(others)}"
    if kind in _ALPACA:
        return "changed", "Alpaca's own words around an instruction there; the template's user and assistant here"
    if any(each.get("split") not in (None, "train") or each.get("shards") for each in sets):
        return "changed", "the whole file is read"
    return "carried", ""
