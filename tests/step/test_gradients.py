from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from support.models import composed, gradient_error, mine, padded, reference_gradients, seeded
from torch import nn

from composer3d import StepError, mesh
from composer3d.mesh import AXES, resolve
from composer3d.step.clipping import clip_norm_, scale_, total_norm
from composer3d.step.gradients import settle_partial
from composer3d.testing import count_collectives, full, run_ranks

TIGHT = 1e-12
CPU = torch.device("cpu")


def world(**degrees):
    layout = resolve(degrees, axes=AXES, world_size=dist.get_world_size(), default="dp_shard")
    return layout, mesh.build(layout, device_type="cpu", options={})


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def placed(gradient, device_mesh, placements):
    from torch.distributed.tensor import distribute_tensor

    parameter = nn.Parameter(distribute_tensor(torch.zeros_like(gradient), device_mesh, placements))
    parameter.grad = distribute_tensor(gradient, device_mesh, placements)
    return parameter


def plain(gradient):
    parameter = nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    return parameter


def mixed():
    """Return a layout, one parameter of every kind with its gradient, and the full gradients."""
    from torch.distributed.tensor import Replicate, Shard

    layout, device_mesh = world(dp_shard=2, tp=2)
    both = device_mesh["dp_shard", "tp"]
    full_gradients = [
        drawn(3, 2),
        drawn(7, 3),  # uneven
        drawn(1, 5),  # empty on the second rank
        drawn(3, 5),
        drawn(6),
        drawn(5, 4),  # hybrid
        drawn(7, 5),
        drawn(2, 3),  # over 4 ranks in both dims, some empty
        drawn(),
    ]
    parameters = [
        plain(full_gradients[0]),
        placed(full_gradients[1], device_mesh["dp_shard"], [Shard(0)]),
        placed(full_gradients[2], device_mesh["dp_shard"], [Shard(0)]),
        placed(full_gradients[3], device_mesh["tp"], [Shard(1)]),
        placed(full_gradients[4], device_mesh["tp"], [Replicate()]),
        placed(full_gradients[5], both, [Replicate(), Shard(0)]),
        placed(full_gradients[6], both, [Shard(0), Shard(1)]),
        placed(full_gradients[7], both, [Shard(0), Shard(0)]),
        plain(full_gradients[8]),
    ]
    frozen = nn.Parameter(torch.ones(3))
    return layout, [*parameters, frozen], full_gradients


def norms(norm_type):
    layout, parameters, full_gradients = mixed()
    expected = torch.linalg.vector_norm(torch.cat([g.flatten() for g in full_gradients]), norm_type)
    with count_collectives() as collectives:
        norm = total_norm(parameters, layout=layout, norm_type=norm_type, group=None, device=CPU)
    return float((norm - expected).abs() / expected), norm, [row.op for row in collectives.rows]


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_is_that_of_the_full_gradient_in_one_all_reduce(norm_type):
    results = run_ranks(norms, 4, norm_type)
    for error, norm, ops in results:
        assert error < TIGHT
        assert torch.equal(norm, results[0][1])
        assert ops == ["all_reduce"]


def clipped(max_norm):
    layout, parameters, full_gradients = mixed()
    reference = [plain(gradient) for gradient in full_gradients]
    expected = torch.nn.utils.clip_grad_norm_(reference, max_norm)
    norm = clip_norm_(parameters, max_norm, layout=layout, norm_type=2.0, group=None, device=CPU)
    errors = [float((full(a.grad) - b.grad).abs().max()) for a, b in zip(parameters, reference, strict=False)]
    return (
        float((norm - expected).abs()),
        max(errors),
        all(torch.equal(b.grad, g) for b, g in zip(reference, full_gradients, strict=True)),
    )


@pytest.mark.parametrize(("max_norm", "unchanged"), [(0.5, False), (1e6, True)])
def test_clipping_is_that_of_torch(max_norm, unchanged):
    for norm, gradients, same in run_ranks(clipped, 4, max_norm):
        assert norm < 1e-11
        assert gradients < TIGHT
        assert same == unchanged


def stages():
    """Two stages, each with its own parameters, and replicas of them along dp_shard; another rank has none at all."""
    layout, _ = world(pp=2, dp_shard=2)
    stage = layout.coordinates(dist.get_rank())["pp"]
    parameters = [plain(drawn(4, seed=stage))] if stage == 0 else []
    return float(total_norm(parameters, layout=layout, norm_type=2.0, group=None, device=CPU) - drawn(4).norm())


def test_stages_hold_other_parameters_and_maybe_none():
    assert max(map(abs, run_ranks(stages, 4))) < TIGHT


def not_finite(value, norm_type):
    layout, _ = world()
    parameter = plain(torch.tensor([1.0, value if dist.get_rank() == 1 else 2.0]))
    return float(total_norm([parameter], layout=layout, norm_type=norm_type, group=None, device=CPU))


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_is_so_on_all(value, norm_type):
    assert not any(map(math.isfinite, run_ranks(not_finite, 2, value, norm_type)))


def partial():
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    layout, device_mesh = world(tp=2)
    tp = device_mesh["tp"]
    rank = dist.get_rank()
    norm_weight, sharded = placed(drawn(3), tp, [Replicate()]), placed(drawn(4), tp, [Shard(0)])
    norm_weight.grad = DTensor.from_local(drawn(3, seed=rank), tp, [Partial()])
    sharded.grad = DTensor.from_local(drawn(4, seed=rank), tp, [Partial()])
    settle_partial([norm_weight, sharded, nn.Parameter(torch.ones(2))])
    sums = [drawn(3) + drawn(3, seed=1), drawn(4) + drawn(4, seed=1)]
    kinds = [str(p.grad.placements) for p in (norm_weight, sharded)]
    errors = [float((full(p.grad) - s).abs().max()) for p, s in zip((norm_weight, sharded), sums, strict=True)]
    norm = total_norm([norm_weight, sharded], layout=layout, norm_type=2.0, group=None, device=CPU)
    return kinds, max(errors), float(norm - torch.cat(sums).norm())


def test_partial_sums_are_settled_into_the_parameters_placement():
    for kinds, error, norm in run_ranks(partial, 2):
        assert kinds == ["(Replicate(),)", "(Shard(dim=0),)"]
        assert error < TIGHT
        assert abs(norm) < TIGHT


def test_scaled_hardware_groups_what_kernels_take_together():
    parameters = [plain(torch.ones(2)), plain(torch.ones(3, dtype=torch.bfloat16)), nn.Parameter(torch.ones(1))]
    scale_(parameters, 0.5)
    scale_(parameters, torch.tensor(4.0, dtype=torch.float64))
    assert [p.grad.tolist() for p in parameters[:2]] == [[2.0] * 2, [2.0] * 3]
    assert [p.grad.dtype for p in parameters[:2]] == [torch.float32, torch.bfloat16]
    assert parameters[2].grad is None


TENSOR = """
[mesh]
tp = 2
[sharding.lockstep]
use = "support.plugins:Lockstep"
[sharding.parallelized]
use = "support.plugins:Parallelized"
columns = ["layers.0.up", "layers.1.up", "layers.2.down", "out"]
rows = ["tok"]
[sharding.fsdp2]
"""


def two_dimensional(text):
    """Tensor parallelism by torch under FSDP2: strided shards, none of which divides."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    reference = seeded()
    _, gradients = reference_gradients(reference, tokens, targets)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
    run = composed(text)
    with run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        with count_collectives(run.mesh) as collectives:
            norm = run.clip_grad_norm_(float("inf"))
            ops = collectives.summary()
        error = gradient_error(run, gradients)
        largest = run.clip_grad_norm_(float("inf"), norm_type=float("inf"))
        with pytest.raises(StepError) as caught:
            run.clip_grad_norm_(1.0, norm_type=1)
    worst = max(float(g.abs().max()) for g in gradients.values())
    kinds = {type(p.placements[0]).__name__ for _, p in run.named_parameters() if len(p.placements) == 2}
    return float((norm - expected).abs() / expected), error, float(largest - worst), list(ops), kinds, str(caught.value)


def test_strided_shards_of_two_axes():
    for norm, gradients, largest, ops, kinds, refusal in run_ranks(two_dimensional, 4, TENSOR):
        assert norm < TIGHT
        assert gradients < TIGHT
        assert abs(largest) < TIGHT
        assert ops == [("all_reduce", "world")]
        assert kinds == {"_StridedShard"}
        assert refusal == "the gradient norm is not computed for norm_type = 1; use 2 or infinity"


def with_copies():
    layout, _ = world(pp=2)
    own, shared = plain(drawn(3, 2, seed=dist.get_rank())), plain(drawn(4))
    copies = {id(shared)} if dist.get_rank() else ()
    norm = clip_norm_([own, shared], 0.5, layout=layout, norm_type=2.0, group=None, device=CPU, copies=copies)
    return norm, own.grad, shared.grad


def test_a_copy_on_another_stage_is_scaled_and_counted_once():
    drawn_gradients = [drawn(3, 2, seed=0), drawn(3, 2, seed=1), drawn(4)]
    expected = torch.cat([gradient.flatten() for gradient in drawn_gradients]).norm()
    factor = 0.5 / (expected + 1e-6)
    for rank, (norm, own, shared) in enumerate(run_ranks(with_copies, 2)):
        assert abs(norm - expected) < TIGHT
        assert torch.allclose(own, drawn_gradients[rank] * factor, rtol=0, atol=TIGHT)
        assert torch.allclose(shared, drawn_gradients[2] * factor, rtol=0, atol=TIGHT)
