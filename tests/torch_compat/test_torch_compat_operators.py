"""Operators made of others: one to the compiler and to checkpoints, seen into by dispatch modes; attention kernels."""

from __future__ import annotations

import itertools

import pytest
import torch

from composer3d import torch_compat
from composer3d.testing import count_collectives, run_ranks


def doubled(x, times):
    return (x * 2) * times


@pytest.fixture(scope="module")
def operator():
    def backward(ctx, grad):
        return grad * 2 * ctx.times, None

    def keep(ctx, inputs, output):
        ctx.times = inputs[1]

    return torch_compat.custom_operator(
        "composer3d_tests::doubled",
        "(Tensor x, int times) -> Tensor",
        doubled,
        kind="attention",
        fake=lambda x, times: torch.empty_like(x),
        backward=backward,
        setup_context=keep,
    )


def test_what_an_operator_is_made_of_is_known_of_these_alone(operator):
    assert torch_compat.operators.operator_python(operator) is doubled
    assert torch_compat.operators.operator_python(torch.ops.aten.mul.Tensor) is None


def names_under(operator, **options):
    seen = []

    def handle(called, types, args, kwargs):
        seen.append(called.name())
        return called(*args, **kwargs)

    leaf = torch.ones(2, requires_grad=True)
    with torch_compat.dispatch_mode(handle, **options):
        result = operator(leaf, 3)
    result.sum().backward()
    assert result.tolist() == [6.0, 6.0]
    assert leaf.grad.tolist() == [6.0, 6.0]
    return seen


def test_a_dispatch_mode_sees_what_an_operator_consists_of(operator):
    assert names_under(operator) == ["aten::mul.Tensor"] * 2


def test_a_dispatch_mode_that_does_not_open_operators_sees_one(operator):
    assert names_under(operator, opens=False) == ["composer3d_tests::doubled"]


def test_modes_inside_each_other_both_see_into_operators(operator):
    outer, inner = [], []

    def handler(seen):
        def handle(called, types, args, kwargs):
            seen.append(called.name())
            return called(*args, **kwargs)

        return handle

    ones = torch.ones(2)
    with torch_compat.dispatch_mode(handler(outer)), torch_compat.dispatch_mode(handler(inner)):
        operator(ones, 3)
    assert outer == inner == ["aten::mul.Tensor"] * 2


def test_fake_tensors_reach_what_an_operator_consists_of(operator):
    with torch_compat.fake_tensors():
        assert names_of_fake(operator) == ["aten::mul.Tensor"] * 2
    assert operator(torch.ones(2, device="meta"), 3).is_meta


def names_of_fake(operator):
    seen = []

    def handle(called, types, args, kwargs):
        seen.append(called.name())
        return called(*args, **kwargs)

    leaf = torch.ones(2)
    with torch_compat.dispatch_mode(handle):
        operator(leaf, 3)
    return seen


def test_operators_are_found_by_kind(operator):
    assert operator in torch_compat.custom_operators("attention")
    assert operator not in torch_compat.custom_operators("collective", "backward")


def summed():
    def function(x, group):
        result = x.clone()
        torch.distributed.all_reduce(result, group=torch_compat.process_group(group))
        return result

    operator = torch_compat.custom_operator(
        "composer3d_tests::summed",
        "(Tensor x, str group) -> Tensor",
        function,
        kind="collective",
        fake=lambda x, group: torch.empty_like(x),
    )
    with count_collectives() as collectives:
        result = operator(torch.ones(3), torch_compat.group_name(None))
    return result.tolist(), collectives.summary()


def test_collectives_inside_of_operators_are_counted():
    assert run_ranks(summed, 2) == [([2.0] * 3, {("all_reduce", "world"): (1, 12)})] * 2


def test_spans_of_operators_are_opened_while_somebody_watches():
    opened = []

    class Span:
        def __enter__(self):
            opened.append("in")

        def __exit__(self, *error):
            opened.append("out")

    def span(name, group, **attributes):
        opened.append((name, group, attributes))
        return Span()

    end = torch_compat.watch_custom_operators(span)
    with torch_compat.operator_span("wait", "ranks", bytes=3):
        pass
    end()
    with torch_compat.operator_span("wait", "ranks", bytes=3):
        pass
    assert opened == [("wait", "ranks", {"bytes": 3}), "in", "out"]


def attention(q, k, v, bias, *, is_causal, scale):
    """Return output and log-sum-exp, written out."""
    repeats = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeats, 1).transpose(-1, -2) * scale
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -1e300)
    scores = scores if bias is None else scores + bias
    return scores.softmax(-1) @ v.repeat_interleave(repeats, 1), scores.logsumexp(-1)


@pytest.mark.parametrize(("kv_heads", "mask"), list(itertools.product([1, 2, 4], ["none", "causal", "bias"])))
def test_flash_attention_of_the_cpu_returns_the_log_sum_exp(kv_heads, mask):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 6, 8, dtype=torch.float64).requires_grad_() for heads in (4, kv_heads, kv_heads))
    bias = torch.randn(2, 1, 6, 6, dtype=torch.float64) if mask == "bias" else None
    expected, expected_lse = attention(q, k, v, bias, is_causal=mask == "causal", scale=0.3)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    options = {"bias": bias, "is_causal": mask == "causal", "scale": 0.3}
    with torch.no_grad():
        o, lse = torch_compat.cpu_flash_attention(q, k, v, **options)
        gradients = torch_compat.cpu_flash_attention_backward(grad, (q, k, v), (o, lse), **options)
    found, wanted = (o, lse, *gradients), (expected, expected_lse, q.grad, k.grad, v.grad)
    assert max(float((x - y).detach().abs().max()) for x, y in zip(found, wanted, strict=True)) <= 1e-14


CUDA_KERNELS = {
    "flash": (torch_compat.cuda_flash_attention, torch_compat.cuda_flash_attention_backward),
    "efficient": (torch_compat.cuda_efficient_attention, torch_compat.cuda_efficient_attention_backward),
}


@pytest.mark.parametrize("kernel", CUDA_KERNELS)
def test_attention_of_cuda_has_the_forms_of_what_it_is_given(kernel):
    forward, backward = CUDA_KERNELS[kernel]
    more = {"bias": None} if kernel == "efficient" else {}
    with torch_compat.fake_tensors(), torch.no_grad():
        q, k, v = (torch.empty(2, 4, length, 16, dtype=torch.float16, device="cuda") for length in (48, 32, 32))
        o, lse = forward(q, k, v, is_causal=False, scale=0.3, **more)
        gradients = backward(torch.empty_like(o), (q, k, v), (o, lse), is_causal=False, scale=0.3, **more)
    assert (*o.shape,) == (2, 4, 48, 16) and (*lse.shape,) == (2, 4, 48)
    assert [x.shape for x in gradients] == [q.shape, k.shape, v.shape]


def test_function_modes_are_listed_from_without_inwards():
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    before = torch_compat.function_modes()
    with Mode() as outer, Mode() as inner:
        assert torch_compat.function_modes() == [*before, outer, inner]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kernel", "mask"), [("flash", "none"), ("flash", "causal"), ("efficient", "causal"), ("efficient", "bias")]
)
def test_attention_of_cuda_returns_the_log_sum_exp(kernel, mask):
    torch.manual_seed(0)
    dtype, tolerance = (torch.float16, 4e-3) if kernel == "flash" else (torch.float32, 1e-5)
    heads = 2 if kernel == "flash" else 4  # of keys; the efficient kernel has no groups
    q, k, v = (
        torch.randn(2, n, 48, 16, device="cuda", dtype=dtype).double().requires_grad_() for n in (4, heads, heads)
    )
    bias = torch.randn(2, 4, 48, 48, device="cuda", dtype=dtype) if mask == "bias" else None
    expected, expected_lse = attention(q, k, v, bias, is_causal=mask == "causal", scale=0.3)
    grad = torch.randn_like(expected).to(dtype)
    expected.backward(grad.double())
    inputs = tuple(x.detach().to(dtype) for x in (q, k, v))
    options = {"is_causal": mask == "causal", "scale": 0.3} | ({"bias": bias} if kernel == "efficient" else {})
    forward, backward = CUDA_KERNELS[kernel]
    o, lse = forward(*inputs, **options)
    gradients = backward(grad, inputs, (o, lse), **options)
    found, wanted = (o, lse, *gradients), (expected, expected_lse, q.grad, k.grad, v.grad)
    for mine, whole in zip(found, wanted, strict=True):
        assert float((mine.double() - whole).detach().abs().max() / whole.abs().max()) <= tolerance


def test_elementwise_operators_are_known_by_torchs_tag():
    assert all(map(torch_compat.is_pointwise, ("add", "gelu", "masked_fill")))
    assert not any(map(torch_compat.is_pointwise, ("cumsum", "flip", "name", "no such operator")))


def called(operator, x):
    """Call an operator by the short way; return its result, and whether its node is the dispatcher's."""
    result = torch_compat.operators.call_operator(operator, x, 3)
    return result, "composer3d_tests" in type(result.grad_fn).__name__


def test_an_operator_that_nothing_looks_at_is_called_without_the_dispatcher(operator):
    leaf = torch.ones(2, requires_grad=True)
    result, is_dispatched = called(operator, leaf)
    result.sum().backward()
    assert not is_dispatched and result.tolist() == leaf.grad.tolist() == [6.0, 6.0]
    with torch.no_grad():
        assert torch_compat.operators.call_operator(operator, leaf, 3).grad_fn is None
    assert not torch_compat.own_function(result.grad_fn).__module__.startswith("tests")


@pytest.mark.parametrize("looks", ["dispatch mode", "function mode", "profiler"])
def test_what_looks_at_operators_sees_one_that_is_called(operator, looks):
    leaf, seen = torch.ones(2, requires_grad=True), []

    def handle(called, *given):
        seen.append(getattr(called, "__name__", "") or called.name())
        return called(*given[-2], **given[-1])

    if looks == "profiler":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            _, is_dispatched = called(operator, leaf)
        seen = [event.key for event in profile.key_averages()]
    else:
        makers = {"dispatch mode": torch_compat.dispatch_mode, "function mode": torch_compat.function_mode}
        with makers[looks](handle, **({"opens": False} if looks == "dispatch mode" else {})):
            _, is_dispatched = called(operator, leaf)
    assert is_dispatched and any("doubled" in name for name in seen), seen


def test_what_python_has_registered_is_told_with_its_files_and_functions():
    library = torch.library.Library("composer3d_registered", "FRAGMENT")
    library.define("plain(Tensor x) -> Tensor")
    library.impl("plain", lambda x: x, "CPU")

    def faked(x):
        return torch.empty_like(x)

    torch.library.register_fake("composer3d_registered::plain", faked, lib=library)
    torch.library.define("composer3d_registered::loose", "(Tensor x) -> Tensor")

    @torch.library.custom_op("composer3d_registered::whole", mutates_args=())
    def whole(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    whole.register_fake(faked)
    found = {each.name: each for each in torch_compat.python_operators()}
    plain, custom = found["composer3d_registered::plain"], found["composer3d_registered::whole"]
    assert (plain.schema, plain.files) == (__file__, {__file__}) and [file for file, _ in plain.functions] == [__file__]
    assert (custom.schema, custom.files) == (__file__, set()) and {__file__} <= {file for file, _ in custom.functions}
    assert len(custom.functions) >= 2
    assert found["composer3d_registered::loose"].schema == ""
    assert not any("" in each.files for name, each in found.items() if name.startswith(("aten::", "prims::")))
