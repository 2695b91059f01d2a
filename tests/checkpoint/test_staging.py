from __future__ import annotations

import threading

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import composer3d
from composer3d.checkpoint import AsyncSaver, Staging, contents, latest, read_tensor, read_tensors, staging
from composer3d.errors import CheckpointError
from composer3d.testing import run_ranks


@pytest.fixture
def gate(monkeypatch):
    """Return an event that copies in threads wait for."""
    opened, copy = threading.Event(), staging._copy

    def gated(pairs, *, after=None):
        if after is not None:
            assert opened.wait(60)
        copy(pairs, after=after)

    monkeypatch.setattr(staging, "_copy", gated)
    return opened


def test_what_is_not_steady_has_the_values_of_the_call():
    weight, copies = torch.zeros(3), Staging()
    for step in range(3):
        taken = copies.take({"weight": weight})
        weight.data += 1
        copies.wait()
        assert taken["weight"].tolist() == [step] * 3


def test_steady_tensors_are_copied_after_the_call_from_the_second_one_on(gate):
    weight, other, copies = torch.zeros(3), torch.zeros(3), Staging()
    taken = copies.take({"weight": weight, "other": other}, steady={"weight"})
    copies.wait()  # the first copy waits for no thread
    assert taken["weight"].tolist() == [0, 0, 0]
    copies.settle()
    weight += 1
    taken = copies.take({"weight": weight, "other": other}, steady={"weight"})
    other += 1  # is none of them
    assert taken["weight"].tolist() == [0, 0, 0]
    gate.set()
    copies.settle()
    weight += 1
    copies.wait()
    assert (taken["weight"].tolist(), taken["other"].tolist()) == ([1, 1, 1], [0, 0, 0])


def test_tensors_that_are_not_steady_after_all_are_copied_in_the_call(gate):
    weight, copies = torch.zeros(3), Staging()
    for step in range(3):
        taken = copies.take({"weight": weight}, steady={"weight"})
        weight.data += 1  # as in a forward, uncounted by torch
        copies.settle()
        copies.wait()
        assert taken["weight"].tolist() == [step] * 3


def test_a_later_write_before_the_optimizer_s_is_an_error(gate):
    weight, copies = torch.zeros(3), Staging()
    copies.take({"weight": weight}, steady={"weight"})
    copies.settle()
    copies.take({"weight": weight}, steady={"weight"})
    weight += 1
    gate.set()
    with pytest.raises(CheckpointError) as caught:
        copies.wait()
    assert str(caught.value) == (
        '"weight" was written to between the save and the optimizer\'s step; write checkpoint.asynchronous = false'
    )
    copies.settle()
    taken = copies.take({"weight": weight}, steady={"weight"})
    weight += 1  # from now on it is copied in the call
    copies.wait()
    assert taken["weight"].tolist() == [1, 1, 1]


def test_memory_of_the_copies_is_used_again():
    weight, copies = torch.zeros(5), Staging()
    first = copies.take({"weight": weight})["weight"].data_ptr()
    assert copies.take({"weight": weight + 1})["weight"].data_ptr() == first
    grown = copies.take({"weight": torch.ones(6), "moment": torch.ones(2)})
    assert [each.tolist() for each in grown.values()] == [[1] * 6, [1] * 2]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(3.0).view(3, 1).expand(3, 5),
        torch.arange(6.0).view(3, 2).to(torch.complex64).conj(),
        torch.tensor(7, dtype=torch.int16),
        torch.tensor(float("nan")),
        torch.empty(0, 3),
        torch.arange(5).to(torch.float8_e4m3fn),
        torch.tensor([True, False, True]),
    ],
    ids=["gaps", "transposed", "expanded", "conjugated", "scalar", "nan", "empty", "float8", "bool"],
)
def test_tensors_of_every_form(tensor, gate):
    copies = Staging()
    gate.set()
    for _ in range(3):
        taken = copies.take({"odd": tensor}, steady={"odd"})["odd"]
        copies.settle()
        assert (taken.shape, taken.dtype) == (tensor.shape, tensor.dtype)
        assert torch.equal(torch.view_as_real(taken.to(torch.complex64)).nan_to_num(9), expected(tensor))
    assert copies._defers


def expected(tensor):
    return torch.view_as_real(tensor.to(torch.complex64).resolve_conj()).nan_to_num(9)


def placed(folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    source = torch.arange(14.0).view(7, 2)  # of an uneven number of rows
    tensors = {name: distribute_tensor(source, mesh, [to]) for name, to in (("rows", Shard(0)), ("whole", Replicate()))}
    copies, of_saver = Staging(), Staging()
    saver = AsyncSaver(of_saver)
    for step in range(3):
        taken = copies.take(tensors, steady=set(tensors))
        copies.settle()
        for key, tensor in tensors.items():
            copy = taken[key]
            assert isinstance(copy, DTensor)
            assert (copy.shape, copy.placements, copy.stride()) == (tensor.shape, tensor.placements, tensor.stride())
            assert torch.equal(copy.to_local(), tensor.to_local())
        saver.save(folder / f"step-{step}", tensors=tensors, state={}, steady=set(tensors))
        of_saver.settle()
        for tensor in tensors.values():
            tensor.to_local().add_(1)
    saver.close()


def test_shards_keep_their_placements(tmp_path):
    run_ranks(placed, 2, tmp_path)
    for step in range(3):
        for key in ("rows", "whole"):
            assert torch.equal(read_tensor(tmp_path / f"step-{step}", key), torch.arange(14.0).view(7, 2) + step)


class Renormalised(nn.Module):
    """An embedding whose forward writes to its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4, max_norm=0.5)
        self.head = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens):
        self.calls += 1
        return self.head(self.embedding(tokens))


def write(path, tables=""):
    path.write_text(f"composer3d = 1\n{tables}")
    return path


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("factory", [Renormalised, lambda: nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3))])
def test_a_deferred_save_is_of_the_moment_of_its_call(tmp_path, factory, in_backward):
    manifest = write(tmp_path / "run.toml")
    loss = nn.functional.cross_entropy
    with composer3d.compose(factory(), manifest, loss_fn=loss, device="cpu") as run:
        optimizer, saved = run.optimizer(torch.optim.AdamW, lr=0.1, in_backward=in_backward), []
        for step in range(4):
            with run.step(step):
                run.forward_backward(torch.tensor([0, 1, 2, 3]), target=torch.tensor([0, 1, 2, 0]))
                optimizer.step()
                optimizer.zero_grad()
            saved.append(run._persistence.snapshot(optimizer)[0])
            run.save(tmp_path / f"step-{step}", asynchronous=True, deferred=True)
    for step, tensors in enumerate(saved):
        held = dict(read_tensors(tmp_path / f"step-{step}", list(contents(tmp_path / f"step-{step}"))))
        assert held.keys() == tensors.keys()
        assert all(torch.equal(held[key], tensors[key]) for key in held)


def late(folder):
    """Save with copies that are only made once the optimizer's step waits for them."""
    opened, copy = threading.Event(), staging._copy
    staging._copy = lambda pairs, *, after=None: (after is None or opened.wait(60), copy(pairs, after=after))
    tables = "[sharding.fsdp2]\n[mesh]\ndp_shard = 2\n"
    manifest = write(folder / f"run-{dist.get_rank()}.toml", tables)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    with composer3d.compose(model, manifest, loss_fn=nn.functional.mse_loss, device="cpu") as run:
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        expected = []
        for step in range(4):
            with run.step(step):
                run.forward_backward(torch.ones(2, 4), target=torch.ones(2, 3))
                threading.Timer(0.05, opened.set).start()
                optimizer.step()
                optimizer.zero_grad()
            opened.clear()
            expected.append(run.full_state_dict())
            run.save(folder / f"step-{step}", asynchronous=True, deferred=True)
        opened.set()
    return expected


def test_the_optimizer_waits_for_what_is_not_copied_yet(tmp_path):
    expected = run_ranks(late, 2, tmp_path)[0]
    assert latest(tmp_path) == tmp_path / "step-3"
    for step, tensors in enumerate(expected):
        for name, tensor in tensors.items():
            assert torch.equal(read_tensor(tmp_path / f"step-{step}", f"model/{name}"), tensor)


@pytest.mark.gpu
def test_states_on_a_gpu_are_copied_into_pinned_memory():
    weight, copies = torch.zeros(1 << 20, device="cuda"), Staging()
    for step in range(3):
        taken = copies.take({"weight": weight}, steady={"weight"})["weight"]
        copies.settle()
        weight += 1
        copies.wait()
        assert taken.is_pinned() and bool((taken == step).all())
