from __future__ import annotations

import dataclasses

import pytest
from pydantic import ValidationError

from composer3d.runner.data import DataTable
from composer3d.runner.data.data_table import ChatTable, DocumentsTable

USER = {"use": "module:build"}
CHATS = {"use": "chats.jsonl", "chat": ChatTable(), "padding": "longest"}
PACKED = {"use": "chats.jsonl", "chat": ChatTable(packing=True)}
REFUSED = [
    ({"args": {"a": 1}}, 'args is for use = "module:callable"; remove it'),
    (
        {"padding": "longest"},
        'padding is for use = "module:callable"; every sequence has seq_len tokens already; remove it',
    ),
    (
        {"use": "synthetic", "bucket": 2},
        'bucket is for use = "module:callable"; every sequence has seq_len tokens already; remove it',
    ),
    (
        {"use": "corpus/", "pad_id": 3},
        'pad_id is for use = "module:callable"; every sequence has seq_len tokens already; remove it',
    ),
    (
        {"order": "stream"},
        'order = "stream" is for use = "module:callable"; take "shuffle" or "sequential"',
    ),
    ({"dtype": "uint16"}, "dtype is for token files; remove it"),
    ({"use": "synthetic", "tokenizer": "bpe"}, 'tokenizer = "bpe" is for text; remove it'),
    (
        {"tokenizer": "bpe", "vocab_size": 256},
        'tokenizer = "bpe" starts from 256 bytes; vocab_size = 256 leaves no room for merges',
    ),
    ({"vocab_size": 300}, 'tokenizer = "bytes" has 256 tokens; remove vocab_size, or set tokenizer = "bpe"'),
    ({"prefetch": 4}, "prefetch is for workers, and workers = 0; set workers"),
    (
        {**USER, "padding": "multiple"},
        'padding = "multiple" needs pad_multiple, for example pad_multiple = 64',
    ),
    ({**USER, "pad_multiple": 8}, 'pad_multiple is for padding = "multiple"'),
    ({**USER, "bucket": 2}, 'bucket batches samples of other lengths together; set padding = "longest"'),
    (
        {**USER, "order": "stream", "workers": 1},
        'order = "stream" is read by one process, in order; remove workers',
    ),
    (
        {**USER, "order": "stream", "padding": "longest", "bucket": 2},
        'order = "stream" does not look ahead, so it has no windows to sort; remove bucket',
    ),
    ({**CHATS, "use": "m:f"}, 'chat is for files of JSON lines, and use = "m:f" is none; remove chat, or name a file'),
    ({**CHATS, "order": "stream"}, 'order = "stream" is for use = "module:callable"; remove it'),
    ({**CHATS, "vocab_size": 9}, "vocab_size is the tokenizer's, of chats; remove it"),
    ({**CHATS, "tokenizer": "bpe"}, 'tokenizer = "bpe" is trained on text; chats need a model\'s, or "bytes"'),
    ({**CHATS, "padding": "none"}, 'chats have many lengths; set padding = "longest", or chat.packing = true'),
    ({**PACKED, "padding": "longest"}, "chat.packing fills every row up to seq_len; remove padding and bucket"),
    (
        {**PACKED, "documents": DocumentsTable()},
        "packed chats would attend to each other; name an argument of the model as documents.positions",
    ),
    (
        {**CHATS, "documents": DocumentsTable(positions="p")},
        "documents is for rows of several documents; set chat.packing = true, or remove it",
    ),
    (
        {**PACKED, "documents": DocumentsTable(positions="p", end=0)},
        "documents.end and loss_after_end are for text and token files; packed chats are known; remove them",
    ),
    ({"documents": DocumentsTable(positions="p")}, "documents needs end, the token that ends a document"),
    (
        {"documents": DocumentsTable(end=0)},
        "documents changes nothing; name positions or numbers, or set loss_after_end = false",
    ),
    (
        {**USER, "documents": DocumentsTable(end=0, positions="p")},
        'documents is for text, token files and packed chats, and use = "module:build" is none; remove it',
    ),
]


@pytest.mark.parametrize(("keys", "message"), REFUSED)
def test_keys_that_would_be_ignored_are_refused(keys, message):
    with pytest.raises(ValidationError) as caught:
        DataTable(**keys)
    (problem,) = caught.value.errors()
    assert problem["msg"] == f"Value error, {message}"


@pytest.mark.parametrize(
    "keys",
    [
        {"usee": "python_docs"},
        {"use": ""},
        {"use": 3},
        {"seq_len": 0},
        {"seq_len": "256"},
        {"order": "random"},
        {"evaluation_fraction": 1.0},
        {"workers": -1},
        {"tokenizer": ""},
        {"dtype": "int8", "use": "a.bin"},
    ],
)
def test_unknown_keys_and_wrong_values_are_refused(keys):
    with pytest.raises(ValidationError) as caught:
        DataTable(**keys)
    assert len(caught.value.errors()) == 1


@pytest.mark.parametrize(
    ("use", "kind"),
    [("python_docs", "python_docs"), ("synthetic", "synthetic"), ("a.b:c", "user"), ("corpus/", "path")],
)
def test_what_use_names(use, kind):
    assert DataTable(use=use).kind == kind


def test_the_table_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DataTable().seq_len = 3
