from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from composer3d import torch_compat
from composer3d.testing import fake_world, run_ranks


class Keeping(torch.nn.Module):
    def inside(self, x):
        self.kept = x * 2.0
        return self.kept.sin()

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)


def test_the_compiler_traces_unflatten_through_a_mode():
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return torch_compat.traceable(func)(*args, **(kwargs or {}))

    x = torch.arange(12.0).view(2, 6)
    compiled = torch.compile(lambda x: x.unflatten(-1, (-1, 2)).unbind(-1), backend="eager", fullgraph=True)
    with Mode():
        assert all(map(torch.equal, compiled(x), x.unflatten(-1, (-1, 2)).unbind(-1)))


def test_what_is_uncompiled_is_called_while_its_caller_is_compiled():
    seen = []

    def caller(x, hook):
        hook(x)
        return x + 1

    hooks = [torch_compat.uncompiled(lambda x: seen.append(torch.compiler.is_compiling())) for _ in range(2)]
    compiled = torch.compile(caller, backend="eager")
    for hook in (*hooks, hooks[0]):
        assert torch.equal(compiled(torch.ones(2), hook), torch.full((2,), 2.0))
    assert seen == [False] * 3
    assert hooks[0].__code__ is not hooks[1].__code__


def test_a_compiled_checkpoint_may_write_to_objects_of_its_own_module_only():
    x = torch.ones(3, requires_grad=True)
    alone, allowed = Keeping(), Keeping()
    alone.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="side effect"):
        alone(x)
    torch_compat.compile_module(allowed, backend="aot_eager", fullgraph=True)
    allowed(x).sum().backward()
    assert torch.equal(allowed.kept, x * 2.0) and torch.allclose(x.grad, 2.0 * (2.0 * x).cos())
    assert not torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint


class Attending(torch.nn.Module):
    """Attention counts as drawing; the weight is a DTensor, whose mesh the backward needs."""

    def __init__(self, weight):
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def attended(self, x):
        projected = (x @ self.weight).to_local()
        return torch.nn.functional.scaled_dot_product_attention(projected, projected, projected)

    def forward(self, x):
        return checkpoint(self.attended, x, use_reentrant=False)


def test_compiled_checkpoints_attend_beside_dtensors():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    torch.manual_seed(0)
    values, weight = torch.randn(1, 2, 4, 8), torch.randn(8, 8)
    gradients = []
    with fake_world(2):
        mesh = init_device_mesh("cpu", (2,))
        for compiles in (False, True):
            module = Attending(distribute_tensor(weight, mesh, src_data_rank=None))
            if compiles:
                torch_compat.compile_module(module, backend="aot_eager", fullgraph=True)
            module(distribute_tensor(values, mesh, src_data_rank=None)).sum().backward()
            gradients.append(module.weight.grad.to_local())
    assert torch.equal(*gradients)


def test_roundings_are_kept_beside_the_settings_of_a_mode():
    given = {}

    def backend(graph, inputs, **options):
        given.update(options)
        return graph

    module = Keeping()
    torch_compat.compile_module(module, backend=backend, mode="reduce-overhead", keep_roundings=True)
    module(torch.ones(1, 2))
    assert given["options"] == {"triton.cudagraphs": True, "emulate_precision_casts": True}


def test_what_profilers_warn_of_is_hidden(recwarn):
    torch_compat.hide_profiler_warnings()
    for _ in range(2):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
            torch.ones(1)
    assert [str(each.message) for each in recwarn if "Profiler" in str(each.message)] == []


def test_quantisers_of_tokens_can_be_compiled():
    from torch.ao.quantization.fx._decomposed import _per_token_quant_qparam_dim_check

    assert _per_token_quant_qparam_dim_check.__name__ == "_per_token_quant_qparam_dim_check"
    torch_compat.trace_quantisers()

    @torch.compile(backend="eager", fullgraph=True)
    def checked(tokens, scales):
        from torch.ao.quantization.fx import _decomposed

        _decomposed._per_token_quant_qparam_dim_check(tokens, scales, scales)
        return tokens * scales

    assert checked(torch.ones(2, 3), torch.full((2, 1), 2.0)).sum() == 12.0


def slope():
    x = torch.tensor(3.0, requires_grad=True)
    (x * x).backward()
    return x.grad.item()


def test_ranks_run_backwards_after_fake_tensors_of_their_parent():
    torch_compat.start_autograd()
    with torch_compat.fake_tensors():
        torch.ones(1)
    assert run_ranks(slope, 1) == [6.0]


def test_a_function_returns_what_state_dict_returns():
    module = torch.nn.Linear(2, 2)
    torch_compat.on_state_dict(module, lambda owner, state, prefix, _: {**state, "more": prefix})
    assert module.state_dict().keys() == {"weight", "bias", "more"}


def test_a_context_is_around_the_hooks_of_a_module_too():
    entered = []

    @contextlib.contextmanager
    def surround():
        try:
            yield
        except ValueError as error:
            raise LookupError(str(error)) from error
        finally:
            entered.append(True)

    def fail(owner, args):
        raise ValueError("in a hook")

    module = torch.nn.Linear(2, 2)
    torch_compat.call_within(module, surround)
    module(torch.ones(2))
    handle = module.register_forward_pre_hook(fail)
    with pytest.raises(LookupError, match="in a hook"):
        module(torch.ones(2))
    handle.remove()
    assert len(entered) == 2
    copy.deepcopy(module)(torch.ones(2))
    assert len(entered) == 2  # a copy is a module of its own


def test_a_subclass_may_look_at_operators_only():
    class Seen(torch.Tensor):
        __torch_function__ = torch_compat.no_torch_function()
        operators: list[str] = []

        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            cls.operators.append(func.name())
            return func(*(arg.plain if isinstance(arg, Seen) else arg for arg in args))

    plain = torch.arange(3.0)
    tensor = plain.as_subclass(Seen)
    tensor.plain = plain
    result = tensor * 2
    assert Seen.operators == ["aten::mul.Tensor"]
    assert type(result) is torch.Tensor and result.tolist() == [0.0, 2.0, 4.0]


def test_a_mode_hands_functions_over_and_sees_recomputations():
    seen = []

    def note(func, args, kwargs):
        seen.append(func.__name__)
        return func(*args, **kwargs)

    x = torch.ones(2, requires_grad=True)
    with torch_compat.function_mode(note):
        torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum().backward()
    assert seen.count("sin") == 2


def test_a_backward_inside_of_a_mode_runs_with_it():
    x = torch.ones(2, requires_grad=True)
    mode = torch_compat.function_mode(lambda func, args, kwargs: func(*args, **kwargs))
    torch_compat.backward_inside(mode, (x.sum(), torch.tensor(2.0)), {})
    assert x.grad.tolist() == [2.0, 2.0]


def test_checkpoints_are_seen_and_run():
    seen, inner = [], []
    layer, x = torch.nn.Linear(2, 2), torch.ones(1, 2, requires_grad=True)
    with torch_compat.watched_checkpoints(lambda: seen.append("reentrant")) as at_work:

        def noted(value):
            inner.append(list(at_work))
            return layer(value)

        checkpoint(lambda value: checkpoint(noted, value, use_reentrant=False), x, use_reentrant=False)
        checkpoint(noted, x, use_reentrant=False)
        checkpoint(layer, x, use_reentrant=True).sum().backward()
        assert list(at_work) == []
    checkpoint(noted, x, use_reentrant=True)
    assert (seen, inner) == (["reentrant"], [[1, 2], [3], []])
    assert torch.equal(x.grad, layer.weight.sum(0, keepdim=True))


def test_the_autograd_function_whose_forward_is_at_work_is_known():
    seen = []

    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            seen.append(torch_compat.function_transforms.calling_function())
            return x * 2

    bound = Calling.apply
    assert torch.equal(bound(torch.ones(1)), torch.full((1,), 2.0))
    assert (*seen, torch_compat.function_transforms.calling_function()) == (Calling, None)


def test_transforms_of_functions_are_left_and_found_again():
    seen = []

    def square(x):
        assert torch_compat.function_transforms.is_transforming()
        with torch_compat.outside_transforms():
            assert not torch_compat.function_transforms.is_transforming()
            seen.append(torch_compat.untransformed(x) * 2)
        return x * x

    x = torch.arange(3.0)
    assert torch.vmap(torch.func.grad(square))(x).tolist() == [0, 2, 4]
    assert seen[0].tolist() == [0, 2, 4] and torch_compat.untransformed(x) is x


def test_a_scaler_asks_an_optimizer_whether_it_scales_itself():
    class Optimizer(torch.optim.SGD):
        pass

    asked = []
    setattr(Optimizer, torch_compat.SCALED_STEP, property(lambda self: asked.append(self) or False))
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler = Optimizer([parameter], lr=0.1), torch.amp.GradScaler("cpu")
    optimizer.step()
    assert asked == []
    scaler.scale(parameter.sum()).backward()
    scaler.step(optimizer)
    assert asked == [optimizer]


def test_a_scaler_unscales_by_the_operator_that_is_named():
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer, scaler, seen = torch.optim.SGD([parameter], lr=0.1), torch.amp.GradScaler("cpu"), []
    scaler.scale(parameter.sum()).backward()

    def note(operator, types, args, kwargs):
        seen.append(operator.name())
        return operator(*args, **kwargs)

    with torch_compat.dispatch_mode(note):
        scaler.unscale_(optimizer)
    assert torch_compat.UNSCALING in seen


@pytest.mark.slow
def test_a_handler_is_no_part_of_what_is_compiled_inside_of_a_function_mode():
    seen = []

    def handler(function, args, kwargs):
        seen.append(getattr(function, "__name__", ""))
        torch._dynamo.graph_break()  # what a handler does cannot be captured
        return function(*args, **kwargs)

    compiled = torch.compile(lambda x: torch.relu(x) * x.detach().abs(), backend="eager", fullgraph=True)
    x = torch.tensor([-1.0, 2.0])
    with torch_compat.function_mode(handler):
        assert compiled(x).tolist() == [0.0, 4.0]
        torch.neg(x)
    assert seen[-1] == "neg"
