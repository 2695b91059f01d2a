"""Operators of other packages that fake modes remember."""

from __future__ import annotations

import torch

from composer3d import torch_compat


def copies():
    """Copy into and out of buffers as FSDP2 does; return what is made, and the buffer."""
    from torch.distributed import fsdp  # noqa: F401  (registers them)

    operators, gathered = torch.ops.fsdp, torch.empty(12)
    copied = operators.all_gather_copy_in([torch.ones(2), torch.ones(4)], gathered, [2, 4], 6, 1)
    parts = [torch.empty(2, 2), torch.empty(2, 4)]
    operators.split_with_sizes_copy(gathered.view(2, 6), [2, 4], dim=1, out=parts)
    reduced = torch.empty(2, 6)
    operators.chunk_cat([torch.ones(4), torch.ones(2, 4)], dim=0, num_chunks=2, out=reduced)
    return [*copied, *parts, reduced], gathered


def forms(tensors):
    return [(x.shape, x.stride(), x.storage_offset(), x.dtype, x.device) for x in tensors]


def test_copies_of_fsdp2_are_remembered_with_the_buffer_that_they_are_in():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        expected = forms(copies()[0])
    memory = torch_compat.ResultMemory()
    with torch_compat.fake_tensors(memory) as mode:
        assert forms(copies()[0]) == expected
        num_known, asked, dispatch = len(memory), [], mode.dispatch
        mode.dispatch = lambda operator, *args: asked.append(operator) or dispatch(operator, *args)
        found, gathered = copies()
        assert forms(found) == expected and len(memory) == num_known and not asked
        assert {torch_compat.storage_key(each) for each in found[:2]} == {torch_compat.storage_key(gathered)}
