from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from composer3d import torch_compat
from composer3d.checkpoint import unwrapped
from composer3d.testing import run_ranks


def test_a_wrapper_is_taken_off():
    fsdp_utils = torch_compat.import_torchao("torchao.float8.fsdp_utils")
    plain = torch.arange(6.0).view(2, 3)
    wrapped = fsdp_utils.WeightWithDynamicFloat8CastTensor(plain, None, torch.float8_e4m3fn)
    assert unwrapped(wrapped).data_ptr() == plain.data_ptr()
    assert unwrapped(plain) is plain

    def sharded():
        mesh = init_device_mesh("cpu", (2,))
        taken = unwrapped(DTensor.from_local(wrapped, mesh, [Shard(0)], run_check=False))
        return type(taken).__name__, type(taken.to_local()).__name__, taken.full_tensor()

    for kind, local, value in run_ranks(sharded, 2):
        assert (kind, local) == ("DTensor", "Tensor")
        assert torch.equal(value, torch.cat([plain, plain]))
