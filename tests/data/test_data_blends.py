"""Megatron-LM's indexed data sets, and blends of sources by weight."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from composer3d.errors import DataError
from composer3d.manifest import load_manifest
from composer3d.runner import TABLES
from composer3d.runner.data import DataTable, Loader, open_source
from composer3d.runner.data.data_table import BlendedTable

CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def write_indexed(prefix, documents, dtype="uint16"):
    """Write documents as Megatron-LM's IndexedDatasetBuilder does, one sequence a document."""
    lengths = [len(document) for document in documents]
    tokens = np.concatenate([np.asarray(document, dtype=dtype) for document in documents])
    tokens.tofile(f"{prefix}.bin")
    pointers = (np.cumsum(lengths) - lengths) * tokens.itemsize
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, CODES[dtype], len(lengths), len(lengths) + 1)
    body = [np.asarray(lengths, "<i4"), pointers.astype("<i8"), np.arange(len(lengths) + 1, dtype="<i8")]
    Path(f"{prefix}.idx").write_bytes(head + b"".join(array.tobytes() for array in body))


def opened(folder, **table):
    table["blend"] = tuple(BlendedTable(**entry) for entry in table.get("blend", ()))
    data = DataTable(evaluation_fraction=table.pop("evaluation_fraction", 0.0), **table)
    return open_source(data, seed=0, folder=folder, cache=folder / "cache"), data


def batches(source, table, steps, *, rank=0, degree=1, size=8):
    loader = Loader(
        source,
        table,
        seed=3,
        rank=rank,
        degree=degree,
        batch_size_of=lambda step: size,
        position_of=lambda step: step * size,
    )
    return [loader.batch(step) for step in steps]


@pytest.mark.parametrize("dtype", CODES)
def test_an_indexed_data_set_is_its_tokens_in_the_dtype_of_its_index(tmp_path, dtype):
    write_indexed(tmp_path / "corpus_text_document", [range(1, 8), range(20, 33), [5]], dtype)
    source, _ = opened(tmp_path, use="corpus_text_document", seq_len=4)
    tokens = [*range(1, 8), *range(20, 33), 5]
    assert [source[i][0].tolist() for i in range(len(source))] == [tokens[i * 4 : i * 4 + 4] for i in range(5)]
    assert source[1][1].tolist() == tokens[5:9]


def test_the_bin_file_by_its_name_and_its_folder_are_the_same(tmp_path):
    (tmp_path / "set").mkdir()
    write_indexed(tmp_path / "set" / "a", [range(300)], "int32")
    found, reported = [], []
    for use in ("set/a", "set/a.bin", "set"):
        table = DataTable(use=use, seq_len=10, evaluation_fraction=0.0)
        source = open_source(table, seed=0, folder=tmp_path, cache=tmp_path / "cache", report=reported.append)
        found.append(source.record()["sha256"])
        assert source[0][0].tolist() == list(range(10))
    assert len(set(found)) == 1 and reported == []


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (
            lambda idx, bin: idx.write_bytes(b"TNTIDX\x00\x00" * 9),
            "a.idx is no index of Megatron-LM's (MMIDIDX); move it away, or write the data set again",
        ),
        (
            lambda idx, bin: idx.write_bytes(idx.read_bytes()[:60]),
            "a.idx is truncated: 2 sequences need 82 bytes",
        ),
        (
            lambda idx, bin: bin.write_bytes(bin.read_bytes()[:-2]),
            "a.idx says 12 tokens of uint16, and a.bin has 22 bytes; they are of two data sets",
        ),
        (
            lambda idx, bin: idx.write_bytes(idx.read_bytes()[:17] + b"\x07" + idx.read_bytes()[18:]),
            "a.idx has version 1 and dtype 7; version 1 of integers can be read",
        ),
        (
            lambda idx, bin: idx.write_bytes(idx.read_bytes()[:50] + b"\x09" + idx.read_bytes()[51:]),
            "a.idx names sequences that do not follow each other in a.bin; write it again",
        ),
    ],
)
def test_an_index_that_is_not_of_its_tokens_is_refused(tmp_path, break_it, message):
    write_indexed(tmp_path / "a", [range(5), range(7)])
    break_it(tmp_path / "a.idx", tmp_path / "a.bin")
    with pytest.raises(DataError) as caught:
        opened(tmp_path, use="a", seq_len=4)
    assert str(caught.value) == f'[data] use = "a": {message}'


def test_a_dtype_besides_the_indexs_is_refused(tmp_path):
    write_indexed(tmp_path / "a", [range(9)])
    with pytest.raises(DataError) as caught:
        opened(tmp_path, use="a", seq_len=4, dtype="uint32")
    assert str(caught.value) == ('[data] dtype = "uint32", and a.idx says uint16; remove dtype: the index says it')


@pytest.fixture
def blended(tmp_path):
    """Three sources whose tokens say which one they are of: 100 samples, 30, and 7."""
    for name, value, size in (("a", 1, 100), ("b", 2, 30), ("c", 3, 7)):
        np.full(size * 4 + 1, value, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    blend = ({"use": "a.bin", "weight": 5.0}, {"use": "b.bin", "weight": 3.0}, {"use": "c.bin", "weight": 2.0})
    return opened(tmp_path, blend=blend, seq_len=4, vocab_size=4)


def owners(found):
    return [int(row[0]) for batch in found for row in batch.tokens]


def test_every_stretch_has_each_source_in_the_share_of_its_weight(blended):
    drawn = np.asarray(owners(batches(*blended, range(100))))
    for length in (10, 64, 800):
        for value, share in ((1, 0.5), (2, 0.3), (3, 0.2)):
            assert abs((drawn[:length] == value).sum() - share * length) <= 1


def test_the_samples_of_a_step_are_a_function_of_seed_and_step_on_any_layout(blended):
    ordered = batches(*blended, range(20))
    assert [batches(*blended, [step])[0].indices for step in (13, 2)] == [ordered[13].indices, ordered[2].indices]
    halves = [batches(*blended, range(20), rank=rank, degree=2) for rank in (0, 1)]
    for whole, first, second in zip(ordered, *halves, strict=True):
        assert whole.indices == first.indices + second.indices


def test_a_source_gives_all_its_samples_before_one_comes_again(blended):
    source, table = blended
    drawn = [index for batch in batches(source, table, range(150)) for index in batch.indices]
    for first, size in ((0, 100), (100, 30), (130, 7)):
        own = [index - first for index in drawn if first <= index < first + size]
        assert len(own) >= 2 * size
        for start in range(0, len(own) - size + 1, size):
            assert sorted(own[start : start + size]) == list(range(size))


def test_shares_stay_exact_over_the_seam_of_a_period(blended):
    from composer3d.runner.data.blend import _PERIOD

    source, _ = blended
    near = source.samples_at(np.arange(_PERIOD - 50, _PERIOD + 50), seed=3, shuffle=True)
    far = source.samples_at(np.arange(_PERIOD, _PERIOD + 50), seed=3, shuffle=True)
    assert near[50:].tolist() == far.tolist()
    assert abs((near < 100).sum() - 50) <= 1


def test_what_each_source_holds_out_is_evaluated(tmp_path):
    for name, size in (("a", 40), ("b", 10)):
        np.full(size * 4 + 1, size, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    blend = ({"use": "a.bin"}, {"use": "b.bin"})
    source, _ = opened(tmp_path, blend=blend, seq_len=4, vocab_size=41, evaluation_fraction=0.2)
    assert (len(source), len(source.evaluation)) == (40, 10)
    assert [int(source.evaluation[i][0][0]) for i in range(10)] == [40] * 8 + [10] * 2


def test_a_blend_that_was_changed_is_told_on_resuming(blended, tmp_path, caplog):
    source, table = blended
    state = Loader(source, table, seed=3, rank=0, degree=1, batch_size_of=lambda _: 8, position_of=lambda s: s * 8)
    saved = state.state_dict()
    other = opened(tmp_path, blend=({"use": "a.bin"}, {"use": "b.bin"}, {"use": "c.bin"}), seq_len=4)
    loader = Loader(*other, seed=3, rank=0, degree=1, batch_size_of=lambda _: 8, position_of=lambda s: s * 8)
    loader.load_state_dict(saved)
    assert "[data] blend was" in caplog.text and "the order of the samples is another" in caplog.text


MANIFEST = """composer3d = 1
train.steps = 1
sharding.fsdp2 = {}
[data]
seq_len = 4
"""


def test_without_weights_sources_have_the_shares_of_their_samples(tmp_path):
    for name, size in (("a", 60), ("b", 20)):
        np.full(size * 4 + 1, size, dtype=np.uint16).tofile(tmp_path / f"{name}.bin")
    source, table = opened(tmp_path, blend=({"use": "a.bin"}, {"use": "b.bin"}), seq_len=4, vocab_size=61)
    drawn = [index for batch in batches(source, table, range(10)) for index in batch.indices]
    assert sorted(drawn) == list(range(80))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[[data.blend]]\nuse = "a.bin"\n[[data.blend]]\nuse = "b.bin"\nweight = 2.0\n',
            "blend has sources with and without weight; state the weight of all, or of none",
        ),
        (
            'use = "a.bin"\n[[data.blend]]\nuse = "b.bin"\n',
            "use and blend both say what the data is; leave one of them out",
        ),
        ('[[data.blend]]\nuse = "b.bin"\nweight = 0\n', "weight must be greater than 0.0, not 0"),
        ('[[data.blend]]\nuse = "b.bin"\nwieght = 1.0\n', 'unknown key "wieght"; did you mean "weight"?'),
        (
            'order = "stream"\n[[data.blend]]\nuse = "m:f"\n',
            'order = "stream" is one iterable\'s; a blend has numbered samples',
        ),
    ],
)
def test_refusals_of_the_manifest(tmp_path, text, message):
    from composer3d import ManifestError

    (tmp_path / "run.toml").write_text(MANIFEST + text)
    with pytest.raises(ManifestError) as caught:
        load_manifest(tmp_path / "run.toml", tables=TABLES)
    assert message in str(caught.value)


def test_check_names_the_entry_that_is_not_there_and_the_weight_that_is_nothing(tmp_path):
    from composer3d import check

    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    blend = '[[data.blend]]\nuse = "a.bin"\nweight = 1.0\n[[data.blend]]\nuse = "b.bin"\nweight = 1e-7\n'
    (tmp_path / "run.toml").write_text(MANIFEST + blend)
    problems = {problem.line: problem.message for problem in check(tmp_path / "run.toml").problems}
    assert problems[10] == 'use = "b.bin": there is no "b.bin" beside the manifest; did you mean "a.bin"?'
    assert "blend: weight = 1e-07 is less than one sample of 262144; raise it, or remove it" in problems.values()
