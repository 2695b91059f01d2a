"""Checkpoints that are made bad on purpose, with digests that fit: refused before anything is executed or unfolded."""

from __future__ import annotations

import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from support.damaged_checkpoints import metadata_of, reseal, without_digests, write_metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from composer3d.checkpoint import contents, load, read_state, read_tensor, save
from composer3d.errors import CheckpointError

META = b"torch.distributed.checkpoint.metadata\n"
NOT = zipfile.ZIP_STORED


@pytest.fixture
def path(tmp_path) -> Path:
    save(tmp_path / "step-1", tensors={"w": torch.arange(12.0).view(4, 3)}, state={})
    return tmp_path / "step-1"


def refused(action) -> str:
    with pytest.raises(CheckpointError) as caught:
        action()
    return str(caught.value)


@pytest.mark.parametrize(
    ("payload", "name"),
    [
        # BUILD with a pair as the state sets attributes; with a dict it fills __dict__.
        (b"c" + META + b"Metadata\n(N}S'evil'\nI1\nstb.", "torch.distributed.checkpoint.metadata.Metadata"),
        (
            b"c" + META + b"TensorProperties\n}S'evil'\nI1\nsb.",
            "torch.distributed.checkpoint.metadata.TensorProperties",
        ),
        (b"ctorch.serialization\n_get_layout\n(N}S'__defaults__'\n(I1\ntstb.", "torch.serialization._get_layout"),
        (b"ctorch\nfloat32\n(N}S'evil'\nI1\nstb.", "torch.float32"),
    ],
)
def test_attributes_of_classes_are_not_set(path, payload, name):
    write_metadata(path, payload)
    text = refused(lambda: contents(path))
    assert text == f"{path / '.metadata'}: refused, nothing was executed: it sets attributes of {name}"
    assert not hasattr(dcp.metadata.Metadata, "evil") and not hasattr(dcp.metadata.MetadataIndex, "evil")
    assert torch.serialization._get_layout.__defaults__ is None


def test_instances_are_data(path):
    # __setstate__ of a real class would be called with this.
    properties = b"c" + META + b"TensorProperties\n)\x81(I1\nI2\nI3\nI4\nI5\ntb"
    write_metadata(path, b"\x80\x02" + properties + b".")
    assert refused(lambda: contents(path)).endswith("damaged: it holds a TensorProperties, not metadata")


def tampered(change):
    def make(path):
        metadata = metadata_of(path)
        change(metadata.state_dict_metadata, metadata.storage_data)
        write_metadata(path, metadata)

    return make


def _chunks(*boxes):
    def change(tensors, storage):
        (info,) = storage.values()
        storage.clear()
        tensors["w"].chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(size)) for at, size in boxes]
        for number, (at, _) in enumerate(boxes):
            place = MetadataIndex("w", torch.Size(at))
            storage[place] = type(info)(info.relative_path, 10_000 * number, info.length)

    return tampered(change)


def _shape(tensors, storage):
    tensors["w"].size = torch.Size([2**40, 3])


def _chunk_of_2_40(tensors, storage):
    tensors["w"].size = torch.Size([2**40])
    (info,) = storage.values()
    storage.clear()
    storage[MetadataIndex("w", torch.Size([0]))] = info
    tensors["w"].chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([2**40]))]


def _length_of_2_40(tensors, storage):
    (info,) = storage.values()
    info.length = 2**40


def _all_of_2_40(tensors, storage):
    tensors["w"].size = torch.Size([2**40])
    (info,) = storage.values()
    info.length = 2**43
    storage.clear()
    storage[MetadataIndex("w", torch.Size([0]))] = info
    tensors["w"].chunks = [ChunkStorageMetadata(torch.Size([0]), torch.Size([2**40]))]


def _integer_key(tensors, storage):
    tensors[3] = tensors.pop("w")


def _state_is_a_list(tensors, storage):
    tensors["w"] = [1, 2]


def _float_size(tensors, storage):
    tensors["w"].size = [4.0, 3]


def _negative(tensors, storage):
    next(iter(storage.values())).offset = -1


def _no_chunks(tensors, storage):
    tensors["w"].chunks = []


def _nowhere(tensors, storage):
    storage.clear()


def _stray(tensors, storage):
    storage[MetadataIndex("v", torch.Size([0]))] = next(iter(storage.values()))


def _shared(tensors, storage):
    entry = tensors["w"]
    tensors["v"] = TensorStorageMetadata(entry.properties, entry.size, entry.chunks)
    storage[MetadataIndex("v", torch.Size([0, 0]))] = next(iter(storage.values()))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_chunks(((0, 0), (2, 3))), "the chunks of w hold 6 elements, and there are 12 elements of its shape [4, 3]"),
        (
            _chunks(((0, 0), (2, 3)), ((1, 0), (2, 3))),
            "the chunks of w hold some elements twice and others never of its shape [4, 3]",
        ),
        (
            _chunks(((0, 0), (4, 2)), ((0, 1), (4, 1))),
            "the chunks of w hold some elements twice and others never of its shape [4, 3]",
        ),
        (
            _chunks(((0, 0), (4, 2)), ((0, 2), (4, 2))),
            "the chunks of w lie outside: one of [4, 2] at [0, 2], outside of its shape [4, 3]",
        ),
        (_chunks(((0,), (12,))), "the chunks of w have other numbers of dims than those of its shape [4, 3]"),
        (tampered(_no_chunks), "the chunks of w hold 0 elements, and there are 12 elements of its shape [4, 3]"),
        (
            tampered(_shape),
            "the chunks of w hold 12 elements, and there are 3,298,534,883,328 elements of its shape "
            "[1099511627776, 3]",
        ),
        (
            tampered(_chunk_of_2_40),
            "w has a chunk of [1099511627776] in 1,577 bytes of __0_0.distcp, which cannot hold it",
        ),
        (tampered(_integer_key), "the key 3 is a int, not a string"),
        (tampered(_state_is_a_list), "w is a list, not a tensor"),
        (tampered(_float_size), "the shape of w has 4.0 where a number of 0 or more is needed"),
        (tampered(_negative), "the place of w has -1 where a number of 0 or more is needed"),
        (tampered(_nowhere), "it does not say where the chunk of w at [0, 0] is"),
        (tampered(_stray), "it says where a shard of v at [0] is, which no tensor has"),
        (tampered(_shared), "v and w lie in the same bytes of __0_0.distcp"),
    ],
)
def test_an_index_that_no_writer_writes(path, make, text):
    make(path)
    expected = f"{path / '.metadata'}: damaged: {text}"
    assert refused(lambda: contents(path)) == expected
    assert refused(lambda: read_tensor(path, "w")) == expected
    assert refused(lambda: load(path, tensors={"w": torch.zeros(4, 3)})) == expected


def test_a_chunk_that_ends_after_its_file(path):
    tampered(_length_of_2_40)(path)
    without_digests(path)
    data = path / "__0_0.distcp"
    text = refused(lambda: read_tensor(path, "w"))
    assert text == f"{data}: damaged: it has 1,577 bytes, and a chunk ends at 1,099,511,627,776"
    tampered(_all_of_2_40)(path)
    text = refused(lambda: read_tensor(path, "w"))
    assert text == f"{data}: damaged: it has 1,577 bytes, and a chunk ends at 8,796,093,022,208"


def _archive(path, change, compression=zipfile.ZIP_STORED):
    """Write the archive of the one tensor anew, with some records changed."""
    data = path / "__0_0.distcp"
    buffer = io.BytesIO()
    torch.save(torch.arange(12.0).view(4, 3), buffer)
    with zipfile.ZipFile(buffer) as archive:
        records = {info.filename.partition("/")[2]: archive.read(info) for info in archive.infolist()}
    change(records)
    with zipfile.ZipFile(data, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(f"archive/{name}", content)
    metadata = metadata_of(path)
    for info in metadata.storage_data.values():
        info.length = data.stat().st_size
    write_metadata(path, metadata)
    reseal(path, data.name)


def _bigger(records):
    records["data/0"] = bytes(2**24)


def _pickled_as(source):
    def change(records):
        buffer = io.BytesIO()
        torch.save(source, buffer)
        with zipfile.ZipFile(buffer) as archive:
            for info in archive.infolist():
                records[info.filename.partition("/")[2]] = archive.read(info)

    return change


def _big_description(records):
    records["data.pkl"] += bytes(100_000)


def _no_values(records):
    del records["data/0"]


@pytest.mark.parametrize(
    ("change", "compression", "text"),
    [
        (_bigger, zipfile.ZIP_DEFLATED, "the record 'archive/data.pkl' is compressed, which torch.save never does"),
        (_bigger, NOT, "its values have 16,777,216 bytes, and [4, 3] of float32 48"),
        (
            _pickled_as(torch.zeros(3, 4)),
            NOT,
            "it holds [3, 4] of float32, and the index says [4, 3] of float32",
        ),
        (
            _pickled_as(torch.zeros(4, 3).double()),
            NOT,
            "it holds [4, 3] of float64, and the index says [4, 3] of float32",
        ),
        (
            _pickled_as(torch.zeros(1).expand(4, 3)),
            NOT,
            "its values have 4 bytes, and [4, 3] of float32 48",
        ),
        (
            _pickled_as({"w": torch.zeros(4, 3)}),
            NOT,
            "refused, nothing was executed: a data file holds more than a tensor",
        ),
        (_big_description, NOT, None),
        (_no_values, NOT, "the file is damaged: KeyError: 'data/0'"),
    ],
)
def test_an_archive_that_torch_save_does_not_write(path, change, compression, text):
    _archive(path, change, compression)
    data = path / "__0_0.distcp"
    found = refused(lambda: read_tensor(path, "w"))
    where = f"{data}: bytes 0 to {data.stat().st_size:,}: "
    assert found.startswith(where)
    if text is None:
        assert found.removeprefix(where).endswith("bytes, more than any tensor's")
    else:
        assert found == where + text


def test_sizes_beyond_the_values_are_not_believed(path):
    # torch's own reader takes as many elements as the description says, whatever the record has.
    def change(records):
        assert records["data.pkl"].count(b"K\x0ct") >= 1  # 12 elements of storage
        records["data.pkl"] = records["data.pkl"].replace(b"K\x0ct", b"J" + struct.pack("<i", 2**30) + b"t")

    _archive(path, change)
    assert refused(lambda: read_tensor(path, "w")).endswith("its values have 48 bytes, and [4, 3] of float32 48")


@pytest.mark.parametrize("name", ["checksums.json", ".metadata", "state.json", "__0_0.distcp"])
def test_a_pipe_is_refused_at_once(path, name):
    (path / name).unlink()
    os.mkfifo(path / name)
    for action in (lambda: read_state(path), lambda: read_tensor(path, "w")):
        try:
            action()
        except CheckpointError as error:
            assert f"{name} is no ordinary file" in str(error) or f"{name}: damaged: it is no ordinary file" in str(
                error
            )
        else:
            assert name == "__0_0.distcp" and action is not None  # a state needs no data file
    assert refused(lambda: load(path, tensors={"w": torch.zeros(4, 3)}))


def test_without_digests_it_is_loaded_with_a_warning(path, caplog):
    without_digests(path)
    assert read_tensor(path, "w").tolist() == torch.arange(12.0).view(4, 3).tolist()
    assert caplog.messages == [
        f"{path}: saved without digests, by an earlier composer3d: damage to its files would not be noticed; "
        "what is saved from now on has them"
    ]


def test_digests_that_are_lost_are_missed(path):
    (path / "checksums.json").unlink()
    for action in (lambda: load(path, tensors={"w": torch.zeros(4, 3)}), lambda: contents(path)):
        assert refused(action).startswith(f"{path / 'checksums.json'}: missing: ")


def test_torch_reads_what_is_saved(path):
    target = {"w": torch.zeros(4, 3)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(target, checkpoint_id=path, no_dist=True)
    assert torch.equal(target["w"], torch.arange(12.0).view(4, 3))


@pytest.mark.parametrize("layout", ["transposed", "channels_last"])
def test_strides_are_read_as_saved(tmp_path, layout):
    tensor = torch.randn(2, 3, 4, 5)
    tensor = tensor.transpose(1, 3) if layout == "transposed" else tensor.to(memory_format=torch.channels_last)
    save(tmp_path / "step-1", tensors={"w": tensor}, state={})
    assert torch.equal(read_tensor(tmp_path / "step-1", "w"), tensor)


def test_pickles_of_other_protocols_are_read(path):
    for protocol in (2, 3, 4, 5):
        write_metadata(path, pickle.dumps(metadata_of(path), protocol=protocol))
        assert torch.equal(read_tensor(path, "w"), torch.arange(12.0).view(4, 3))
