"""What torch keeps from its compiler is called without it, and as before afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.utils.checkpoint import checkpoint

from composer3d.torch_compat.compilers import nothing_compiles
from composer3d.torch_compat.compilers.settings_alone import settings_alone

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


FAKES = """
import sys
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from composer3d.torch_compat.compilers import nothing_compiles

weight, given = torch.nn.Parameter(torch.ones(4)), torch.ones(4)
weight.grad = torch.ones(4)
with nothing_compiles():
    with FakeTensorMode(allow_non_fake_inputs=True):
        print(type(torch.empty(4) + given).__name__)
    torch.optim.SGD([weight], lr=0.5).step()
    from torch.distributed.pipelining import schedules
kept = vars(FakeTensorMode.__torch_dispatch__.__wrapped__).get("__dynamo_disable")
print([name for name in sys.modules if name.startswith("torch._dynamo")], vars(torch).get("_dynamo"), kept)
with nothing_compiles():
    from torch._dynamo.eval_frame import OptimizedModule
import torch._dynamo
module = torch._dynamo.eval_frame
print(OptimizedModule is torch._dynamo.OptimizedModule, module is sys.modules["torch._dynamo.eval_frame"])
print(torch._dynamo.config.fake_tensor_cache_enabled, module.__spec__.name, weight.tolist())
compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
print(isinstance(compiled, schedules.OptimizedModule), isinstance(weight, schedules.OptimizedModule))
print(compiled(torch.ones(2)).shape)
"""


def test_fake_tensors_and_optimizers_take_settings_alone_and_what_asks_for_more_gets_dynamo():
    done = subprocess.run([sys.executable, "-c", FAKES], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines() == [
        "FakeTensor",
        "[] None None",
        "True True",
        "True torch._dynamo.eval_frame [0.5, 0.5, 0.5, 0.5]",
        "True False",
        "torch.Size([2])",
    ]


def test_where_dynamo_is_imported_its_settings_do_not_take_its_place():
    import torch._dynamo

    before = sys.modules["torch._dynamo"], list(sys.meta_path), torch._dynamo.config
    with settings_alone():
        assert (sys.modules["torch._dynamo"], list(sys.meta_path), torch._dynamo.config) == before


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
