"""Folders of weights that are damaged, or made to read other files of this machine."""

from __future__ import annotations

import json
import os
import random
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.daily_part import PART
from support.huggingface import make

from composer3d.errors import ModelError
from composer3d.huggingface import HuggingFaceModel
from composer3d.huggingface.files import WeightFiles

NAMES = ("model-1.safetensors", "model-2.safetensors")


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    save_file({"a": torch.arange(4.0), "b": torch.ones(2)}, path / NAMES[0])
    save_file({"c": torch.zeros(3)}, path / NAMES[1])
    write(path, {"weight_map": {"a": NAMES[0], "b": NAMES[0], "c": NAMES[1]}})
    return path


def write(folder, content):
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    (folder / "model.safetensors.index.json").write_bytes(text)


def refused(folder) -> str:
    with pytest.raises(ModelError) as caught:
        WeightFiles(folder)
    return str(caught.value).replace(str(folder), "FOLDER")


def test_a_good_folder_is_read(folder):
    files = WeightFiles(folder)
    assert sorted(files.tensors) == ["a", "b", "c"]
    assert files.read("a", [(1, 3)]).tolist() == [1, 2]


INDEX = "FOLDER/model.safetensors.index.json"
NO_MAP = f'{INDEX} is damaged: it has no "weight_map" of names of tensors to names of files'


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([1], NO_MAP),
        (None, NO_MAP),
        ("text", NO_MAP),
        ({}, NO_MAP),
        ({"weight_map": None}, NO_MAP),
        ({"weight_map": []}, NO_MAP),
        ({"weight_map": {}}, NO_MAP),
        ({"weight_map": {"a": 3}}, f'{INDEX} is damaged: the file of "a" is 3, no name'),
        ({"weight_map": {"a": None}}, f'{INDEX} is damaged: the file of "a" is null, no name'),
        ({"weight_map": {"a": ["x"]}}, f'{INDEX} is damaged: the file of "a" is ["x"], no name'),
        ({"weight_map": {"a": "gone.safetensors"}}, f"{INDEX} names gone.safetensors, which is not there"),
        ({"weight_map": {"a": ""}}, f"{INDEX} names '', which is outside the folder"),
        ({"weight_map": {"a": "."}}, f"{INDEX} names ., which is not there"),
        ({"weight_map": {"a": "x\0y"}}, f"{INDEX} names 'x\\x00y', which is outside the folder"),
        ({"weight_map": {"a": "x" * 5000}}, f"{INDEX} names '{'x' * 97}...': File name too long"),
        ({"weight_map": {"a": "/etc/passwd"}}, f"{INDEX} names '/etc/passwd', which is outside the folder"),
        (
            {"weight_map": {"a": "../outside.safetensors"}},
            f"{INDEX} names '../outside.safetensors', which is outside the folder",
        ),
        (
            {"weight_map": {"a": NAMES[0], "d": NAMES[1]}},
            f'{INDEX} says that "d" is in model-2.safetensors, which lacks it',
        ),
        (b"", f"{INDEX} is damaged: JSONDecodeError: Expecting value: line 1 column 1 (char 0)"),
        (b"[" * 100_000, f"{INDEX} is damaged: RecursionError: maximum recursion depth exceeded"),
        (b'{"weight_map": \xff', f"{INDEX} is damaged: UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"),
    ],
)
def test_a_bad_index_is_named(folder, content, text):
    write(folder, content)
    assert refused(folder).startswith(text)


@pytest.mark.parametrize("through", ["file", "folder"])
def test_links_out_of_the_folder_are_refused(folder, tmp_path, through):
    outside = tmp_path / "outside"
    outside.mkdir()
    (folder / NAMES[0]).rename(outside / NAMES[0])
    if through == "file":
        name = NAMES[0]
        (folder / name).symlink_to(outside / name)
    else:
        name = f"sub/{NAMES[0]}"
        (folder / "sub").symlink_to(outside)
    write(folder, {"weight_map": {"a": name, "b": name, "c": NAMES[1]}})
    assert refused(folder) == (
        f"{INDEX} names {name}, which is a link to {outside / NAMES[0]}, outside the folder; "
        "put the file itself into the folder"
    )


def test_links_of_the_hugging_face_cache_are_followed(folder, tmp_path):
    snapshot, blobs = tmp_path / "models--x" / "snapshots" / "1", tmp_path / "models--x" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(folder.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    assert sorted(WeightFiles(snapshot).tensors) == ["a", "b", "c"]


def test_a_link_to_the_folder_itself_is_followed(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert sorted(WeightFiles(tmp_path / "link").tensors) == ["a", "b", "c"]


def test_a_pipe_is_not_waited_for(folder):
    (folder / NAMES[1]).unlink()
    os.mkfifo(folder / NAMES[1])
    assert refused(folder) == f"{INDEX} names model-2.safetensors, which is not there"


def test_a_tensor_of_two_files_is_the_one_that_the_index_names(folder):
    save_file({"c": torch.zeros(3), "a": torch.full((4,), 7.0), "d": torch.ones(1)}, folder / NAMES[1])
    assert WeightFiles(folder).read("a", [(0, 4)]).tolist() == [0, 1, 2, 3]
    save_file({"a": torch.arange(4.0), "b": torch.ones(2), "d": torch.ones(1)}, folder / NAMES[0])
    assert refused(folder) == 'FOLDER holds "d" twice: in model-1.safetensors and in model-2.safetensors'


@pytest.mark.parametrize("length", [0, 2**20, 2**40, 2**64 - 1])
def test_a_header_of_another_length(folder, length):
    file = folder / NAMES[0]
    file.write_bytes(struct.pack("<Q", length) + file.read_bytes()[8:])
    assert refused(folder).startswith(f"FOLDER/{NAMES[0]} cannot be read: ")


def test_random_damage_is_an_error_or_harmless(folder):
    chance = random.Random(PART)
    good = {name: (folder / name).read_bytes() for name in (*NAMES, "model.safetensors.index.json")}
    refusals = 0
    for _ in range(300):
        name = chance.choice(list(good))
        data = bytearray(good[name])
        if chance.random() < 0.3:
            del data[chance.randrange(len(data)) :]
        else:
            at = chance.randrange(min(len(data), 200))
            data[at] ^= 1 << chance.randrange(8)
        (folder / name).write_bytes(data)
        try:
            files = WeightFiles(folder)
            for tensor, stored in files.tensors.items():
                files.read(tensor, [(0, size) for size in stored.shape])
        except ModelError:
            refusals += 1
        (folder / name).write_bytes(good[name])
    assert refusals > 100


def test_more_layers_than_any_model_has_are_refused_at_once(tmp_path):
    path = make("llama", tmp_path / "llama")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2**30}))
    with pytest.raises(ModelError) as caught:
        HuggingFaceModel(path)
    assert str(caught.value) == (
        f"the configuration in {path} has num_hidden_layers = 1,073,741,824, more than any model's"
    )
