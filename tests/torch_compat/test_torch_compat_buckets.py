from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from composer3d import torch_compat
from composer3d.testing import full, run_ranks


def averaged(attach):
    """Return a gradient, what it should be, and the kind of the parameter, after one step of another input a rank."""
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    attach(module, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    module(torch.full((1, 3), dist.get_rank() + 1.0)).sum().backward()
    return full(module.weight.grad), type(module.weight).__name__, [name for name, _ in module.named_parameters()]


def test_units_are_replicated_over_dtensors():
    def attach(module, mesh):
        torch_compat.replicate_units(module, mesh=mesh)
        module.set_requires_gradient_sync(True)

    for gradient, kind, names in run_ranks(averaged, 2, attach):
        assert (kind, names) == ("DTensor", ["weight", "bias"])
        assert torch.equal(gradient, torch.full((2, 3), 1.5))


def test_buckets_are_attached_without_a_wrapper():
    def attach(module, mesh):
        torch_compat.replicate_buckets(module, device_mesh=mesh)

    for gradient, kind, names in run_ranks(averaged, 2, attach):
        assert (kind, names) == ("Parameter", ["weight", "bias"])
        assert torch.equal(gradient, torch.full((2, 3), 1.5))


def test_spans_are_opened_around_buckets():
    seen = []

    @contextlib.contextmanager
    def span(name, **attributes):
        seen.append((name, attributes))
        yield

    def attach(module, mesh):
        torch_compat.replicate_buckets(module, device_mesh=mesh)
        torch_compat.watch_buckets(module, span)
        torch_compat.watch_buckets(module.forward, span)

    for (gradient, *_), told in run_ranks(lambda: (averaged(attach), seen), 2):
        assert torch.equal(gradient, torch.full((2, 3), 1.5))
        assert told == [
            ("broadcast", {"axis": "dp", "group": "weights"}),
            ("all_reduce", {"axis": "dp", "group": "buckets", "bytes": 4 * (6 + 2), "bucket": 0}),
            ("wait", {"axis": "dp", "group": "buckets", "op": "all_reduce"}),
        ]
