"""Optimizer state on disk: the same bits, the stated bytes, no file left behind, and errors that say what happened."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from composer3d_plugins.sharding.nvme_offload.disk import BLOCK, Range, StateFile
from support.models import composed, full, mine, padded, seeded, sum_loss, write_manifest
from support.offloading import DDP, FSDP, PP, TP, Even, assert_same, local, resumed, trained
from support.shared_worlds import by_world_size, in_one_world

from composer3d import Batch, ComposerError, PluginError, RankError
from composer3d.testing import assert_parity, run_ranks

# A piece is 20 KiB; a run of a large matrix, of 64 KiB, has 4096 elements.
TABLE = "[sharding.nvme_offload]\nchunk_mib = 0.02\ndepth = 2\nthreads = 3\nfolder = {!r}\n"
LAYOUTS = [
    pytest.param(1, "", id="plain"),
    pytest.param(2, FSDP, id="fsdp2"),
    pytest.param(2, DDP, id="ddp"),
    pytest.param(2, PP, id="pp"),
    pytest.param(2, TP, id="tp"),
    # Each of the two is above.
    pytest.param(4, TP.replace("tp = 2", "tp = 2\ndp_shard = 2") + FSDP, id="tp and fsdp2", marks=pytest.mark.slow),
]
OPTIMIZERS = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": False, "amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9, "foreach": False}),
    (torch.optim.NAdam, {"foreach": False}),
]


@pytest.mark.parametrize(("world_size", "layouts"), by_world_size(LAYOUTS))
def test_every_bit_is_that_of_the_run_in_memory_and_so_are_the_collectives(tmp_path, world_size, layouts):
    cases = [
        (layout + text, *chosen)
        for layout in layouts
        for chosen in (OPTIMIZERS if layout == "" else OPTIMIZERS[:1])
        for text in ("", TABLE.format(str(tmp_path)))
    ]
    results = in_one_world(trained, world_size, *cases)
    for plain, ranks in zip(results[::2], results[1::2], strict=True):
        for found, wanted in zip(ranks, plain, strict=True):
            assert_same(found, wanted)
            assert found[3] == wanted[3] and found[3]
    assert list(tmp_path.iterdir()) == []


# ---- memory and bytes ------------------------------------------------------------------------------------------------


def stepped(text, num_steps=3):
    run = composed(text, seeded(Even))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    for number in range(num_steps):
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
    sizes = [local(p).numel() * 4 for _, p in run.named_parameters()]
    kept = sum(
        value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if value.dim() > 0
    )
    (file,) = (value for value in run.context.state.values() if isinstance(value, StateFile))
    metrics = run.report(0, {})
    found = sizes, kept, file.num_bytes, file.read_bytes, file.written_bytes, file.is_direct, metrics
    run.close()
    return found


@pytest.mark.parametrize(("world_size", "layout"), [(1, ""), (2, FSDP)])
def test_bytes(tmp_path, world_size, layout):
    ranks = run_ranks(stepped, world_size, layout + TABLE.format(str(tmp_path)))
    for sizes, kept, num_bytes, read, written, _, _ in ranks:
        # Nothing in memory between steps; two moments of every parameter in the file, each on blocks of its own.
        assert kept == 0
        blocks = sum(2 * -(-size // BLOCK) * BLOCK for size in sizes)
        assert num_bytes == blocks
        # Written in three steps, read in all but the first.
        assert (read, written) == (2 * blocks, 3 * blocks)
    assert ranks[0][-1] == {
        "nvme_read_bytes": sum(found[3] for found in ranks),
        "nvme_written_bytes": sum(found[4] for found in ranks),
    }


# ---- state -----------------------------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_same_and_reshards(tmp_path):
    path, table = tmp_path / "step-2", TABLE.format(str(tmp_path / "disk"))
    going_on = ((path, text, True, 2) for text in (FSDP + table, FSDP, TP + table))
    (whole, _), *again, cut = in_one_world(resumed, 2, (path, FSDP + table, False, 4), *going_on)
    assert all(torch.equal(whole[name], weights[name]) for weights, _ in again for name in whole)
    for weights in cut:
        assert all(torch.allclose(whole[name], weights[name], atol=1e-5) for name in weights)
    (weights,) = run_ranks(resumed, 1, path, table, True, 2)
    assert all(torch.allclose(whole[name], weights[name], atol=1e-5) for name in whole)
    assert list((tmp_path / "disk").iterdir()) == []


def test_state_that_a_checkpoint_does_not_have_is_forgotten(tmp_path):
    def rank():
        text = TABLE.format(str(tmp_path / "disk"))
        run = composed(text, seeded(Even))
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        run.save(tmp_path / "step-0")
        tokens, targets = padded()
        weights = []
        for _ in range(2):
            with run.step(0):
                run.forward_backward(tokens, target=targets)
                optimizer.step()
                optimizer.zero_grad()
            weights.append({name: full(p).clone() for name, p in run.named_parameters()})
            run.load(tmp_path / "step-0")
        run.close()
        return weights

    first, second = run_ranks(rank, 1)[0]
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_is_proven_is_kept_in_memory_and_steps_alike(tmp_path):
    def rank(text, purpose):
        run = composed(text, seeded(Even), purpose=purpose)
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        tokens, targets = padded()
        for number in range(2):
            with run.step(number):
                run.forward_backward(tokens, target=targets)
                optimizer.step()
                optimizer.zero_grad()
        weights = {name: full(p).clone() for name, p in run.named_parameters()}
        run.close()
        return weights

    folder = tmp_path / "never made"
    (plain,), (away,) = in_one_world(rank, 1, ("", "run"), (TABLE.format(str(folder)), "verify"))
    assert all(torch.equal(away[name], weight) for name, weight in plain.items())
    assert not folder.exists()


@pytest.mark.slow  # what it adds to the proof of fsdp2 is above
def test_verify_passes_and_opens_no_file(tmp_path):
    folder = tmp_path / "never made"
    path = write_manifest(FSDP + "[mesh]\ndp_shard = 2\n" + TABLE.format(str(folder)))
    tokens, targets = padded()
    assert_parity(Even, path, Batch(args=(tokens,), target=targets), loss_fn=sum_loss, steps=2)
    assert not folder.exists()


def test_a_killed_run_leaves_no_file(tmp_path):
    def rank():
        run = composed(TABLE.format(str(tmp_path)), seeded(Even))
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        tokens, targets = padded()
        for number in range(2):
            with run.step(number):
                run.forward_backward(tokens, target=targets)
                optimizer.step()
        names = [os.readlink(entry) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        assert any(name.startswith(str(tmp_path)) and name.endswith("(deleted)") for name in names)
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(RankError, match="rank 0 of 1 failed: killed by SIGKILL"):
        run_ranks(rank, 1)
    assert list(tmp_path.iterdir()) == []


READ_ONLY = 1  # of mount(2)

# ---- what disks do ---------------------------------------------------------------------------------------------------


def mounted(kind, folder, options="", flags=0):
    """Mount a file system where only this process, and those it starts, see it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(0x20000) or libc.mount(b"none", b"/", None, 0x44000, None):
        return os.strerror(ctypes.get_errno())
    if libc.mount(b"none", os.fsencode(folder), kind.encode(), flags, options.encode()):
        return os.strerror(ctypes.get_errno())
    return None


def on_mount(kind, folder, options, flags, table):
    """Train on a file system of its own; return the result, or the error, and what was logged."""
    refused = mounted(kind, folder, options, flags)
    if refused:
        return ("skip", refused)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("composer3d_plugins").addHandler(handler)
    try:
        return trained(table), lines
    except ComposerError as error:
        return str(error), lines


def result_of(kind, folder, options="", flags=0):
    found = run_ranks(on_mount, 1, kind, folder, options, flags, TABLE.format(str(folder)))[0]
    if found[0] == "skip":
        pytest.skip(f"this machine does not let tests mount a {kind}: {found[1]}")
    return found


def test_a_file_system_without_direct_requests_is_told_and_used(tmp_path):
    found, lines = result_of("ramfs", tmp_path)
    assert lines == [f"{tmp_path} has no O_DIRECT: optimizer state goes through the page cache, and takes memory there"]
    assert_same(found, run_ranks(trained, 1, "")[0])


def test_a_file_system_without_nameless_files(tmp_path, monkeypatch):
    opened, begun = os.open, []

    def without(path, flags, *args, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:  # what NFS and others say
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        begun.append(flags & os.O_DIRECT)
        return opened(path, flags, *args, **options)

    monkeypatch.setattr(os, "open", without)
    found = run_ranks(trained, 1, TABLE.format(str(tmp_path)))[0]
    assert_same(found, run_ranks(trained, 1, "")[0])
    # The name is gone at once, and the file is direct where one without a name would be.
    file = StateFile(tmp_path, chunk_bytes=BLOCK, num_threads=1)
    assert list(tmp_path.iterdir()) == []
    assert begun and bool(begun[-1]) == file.is_direct
    source, target = (torch.frombuffer(mmap.mmap(-1, BLOCK), dtype=torch.uint8) for _ in range(2))
    source.random_(256)
    file.reserve(BLOCK)
    file.wait(file.write([Range(0, 0, BLOCK)], memoryview(source.numpy())))
    file.wait(file.read([Range(0, 0, BLOCK)], memoryview(target.numpy())))
    assert torch.equal(source, target)
    file.close()


def test_a_full_disk(tmp_path):
    error, _ = result_of("tmpfs", tmp_path, "size=600k")
    assert error.startswith(
        f"{tmp_path} has no room for optimizer state: No space left on device; it holds 0.5 MiB of it, 0.1 MiB more "
        "are needed, 0.0 MiB are free; name another folder in [sharding.nvme_offload]"
    )


def test_a_read_only_file_system(tmp_path):
    error, _ = result_of("tmpfs", tmp_path, flags=READ_ONLY)
    assert error == (
        f"{tmp_path} takes no files: Read-only file system; name another folder in [sharding.nvme_offload]"
    )


def test_a_file_that_may_not_grow(tmp_path):
    def rank():
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, 2**18))
        with pytest.raises(PluginError) as caught:
            trained(TABLE.format(str(tmp_path)))
        return str(caught.value)

    error = run_ranks(rank, 1)[0]
    assert error.startswith(f"{tmp_path} has no room for optimizer state: File too large; it holds 0.2 MiB of it, ")
    assert list(tmp_path.iterdir()) == []


def test_a_short_read(tmp_path):
    def rank():
        run = composed(TABLE.format(str(tmp_path)), seeded(Even))
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        (file,) = (value for value in run.context.state.values() if isinstance(value, StateFile))
        tokens, targets = padded()
        with pytest.raises(PluginError) as caught:
            for number in range(2):
                with run.step(number):
                    run.forward_backward(tokens, target=targets)
                    optimizer.step()
                descriptor = next(
                    int(entry.name)
                    for entry in Path("/proc/self/fd").iterdir()
                    if os.readlink(entry).startswith(str(tmp_path))
                )
                os.truncate(f"/proc/self/fd/{descriptor}", 3 * BLOCK)
        run.close(caught.value)
        return str(caught.value), file.num_bytes

    error, num_bytes = run_ranks(rank, 1)[0]
    assert error == (
        f"optimizer state in {tmp_path} ends at byte {3 * BLOCK} of {num_bytes}: something shortened the file; "
        "go on from the last checkpoint"
    )


def test_requests_are_cut_into_chunks_and_come_back_whole(tmp_path):
    file = StateFile(tmp_path, chunk_bytes=2 * BLOCK, num_threads=3)
    size = 7 * BLOCK
    assert [file.reserve(size - 5), file.reserve(BLOCK)] == [0, size]
    source, target = torch.randint(256, (size,), dtype=torch.uint8), torch.zeros(size + BLOCK, dtype=torch.uint8)
    memory = torch.frombuffer(file.map(), dtype=torch.uint8)
    memory[:size] = source
    aligned = -target.data_ptr() % BLOCK
    view = memoryview(target.numpy())[aligned:]
    if aligned == 0 or not file.is_direct:
        requests = file.read([Range(0, 0, size)], view)
        assert len(requests) == 4
        file.wait(requests)
        assert torch.equal(target[aligned : aligned + size], source)
    file.close()


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text, options):
    run = composed(text)
    with pytest.raises(ComposerError) as caught:
        run.optimizer(torch.optim.AdamW, lr=1e-2, **options)
    run.close(caught.value)
    return str(caught.value)


REFUSED = [
    # Not writable for anyone, root included.
    ("/sys/kernel", {}, "/sys/kernel takes no files: Permission denied; "),
    ("/proc/self/fdinfo", {}, "/proc/self/fdinfo takes no files: "),
    ("/dev/null/states", {}, "/dev/null/states takes no files: Not a directory; "),
    (
        "",
        {"differentiable": True},
        "nvme_offload does not do what differentiable = true asks: its pieces are stepped in place",
    ),
]


def test_refusals():
    lines = (f'folder = "{folder}"\n' if folder else "" for folder, *_ in REFUSED)
    tables = (f"[sharding.nvme_offload]\n{line}" for line in lines)
    cases = ((table, options) for table, (_, options, _) in zip(tables, REFUSED, strict=True))
    for (folder, _, message), (found,) in zip(REFUSED, in_one_world(refusal, 1, *cases), strict=True):
        end = "name another folder in [sharding.nvme_offload]" if folder else ""
        assert found.startswith(message) and found.endswith(end)


def test_values_are_checked():
    def rank():
        found = []
        for option in ("depth = 0", "chunk_mib = 0.003"):
            with pytest.raises(ComposerError) as caught:
                composed(f"[sharding.nvme_offload]\n{option}\n")
            found.append(str(caught.value).partition("run.toml")[2])
        return found

    assert run_ranks(rank, 1)[0] == [
        ":3:1: [sharding.nvme_offload] sharding.nvme_offload.depth must be at least 1, not 0",
        ":3:1: [sharding.nvme_offload] sharding.nvme_offload.chunk_mib must be at least 0.00390625, not 0.003",
    ]
