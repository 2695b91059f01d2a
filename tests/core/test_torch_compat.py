from __future__ import annotations

import importlib
import pickle
import signal

import torch
import torch.distributed as dist

from composer3d import torch_compat
from composer3d.checkpoint import save
from composer3d.testing import fake_world


def test_lazy_modules_exist():
    for name in torch_compat.lazy_modules():
        assert importlib.import_module(name).__name__ == name


def test_fake_store_registers_the_backend():
    dist.init_process_group("fake", rank=2, world_size=5, store=torch_compat.fake_store())
    try:
        assert (dist.get_rank(), dist.get_world_size()) == (2, 5)
    finally:
        dist.destroy_process_group()


def test_dispatch_mode_hands_over_every_operator():
    seen = []

    def handle(operator, types, args, kwargs):
        seen.append((str(operator), types))
        return operator(*args, **kwargs)

    leaf = torch.ones(2, requires_grad=True)
    with torch_compat.dispatch_mode(handle):
        result = (leaf * 2).sum()
        result.backward()
    assert result.item() == 4.0
    assert [name for name, _ in seen[:2]] == ["aten.mul.Tensor", "aten.sum.default"]
    assert "aten.expand.default" in [name for name, _ in seen]


def test_wrapper_subclasses_are_told_from_plain_tensors():
    from torch.distributed.tensor import DTensor

    assert torch_compat.is_wrapper_subclass(DTensor)
    assert not torch_compat.is_wrapper_subclass(torch.Tensor)
    assert not torch_compat.is_wrapper_subclass(torch.nn.Parameter)


def test_process_group_from_a_name_a_box_and_itself():
    boxes = []

    def handle(operator, types, args, kwargs):
        boxes.extend(arg for arg in args if isinstance(arg, torch.ScriptObject))
        return operator(*args, **kwargs)

    with fake_world(4, 2):
        group = dist.new_group([2, 3])
        with torch_compat.dispatch_mode(handle):
            dist.barrier(group)
        for argument in (group, group.group_name, boxes[0]):
            assert dist.get_process_group_ranks(torch_compat.process_group(argument)) == [2, 3]


def test_checkpoint_metadata_consists_of_the_named_classes(tmp_path):
    named = set()

    class Recorder(pickle.Unpickler):
        def find_class(self, module, name):
            named.add((module, name))
            return super().find_class(module, name)

    save(tmp_path / "step-1", tensors={"w": torch.zeros(2)}, state={})
    with (tmp_path / "step-1" / ".metadata").open("rb") as file:
        Recorder(file).load()
    assert named - torch_compat.CHECKPOINT_METADATA_GLOBALS == {
        ("torch", "float32"),
        ("torch.serialization", "_get_layout"),
    }
    for module, name in torch_compat.CHECKPOINT_METADATA_GLOBALS:
        assert isinstance(getattr(importlib.import_module(module), name), type)


def four():
    return 4


def test_the_local_agent_shows_its_ranks_and_is_looked_at():
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    pids, looks = {}, []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    handler = get_rendezvous_handler(RendezvousParameters("c10d", "localhost:0", "here", 1, 1, "localhost"))
    spec = WorkerSpec("rank", 1, handler, entrypoint=four, max_restarts=0, monitor_interval=0.01)
    agent = torch_compat.local_agent(
        spec, "fork", started=pids.update, look=lambda: looks.append(1), failed=lambda codes: None
    )
    try:
        assert agent.run().return_values == {0: 4}
    finally:
        handler.shutdown()
        for number, previous in before.items():
            signal.signal(number, previous)
    assert list(pids) == [0] and looks
