from __future__ import annotations

import importlib.metadata
import os

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from composer3d.errors import DataError
from composer3d.runner.data import DataTable, open_source

TEXT = "the cat sat on the mat.\n\nthe dog \u00e9t\u00e9 sat on the log.\n" * 200


def opened(folder, cache="cache", **keys):
    messages = []
    table = DataTable(use="a.txt", **{"tokenizer": "bpe", "vocab_size": 300, "seq_len": 16, **keys})
    source = open_source(table, seed=0, folder=folder, cache=folder / cache, report=messages.append)
    return source, messages


def test_the_tokens_spell_the_text(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    source, _ = opened(tmp_path, evaluation_fraction=0.0)
    tokenizer = Tokenizer.from_file(str(next(tmp_path.glob("cache/bpe-*/tokenizer.json"))))
    tokens = torch.cat([source[index][0] for index in range(len(source))]).tolist()
    assert TEXT.startswith(tokenizer.decode(tokens)) and len(tokens) < len(TEXT) / 2
    record = source.record()
    assert source.vocab_size == tokenizer.get_vocab_size() == record["vocab_size"] <= 300
    assert record["tokenizer"] == "bpe" and record["num_bytes"] == len(TEXT.encode())


def test_training_is_deterministic_and_done_once(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    before = dict(os.environ)
    first, said = opened(tmp_path)
    again, nothing = opened(tmp_path)
    fresh, _ = opened(tmp_path, cache="other")
    assert first.record() == again.record() == fresh.record()
    assert first[7][0].tolist() == again[7][0].tolist() == fresh[7][0].tolist()
    assert said == ['rank 0 prepares the tokenizer of "a.txt"'] and nothing == []
    assert dict(os.environ) == before


def test_another_size_or_text_is_another_tokenizer(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    digests = {
        opened(tmp_path)[0].record()["tokenizer_sha256"],
        opened(tmp_path, vocab_size=260)[0].record()["tokenizer_sha256"],
    }
    (tmp_path / "a.txt").write_text("other words altogether, other words.\n" * 200)
    digests.add(opened(tmp_path)[0].record()["tokenizer_sha256"])
    assert len(digests) == 3 and len(list(tmp_path.glob("cache/bpe-*/meta.json"))) == 3


@pytest.mark.parametrize("damage", ["meta", "tokens"])
def test_a_cache_that_is_half_written_is_written_again(tmp_path, damage):
    (tmp_path / "a.txt").write_text(TEXT)
    whole = opened(tmp_path)[0][3][0].tolist()
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    if damage == "meta":
        (folder / "meta.json").unlink()
    os.truncate(folder / "tokens.bin", 10)
    source, said = opened(tmp_path)
    assert source[3][0].tolist() == whole and said == ['rank 0 prepares the tokenizer of "a.txt"']


def test_text_longer_than_a_piece_is_encoded_whole(tmp_path, monkeypatch):
    text = TEXT + "a line that is longer than a piece, " * 50 + "\n" + TEXT
    (tmp_path / "a.txt").write_text(text)
    monkeypatch.setattr("composer3d.runner.data.bpe._PIECE_CHARACTERS", 1000)
    monkeypatch.setattr("composer3d.runner.data.text._BLOCK_BYTES", 700)
    source, _ = opened(tmp_path)
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = np.fromfile(folder / "tokens.bin", dtype=np.uint16)
    assert tokenizer.decode(tokens.tolist()) == text and source.record()["num_tokens"] == len(tokens)


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text(TEXT)
    # Hides the library's metadata, as if it were not installed.
    monkeypatch.setattr(importlib.metadata.Distribution, "discover", classmethod(lambda cls, **kwargs: iter(())))
    with pytest.raises(DataError) as caught:
        opened(tmp_path)
    assert str(caught.value) == (
        '[data] tokenizer = "bpe" needs the extra "bpe": pip install "composer3d[bpe]"; or set tokenizer = "bytes"'
    )
    assert not (tmp_path / "cache").exists()


def test_a_file_too_large_for_a_tokenizer_is_not_read(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    file = tmp_path / "huge.json"
    with file.open("wb") as opened_file:
        opened_file.truncate(1 << 36)  # a hole: nothing on disk
    with pytest.raises(DataError) as caught:
        opened(tmp_path, tokenizer=str(file), vocab_size=None)
    assert str(caught.value) == (
        f'[data] tokenizer = "{file}" has 68,719,476,736 bytes, and a tokenizer.json at most 268,435,456'
    )
