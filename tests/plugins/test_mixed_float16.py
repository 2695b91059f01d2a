"""Float16 with a loss scale that all ranks agree on."""

from __future__ import annotations

import pytest
import torch
from composer3d_plugins.precision.mixed.scaler import LossScaler
from support.models import composed, mine, padded
from support.narrow_dtypes import FLOAT16, LAYOUTS, narrow_reference
from support.shared_worlds import by_world_size, in_one_world
from torch.distributed.tensor import DTensor

from composer3d import StepAction, StepError, StepPoint, hookimpl, plugin
from composer3d.testing import count_collectives, full, run_ranks

# ---- float16 ---------------------------------------------------------------------------------------------------------


def float16_step(text):
    tokens, targets = padded()
    run = composed(f"{text}\n{FLOAT16}initial_scale = 1024.0\n")
    run.optimizer(torch.optim.SGD, lr=0.1)
    reference = narrow_reference(tokens, targets, run.context.data_parallel_degree, torch.float16, 1024.0)
    with run.step(0), count_collectives(run.mesh) as collectives:
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        dtypes = {(row.op, row.axis, str(row.dtype)) for row in collectives.rows}
        run.clip_grad_norm_(float("inf"))
    error = max(
        float((full(p.grad) - reference[name]).abs().max() / reference[name].abs().max())
        for name, p in run.named_parameters()
    )
    run.close()
    return error, dtypes


@pytest.mark.parametrize(("world_size", "texts"), by_world_size(LAYOUTS))
def test_float16_means_the_same_in_every_layout(world_size, texts):
    found = in_one_world(float16_step, world_size, *((text,) for text in texts))
    for text, (error, dtypes) in ((text, rank) for text, ranks in zip(texts, found, strict=True) for rank in ranks):
        assert error < 2e-6
        if "fsdp2" in text:
            assert ("all_gather", "dp_shard", "torch.float16") in dtypes
            assert ("reduce_scatter", "dp_shard", "torch.float32") in dtypes


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@plugin(family="profiling")
class Overflowing:
    """Puts an infinity into one gradient of one rank.

    Args:
        rank: Which.
        steps: When.
    """

    rank: int = 0
    steps: tuple[int, ...] = (1,)

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="overflowing", point=StepPoint.GRADIENTS_REDUCED, run=self._overflow)

    def _overflow(self, state):
        if state.context.rank == self.rank and state.step in self.steps:
            gradient = next(p.grad for p in state.parts[0].module.parameters() if p.grad is not None)
            local(gradient).view(-1)[0] = float("inf")


PP = "[mesh]\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 3\n"
OVERFLOWING = '[profiling.overflowing]\nuse = "plugins.test_mixed_float16:Overflowing"\n'


def overflowing(text, num_steps=4):
    """Train with an overflow on one rank; return scales, skipped steps, whether weights stayed, and the weights."""
    run = composed(text)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    rows, unchanged = [], []
    for number in range(num_steps):
        before = [local(p.detach()).clone() for _, p in run.named_parameters()]
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        rows.append(run.report(number, {}))
        unchanged.append(
            all(torch.equal(a, local(p)) for a, (_, p) in zip(before, run.named_parameters(), strict=True))
        )
    run.close()
    return [row["loss_scale"] for row in rows], [row["overflow_steps"] for row in rows], unchanged


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        # Stages have other parameters: torch's own scaler would desynchronise there.
        (2, ["[sharding.fsdp2]\n", "[sharding.ddp]\n", PP]),
        (4, ["[sharding.fsdp2]\n" + PP.replace("pp = 2", "pp = 2\ndp_shard = 2")]),
    ],
)
def test_an_overflow_on_one_rank_is_agreed_over_all(world_size, layouts):
    settings = "initial_scale = 1024.0\ngrowth_interval = 1\nbackoff_factor = 0.25\ngrowth_factor = 4.0\n"
    more = FLOAT16 + settings + OVERFLOWING + f"rank = {world_size - 1}\n"
    for ranks in in_one_world(overflowing, world_size, *((layout + more,) for layout in layouts)):
        for scales, skipped, unchanged in ranks:
            assert scales == [4096.0, 1024.0, 4096.0, 16384.0]
            assert skipped == [0, 1, 1, 1]
            assert unchanged == [False, True, False, False]


def test_a_scale_that_is_too_high_comes_down_by_itself():
    manifest = "[sharding.fsdp2]\n" + FLOAT16 + f"initial_scale = {2.0**24}\n"
    for scales, skipped, unchanged in run_ranks(overflowing, 2, manifest, 12):
        assert scales[0] == 2.0**23
        assert 0 < skipped[-1] < 12
        assert scales[-1] == 2.0 ** (24 - skipped[-1])
        assert unchanged == [True] * int(skipped[-1]) + [False] * (12 - int(skipped[-1]))


def test_the_vote_is_the_only_collective_of_its_own():
    def counts(text):
        run = composed(text)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        tokens, targets = (mine(run, tensor) for tensor in padded())
        with count_collectives(run.mesh) as collectives, run.step(0):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
        run.close()
        return {key: count for key, (count, _) in collectives.summary().items()}

    texts = (f"[sharding.fsdp2]\n{text}" for text in ("[precision.mixed]", FLOAT16))
    (plain, _), (scaled, _) = in_one_world(counts, 2, *((text,) for text in texts))
    (key,) = (key for key in scaled if scaled[key] != plain.get(key, 0))
    assert (key[0], scaled.pop(key) - plain.pop(key)) == ("all_reduce", 1)
    assert scaled == plain


def resumed(path, text, cut, end=6):
    """Train six steps, or load after three and train the other three; return weights and metrics."""
    run = composed(text)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    start = 0
    if cut:
        run.load(path)
        start = 3
    for number in range(start, end):
        if number == 3 and not cut:
            run.save(path)
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: full(p) for name, p in run.named_parameters()}
    row = run.report(6, {})
    run.close()
    return weights, row


@pytest.mark.parametrize(
    "layout",
    [pytest.param("", marks=pytest.mark.slow), PP],
)
def test_a_resumed_run_is_the_same_and_reshards(tmp_path, layout):
    settings = "initial_scale = 64.0\ngrowth_interval = 2\n" + OVERFLOWING + "steps = [1]\n"
    sharded = "[sharding.fsdp2]\n" + FLOAT16 + settings
    path = tmp_path / "step-3"
    whole, again = in_one_world(resumed, 2, (path, sharded, False), (path, sharded, True))
    for (weights, row), (other, other_row) in zip(whole, again, strict=True):
        assert row == other_row == {"loss_scale": 128.0, "overflow_steps": 1.0}
        assert all(torch.equal(weights[name], other[name]) for name in weights)
    # In another layout the same scale goes on, and the same weights up to float16's rounding.
    for weights, row in run_ranks(resumed, 2 if layout else 1, path, layout + FLOAT16 + settings, True):
        assert row == {"loss_scale": 128.0, "overflow_steps": 1.0}
        for name, weight in weights.items():
            assert torch.allclose(weight, whole[0][0][name], atol=2e-2)


def test_a_run_goes_on_in_the_other_precision(tmp_path):
    texts = ["[sharding.fsdp2]\n[precision.mixed]\n", f"[sharding.fsdp2]\n{FLOAT16}growth_interval = 2\n"]
    cases = [(tmp_path / str(index), text, False) for index, text in enumerate(texts)]
    # From each the same weights; with the other one the scale begins anew, or is left behind.
    cases += [(path, text, True, 3) for path, *_ in cases for text in texts]
    cases += [(tmp_path / "0", texts[1], True), (tmp_path / "1", texts[0], True)]
    *whole, bf16, to_fp16, to_bf16, fp16, scaled, narrow = (ranks[0] for ranks in in_one_world(resumed, 2, *cases))
    for (weights, _), (other, _) in ((bf16, to_fp16), (fp16, to_bf16)):
        assert all(torch.equal(weights[name], other[name]) for name in weights)
    assert to_fp16[1] == {"loss_scale": 65536.0, "overflow_steps": 0.0} and to_bf16[1] == {}
    assert scaled[1] == {"loss_scale": 131072.0, "overflow_steps": 0.0}
    for (weights, _), (other, _) in zip((scaled, narrow), whole, strict=True):
        assert all(torch.allclose(weights[name], other[name], atol=2e-2) for name in weights)


def test_a_scale_that_finds_no_end_stops_the_run():
    scaler = LossScaler(scale=2.0**-22, growth=2.0, backoff=0.5, interval=9)
    scaler.update(True)
    scaler.update(True)
    with pytest.raises(StepError) as caught:
        scaler.update(True)
    assert str(caught.value) == (
        "float16 overflows at any loss scale: after 3 skipped steps it would be 2.98023e-08; what overflows lies in "
        'the model\'s own values; write param_dtype = "bfloat16", or lower optimizer.lr'
    )


def scales_of_the_rule(overflows, *, hysteresis, window, is_restored_by_steps):
    """Return the scale after every step by the rule of DeepSpeed's and Megatron-LM's scalers, from 2**10."""
    scale, patience, since = 2.0**10, hysteresis, 0
    for overflow in overflows:
        if overflow:
            since = 0
            if patience > 1:
                patience -= 1
            else:
                scale = max(scale / 2, 1.0)
        else:
            since += 1
            if is_restored_by_steps:
                patience = hysteresis
            if since == window:
                since, scale, patience = 0, scale * 2, hysteresis
        yield scale


@pytest.mark.parametrize("is_restored_by_steps", [False, True])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_hysteresis_is_that_of_other_systems(hysteresis, is_restored_by_steps):
    scaler = LossScaler(
        scale=2.0**10,
        growth=2.0,
        backoff=0.5,
        interval=3,
        hysteresis=hysteresis,
        is_restored_by_steps=is_restored_by_steps,
        smallest=1.0,
    )
    overflows = [digit == "1" for digit in "1101000110000001110100000000011011000100100100"]
    scales = []
    for overflow in overflows:
        scaler.update(overflow)
        scales.append(scaler.factor)
    options = {"hysteresis": hysteresis, "window": 3, "is_restored_by_steps": is_restored_by_steps}
    assert scales == list(scales_of_the_rule(overflows, **options)) and len(set(scales)) > 3


def test_a_resumed_scale_tolerates_as_many_overflows():
    def scaler(**options):
        return LossScaler(scale=1024.0, growth=2.0, backoff=0.5, interval=9, hysteresis=3, **options)

    first, second = scaler(), scaler()
    first.update(True)
    second.load_state_dict(dict(first.state_dict()))
    for overflow in (True, True, False, True):
        first.update(overflow)
        second.update(overflow)
        assert first.state_dict() == second.state_dict()
    assert first.factor == 256.0


def test_a_static_scale_never_changes():
    scaler = LossScaler(scale=128.0, growth=2.0, backoff=0.5, interval=1, is_static=True)
    for overflow in (False, True, False, True, True):
        scaler.update(overflow)
    assert (scaler.factor, scaler.num_overflows) == (128.0, 3)
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    assert scaler.factor == 128.0
