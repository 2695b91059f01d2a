"""The one device of a proof is the factory as written: what recording it loses is found."""

from __future__ import annotations

import torch
from support.composition_faults import Even
from support.models import sum_loss, write_manifest
from support.verification_cases import DDP, assert_named, batch, subject

from composer3d.testing import assert_parity, run_ranks


class Addressing(Even):
    """Looks at memory, which is not there while it is recorded."""

    def __init__(self):
        super().__init__()
        self.scale = 1.0 if self.out.weight.data_ptr() else 1.01

    def forward(self, tokens):
        return self.scale * super().forward(tokens)


def hooked():
    model = Even()
    mask = torch.linspace(0.0, 1.0, model.out.weight.shape[0])[:, None]
    model.out.weight.register_hook(lambda grad: grad * mask)
    model.out.weight.lr_scale = 2.0
    return model


def test_a_factory_that_makes_another_model_while_recorded_is_found():
    told = assert_named(DDP, {"factory": Addressing}, "composing loses or changes something of the model, at ")
    assert "one device has another loss with the factory as written" in told


def test_what_is_carried_over_is_proven():
    options = {"loss_fn": sum_loss, "microbatch": 3, "steps": 1, "own_dtype": False}
    assert_parity(hooked, write_manifest(DDP), batch(), **options)


class Drawing(Even):
    """A constant that the factory draws and keeps in a closure."""

    def __init__(self):
        super().__init__()
        noise = torch.rand(())
        self.register_forward_hook(lambda module, args, output: output * noise)


def test_a_constant_in_a_closure_is_the_same_in_both():
    options = {"loss_fn": sum_loss, "microbatch": 3, "steps": 1, "own_dtype": False}
    assert_parity(Drawing, write_manifest(DDP), batch(), **options)


def with_a_lost_hook():
    """Compare the factory with a composition that has lost its gradient hooks."""
    import composer3d.initialisation.attachments as attachments
    from composer3d.processes.process_group import join_world
    from composer3d.torch_compat import tensors
    from composer3d.verification.evidence.as_written import as_written

    tensors.take_memory = lambda tensor, memory: False
    attachments.set_gradient_hooks = lambda *_: None
    join_world(torch.device("cpu"))
    one = subject("", batch=lambda step, rank, degree: batch(), loss_fn=sum_loss, factory=hooked)
    return as_written(one, degree=1).gradients


def test_a_lost_gradient_hook_is_found():
    found = run_ranks(with_a_lost_hook, 1)[0]
    assert [fqn for fqn, _ in found] == ["out.weight"] and found[0][1] > 0.1
