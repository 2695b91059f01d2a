"""Numbers that forwards draw are those of one device, in every layout, to the last bits of float64."""

from __future__ import annotations

import pytest
import torch
from support.drawing_models import (
    Diffusion,
    Guided,
    LayerDrop,
    Recurrent,
    Skipping,
    Stochastic,
    class_loss,
    error_loss,
    images,
    noisy_class_loss,
)
from support.models import mine, write_manifest

import composer3d
from composer3d.testing import assert_gradients_equal, full, run_ranks

KINDS = {
    "dropped labels": (Guided, class_loss),
    "stochastic depth": (Stochastic, class_loss),
    "noise": (Diffusion, error_loss),
    "a loss": (Stochastic, noisy_class_loss),
    "layers left out": (LayerDrop, class_loss),
    "recurrent": (Recurrent, class_loss),
    "skipped": (Skipping, class_loss),
}
FSDP, TP = "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n", "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"
PP = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n'
AC = "[scheduling.activation_checkpoint]\n"
HALVES = "[train]\nmicrobatch = 4\n"
LAYOUTS = {
    "fsdp2": (FSDP, 2),
    "tp": (TP, 2),
    "sequence parallel": (TP + "sequence_parallel = true\n" + AC, 2),
    "pipeline": (PP + HALVES, 2),
    "micro-batches": (HALVES, 1),
    "quarters over ranks": (FSDP + "[train]\nmicrobatch = 2\n", 2),
    "recomputed": (AC, 1),
    "recomputed over ranks": (FSDP + AC + "[train]\nmicrobatch = 2\n", 2),
    "recomputed in a pipeline": (PP + AC + HALVES, 2),
}


def trained(kind, text, steps=(0, 1), path=None):
    """Run steps; return losses, the last gradients, and the loss of an evaluation."""
    torch.set_default_dtype(torch.float64)
    factory, loss_fn = KINDS[kind]
    image, label = images()
    inputs = (image, label) if factory is Guided else (image,)
    run = composer3d.compose(factory, write_manifest(text), loss_fn=loss_fn, example=(inputs, {}))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    if path is not None and path.exists():
        run.load(path)
    label, *inputs = (mine(run, tensor) for tensor in (label, *inputs))
    losses = []
    for number in steps:
        with run.step(number):
            losses.append(float(run.forward_backward(*inputs, target=label)))
            run.clip_grad_norm_(float("inf"))
            gradients = {fqn: full(p.grad) for fqn, p in run.named_parameters() if p.grad is not None}
            optimizer.step()
            optimizer.zero_grad()
    evaluated = float(run.evaluate(*inputs, target=label).loss)
    if path is not None and not path.exists():
        run.save(path)
    run.close()
    return losses, gradients, evaluated


@pytest.fixture(scope="module")
def alone():
    return {kind: run_ranks(trained, 1, kind, "")[0] for kind in KINDS}


# Code of the whole model draws on every stage by itself, which `verify` says; under sequence parallelism the first and
# the last layer are called.
CELLS = [
    (kind, layout)
    for kind in KINDS
    for layout in LAYOUTS
    if kind != "skipped" or not any(word in layout for word in ("pipeline", "sequence"))
]


@pytest.mark.parametrize(("kind", "layout"), CELLS)
def test_every_layout_draws_what_one_device_draws(kind, layout, alone):
    losses, gradients, evaluated = alone[kind]
    text, world_size = LAYOUTS[layout]
    seen = {}
    for own_losses, own, own_evaluated in run_ranks(trained, world_size, kind, text):
        assert own_losses == pytest.approx(losses, rel=1e-12)
        assert own_evaluated == pytest.approx(evaluated, rel=1e-12)
        assert_gradients_equal(own, {fqn: gradients[fqn] for fqn in own}, tolerance=1e-11)
        seen |= own
    assert seen.keys() == gradients.keys()


@pytest.mark.parametrize("kind", ["stochastic depth", "noise"])
def test_a_run_goes_on_alike_in_another_layout(kind, tmp_path):
    whole, *_ = run_ranks(trained, 1, kind, "", (0, 1, 2))[0]
    first, *_ = run_ranks(trained, 2, kind, FSDP, (0,), tmp_path / "saved")[0]
    rest, *_ = run_ranks(trained, 2, kind, PP + AC + HALVES, (1, 2), tmp_path / "saved")[0]
    assert first + rest == pytest.approx(whole, rel=1e-11)
    (again, *_), (other, *_) = run_ranks(trained, 2, kind, PP + AC + HALVES, (1, 2), tmp_path / "saved")
    assert again == other == rest
