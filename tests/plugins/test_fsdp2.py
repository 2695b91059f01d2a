from __future__ import annotations

import pytest
import torch
from support.models import Net, composed, gradient_error, mine, one_step, padded, seeded, sum_loss
from torch.distributed.tensor import Replicate, Shard

from composer3d import ManifestError
from composer3d.testing import run_ranks

TIGHT = 1e-12
UNITS = 4  # three blocks and the root

LAYOUTS = [
    pytest.param(1, "[sharding.fsdp2]", id="1"),
    *(pytest.param(2, f"[sharding.fsdp2]\nzero = {zero}", id=f"2-zero{zero}") for zero in (1, 2, 3)),
    *(pytest.param(4, f"[sharding.fsdp2]\nzero = {zero}", id=f"4-zero{zero}") for zero in (1, 2, 3)),
    *(
        pytest.param(4, f"[mesh]\ndp_replicate = 2\n[sharding.fsdp2]\nzero = {zero}", id=f"hsdp-zero{zero}")
        for zero in (1, 2, 3)
    ),
    pytest.param(4, "[sharding.fsdp2]\nreshard_after_forward = 2", id="4-reshard2"),
    pytest.param(2, "[sharding.fsdp2]\nreshard_after_forward = false", id="2-keep"),
    pytest.param(2, "[sharding.fsdp2]\nreshard_root = true", id="2-root"),
    pytest.param(2, "[sharding.fsdp2]\nforward_prefetch = 2\nbackward_prefetch = 2", id="2-prefetch"),
    pytest.param(2, '[sharding.fsdp2]\nunits = ["layers.1", "norm"]', id="2-units"),
    pytest.param(2, '[sharding.fsdp2]\nignored = ["out.*", "layers.1.up.weight"]', id="2-ignored"),
    pytest.param(4, '[mesh]\ndp_replicate = 2\n[sharding.fsdp2]\nignored = ["norm.*"]', id="hsdp-ignored"),
    pytest.param(4, "[mesh]\ndp_replicate = 2\n[sharding.fsdp2]\ndelay_all_reduce = true", id="hsdp-delayed"),
]


def step_with(text, microbatch=None, options=None, calls=1):
    return one_step(text, microbatch=microbatch, options=options, calls=calls)


@pytest.mark.parametrize(("world_size", "text"), LAYOUTS)
@pytest.mark.parametrize("microbatch", [None, 1])
def test_gradients_equal_one_device(world_size, text, microbatch):
    # 12 sequences: with microbatch 1 every rank accumulates 3, 6 or 12 times.
    for loss, norm, gradients, _ in run_ranks(step_with, world_size, text, microbatch):
        assert loss < TIGHT
        assert norm < TIGHT
        assert gradients < TIGHT


def test_several_batches_in_one_step_are_one_global_batch():
    for _, norm, gradients, _ in run_ranks(step_with, 2, "[sharding.fsdp2]", 1, None, 3):
        assert norm < TIGHT
        assert gradients < TIGHT


def test_tied_weights():
    for _, norm, gradients, _ in run_ranks(step_with, 2, "[sharding.fsdp2]", 2, {"tied": True}):
        assert norm < TIGHT
        assert gradients < TIGHT


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize(
    ("text", "gathers", "reductions"),
    [
        # All-gathers and reduce-scatters as formulas of units U and micro-batches M.
        pytest.param("zero = 3", lambda u, m: 2 * u * m - m, lambda u, m: u * m, id="zero3"),
        pytest.param("zero = 3\nreshard_root = true", lambda u, m: 2 * u * m, lambda u, m: u * m, id="zero3-root"),
        pytest.param("zero = 2", lambda u, m: u * m, lambda u, m: u, id="zero2"),
        pytest.param("zero = 1", lambda u, m: u, lambda u, m: u, id="zero1"),
    ],
)
def test_collectives(text, gathers, reductions, microbatches):
    for *_, counted in run_ranks(step_with, 2, f"[sharding.fsdp2]\n{text}", 6 // microbatches):
        assert counted == {
            ("all_gather", "dp_shard"): gathers(UNITS, microbatches),
            ("reduce_scatter", "dp_shard"): reductions(UNITS, microbatches),
            ("all_reduce", "dp_shard"): 3,
        }


def test_hybrid_sharding_adds_an_all_reduce_of_every_shard():
    for *_, counted in run_ranks(step_with, 4, "[mesh]\ndp_replicate = 2\n[sharding.fsdp2]", 3):
        assert counted == {
            ("all_gather", "dp_shard"): 2 * UNITS - 1,
            ("reduce_scatter", "dp_shard"): UNITS,
            ("all_reduce", "dp_replicate"): UNITS,
            ("all_reduce", "world"): 3,
        }


def test_a_delayed_all_reduce_is_one_for_all_micro_batches():
    text = "[mesh]\ndp_replicate = 2\n[sharding.fsdp2]\ndelay_all_reduce = true\n"
    for *_, counted in run_ranks(step_with, 4, text, 1):  # three micro-batches
        assert counted["all_reduce", "dp_replicate"] == UNITS
        assert counted["reduce_scatter", "dp_shard"] == 3 * UNITS


class Skipping(Net):
    """A model whose second block only samples that begin with an odd token use."""

    def forward(self, tokens):
        x = self.tok(tokens)
        for index, layer in enumerate(self.layers):
            if index != 1 or int(tokens[0, 0]) % 2:
                x = layer(x)
        return self.out(self.norm(x)) + 0.0


def skipped_last(text):
    """Return the error of gradients where no rank's last micro-batch uses one of the units."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    tokens[:, 0] = torch.tensor([1, 1, 0] * 4)
    reference, count = seeded(Skipping), (targets != -100).sum()
    for sample, target in zip(tokens.split(1), targets.split(1), strict=True):
        (sum_loss(reference(sample), target)[0] / count).backward()
    run = composed("model.blocks = 'layers.*'\ntrain.microbatch = 1\n" + text, seeded(Skipping))
    with run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
    error = gradient_error(run, {name: p.grad for name, p in reference.named_parameters()})
    run.close()
    return error


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_unit_that_the_last_micro_batch_leaves_out_is_averaged_all_the_same():
    text = "[mesh]\ndp_replicate = 2\n[sharding.fsdp2]\ndelay_all_reduce = true\n"
    assert max(run_ranks(skipped_last, 4, text)) < TIGHT


def placements(text):
    run = composed(text)
    found = {name: (tuple(p.placements), tuple(p.to_local().shape)) for name, p in run.named_parameters()}
    names = [name for name, _ in run.parts[0].module.named_parameters()]
    run.close()
    return found, names


def test_state():
    expected = [name for name, _ in Net().named_parameters()]
    for rank, (found, names) in enumerate(run_ranks(placements, 2, "[sharding.fsdp2]")):
        assert names == expected
        # 15 rows over two ranks: 8 and 7.
        assert found["layers.0.up.weight"] == ((Shard(0),), (8 - rank, 7))
    for rank, (found, _) in enumerate(run_ranks(placements, 4, "[mesh]\ndp_replicate = 2\n[sharding.fsdp2]")):
        assert found["layers.0.up.weight"] == ((Replicate(), Shard(0)), (8 - rank % 2, 7))


def ignored_agree():
    run = composed('[sharding.fsdp2]\nignored = ["out.*"]')
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
    weight = dict(run.named_parameters())["out.weight"]
    run.close()
    return type(weight).__name__, weight.detach()


def test_ignored_parameters_stay_plain_and_equal_on_all_ranks():
    (kind, first), (_, second) = run_ranks(ignored_agree, 2)
    assert kind == "Parameter"
    assert torch.equal(first, second)
    assert not torch.equal(first, seeded().out.weight)


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


def test_what_is_gathered_early_is_not_replaced():
    text = '[sharding.fsdp2]\ngather_early = 1\n[communication.compression]\nweights = "int8"'
    assert "gather_early begins all-gathers, and [communication.compression]" in run_ranks(refusal, 2, text)[0]


@pytest.mark.parametrize(
    ("world_size", "text", "message"),
    [
        (
            1,
            "[sharding.fsdp2]\nzero = 2\nreshard_after_forward = true",
            ":2:11: [sharding.fsdp2] reshard_after_forward is zero = 3's choice, and zero is 2; leave one of them out",
        ),
        (
            2,
            "[sharding.fsdp2]\ndelay_all_reduce = true",
            ":3:1: [sharding.fsdp2] delay_all_reduce has no effect: dp_replicate = 1; remove it",
        ),
        (
            2,
            "[mesh]\ndp_replicate = 2\n[sharding.fsdp2]\nzero = 2\ndelay_all_reduce = true",
            ":6:1: [sharding.fsdp2] delay_all_reduce has no effect: zero = 2 reduces once a step anyway; remove it",
        ),
        (
            2,
            "[sharding.fsdp2]\nreshard_after_forward = 3",
            ":2:11: [sharding.fsdp2] reshard_after_forward = 3 does not divide dp_shard = 2 into groups of at least 2",
        ),
        (
            1,
            '[sharding.fsdp2]\nunits = ["layers.*", "leyers.*"]',
            ':3:1: [sharding.fsdp2] the pattern "leyers.*" matches nothing in the model; did you mean "layers.*"?',
        ),
        (
            1,
            '[sharding.fsdp2]\nignored = ["out.wieght"]',
            ':3:1: [sharding.fsdp2] the pattern "out.wieght" matches nothing in the model; did you mean "out.weight"?',
        ),
    ],
)
def test_refusals(world_size, text, message):
    assert run_ranks(refusal, world_size, text)[0] == message


def trains(text):
    run = composed(text)
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for number in range(60):
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    run.close()
    return losses


def test_the_loss_falls_alike_in_every_stage():
    losses = [run_ranks(trains, 2, f"[sharding.fsdp2]\nzero = {zero}")[0] for zero in (1, 2, 3)]
    assert losses[0][-1] < 0.5 * losses[0][0]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0] == pytest.approx(losses[2], rel=1e-5)
