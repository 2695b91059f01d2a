"""Damaged files of a run's folder: doctor names them, ends without a traceback, and never says that all is well."""

from __future__ import annotations

import copy
import json
import os

import pytest
from support.doctor_cases import folder, start, write

from composer3d.cli import main
from composer3d.diagnostics.doctor import examine, read_evidence
from composer3d.processes.forking import limit_ranks

__all__ = ["folder"]

ANOMALY = {"step": 3, "rank": 1, "what": "output", "fqn": "head", "class": "Linear", "microbatch": 0, "stage": 0}
ODD = (None, "text", -1, 2**70, [None])


def swapped(content, path, value):
    """Return a copy of JSON values with one of them replaced."""
    result = copy.deepcopy(content)
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return result


def leaves(content, path=()):
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    for key, value in list(items)[:16]:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def whole(data):
    """Yield what a disk, a kill or another program makes of a file."""
    yield b""
    yield data[: len(data) // 2]
    yield data[:-1] + b"\xff\xfe"
    yield data.replace(b'"', b"'")
    yield b"\x00" * len(data)
    yield b"[" * 100_000
    yield b"9" * 5000
    yield from (b"{}\n", b"null\n", b"[1]\n", b'"text"\n', b'{"rank": 1}\n', b'{"step": 2')


def diagnosed(run):
    diagnosis = examine(read_evidence(run))
    assert all(isinstance(line, str) for line in (diagnosis.first, *diagnosis.others, *diagnosis.advice))
    return diagnosis


def names(diagnosis, path):
    return any(line.startswith(f"{path} is not what a run writes: ") for line in diagnosis.others)


@pytest.fixture
def run(folder, capfd):
    """A run that failed, with all that doctor reads in its folder."""
    write("memory", more="[profiling.memory_snapshot]\n")
    with limit_ranks(2):
        assert main(start()) == 3
    out = folder / "out"
    (out / "anomaly").mkdir()
    (out / "anomaly" / "rank-1.jsonl").write_text(json.dumps({**ANOMALY, "weights_not_finite": ["weight"]}) + "\n")
    assert diagnosed(out).kind == "out_of_memory"
    return out


def test_no_damage_ends_in_a_traceback_or_is_left_unsaid(run):
    files = [path for path in run.rglob("*.json*") if "checkpoints" not in path.parts]
    assert {path.parent.name for path in files} == {"out", "accounts", "memory", "anomaly"}
    for path in files:
        data, name = path.read_bytes(), str(path.relative_to(run))
        for damaged in whole(data):
            path.write_bytes(damaged)
            diagnosis = diagnosed(run)
            assert not damaged or names(diagnosis, name) or name.startswith("anomaly"), (name, damaged[:40])
            assert diagnosis.kind not in ("ended", "running")
        first = json.loads(data.splitlines()[0]) if path.suffix == ".jsonl" else json.loads(data)
        for leaf in leaves(first):
            for value in ODD:
                path.write_text(json.dumps(swapped(first, leaf, value)) + "\n")
                assert diagnosed(run).kind not in ("ended", "running"), (name, leaf, value)
        for make in (path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/nowhere/at/all")):  # noqa: B023
            path.unlink() if not path.is_dir() or path.is_symlink() else path.rmdir()
            make()
            assert names(diagnosed(run), name)
        path.unlink()
        path.write_bytes(data)


def test_a_finished_run_with_a_damaged_file_is_not_well(run):
    (run / "error.json").unlink()
    for path in (run / "accounts").glob("*.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "state": "ended"}))
    assert diagnosed(run).kind in ("ended", "straggler")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "loss": \xff\xfe')
    diagnosis = diagnosed(run)
    assert diagnosis.others[-1] == "metrics.jsonl is not what a run writes: its last line is torn"
    assert diagnosis.kind == "straggler" or (diagnosis.kind, diagnosis.first.partition("; ")[2]) == (
        "damaged",
        f"{diagnosis.first.split('; ')[1]}; a file of the run is damaged",
    )
    (run / "metrics.jsonl").unlink()
    (run / "accounts" / "rank-1.json").write_text("{")
    diagnosis = diagnosed(run)
    assert (diagnosis.kind, diagnosis.first) == (
        "damaged",
        "the run ended, and a rank's account of how cannot be read; a file of the run is damaged",
    )
    (run / "error.json").write_text('{"rank": 1, "wor')
    diagnosis = diagnosed(run)
    assert (diagnosis.kind, diagnosis.first) == ("damaged", "the run failed, and its error.json cannot be read")
