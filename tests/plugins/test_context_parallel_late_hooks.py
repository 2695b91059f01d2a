"""Context parallelism: hooks of the whole model, on its output and on what a loop keeps, see whole sequences.

So do gradients that `retain_grad` keeps.
"""

from __future__ import annotations

import pytest
import torch
from support.late_hooks import INSIDE, PREPARED, VOCAB, D, Model, errors
from support.models import write_manifest
from torch import Tensor
from torch.nn.functional import cross_entropy

import composer3d
from composer3d.propagation import PropagationError
from composer3d.testing import run_ranks

TIGHT = 1e-12
CP = "mesh.cp = 2\n[sharding.context_parallel]\n"
FSDP = f"{CP}[sharding.fsdp2]\n"
RECOMPUTED = "[scheduling.activation_checkpoint]\nmode = 'full'\n"


def various(text: str, length: int, late: bool) -> dict[str, float]:
    return errors(list(PREPARED), text, length=length, late=late)


@pytest.mark.parametrize(
    ("text", "length", "late"),
    [
        pytest.param(FSDP, 8, False, id="fsdp2"),
        pytest.param(CP, 8, True, id="nobody else averages, late"),
        pytest.param(FSDP, 7, False, id="padded"),
        pytest.param(
            f"{FSDP}[scheduling.activation_checkpoint]\nmode = 'full'\n",
            8,
            True,
            id="recomputed",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_they_are_one_devices_in_a_loop_and_in_the_engine(text: str, length: int, late: bool):
    for found in run_ranks(various, 2, text, length, late):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


@pytest.mark.slow
def test_they_are_over_samples_and_positions():
    for found in run_ranks(various, 4, f"mesh.dp_shard = 2\n{FSDP}", 8, False):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def after_steps_without(text: str, length: int) -> dict[str, float]:
    return errors(list(INSIDE), text, length=length, after=4)


@pytest.mark.parametrize(("text", "length"), [(FSDP, 8), pytest.param(FSDP, 7, marks=pytest.mark.slow)])
def test_hooks_inside_are_whenever_they_are_registered(text: str, length: int):
    for found in run_ranks(after_steps_without, 2, text, length):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


@pytest.mark.slow
def test_hooks_inside_are_beside_tp_whenever_they_are_registered():
    text = f"mesh.tp = 2\n{FSDP}[sharding.tensor_parallel]\n"
    for found in run_ranks(after_steps_without, 4, text, 8):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def of_a_loss() -> str:
    def loss(o: Tensor, t: Tensor) -> Tensor:
        logits = o * 2
        if logits.requires_grad and not logits.is_meta:
            logits.retain_grad()
        return cross_entropy(logits.flatten(0, 1), t.flatten())

    x, noise = torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 8, D)
    run = composer3d.compose(Model(), write_manifest(FSDP), loss_fn=loss, example=((x, noise), {}))
    try:
        with run.step(0):
            run.forward_backward(x, noise, target=x % VOCAB)
    except PropagationError as error:
        return str(error)
    finally:
        run.close()
    return ""


def test_gradients_of_what_a_loss_computes_of_a_ranks_positions_are_not_retained():
    for text in run_ranks(of_a_loss, 2):
        assert text.startswith(
            "retain_grad of what a loss computes of a rank's own positions (test_context_parallel_late"
        )
        assert text.endswith("write it for the model's output, or for what a module of the model returns")
