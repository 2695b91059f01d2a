"""Live bytes of storages: what is no memory of a rank is not counted."""

from __future__ import annotations

import torch

from composer3d import torch_compat
from composer3d.planning.tracing.storages import StorageCounter


def test_tensors_on_meta_are_no_memory_of_a_fake_rank_either():
    counter = StorageCounter()
    with torch_compat.fake_tensors():
        held = torch.empty(5), torch.empty(7, device="meta")
        counter.track(held)
    assert counter.live == held[0].nbytes
    counter.track([torch.empty(3, device="meta")])
    assert counter.live == held[0].nbytes
