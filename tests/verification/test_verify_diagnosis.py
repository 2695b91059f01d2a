"""What verify once did not see, named wrongly, or called wrong though it is right."""

from __future__ import annotations

import functools

import pytest
import torch
from support import diagnosis_faults as telling
from support.composition_faults import Even
from support.models import sum_loss, write_manifest
from support.verification_cases import DDP, FSDP, assert_named, batch, planted, refuted
from support.verification_cases import TP as CUT

from composer3d import Batch
from composer3d.testing import assert_parity
from composer3d.verification.verdict_report import to_json, to_text

table = planted("diagnosis_faults")
SLOW = pytest.mark.slow
AC, TP = "[scheduling.activation_checkpoint]\n", "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"
TRACED = '[mesh]\npp = 2\n[scheduling.pipeline]\nsplit = "tracer"\n'
OWN = "[mesh]\ndp_replicate = 2\n"
SUM = r"the loss is no sum over samples: what it makes of one depends on the others of its micro-batch"


def full():
    """Return samples with a target for every token."""
    whole = batch()
    return Batch(args=whole.args, target=whole.target.abs() % 12)


@pytest.mark.parametrize(
    ("text", "options", "cause"),
    [
        pytest.param(
            DDP + table("communication", "points", "seeded"),
            {"factory": telling.with_dropout, "microbatch": 3},
            r"every step draws the same random numbers at layers.0.dropout:dropout, .* something seeds them anew",
            id="seeded anew in every step",
        ),
        pytest.param(
            FSDP + table("scheduling", "changing", "quiet"),
            {"factory": telling.with_dropout, "microbatch": 3},
            r"drawn at layers.0.dropout:dropout, .* less often than on one device on rank 1 \(dp_shard 1\)",
            id="dropout off on one rank",
        ),
        pytest.param(
            FSDP + "[precision.mixed]\n" + table("communication", "points", "narrow"),
            {"microbatch": 3, "own_dtype": True},
            r"the gradients of .* have no more digits than bfloat16: they are rounded on the way",
            id="rounded no more than the compute",
        ),
        pytest.param(
            DDP.replace("2", "4") + table("communication", "points", "scaled"),
            {"microbatch": 3},
            r"all gradients are 0.75 times the right ones; that is 3 / 4, with dp_replicate = 4",
            id="divided by a rank too few",
            marks=SLOW,
        ),
        pytest.param(
            OWN + table("sharding", "handing"),
            {"microbatch": 3},
            r"data-parallel rank 0 alone, of 2, and are equal on all ranks: .* as by a broadcast",
            id="handed to all",
            marks=SLOW,
        ),
        pytest.param(
            DDP + table("communication", "points", "decayed"),
            {},
            r"are off by -1e-05 times the parameters themselves: .* or applied more than once",
            id="decayed twice",
            marks=SLOW,
        ),
        pytest.param(
            DDP + table("communication", "points", "rounded"),
            {},
            r"the updated .* have no more digits than float32: they are rounded after the update",
            id="updated parameters rounded",
            marks=SLOW,
        ),
        pytest.param(
            CUT + table("scheduling", "changing", "stale"),
            {"microbatch": 3},
            r"every micro-batch but the first adds what the one before it gave: a stale gradient",
            id="the gradient of the micro-batch before",
            marks=SLOW,
        ),
        pytest.param(DDP, {"loss_fn": telling.contrastive, "microbatch": 3}, SUM, id="a contrastive loss"),
        pytest.param(
            DDP,
            {"factory": telling.normed, "microbatch": 3},
            r"on rank 1 \(dp_replicate 1\).*; its forwards change .*weight.0._u, .* it depends on the layout",
            id="kept from forward to forward",
            marks=SLOW,
        ),
    ],
)
def test_what_was_not_told_is_named(text, options, cause):
    assert_named(text, options, cause)


def test_a_mean_with_class_weights_is_one_over_the_weights_of_the_global_batch():
    assert_parity(Even, write_manifest(DDP), full(), loss_fn=telling.mean_of_weights, microbatch=3, steps=1)


def test_a_mask_that_is_left_out_is_named():
    whole = batch()
    given = Batch(args=whole.args, kwargs={"mask": (whole.args[0] % 3 > 0).float()}, target=whole.target)
    path = write_manifest(FSDP + table("sharding", "dropping"))
    with pytest.raises(AssertionError, match="the model is not given the argument mask that the batch has"):
        assert_parity(telling.Hiding, path, given, loss_fn=sum_loss, steps=1, own_dtype=False)


def test_gradients_that_are_equal_beside_a_residual_are_not_taken_for_each_other():
    told = refuted(DDP + table("scheduling", "changing", "detached"))
    assert "the backward goes wrong between it and layers.0.down" in told and "are those of" not in told


@pytest.mark.parametrize(
    ("text", "factory", "options"),
    [
        pytest.param(DDP + AC, telling.functional, {"microbatch": 3}, id="functional dropout, recomputed"),
        pytest.param(TP, telling.functional, {"steps": 3}, id="functional dropout and casts, followed on shares"),
        pytest.param(
            TRACED,
            functools.partial(Even, dropout=0.2),
            {"microbatch": 3},
            id="blocks of another stage, looked at on meta",
        ),
        pytest.param(FSDP, telling.penalty, {"microbatch": 3}, id="a gradient in the forward", marks=SLOW),
        pytest.param(DDP, telling.seeding, {"microbatch": 3}, id="random features by a seed of the model's"),
        pytest.param(DDP, Even, {"microbatch": 3, "loss_fn": telling.weighted}, id="weights for counts"),
        pytest.param(TP, telling.attending, {"microbatch": 6}, id="torch's own attention, followed on shares"),
        pytest.param(FSDP, telling.shared_inside, {"microbatch": 3}, id="blocks that share a layer"),
        pytest.param(DDP, telling.shared_inside, {"microbatch": 3}, id="the same, replicated", marks=SLOW),
    ],
)
def test_what_was_called_wrong_is_proven(text, factory, options):
    options = {"loss_fn": sum_loss, "own_dtype": False, **options}
    verdict = assert_parity(factory, write_manifest(text), batch(), **options).verdict
    # torch's attention drops on its own, in one kernel, and so by rank.
    notes = tuple(note for note in verdict.notes if not note.startswith("random numbers drawn at scaled_dot_product"))
    assert (verdict.failures, verdict.diagnosis, notes) == ((), (), ())


def test_a_model_that_mixes_samples_is_proven_and_said_to():
    factory = functools.partial(Even, batch_norm=True)
    path = write_manifest('[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n')
    verdict = assert_parity(factory, path, batch(), loss_fn=sum_loss, microbatch=4, own_dtype=False).verdict
    (note,) = verdict.notes
    assert note.startswith("statistics (BatchNorm1d) relates the samples of a micro-batch")


class Centred(Even):
    """Subtracts the mean of a micro-batch."""

    def forward(self, tokens):
        x = super().forward(tokens)
        return x - x.mean(0)


class Normalised(Even):
    """Has a layer norm, which relates no samples."""

    def __init__(self):
        super().__init__()
        self.out = torch.nn.Sequential(torch.nn.LayerNorm(8), self.out)


@pytest.mark.parametrize(
    ("factory", "named"),
    [(functools.partial(Even, batch_norm=True), "statistics (BatchNorm1d)"), (Centred, "the model (Centred)")],
)
def test_the_first_module_that_relates_samples_is_named_in_the_verdict(factory, named):
    verdict = assert_parity(factory, write_manifest(DDP), batch(), loss_fn=sum_loss, microbatch=3, steps=1).verdict
    (note,) = to_json(verdict)["notes"]
    assert note.startswith(f"{named} relates the samples of a micro-batch") and f"note: {note}" in to_text(verdict)
    assert to_text(verdict).endswith("on the same micro-batches, whose samples the model relates")


def test_a_model_that_relates_no_samples_is_proven_without_a_note():
    verdict = assert_parity(Normalised, write_manifest(DDP), batch(), loss_fn=sum_loss, microbatch=3, steps=1).verdict
    assert not verdict.notes and to_text(verdict).endswith("computes what one device computes")


class OfThree(Even):
    """Takes three samples, and no other number of them."""

    def forward(self, tokens):
        if len(tokens) != 3:
            raise ValueError("not three samples")
        return super().forward(tokens)


def test_that_a_loss_could_not_be_asked_for_is_said():
    verdict = assert_parity(
        OfThree, write_manifest(DDP), batch(), loss_fn=sum_loss, microbatch=3, steps=1, own_dtype=False
    ).verdict
    (note,) = verdict.notes
    assert note.startswith("whether a loss of two micro-batches together is the sum of theirs could not be asked")
    assert "(ValueError)" in note


def test_units_that_share_a_parameter_are_refused_where_they_are_stated():
    path = write_manifest(FSDP + 'units = ["layers.*"]\n')
    with pytest.raises(Exception, match='"layers.0" and "layers.1" share the parameter "layers.0.up.weight"'):
        assert_parity(telling.shared_inside, path, batch(), loss_fn=sum_loss, steps=1, own_dtype=False)


class Running:
    """Divides by a running mean of its own sums."""

    mean = 1.0

    def __call__(self, logits, targets):
        total, count = sum_loss(logits, targets)
        self.mean = 0.9 * self.mean + 0.1 * float(total.detach() / count)
        return total / self.mean, count


@pytest.mark.parametrize("kind", ["object", "closure"])
def test_a_loss_that_normalises_by_what_it_has_seen_is_named(kind):
    running = Running()
    state = {"mean": 1.0}

    def closed(logits, targets):
        total, count = sum_loss(logits, targets)
        state["mean"] = 0.9 * state["mean"] + 0.1 * float(total.detach() / count)
        return total / state["mean"], count

    name = "mean" if kind == "object" else r"state\['mean'\]"
    assert_named(
        DDP,
        {"loss_fn": running if kind == "object" else closed},
        f"the loss changes the loss's {name} while it computes, .*; the model is not to blame",
    )
