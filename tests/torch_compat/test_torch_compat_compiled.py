from __future__ import annotations

import torch
from torch import nn

from composer3d.torch_compat.compilers.compiling import is_compiled, leave_uncompiled


class Named(nn.Module):
    """Answers any name."""

    def __getattr__(self, name):
        return super().__getattr__(name) if name.startswith("__") or name in ("_modules", "_parameters") else 1


def test_what_is_compiled_is_told_from_what_is_not():
    module = nn.Linear(2, 2)
    assert is_compiled(torch.compile(torch.nn.functional.relu, backend="eager"))
    assert is_compiled(torch.compile(module.forward, backend="eager"))
    assert not any(map(is_compiled, (torch.relu, module, module.forward, torch.nn.functional.relu, Named, 1)))
    module.compile(backend="eager")
    assert is_compiled(module)


def test_modules_that_are_compiled_in_place_are_left_uncompiled():
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    assert not leave_uncompiled(model)
    model[0].compile(backend="eager")
    assert leave_uncompiled(model)
    assert not is_compiled(model[0])
    assert model(torch.ones(1, 2)).shape == (1, 2)
