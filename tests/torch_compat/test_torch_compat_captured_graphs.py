"""Graphs that are captured of functions: what they do, and what they would not do."""

from __future__ import annotations

import pytest
import torch
from torch.overrides import TorchFunctionMode

from composer3d import torch_compat
from composer3d.torch_compat.compilers.captured_graphs import outside_capture, traced_function_modes


class Tripled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 3


OUTSIDE = torch.ones(3, requires_grad=True)


def as_it_is(graph, given):
    return graph.forward


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda x: x * OUTSIDE, "a tensor of other modules that needs a gradient"),
        (lambda x: x if bool(x.sum() > 0) else -x, "data-dependent"),
        (lambda x: x[x > 0], "data-dependent"),
    ],
)
def test_what_a_graph_would_not_do_is_refused(function, reason):
    with pytest.raises(torch_compat.CaptureError, match=reason):
        torch_compat.capture_graph(lambda x: [function(x)], as_it_is)(torch.ones(3, requires_grad=True))
    assert not torch_compat.capture_is_on()


def test_an_error_of_what_runs_is_none_of_the_capture():
    def failing(graph, given):
        def run(*tensors):
            raise RuntimeError("no memory")

        return run

    with pytest.raises(RuntimeError, match="no memory"):
        torch_compat.capture_graph(lambda x: [x * 2], failing)(torch.ones(3))


def test_graphs_do_what_the_function_and_its_backward_do_without_what_is_on_meta():
    graphs = []

    def function(x):
        assert torch_compat.capture_is_on()
        with outside_capture():
            whole = torch.nn.functional.dropout(torch.empty(6, 4, device="meta"))
        with torch.no_grad():
            scale = x.exp()
        return [Tripled.apply(x.sin()) * scale * whole.shape[1]]

    def compiled(graph, given):
        graphs.append(graph)
        return torch_compat.compile_graph(graph, backend="aot_eager")

    run = torch_compat.capture_graph(function, compiled)
    for _ in range(2):
        x = torch.linspace(0.0, 1.0, 4, requires_grad=True)
        (result,) = run(x)
        assert not torch_compat.capture_is_on()
        result.sum().backward()
        torch.testing.assert_close(result, 2 * x.sin() * x.exp() * 4)
        torch.testing.assert_close(x.grad, 3 * x.cos() * x.exp() * 4)
    assert len(graphs) == 2 and not any("meta" in graph.code for graph in graphs)


class Mode(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_modes_of_functions_are_left_and_entered_again():
    with Mode() as one, Mode() as other:
        with torch_compat.outside_function_modes():
            assert torch_compat.function_modes() == []
        assert torch_compat.function_modes() == [one, other]


def test_whoever_looks_at_operators_or_forces_the_eager_mode_sees_no_graph():
    assert not torch_compat.is_run_eagerly()
    with torch_compat.dispatch_mode(lambda func, types, args, kwargs: func(*args, **kwargs)):
        assert torch_compat.is_run_eagerly()
    with torch.compiler.set_stance("force_eager"):
        assert torch_compat.is_run_eagerly()
    assert not torch_compat.is_run_eagerly()


class Traced(Mode):
    is_traced = True


def test_modes_through_which_compiled_code_goes_say_so():
    with Mode(), Traced() as traced:
        assert traced_function_modes() == [traced]
        with torch_compat.outside_function_modes(but=traced_function_modes()):
            assert torch_compat.function_modes() == [traced]
