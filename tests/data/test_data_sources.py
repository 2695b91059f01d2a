from __future__ import annotations

import hashlib
import json
import os
import pickle
import tracemalloc
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch

from composer3d.errors import DataError
from composer3d.runner.data import DataTable, open_source
from composer3d.runner.data.paths import locate
from composer3d.runner.data.tokens import MappedTokens


def opened(folder, use="python_docs", **keys):
    messages = []
    source = open_source(
        DataTable(use=use, **keys), seed=3, folder=folder, cache=folder / "cache", report=messages.append, rank=1
    )
    return source, messages


def text_of(source):
    """Return the text that a source's samples and those held out spell, without the last token."""
    parts = [source] if source.evaluation is None else [source, source.evaluation]
    return bytes(torch.cat([part[index][0] for part in parts for index in range(len(part))]).tolist())


def refusal(folder, **keys):
    with pytest.raises(DataError) as caught:
        opened(folder, **keys)
    return str(caught.value)


def test_the_text_inside_python_is_the_default(tmp_path):
    source, messages = opened(tmp_path)
    text = "\n\n".join(topics[name] for name in sorted(topics)).encode()
    num_samples = (len(text) - 1) // 256
    num_evaluation = -(-num_samples // 20)
    assert text.startswith(text_of(source)) and len(text) - len(text_of(source)) <= 256
    assert messages == [] and source.vocab_size == 256
    assert source.record() == {
        "kind": "text",
        "use": "python_docs",
        "sha256": hashlib.sha256(text).hexdigest(),
        "num_bytes": len(text),
        "tokenizer": "bytes",
        "num_tokens": len(text),
        "seq_len": 256,
        "num_samples": num_samples - num_evaluation,
        "num_evaluation_samples": num_evaluation,
        "vocab_size": 256,
    }
    assert json.loads(json.dumps(source.record())) == source.record()


def test_targets_are_the_next_tokens(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh")
    source, _ = opened(tmp_path, "a.txt", seq_len=3, evaluation_fraction=0.0)
    pairs = [(bytes(tokens.tolist()), bytes(targets.tolist())) for tokens, targets in (source[0], source[1])]
    assert pairs == [(b"abc", b"bcd"), (b"def", b"efg")] and len(source) == 2
    assert source[0][0].dtype == source[0][1].dtype == torch.int64
    with pytest.raises(IndexError):
        source[2]


@pytest.mark.parametrize(("fraction", "train", "held_out"), [(0.0, 20, 0), (0.05, 19, 1), (0.3, 14, 6), (0.99, 1, 19)])
def test_the_last_samples_are_held_out(tmp_path, fraction, train, held_out):
    (tmp_path / "a.txt").write_bytes(bytes(range(32, 93)))
    source, _ = opened(tmp_path, "a.txt", seq_len=3, evaluation_fraction=fraction)
    assert (len(source), len(source.evaluation) if source.evaluation else 0) == (train, held_out)
    assert text_of(source) == bytes(range(32, 92))


def test_one_sequence_is_enough_and_then_none_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    source, _ = opened(tmp_path, "a.txt", seq_len=3)
    assert len(source) == 1 and source.evaluation is None


def test_a_folder_is_its_text_files_in_the_order_of_their_paths(tmp_path):
    (tmp_path / "c" / "b").mkdir(parents=True)
    (tmp_path / "c" / ".hidden").mkdir()
    for name, text in {"z.md": "last", "b/m.py": "middle", "a.txt": "first", "e.txt": ""}.items():
        (tmp_path / "c" / name).write_text(text)
    (tmp_path / "c" / ".hidden" / "no.txt").write_text("never")
    (tmp_path / "c" / "image.png").write_bytes(b"\xff\x00")
    source, messages = opened(tmp_path, "c", seq_len=1, evaluation_fraction=0.0)
    joined = b"first\n\nmiddle\n\n\n\nlast"
    assert text_of(source) == joined[:-1] and source.record()["sha256"] == hashlib.sha256(joined).hexdigest()
    assert messages == [
        '[data] use = "c": files of other kinds are left out: 1 .png',
        'rank 1 prepares the text of "c"',
    ]
    assert opened(tmp_path, "c", seq_len=1)[1] == messages[:1]  # made once


def test_a_text_file_is_mapped_and_not_read_into_memory(tmp_path):
    (tmp_path / "large.txt").write_bytes(b"0123456789abcdef" * (1 << 19))
    tracemalloc.start()
    source, _ = opened(tmp_path, "large.txt", seq_len=16)
    assert bytes(source[len(source) - 1][0].tolist()) == b"0123456789abcdef"
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # Hashing reads blocks of 1 MiB; the file has 8.
    assert peak_bytes < 4 << 20


@pytest.mark.parametrize("name", ["tokens.bin", "tokens.npy"])
def test_token_files_are_mapped_and_never_read_whole(tmp_path, name):
    tokens = (np.arange(4 << 20) % 50_000).astype(np.uint16)
    tokens.tofile(tmp_path / name) if name.endswith("bin") else np.save(tmp_path / name, tokens)
    tracemalloc.start()
    source, _ = opened(tmp_path, name, seq_len=64)
    seen = [source[index] for index in (0, 1000, len(source) - 1)]
    mapped = source._arrays[0]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [sample[0].tolist() for sample in seen] == [
        tokens[start : start + 64].tolist() for start in (0, 64_000, 64 * (len(source) - 1))
    ]
    assert [sample[1].tolist() for sample in seen[:2]] == [tokens[1:65].tolist(), tokens[64_001:64_065].tolist()]
    # The file has 8 MiB, which are read for the digest, 256 KiB at a time.
    assert isinstance(mapped, MappedTokens) and isinstance(mapped[:1], np.memmap) and peak_bytes < 1 << 20
    assert len(pickle.dumps(source)) < 10_000
    assert pickle.loads(pickle.dumps(source))[5][0].tolist() == source[5][0].tolist()


def test_the_digest_of_a_token_file_changes_with_its_tokens(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    digests = set()
    for place in (None, 0, 500, 999):
        if place is not None:
            tokens[place] += 1
        tokens.tofile(tmp_path / "t.bin")
        digests.add(opened(tmp_path, "t.bin", seq_len=8)[0].record()["sha256"])
    assert len(digests) == 4


def test_a_folder_of_token_files_has_no_sequence_across_two_files(tmp_path):
    (tmp_path / "t").mkdir()
    np.arange(10, dtype=np.uint32).tofile(tmp_path / "t" / "a.bin")
    np.arange(100, 103, dtype=np.uint32).tofile(tmp_path / "t" / "b.bin")
    np.arange(200, 209, dtype=np.uint32).tofile(tmp_path / "t" / "c.bin")
    source, _ = opened(tmp_path, "t", seq_len=4, dtype="uint32", vocab_size=300, evaluation_fraction=0.25)
    assert [source[index][0][0].item() for index in range(len(source))] == [0, 4, 200]
    assert source.evaluation[0][0].tolist() == [204, 205, 206, 207] and source.vocab_size == 300


def test_synthetic_samples_are_functions_of_seed_and_number(tmp_path):
    source, _ = opened(tmp_path, "synthetic", seq_len=100, vocab_size=50)
    again = open_source(DataTable(use="synthetic", seq_len=100, vocab_size=50), seed=3, folder=tmp_path, cache=tmp_path)
    other = open_source(DataTable(use="synthetic", seq_len=100, vocab_size=50), seed=4, folder=tmp_path, cache=tmp_path)
    tokens, targets = source[10**9]
    assert tokens.tolist() == again[10**9][0].tolist() != other[10**9][0].tolist()
    assert tokens[1:].tolist() == targets[:-1].tolist() and tokens.tolist() != source[10**9 - 1][0].tolist()
    assert set(torch.cat([source[index][0] for index in range(50)]).tolist()) == set(range(50))
    assert source[0][0].tolist() != source.evaluation[0][0].tolist()
    assert source.vocab_size == 50 and source.record()["seed"] == 3


def test_opening_and_reading_draw_nothing_from_the_global_generators(tmp_path):
    states = torch.get_rng_state(), np.random.get_state()[1].tolist()
    for use in ("python_docs", "synthetic"):
        opened(tmp_path, use)[0][5]
    assert torch.equal(torch.get_rng_state(), states[0]) and np.random.get_state()[1].tolist() == states[1]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"use": "empty.txt"}, '[data] use = "empty.txt" is empty; give text'),
        ({"use": "empty.bin"}, '[data] use = "empty.bin": empty.bin is empty; give a file of tokens'),
        ({"use": "empty.npy"}, '[data] use = "empty.npy": empty.npy is empty; give a file of tokens'),
        ({"use": "hollow"}, '[data] use = "hollow" holds 2 files, and all are empty; give text'),
        (
            {"use": "short.txt"},
            '[data] use = "short.txt" is shorter than one sequence: it has 5 tokens, and seq_len = 256 needs 257 (the '
            "last target is one token further); give more data, or set seq_len to at most 4",
        ),
        (
            {"use": "one.txt", "seq_len": 1},
            '[data] use = "one.txt" is shorter than one sequence: it has 1 token, and seq_len = 1 needs 2 (the last '
            "target is one token further); give more data",
        ),
        (
            {"use": "tokens", "seq_len": 8},
            '[data] use = "tokens" is shorter than one sequence: it has 4 tokens in the largest file, and seq_len = 8 '
            "needs 9 (the last target is one token further); give more data, or set seq_len to at most 3",
        ),
        (
            {"use": "short.tx"},
            '[data] use = "short.tx": there is no "short.tx" beside the manifest; did you mean "short.txt"?',
        ),
        (
            {"use": "python_doc"},
            '[data] use = "python_doc": there is no "python_doc" beside the manifest; did you mean "python_docs"?',
        ),
        (
            {"use": "tokens/aa.bin"},
            '[data] use = "tokens/aa.bin": there is no "aa.bin" in "tokens"; did you mean "tokens/a.bin"?',
        ),
        (
            {"use": "nothing/like/it"},
            '[data] use = "nothing/like/it": there is no "nothing" beside the manifest; give "python_docs", '
            '"synthetic", a file or folder, or "module:callable"',
        ),
        (
            {"use": "binary.txt"},
            '[data] use = "binary.txt": binary.txt is binary (at byte 2); convert it to UTF-8 text, take it out, or '
            "give tokens as .npy or .bin",
        ),
        (
            {"use": "latin"},
            '[data] use = "latin": b.md is not UTF-8 (at byte 3); convert it to UTF-8 text, take it out, or give '
            "tokens as .npy or .bin",
        ),
        (
            {"use": "cut.txt"},
            '[data] use = "cut.txt": cut.txt is not UTF-8 (at byte 3); convert it to UTF-8 text, take it out, or give '
            "tokens as .npy or .bin",
        ),
        (
            {"use": "both"},
            '[data] use = "both" holds both text (a.txt) and tokens (a.bin); move one kind away',
        ),
        (
            {"use": "odd.bin"},
            '[data] use = "odd.bin": odd.bin has 3 bytes, which is no whole number of uint16 tokens; set dtype, or '
            "write the file again",
        ),
        (
            {"use": "float.npy"},
            '[data] use = "float.npy": float.npy holds float64 of shape (3,); tokens are one row of integers',
        ),
        (
            {"use": "square.npy"},
            '[data] use = "square.npy": square.npy holds int64 of shape (2, 2); tokens are one row of integers',
        ),
        (
            {"use": "objects.npy"},
            '[data] use = "objects.npy": objects.npy is not a .npy file of tokens; write it with '
            "numpy.save(path, tokens)",
        ),
        (
            {"use": "right.npy", "dtype": "uint32"},
            '[data] dtype = "uint32", and right.npy says uint16; remove dtype: a .npy file carries it',
        ),
        (
            {"use": "short.txt", "dtype": "uint16"},
            '[data] dtype is for token files, and use = "short.txt" is text; remove it',
        ),
        (
            {"use": "right.npy", "tokenizer": "bpe"},
            '[data] tokenizer = "bpe" is for text, and use = "right.npy" holds tokens; remove it',
        ),
        (
            {"use": "short.txt", "vocab_size": 300},
            '[data] tokenizer = "bytes" has 256 tokens; remove vocab_size = 300, or set tokenizer = "bpe"',
        ),
    ],
)
def test_sources_that_cannot_be_read_are_refused(tmp_path, keys, message):
    for folder in ("hollow", "tokens", "latin", "both"):
        (tmp_path / folder).mkdir()
    files = {
        **{"empty.txt": b"", "empty.bin": b"", "empty.npy": b"", "hollow/a.txt": b"", "hollow/b.txt": b""},
        **{"short.txt": b"12345", "one.txt": b"1", "binary.txt": b"ab\0c", "cut.txt": "abc\u00e9".encode()[:-1]},
        **{"tokens/a.bin": b"12345678", "tokens/b.bin": b"12", "latin/a.txt": b"good", "latin/b.md": b"caf\xe9 noir"},
        **{"both/a.txt": b"good", "both/a.bin": b"12", "odd.bin": b"123"},
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "float.npy", np.zeros(3))
    np.save(tmp_path / "square.npy", np.zeros((2, 2), dtype=np.int64))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    np.save(tmp_path / "right.npy", np.zeros(300, dtype=np.uint16))
    assert refusal(tmp_path, **keys) == message


def test_only_regular_files_of_a_folder_are_read(tmp_path):
    folder = tmp_path / "docs"
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (tmp_path / "elsewhere.txt").write_text("elsewhere")
    for name in ("b.txt", "deep.txt", "deep/er/a.txt", ".hidden/c.txt", ".d.txt"):
        (folder / name).write_text(name)
    os.mkfifo(folder / "pipe.txt")
    (folder / "a.txt").symlink_to(tmp_path / "elsewhere.txt")
    (folder / "loop.txt").symlink_to("loop.txt")
    (folder / "around").symlink_to(folder)
    found = locate("docs", folder=tmp_path)
    assert [str(file.relative_to(folder)) for file in found.files] == ["a.txt", "b.txt", "deep/er/a.txt", "deep.txt"]


def test_a_folder_without_readable_files_is_refused(tmp_path):
    (tmp_path / "none").mkdir()
    wanted = (
        "it must hold text (.c, .cfg, .cpp, .css, .csv, .go, .h, .hpp, .html, .ini, .java, .js, .json, .jsonl, .lua, "
        ".md, .py, .pyi, .rb, .rs, .rst, .sh, .sql, .tex, .toml, .ts, .tsv, .txt, .xml, .yaml, .yml) or tokens "
        "(.bin, .npy)"
    )
    assert refusal(tmp_path, use="none") == f'[data] use = "none" is a folder with no files; {wanted}'
    (tmp_path / "none" / "a.png").write_bytes(b"1")
    (tmp_path / "none" / "README").write_bytes(b"1")
    assert refusal(tmp_path, use="none") == (
        f'[data] use = "none" is a folder with only files of other kinds (1 .png, 1 no suffix); {wanted}'
    )


def test_a_character_across_two_blocks_is_text(tmp_path):
    text = b"a" * ((1 << 20) - 1) + "\u00e9".encode() + b"b" * 10
    (tmp_path / "a.txt").write_bytes(text)
    source, _ = opened(tmp_path, "a.txt", seq_len=1024, evaluation_fraction=0.0)
    assert source.record()["num_bytes"] == len(text)
    (tmp_path / "b.txt").write_bytes(b"a" * ((1 << 20) - 1) + b"\xc3(" + b"b" * 10)
    assert "b.txt is not UTF-8 (at byte 1048575)" in refusal(tmp_path, use="b.txt")


# ---- token files that are not what they seem -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "keys", "said"),
    [
        ("<u4", {}, 'dtype = "uint16", the default: every other one is 0; set dtype = "uint32"'),
        (
            "<i8",
            {"dtype": "uint32"},
            'dtype = "uint32": every other one is 0; write them as uint32 again',
        ),
        (
            "<i8",
            {},
            'dtype = "uint16", the default: every other one is 0; it looks like 64-bit integers; write them as uint32 '
            "again",
        ),
        (">u4", {}, 'dtype = "uint16", the default: every other one is 0; set dtype = "uint32"'),
        ("<u2", {"dtype": "uint32"}, 'dtype = "uint32": half of them are above 16,777,216; set dtype = "uint16"'),
    ],
)
def test_tokens_of_another_dtype_than_stated_are_refused(tmp_path, written, keys, said):
    tokens = np.random.default_rng(0).integers(0, 50_000, 20_000)
    tokens.astype(written).tofile(tmp_path / "t.bin")
    assert (
        refusal(tmp_path, use="t.bin", seq_len=8, **keys)
        == f'[data] use = "t.bin": t.bin does not hold tokens of {said}'
    )


@pytest.mark.parametrize(("dtype", "size"), [("uint16", 40), ("uint32", 40), ("uint16", 100_000), ("uint32", 100_000)])
def test_tokens_of_the_stated_dtype_are_taken(tmp_path, dtype, size):
    for tokens in (np.random.default_rng(0).integers(0, 60_000, size), np.arange(size) % 3, np.zeros(size)):
        tokens.astype(dtype).tofile(tmp_path / "t.bin")
        assert len(opened(tmp_path, "t.bin", seq_len=8, dtype=dtype)[0]) > 0


def test_a_file_changed_in_its_middle_is_another_one_in_the_record(tmp_path):
    (tmp_path / "t").mkdir()
    tokens = np.arange(5_000_000) % 50_000
    for name in ("a.bin", "b.bin"):
        tokens.astype(np.uint16).tofile(tmp_path / "t" / name)
    before = opened(tmp_path, "t", seq_len=8)[0].record()["files"]
    changed = np.memmap(tmp_path / "t" / "b.bin", dtype=np.uint16, mode="r+")
    changed[2_534_567] += 1
    changed.flush()
    after = opened(tmp_path, "t", seq_len=8)[0].record()["files"]
    assert before.keys() == {"a.bin", "b.bin"} and before["a.bin"] == after["a.bin"]
    assert before["b.bin"] != after["b.bin"]


def test_a_file_that_is_too_large_to_be_read_whole_says_when_it_was_changed(tmp_path, monkeypatch):
    monkeypatch.setattr("composer3d.runner.data.token_digest._WHOLE_BYTES", 1000)
    (np.arange(5000) % 500).astype(np.uint16).tofile(tmp_path / "t.bin")
    source, _ = opened(tmp_path, "t.bin", seq_len=8)
    assert "sha256_sampled" in source.record() and "sha256" not in source.record()
    assert source.modified == {str(tmp_path / "t.bin"): (tmp_path / "t.bin").stat().st_mtime_ns}


def test_a_file_that_is_changed_while_it_is_read_is_noticed(tmp_path):
    path = tmp_path / "t.bin"
    (np.arange(5000) % 500).astype(np.uint16).tofile(path)
    source, _ = opened(tmp_path, "t.bin", seq_len=8)
    assert source[0][0].tolist() == list(range(8))
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), b"\x01\x00", 4000)
    os.utime(path, ns=(0, path.stat().st_mtime_ns + 1))  # a clock's tick may be longer than this test
    with pytest.raises(DataError, match=r"^\[data\] t.bin was changed while the run reads it, so its samples"):
        [source[index] for index in range(64)]


def test_a_class_written_with_a_dot_is_told_how_it_is_written(tmp_path):
    (tmp_path / "forecast.py").write_text("class Series: ...\n")
    with pytest.raises(DataError, match='write "forecast:Series"'):
        opened(tmp_path, "forecast.Series")
