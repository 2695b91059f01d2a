"""Forwards that run graphs of themselves: what has no form, and runs as it is, is named once for all blocks."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from composer3d.propagation.captured_forward import MOST_FORMS, Graphs, captured_forward, repeatable
from composer3d.propagation.shards import Marks, Placed


class Converted(torch.Tensor):
    """Weights of another class, as a plugin makes them."""


def captured(module, compiled):
    graphs = Graphs(
        lambda graph: compiled.append(graph) or graph.forward, recomputes=True, axis="cp", around=lambda: None
    )
    return captured_forward(module, module.forward, graphs, fqn="layers.0", alone=contextlib.nullcontext)


def hook(module, args):
    return None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda module: None, ""),
        (lambda module: module[0].register_forward_pre_hook(repeatable(lambda module, args: None)), ""),
        (lambda module: module[0].register_forward_pre_hook(hook), "a Linear in it has a hook"),
        (
            lambda module: setattr(module[0], "bias", nn.Parameter(module[0].bias.as_subclass(Converted))),
            "bias is a Converted",
        ),
    ],
    ids=["plain", "repeatable hook", "hook", "converted"],
)
def test_what_a_graph_does_not_hold_runs_as_it_is_and_is_named_once(caplog, change, why):
    module, compiled = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), []
    change(module)
    forward = captured(module, compiled)
    x = torch.randn(2, 3)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(forward(x), nn.Sequential.forward(module, x), rtol=0.0, atol=0.0)
    said = f'compile: "layers.0" runs as it is, and so do others like it, since {why}'
    assert caplog.messages == ([said] if why else [])
    assert bool(compiled) is not bool(why)


def test_tensors_that_another_axis_shards_are_not_captured(caplog):
    module, compiled = nn.Tanh(), []
    x = Marks(2).mark(torch.randn(2, 3), Placed(dim=1, parts=(6,)))
    captured(module, compiled)(x)
    assert not compiled and "sharded over another axis too" in caplog.text


class Negated(TorchFunctionMode):
    """Negates exponentials."""

    is_traced = True

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return -result if getattr(func, "__name__", "") == "exp" else result


class Exponential(nn.Module):
    def forward(self, x):
        return x.exp()


def test_a_graph_holds_what_modes_do_through_which_compiled_code_goes():
    module, compiled = Exponential(), []
    forward = captured(module, compiled)
    x = torch.randn(2, 3)
    for _ in range(2):
        with Negated():
            negated = forward(x)
        assert torch.equal(negated, -x.exp())
        assert torch.equal(forward(x), x.exp())
    assert len(compiled) == 2


class Counted(nn.Module):
    number = 0

    def forward(self, x):
        return x + self.number


def test_a_module_whose_numbers_change_all_the_time_runs_as_it_is_in_the_end(caplog):
    module, compiled = Counted(), []
    forward = captured(module, compiled)
    with caplog.at_level(logging.WARNING):
        for module.number in range(2 * MOST_FORMS):
            assert torch.equal(forward(torch.zeros(2)), torch.full((2,), float(module.number)))
    assert len(compiled) == MOST_FORMS
    (said,) = caplog.messages
    assert said.endswith("it has had 16 forms before: sizes, or numbers that its code reads, change all the time")


LOG = logging.getLogger("a.model")


class Logging(nn.Module):
    def forward(self, x):
        LOG.debug("called")
        return x + 1


def test_what_a_logger_keeps_is_no_setting():
    module, compiled = Logging(), []
    forward = captured(module, compiled)
    for level in (logging.INFO, logging.ERROR):
        LOG.setLevel(level)
        forward(torch.zeros(2))
    assert len(compiled) == 1
