"""Private names of torch about units of FSDP2 of which a rank has all."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import linear

from composer3d import torch_compat
from composer3d.testing import run_ranks
from composer3d.torch_compat.fsdp_units.one_rank import OneRankGroup


class Pair(nn.Module):
    """Two weights whose gradients are one tensor of autograd's, and one of its own."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.other = (nn.Parameter(torch.randn(3, 4, dtype=torch.float64)) for _ in range(2))
        self.own = nn.Linear(4, 3, bias=False, dtype=torch.float64)
        self.read: list[int] = []

    def forward(self, x):
        self.read = [p.data_ptr() for p in (self.one, self.other, self.own.weight)]
        return (linear(self.own(x), (self.one + self.other).T).sin()).sum()


def unit(**policy):
    model = fully_shard(Pair(), mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(**policy))
    torch_compat.watch_units(model)
    (group,) = [found for found, _, _ in torch_compat.fsdp_groups(model)]
    assert isinstance(group, OneRankGroup)
    return model, group


def shards(model):
    return [p._local_tensor for p in model.parameters()]


def stepped():
    """Take two steps of two micro-batches, with shards that are given other memory between them."""
    model, reference = unit()[0], Pair()
    for step in range(2):
        for index in range(2):
            x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * step + index))
            model(x).backward()
            reference(x).backward()
            assert model.read == [shard.data_ptr() for shard in shards(model)]  # nothing was copied
        gradients = [p.grad._local_tensor for p in model.parameters()]
        assert len({grad.data_ptr() for grad in gradients}) == 3  # of a tensor that two had each has its own
        for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(parameter.grad._local_tensor, other.grad)
            parameter.grad.mul_(0.5)  # as clipping does; of shared memory it would be done twice
            other.grad.mul_(0.5)
            with torch.no_grad():
                parameter.sub_(parameter.grad)
                other.sub_(other.grad)
            parameter.grad = other.grad = None
            assert torch.equal(parameter._local_tensor, other)
        record = torch_compat.unit_shards(model)[id(model.one)]
        value = model.one.detach().clone()
        torch_compat.take_local(model.one, value, record)
        assert model.one._local_tensor.data_ptr() == value._local_tensor.data_ptr()
    return True


def rounded():
    """Return dtypes of what a forward reads and of gradients, where weights are cast."""
    model, group = unit(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    reference = Pair().to(torch.bfloat16)
    x = torch.randn(5, 4, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    model(x).backward()
    reference(x).backward()
    assert not set(model.read) & {shard.data_ptr() for shard in shards(model)}
    for parameter, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad._local_tensor, other.grad.to(torch.float64))
    # Freed after the backward, as ever.
    return [record._unsharded_param.untyped_storage().nbytes() for record in group.fsdp_params]


def moved():
    """Return whether a shard that is a part of larger memory is copied, and shared once it is not any more."""
    model = unit()[0]
    record = torch_compat.unit_shards(model)[id(model.one)].record
    x, found = torch.randn(5, 4, dtype=torch.float64), []
    whole = torch.randn(2, 3, 4, dtype=torch.float64)
    for memory in (None, whole[1], torch.randn(3, 4, dtype=torch.float64)):
        if memory is not None:
            record.sharded_param._local_tensor, record._sharded_param_data = memory, memory.view(-1)
        loss = model(x)
        loss.backward()
        found.append(model.read[0] == model.one._local_tensor.data_ptr())
        assert torch.equal(loss, plain(model, x))
    return found


def plain(model, x):
    one, other, own = shards(model)
    return linear(linear(x, own), (one + other).T).sin().sum()


def test_what_a_rank_has_all_of_is_read_and_reduced_where_it_lies():
    assert run_ranks(stepped, 1) == [True]


def test_what_has_to_be_copied_is():
    assert run_ranks(rounded, 1) == [[0, 0, 0]]
    assert run_ranks(moved, 1) == [[True, False, True]]
