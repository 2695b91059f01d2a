"""Entries on disk are whole, bounded in number and bytes, and leave no temporary files of writers that are gone."""

from __future__ import annotations

import os
import threading

import pytest

from composer3d.planning.tracing import kept_entries
from composer3d.planning.tracing.kept_entries import Entries


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """Return entries in a folder of the test's own, and that folder."""
    monkeypatch.setenv("COMPOSER3D_TRACES", str(tmp_path))
    entries = Entries(list[int])
    (folder,) = tmp_path.iterdir()
    return entries, folder


@pytest.mark.parametrize("word", ["off", "OFF"])
def test_a_word_switches_them_off_however_it_is_written(word, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMPOSER3D_TRACES", word)
    assert not Entries(list[int]).are_kept and not [*tmp_path.iterdir()]


def used_at(folder, key, seconds):
    os.utime(folder / f"{key}.json", (seconds, seconds))


def test_entries_that_were_not_used_for_the_longest_go_first(kept, monkeypatch):
    entries, folder = kept
    monkeypatch.setattr(kept_entries, "_MOST_ENTRIES", 2)
    for number, key in enumerate("abc"):
        entries.write(key, [number])
        used_at(folder, key, 1000 + number)
        if key == "b":
            assert entries.read("a") == [0]
    assert sorted(path.name for path in folder.iterdir()) == ["a.json", "c.json"]


def test_all_entries_together_have_a_bound_in_bytes(kept, monkeypatch):
    entries, folder = kept
    monkeypatch.setattr(kept_entries, "_MOST_BYTES", 300)
    for number, key in enumerate("abc"):
        entries.write(key, [number] * 20)  # and a digest of 64 characters
        used_at(folder, key, 1000 + number)
    assert sorted(path.name for path in folder.iterdir()) == ["b.json", "c.json"]
    entries.write("d", [0] * 200)
    assert entries.read("d") is None and entries.read("c") == [2] * 20


def test_temporary_files_are_removed_once_their_writers_are_gone(kept):
    entries, folder = kept
    for name, age in ((".old.json.1", 2 * 3600), (".new.json.2", 0)):
        (folder / name).touch()
        state = (folder / name).stat()
        os.utime(folder / name, (state.st_atime - age, state.st_mtime - age))
    entries.write("a", [1])
    assert sorted(path.name for path in folder.iterdir()) == [".new.json.2", "a.json"]


def test_an_entry_under_another_name_or_of_another_type_is_not_used(kept, caplog):
    entries, folder = kept
    entries.write("a", [1])
    (folder / "b.json").write_bytes((folder / "a.json").read_bytes())
    assert entries.read("b") is None
    assert "is not what was written there" in caplog.text
    assert Entries(list[str]).read("a") is None
    assert entries.read("a") == [1]


def test_writers_of_one_entry_do_not_disturb_each_other_or_a_reader(kept):
    entries, folder = kept
    values = [[number] * 2000 for number in range(4)]
    entries.write("a", values[0])

    def write(value):
        for _ in range(25):
            entries.write("a", value)

    threads = [threading.Thread(target=write, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    seen = [entries.read("a") for _ in range(50)]
    for thread in threads:
        thread.join()
    assert all(value in values for value in [*seen, entries.read("a")])
    assert [path.name for path in folder.iterdir()] == ["a.json"]
