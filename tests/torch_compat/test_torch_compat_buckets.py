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


def read_beside():
    """Return gradients of a loss that reads a parameter which the forward's output does not depend on."""

    class Beside(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.beside = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.used

    module, mesh = Beside(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch_compat.replicate_buckets(module, device_mesh=mesh, find_unused_parameters=True)
    loss = (module(torch.full((2,), dist.get_rank() + 1.0)) * module.beside).sum()
    torch_compat.find_unused_in(module, loss)
    loss.backward()
    return module.used.grad, module.beside.grad


def test_parameters_that_a_loss_reads_beside_the_output_are_waited_for():
    for gradients in run_ranks(read_beside, 2):
        assert all(torch.equal(gradient, torch.full((2,), 1.5)) for gradient in gradients)


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
