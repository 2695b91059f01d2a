"""What the machine does to a run: full disks, folders that are gone, too few open files. One report, no traceback."""

from __future__ import annotations

import ctypes
import json
import re
import tempfile

import pytest
from support.doctor_cases import in_child, may_mount, mount

from composer3d.cli import main
from composer3d.processes.forking import limit_ranks
from composer3d.processes.machine_errors import machine_error

ROWS = """\
import os, resource, shutil, signal
from pathlib import Path
import torch


class Rows:
    \"\"\"Samples; once there is a checkpoint, reading one does something to the machine.\"\"\"

    def __init__(self, fault, output):
        self.fault, self.output = fault, Path(output)

    def __len__(self):
        return 64

    def __getitem__(self, number):
        if (self.output / "checkpoints" / "latest").exists():
            getattr(self, self.fault)()
        return torch.arange(number, number + 17) % 100

    def fill(self):
        for size in (1 << 16, 1 << 10, 1):
            try:
                with (self.output / f"fill-{os.getpid()}").open("ab", buffering=0) as file:
                    while True:
                        file.write(bytes(size))
            except OSError:
                pass

    def delete(self):
        shutil.rmtree(self.output, ignore_errors=True)

    def protect(self):
        (self.output / "checkpoints").chmod(0o500)
        self.output.chmod(0o500)

    def stop(self):
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)

    def close(self):
        lowest = os.open(os.devnull, os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
"""
WHO = r"\\(rank [01] of 2 \([^ ]+, pid \d+\) at step \d+( while saving)?\)"


def run(folder, fault, output="out", *more):
    (folder / "faulty.py").write_text(ROWS)
    arguments = [
        "data.use=faulty:Rows",
        f'data.args={{fault = "{fault}", output = "{output}"}}',
        f"run.output={output}",
    ]
    settings = [*arguments, "model.args.vocab_size=100", "train.steps=1000", "checkpoint.every=3", *more]
    return main(["run", "run.toml", *(option for text in settings for option in ("--set", text))])


def report(told):
    """Return the lines after those of the training."""
    assert "Traceback" not in told.err and told.out == "", told.err
    text = told.err[told.err.index("run failed: ") :]
    assert told.err.count("run failed: ") == 1
    return text.splitlines()


def test_a_disk_that_fills_up_is_named_even_where_no_file_finds_room(folder, capfd, monkeypatch):
    """The temporary folder is on the same disk: the reason travels in space that was taken before."""
    if not may_mount():
        pytest.skip("needs to mount a small disk, in a namespace of its own")
    (folder / "disk").mkdir()

    def in_namespace():
        mount(folder / "disk", "2m")
        (folder / "disk" / "tmp").mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "disk" / "tmp"))
        return run(folder, "fill", "disk/out")

    with limit_ranks(2):
        assert in_child(in_namespace) == 3
    first, *rest = report(capfd.readouterr())
    newest = "disk/out/checkpoints/step-3"
    assert re.fullmatch(
        r"run failed: the disk of disk/out\S* is full: 0.0 of 2.0 MiB free now \(.*No space left on device.*\).*", first
    )
    rest = [line for line in rest if not line.startswith(("likewise: ", "also ended: "))]
    assert rest == [
        "try: free space there, keep fewer checkpoints (checkpoint.keep), or choose another run.output; then start the "
        "same command again: it goes on from the newest checkpoint",
        f"disk/out/error.json could not be written; the newest complete checkpoint is {newest}",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [("", "is full: 0.0 of 0.0 MiB free now"), (",nr_inodes=3", "holds as many files as it may: 3 inodes, none free")],
    ids=["bytes", "files"],
)
def test_the_full_disk_of_temporary_files_is_named_where_the_error_names_none(folder, options, said):
    if not may_mount():
        pytest.skip("needs to mount a small disk, in a namespace of its own")
    temporary = folder / "temporary"
    temporary.mkdir()

    def in_namespace():
        mount(temporary, "16k", options=options)
        tempfile.tempdir = str(temporary)
        try:
            for number in range(20):
                (temporary / f"{number}").write_bytes(bytes(4096))
        except OSError as error:
            found = machine_error(OSError(error.errno, error.strerror), folder / "out")
        is_named = str(found).startswith(f"the disk of {temporary} {said} (")
        return 0 if is_named and ", or set TMPDIR to a folder of another disk; then start" in found.advice else 1

    assert in_child(in_namespace) == 0


def test_a_folder_that_is_deleted_is_named_in_the_next_step(folder, capfd):
    with limit_ranks(2):
        assert run(folder, "delete") == 3
    first, *rest = report(capfd.readouterr())
    assert re.fullmatch(
        r"run failed: out/metrics.jsonl is gone: it was deleted, or moved, while the run wrote to it "
        r"\(FileNotFoundError: \[Errno 2\] No such file or directory: 'out/metrics.jsonl'\).*",
        first,
    )
    assert rest[-2:] == [
        "try: leave out where it is while a run writes to it; then start the same command again: it goes on from the "
        "newest checkpoint, if one is left",
        "details: out/error.json; no checkpoint was complete",
    ]
    assert json.loads((folder / "out" / "error.json").read_text())["kind"] == "machine"


def test_ranks_without_a_file_descriptor_left_say_so(folder, capfd):
    with limit_ranks(2):
        assert run(folder, "close") == 3
    first, *rest = report(capfd.readouterr())
    assert re.fullmatch(
        r"run failed: this process may have no more than \d+ files open \(.*Too many open files.*", first
    )
    # The save of the first checkpoint may still have had a file open, which it has left to the next.
    assert re.fullmatch(
        r"details: out/error.json; the newest complete checkpoint is out/checkpoints/step-\d+", rest[-1]
    )
    assert rest[-2].startswith("try: raise the limit (ulimit -n 65536)")


def drop_capabilities():
    """Let permissions hold for root too, in this process and its children."""
    header, none = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None, use_errno=True).capset(header, none) == 0


def test_a_folder_that_becomes_read_only_is_named(folder, capfd):
    def without_capabilities():
        drop_capabilities()
        return run(folder, "protect")

    with limit_ranks(2):
        assert in_child(without_capabilities) == 3
    (folder / "out").chmod(0o700)
    first, *rest = report(capfd.readouterr())
    # Where it was so before the save began its folder cannot be made, and else it cannot get its name.
    assert re.fullmatch(
        r"run failed: out/checkpoints/step-\d+.tmp cannot be written to \(CheckpointError: out/checkpoints/step-\d+: "
        r"rank 0: (no checkpoint can be written there \()?PermissionError: \[Errno 13\] Permission denied: "
        r"'out/checkpoints/step-\d+.tmp'( -> 'out/checkpoints/step-\d+'|\); save into a folder that .*)\)",
        first,
    )
    assert rest == [
        "try: make out writable for this user, or choose another run.output; then start the same command again: it "
        "goes on from the newest checkpoint",
        "out/error.json could not be written; the newest complete checkpoint is out/checkpoints/step-3",
    ]


def test_a_stopped_rank_is_waited_for_no_longer_than_the_timeout(folder, capfd):
    with limit_ranks(2):
        assert run(folder, "stop", "out", "run.timeout_s=5") == 3
    told = capfd.readouterr()
    assert (
        "rank 1 (dp_shard 1): gave no answer: it ended, or hangs" in told.err and "Timed out waiting 5000ms" in told.err
    )
    assert "; the newest complete checkpoint is out/checkpoints/step-" in told.err
