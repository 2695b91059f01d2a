"""What is measured is what is traced: names, bytes and shapes of the reference operators."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest
import torch

from composer3d import torch_compat
from composer3d.planning.hardware.cluster import BROADCAST, SHORT_ROW
from composer3d.planning.hardware.cpu_operators import REFERENCES, bytes_of, calls_of, time_references
from composer3d.planning.hardware.kernels import attention_flops, gemm_shapes
from composer3d.planning.hardware.timed_calls import seconds_of
from composer3d.planning.tracing.calls import calls_of as recorded_calls_of


@pytest.mark.parametrize("reference", REFERENCES, ids=lambda reference: reference.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reference_is_traced_by_its_name_with_its_bytes(reference, dtype):
    seen = []

    def handle(operator, types, args, kwargs):
        result = operator(*args, **kwargs)
        if not torch_compat.is_view(operator):
            name = ".".join(operator.name().replace("::", ".").split(".")[:2])
            seen.append(recorded_calls_of(name, operator, args, kwargs, result))
        return result

    call, moved = calls_of(reference, 4096, dtype)
    with torch_compat.dispatch_mode(handle, compiles=False):
        call()
    ((name, _, _, flops, counted),) = seen
    assert (name, flops) == (reference.name.removesuffix(".rows"), 0)
    assert counted == moved


def test_rows_that_share_a_factor_are_timed_as_a_rotation_has_them():
    """One of each pair: memory is not read in one piece, in the copies neither."""
    (reference,) = [each for each in REFERENCES if each.name == BROADCAST]
    taken = []
    call, moved = calls_of(replace(reference, call=lambda a, b: taken.append((a, b)) or a * b), 2**12, torch.float32)
    taken.clear()
    call()
    call()
    for values, factors in taken:
        assert (values.shape, values.stride(-1)) == ((32, 8, SHORT_ROW), 2)
        assert factors.shape == (32, 1, SHORT_ROW)
    assert torch.equal(taken[0][0], taken[1][0])
    assert moved == 4 * (2 * 32 * 8 * SHORT_ROW + 32 * SHORT_ROW)


def test_the_time_of_a_call_on_a_cpu_is_the_threads_own():
    """What another thread computes while this one waits for it is not in it; so it is with other processes."""
    others = []

    def compute():
        begin = time.thread_time()
        sum(range(10**6))
        others.append(time.thread_time() - begin)

    def wait():
        thread = threading.Thread(target=compute)
        thread.start()
        thread.join()

    assert torch.get_num_threads() == 1
    assert seconds_of(torch.device("cpu"), wait, 0.0) < min(others) / 2


def test_every_call_takes_other_tensors():
    taken = []
    (reference,) = [each for each in REFERENCES if each.name == "aten.mul"]
    watched = replace(reference, call=lambda a, b: taken.append((a.data_ptr(), b.data_ptr())) or a * b)
    call, moved = calls_of(watched, 4096, torch.float32)
    assert moved == 3 * 4096 * 4
    taken.clear()
    results = [call() for _ in range(65)]
    assert len(set(taken)) == 64
    assert taken[64] == taken[0]
    assert all(torch.equal(results[0], result) for result in results)
    assert bytes_of([torch.zeros(2, 3), (torch.zeros(4, dtype=torch.bfloat16), 5)]) == 24 + 8


def test_every_reference_is_timed_at_every_size():
    rows = list(time_references([torch.float32], 0.0))
    assert len(rows) == 4 * len(REFERENCES)
    assert all(seconds > 0 for *_, seconds in rows)
    sizes = [moved for name, _, moved, _ in rows if name == "aten.silu"]
    assert sizes == [2 * 4 * 2**power for power in (14, 17, 19, 21)]


def test_a_budget_buys_the_smaller_products_first():
    few, many = gemm_shapes(True, 0.001), gemm_shapes(True, 100.0)
    assert many[: len(few)] == few
    assert len(few) == 3 < len(many) == 27


def test_a_causal_attention_executes_half_of_the_square():
    # Two products of 16 x 16 scores with width 8, of each of 6 heads: 2 x 2 x 16 x 16 x 8 operations, and half of them.
    assert attention_flops((2, 3, 16, 8)) == 6 * 2 * 2 * 16 * 16 * 8 / 2
