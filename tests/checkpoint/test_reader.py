from __future__ import annotations

import os
import pickle
from enum import Enum
from pathlib import Path

import pytest
import torch
from support.damaged_checkpoints import metadata_of, reseal, write_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from composer3d.checkpoint import TensorInfo, contents, load, read_tensor, read_tensors, save
from composer3d.errors import CheckpointError

READERS = {
    "contents": contents,
    "read_tensor": lambda path: read_tensor(path, "w"),
    "load": lambda path: load(path, tensors={"w": torch.zeros(4, 3)}),
}


class Call:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.fixture
def path(tmp_path) -> Path:
    save(tmp_path / "step-1", tensors={"w": torch.arange(12.0).view(4, 3)}, state={})
    return tmp_path / "step-1"


def refused(read, path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read(path)
    return str(caught.value)


@pytest.mark.parametrize("reader", READERS)
def test_a_malicious_metadata_executes_nothing(path, reader):
    witness = path.parent / "executed"
    write_metadata(path, pickle.dumps(Call(os.system, f"touch {witness}")))
    text = refused(READERS[reader], path)
    assert text == (
        f"{path / '.metadata'}: refused, nothing was executed: it names posix.system, which no checkpoint "
        "needs; it is damaged, or made to run code on this machine"
    )
    assert not witness.exists()


@pytest.mark.parametrize(
    ("payload", "name"),
    [
        (b"cbuiltins\neval\n(S'1'\ntR.", "builtins.eval"),
        (b"\x80\x04\x8c\x05torch\x8c\x0eos.path.exists\x93.", "torch.os.path.exists"),
        (b"ctorch\nload\n(S'x'\ntR.", "torch.load"),
        (b"ctorch.distributed.checkpoint.metadata\nos\n.", "torch.distributed.checkpoint.metadata.os"),
        (b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x11Metadata.__init__\x93.", "Metadata.__init__"),
    ],
)
def test_other_ways_to_code_are_refused(path, payload, name):
    write_metadata(path, payload)
    text = refused(contents, path)
    assert "refused, nothing was executed: it names " in text and name in text


def test_a_call_hidden_among_good_metadata_is_refused(path):
    metadata = metadata_of(path)
    metadata.planner_data = {"w": Call(os.mkdir, str(path / "executed"))}
    write_metadata(path, pickle.dumps(metadata))
    assert "it names posix.mkdir, which no checkpoint needs" in refused(contents, path)
    assert not (path / "executed").exists()


def test_pickled_entries_are_refused(path):
    metadata = metadata_of(path)
    metadata.state_dict_metadata["secret"] = BytesStorageMetadata()
    write_metadata(path, pickle.dumps(metadata))
    for read in READERS.values():
        assert refused(read, path) == (
            f"{path}: secret is saved as pickled bytes, which are never read; only tensors are"
        )


def test_malicious_tensor_data_execute_nothing(path):
    (data,) = path.glob("*.distcp")
    torch.save(Call(os.mkdir, str(path / "executed")), data)
    metadata = metadata_of(path)
    for entry in metadata.storage_data.values():
        entry.length = data.stat().st_size
    write_metadata(path, metadata)
    reseal(path, data.name)
    text = refused(lambda path: read_tensor(path, "w"), path)
    assert text == (
        f"{data}: bytes 0 to {data.stat().st_size:,}: refused, nothing was executed: a data file holds more than a "
        "tensor: it names posix.mkdir"
    )
    assert not (path / "executed").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "", ".."])
def test_data_outside_the_folder_are_refused(path, name):
    metadata = metadata_of(path)
    for entry in metadata.storage_data.values():
        entry.relative_path = name
    write_metadata(path, pickle.dumps(metadata))
    text = refused(contents, path)
    assert text == f"{path / '.metadata'}: refused: its data would come from {name!r}, outside the folder"


def test_data_through_extensions_are_refused(path):
    metadata = metadata_of(path)
    for entry in metadata.storage_data.values():
        entry.transform_descriptors = ["stream.zstd"]
    write_metadata(path, pickle.dumps(metadata))
    assert "its data pass through extensions, which are not run" in refused(contents, path)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_metadata_is_damaged(path, share):
    file = path / ".metadata"
    write_metadata(path, file.read_bytes()[: int(share * file.stat().st_size)])
    assert refused(contents, path).startswith(f"{file}: damaged: ")


@pytest.mark.parametrize(("content", "what"), [({"w": 1}, "a dict"), (torch.Size([1]), "a Size"), ([1], "a list")])
def test_a_metadata_of_something_else_is_damaged(path, content, what):
    write_metadata(path, pickle.dumps(content))
    assert refused(contents, path) == f"{path / '.metadata'}: damaged: it holds {what}, not metadata"


def test_a_metadata_without_lists_is_damaged(path):
    write_metadata(path, pickle.dumps(Metadata({})))
    assert refused(contents, path) == f"{path / '.metadata'}: damaged: its lists of tensors are missing"


@pytest.mark.parametrize("share", [0.0, 0.5, 0.95])
def test_truncated_data_are_damaged(path, share):
    (data,) = path.glob("*.distcp")
    size = data.stat().st_size
    data.write_bytes(data.read_bytes()[: int(share * size)])
    text = refused(lambda path: read_tensor(path, "w"), path)
    assert text == (
        f"{data}: damaged: it has {int(share * size):,} bytes, {size:,} were written; "
        "go on from another checkpoint, or from a copy of this file"
    )


def test_missing_data_are_damaged(path):
    (data,) = path.glob("*.distcp")
    data.unlink()
    text = refused(lambda path: read_tensor(path, "w"), path)
    assert text.startswith(f"{data}: damaged: FileNotFoundError: ")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn]
)
def test_contents_and_tensors_by_dtype(tmp_path, dtype):
    tensor = torch.arange(6).view(2, 3).to(dtype)
    empty = torch.empty(0, 3, dtype=dtype)
    save(tmp_path / "step-1", tensors={"w": tensor, "scalar": tensor[1, 1], "empty": empty}, state={})
    assert contents(tmp_path / "step-1") == {
        "empty": TensorInfo(shape=(0, 3), dtype=dtype),
        "scalar": TensorInfo(shape=(), dtype=dtype),
        "w": TensorInfo(shape=(2, 3), dtype=dtype),
    }
    read = dict(read_tensors(tmp_path / "step-1", ["w", "scalar", "empty"]))
    for key, expected in {"w": tensor, "scalar": tensor[1, 1], "empty": empty}.items():
        assert read[key].dtype == dtype
        assert torch.equal(read[key].double(), expected.double())


def test_a_key_that_is_not_there(path):
    assert refused(lambda path: read_tensor(path, "v"), path) == f"{path}: the checkpoint lacks v"


def test_the_path_is_not_in_the_metadata(path):
    assert str(path.parent).encode() not in (path / ".metadata").read_bytes()


class ByName(pickle.Pickler):
    """Pickles enum members as Python 3.11.0 to 3.11.3 do."""

    def reducer_override(self, value):
        return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented


def test_an_enum_member_pickled_by_name_is_read(path):
    metadata = metadata_of(path)
    with (path / ".metadata").open("wb") as file:
        ByName(file).dump(metadata)
    reseal(path, ".metadata")
    assert b"getattr" in (path / ".metadata").read_bytes()
    assert torch.equal(read_tensor(path, "w"), torch.arange(12.0).view(4, 3))
