"""Models that draw in their forward are proven with their random numbers; what depends on the layout is said."""

from __future__ import annotations

import pytest
from support.drawing_models import (
    Diffusion,
    LayerDrop,
    Recurrent,
    Shared,
    Stochastic,
    Weighed,
    class_loss,
    error_loss,
    images,
    noisy_class_loss,
)
from support.models import write_manifest
from support.verification_cases import FSDP

from composer3d import Batch
from composer3d.testing import assert_parity

HALVES = "[train]\nmicrobatch = 2\n"


def proven(text, factory, loss_fn):
    image, label = images()
    batch = Batch(args=(image.float(),), target=label)
    return assert_parity(factory, write_manifest(text), batch, loss_fn=loss_fn, steps=1, own_dtype=False).verdict


@pytest.mark.parametrize(
    ("factory", "loss_fn"),
    [
        (Stochastic, class_loss),
        (Diffusion, error_loss),
        (Stochastic, noisy_class_loss),
        (LayerDrop, class_loss),
        (Recurrent, class_loss),
    ],
)
def test_random_numbers_are_compared_with_one_devices(factory, loss_fn):
    verdict = proven(FSDP + HALVES, factory, loss_fn)
    ranks = [report.drawing for report in verdict.evidence.ranks]
    assert all(drawing.sites and not drawing.off for drawing in ranks)
    assert verdict.notes == ()


def test_what_is_drawn_for_a_micro_batch_is_said_with_its_line():
    verdict = proven(FSDP + HALVES, Weighed, class_loss)
    (note,) = verdict.notes
    assert note.startswith("random numbers drawn at rand in the model, drawing_models.py:")
    assert note.endswith("they depend on micro-batches and ranks, so another layout draws other ones")


def test_numbers_that_ranks_draw_by_themselves_are_said():
    verdict = proven(FSDP + HALVES + 'random_numbers = "ranks"\n', Stochastic, class_loss)
    assert verdict.notes == ("random numbers are drawn by rank and micro-batch: another layout trains on other ones",)


PP = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n'


def test_a_module_that_draws_in_blocks_of_several_stages_is_said():
    """One device goes on with its numbers from block to block, and no stage knows how many others draw before it."""
    (note,) = proven(PP + HALVES, Shared, class_loss).notes
    assert note.startswith("random numbers drawn at dropout in layers.0.dropout, drawing_models.py:")


def test_a_module_that_draws_in_several_blocks_is_one_devices_without_stages():
    assert proven(FSDP + HALVES, Shared, class_loss).notes == ()
