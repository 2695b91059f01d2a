"""A proof saves, loads and steps: what comes back otherwise is named, and what comes back is said to."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from support.composition_faults import Even
from support.models import sum_loss, write_manifest
from support.resuming_faults import OwnDraws, Remembering, Rising, hidden, restoring
from support.verification_cases import DDP, FSDP, assert_named, batch, launch, layout_of, planted, subject

from composer3d.step.microbatches import split_batch
from composer3d.testing import assert_parity
from composer3d.verification import prove, to_json, to_text

PP = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n'
ONE = "[mesh]\n"
momentum = planted("resuming_faults")("communication", "momentum")
slow = planted("resuming_faults")("communication", "slow")


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            FSDP,
            {"optimizer": restoring("another")},
            r"saved and loaded, exp_avg of (\S+) is that of \S+, exp_avg of \S+ is that of \1: what saves or restores",
            id="into another parameter",
        ),
        pytest.param(
            DDP,
            {"optimizer": restoring("dropped")},
            r"saved and loaded, exp_avg_sq of \S+ is zero: what saves",
            id="dropped",
        ),
        pytest.param(
            FSDP,
            {"optimizer": restoring("stale")},
            r"saved and loaded, step of tok.weight is off by 1 of its largest element|is zero",
            id="of the step before",
        ),
        pytest.param(
            PP,
            {"optimizer": restoring("scaled"), "microbatch": 6},
            r"saved and loaded, exp_avg of \S+ is 2 times what it was",
            id="scaled",
        ),
        pytest.param(
            FSDP,
            {"optimizer": hidden},
            r"saved, loaded and equal, and a step later \S+ is off by \S+ of its largest element, .*no checkpoint has",
            id="kept in an attribute",
        ),
        pytest.param(
            FSDP + momentum, {}, r"saved and loaded, plugin/momentum/momentum/past is zero", id="a plugin's state"
        ),
        pytest.param(
            FSDP + slow,
            {},
            r"saved and loaded, plugin/slow/slow/\S+ is a tensor of .*: tensors of a plugin.s state that a first step",
            id="a plugin's state that a first step makes",
        ),
        pytest.param(
            ONE,
            {"factory": functools.partial(Even, block=OwnDraws), "world_size": 1},
            r"a step later .*: it rests on layers.0.generator, layers.1.generator, which no checkpoint has",
            id="random numbers of its own",
        ),
        pytest.param(
            ONE,
            {"factory": functools.partial(Even, block=Remembering), "world_size": 1},
            r"a step later .*: it rests on layers.0.seen, layers.1.seen, which no checkpoint has: make it a persistent",
            id="a buffer that is not saved",
        ),
    ],
)
def test_what_a_loaded_run_has_otherwise_is_named(text, options, cause):
    assert_named(text, options, cause)


def proven(text, *, make_schedule=None, **options):
    def make():
        made = subject(
            text, batch=lambda step, rank, size: split_batch(batch(), 12 // size)[rank], loss_fn=sum_loss, factory=Even
        )
        return dataclasses.replace(made, make_schedule=make_schedule)

    options |= {"layout": layout_of(text), "launch": launch, "num_steps": 1, "microbatches": 1}
    return prove(make, grad_clip=float("inf"), **options)


def test_a_rate_that_is_not_restored_is_named():
    verdict = proven(FSDP, make_schedule=lambda run, optimizer: Rising(optimizer), passes=("float64",))
    assert not verdict.ok
    assert any("lr of the optimizer's group 0 is 0.001, not 0.002" in line for line in verdict.diagnosis)


def test_a_right_run_is_said_to_be_equal():
    verdict = proven(FSDP)
    assert verdict.ok
    assert "saved, loaded and stepped: equal" in to_text(verdict).split("\n")
    assert to_json(verdict)["resumed"] == "saved, loaded and stepped: equal"


class Unsaveable(torch.optim.AdamW):
    """Has a state that JSON does not have."""

    def step(self, closure=None):
        result = super().step(closure)
        for state in self.state.values():
            state["what"] = object()
        return result


def test_what_cannot_be_saved_is_said():
    parity = assert_parity(
        Even,
        write_manifest(FSDP),
        batch(),
        loss_fn=sum_loss,
        steps=1,
        optimizer=lambda run: run.optimizer(Unsaveable, lr=1e-3),
    )
    assert [note for note in parity.verdict.notes if note.startswith("not saved, loaded and stepped: ")]
