"""What torch keeps from its compiler is called without it, and as before afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.utils.checkpoint import checkpoint

from composer3d.torch_compat.compilers import nothing_compiles

# Its import cannot be undone, so that it is looked at in a process of its own.
SCRIPT = """
import sys
import torch
from torch.utils.checkpoint import checkpoint
from composer3d import torch_compat
from composer3d.torch_compat.compilers import nothing_compiles

weight = torch.nn.Parameter(torch.ones(4))
with nothing_compiles():
    torch.optim.AdamW([weight]).add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    torch.nn.functional.rms_norm(torch.empty(2, 4, device="meta"), (4,), torch.empty(4, device="meta"))
with torch_compat.dispatch_mode(lambda operator, types, args, kwargs: operator(*args, **kwargs), compiles=False):
    torch.nn.functional.rms_norm(torch.empty(2, 4, device="meta"), (4,), torch.empty(4, device="meta"))
print("torch._dynamo" in sys.modules)
checkpoint(torch.square, weight, use_reentrant=False).sum().backward()
print("torch._dynamo" in sys.modules, weight.grad.tolist())
"""


def test_dynamo_is_not_imported_inside():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == ["False", "True [2.0, 2.0, 2.0, 2.0]"]


def test_functions_and_hooks_are_as_before_behind_it():
    function = checkpoint.__wrapped__
    before = vars(function).get("__dynamo_disable")
    hook = vars(_fsdp_state.FSDPState)["_pre_forward"]
    with pytest.raises(ZeroDivisionError), nothing_compiles(), nothing_compiles():
        assert vars(function)["__dynamo_disable"] is function
        assert vars(_fsdp_state.FSDPState)["_pre_forward"] is hook.__wrapped__
        raise ZeroDivisionError
    assert vars(function).get("__dynamo_disable") is before
    assert vars(_fsdp_state.FSDPState)["_pre_forward"] is hook
