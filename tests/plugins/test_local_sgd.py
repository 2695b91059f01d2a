"""`[communication.local_sgd]`: identities that hold to the last bit, and the papers' formulas on one device."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import pytest
import torch
from support.islands import ALONE, ISLANDS, LR, PLAIN, STEPS, batches, distance, equal, mine, table, trained
from support.models import composed, full, padded, seeded, sum_loss, unpadded

import composer3d
from composer3d import ManifestError, block_codec
from composer3d.runner import EMA
from composer3d.testing import run_ranks

# ---- identities ------------------------------------------------------------------------------------------------------


def test_an_outer_rate_of_1_without_momentum_is_averaging():
    averaged = run_ranks(trained, 2, PLAIN + table("average", every=2))
    outer = run_ranks(trained, 2, PLAIN + table("diloco", every=2, outer_lr=1.0, outer_momentum=0.0))
    for one, other in zip(averaged, outer, strict=True):
        assert all(equal(a, b) for a, b in zip(one, other, strict=True))
    # Apart between exchanges, and together after them.
    assert [equal(a, b) for a, b in zip(*averaged, strict=True)] == [False, True] * 3


def test_one_island_is_the_inner_run():
    (alone,) = run_ranks(trained, 1, ALONE + table("average", every=2))
    (outer,) = run_ranks(trained, 1, ALONE + table("diloco", every=2, outer_lr=1.0, outer_momentum=0.0))
    (inner,) = run_ranks(trained, 1, "")
    assert equal(alone[-1], inner[-1]) and equal(outer[-1], inner[-1])


def even(num_sequences, seed):
    """Return sequences of 4 tokens: an island has 16 a step, by which a gradient is multiplied without rounding."""
    return unpadded(num_sequences=num_sequences, seq_len=4, seed=seed)


def test_every_warm_up_step_is_one_of_data_parallelism():
    """To the bit where islands have a power of two of tokens, by which each weighs its gradient; else but for that."""
    text = table("post_local", every=3, warmup_steps=STEPS - 3)
    for make, is_same in ((even, equal), (unpadded, lambda one, other: distance(one, other) < 1e-13)):
        parallel = run_ranks(partial(trained, make=make), 2, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n")[0]
        together = run_ranks(partial(trained, make=make), 2, PLAIN + text)[0]
        assert all(is_same(parallel[step], together[step]) for step in range(STEPS - 3))


def whole_numbers(num_sequences, seed):
    """Return inputs and targets that are small whole numbers."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(-1, 2, (num_sequences, size), generator=generator).double() for size in (4, 4)]
    return tuple(rows)


def halved_squares(output, target):
    return (output - target).square().sum() / 2, target.numel()


def exactly_trained(text):
    """Train a linear model from whole numbers on 4 samples a rank: no sum or product is rounded."""
    torch.set_default_dtype(torch.float64)
    model = torch.nn.Linear(4, 4, bias=False)
    model.weight.data = torch.arange(-8.0, 8.0).view(4, 4)
    return trained(text, 4, make=whole_numbers, model=model, loss_fn=halved_squares)


def test_every_step_with_plain_sgd_is_data_parallelism():
    """To the bit where nothing is rounded. Else the mean of two steps is rounded otherwise than a step of the mean."""
    parallel = run_ranks(exactly_trained, 2, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n")[0]
    for more in (table("average", every=1), table("diloco", every=1, outer_lr=1.0, outer_momentum=0.0)):
        together = run_ranks(exactly_trained, 2, PLAIN + more)[0]
        assert all(equal(one, other) for one, other in zip(parallel, together, strict=True))
    assert not equal(parallel[-1], parallel[-2])
    parallel = run_ranks(trained, 2, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n")[0]
    together = run_ranks(trained, 2, PLAIN + table("average", every=1))[0]
    assert all(distance(one, other) < 1e-13 for one, other in zip(parallel, together, strict=True))


def test_warm_up_weighs_islands_by_their_tokens():
    """Islands have other numbers of valid targets: the mean is over tokens, as in data parallelism.

    There the loss is divided by the tokens of all, here by an island's own, which its gradient is multiplied by.
    """
    text = table("diloco", every=2, warmup_steps=3)
    parallel = run_ranks(partial(trained, make=padded), 2, "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n", 3)[0]
    one, other = run_ranks(partial(trained, make=padded), 2, PLAIN + text)
    assert distance(parallel[2], one[2]) < 1e-13
    assert equal(one[2], other[2]) and not equal(one[3], other[3]) and equal(one[4], other[4])


def test_one_fragment_without_delay_is_diloco():
    plain = run_ranks(trained, 2, PLAIN + table("diloco", every=2))[0]
    streamed = run_ranks(trained, 2, PLAIN + table("streaming_diloco", every=2))[0]
    assert all(equal(a, b) for a, b in zip(plain, streamed, strict=True))


# ---- formulas --------------------------------------------------------------------------------------------------------


def simulated(
    *,
    every,
    lr,
    momentum,
    fragments=1,
    overlap=0,
    mix=0.0,
    quantise=None,
    weigh=False,
    make=unpadded,
    islands=ISLANDS,
    samples=None,
):
    """Train the islands one after the other on one device, by the papers' formulas; return island 0 after each step."""
    torch.set_default_dtype(torch.float64)
    models = [seeded() for _ in range(islands)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=LR) for model in models]
    names = [fqn for fqn, _ in models[0].named_parameters()]
    held = [[f for f in names if fragment_of(f, fragments) == number] for number in range(fragments)]
    outer = {fqn: p.detach().clone() for fqn, p in models[0].named_parameters()}
    velocity = {fqn: torch.zeros_like(tensor) for fqn, tensor in outer.items()}
    flights, found = {}, []
    counts = [[0] * islands for _ in held]
    for step in range(STEPS):
        for island, (tokens, targets) in enumerate(batches(step, islands, make, samples)):
            model = models[island]
            loss, count = sum_loss(model(tokens), targets)
            for each in counts:
                each[island] += int(count)
            model.zero_grad()
            (loss / count).backward()
            optimizers[island].step()
        parameters = [dict(model.named_parameters()) for model in models]
        for number, fqns in enumerate(held):
            if number in flights and step - flights[number][0] >= overlap:
                apply(parameters, outer, velocity, flights.pop(number)[1], lr, momentum, mix)
            since = step + 1 - number * every // fragments
            if since > 0 and since % every == 0:
                weights = counts[number] if weigh else [1] * islands
                counts[number] = [0] * islands
                means = mean_of(parameters, fqns, weights, outer, quantise)
                if overlap == 0:
                    apply(parameters, outer, velocity, means, lr, momentum, mix)
                else:
                    flights[number] = (step, means)
        found.append({fqn: p.detach().clone() for fqn, p in parameters[0].items()})
    torch.set_default_dtype(torch.float32)
    return found


def mean_of(parameters, fqns, weights, outer, quantise):
    """Return the weighted mean of islands, of whose distances from the outer parameters one flat row is encoded."""
    if quantise is None:
        return {
            f: sum(w * each[f].detach() for w, each in zip(weights, parameters, strict=True)) / sum(weights)
            for f in fqns
        }
    codec = block_codec(quantise)
    before = torch.cat([outer[f].flatten() for f in fqns])
    rows = [before - torch.cat([each[f].detach().flatten() for f in fqns]) for each in parameters]
    decoded = [codec.decode(codec.encode(row.view(1, -1)), row.numel()).view(-1).to(row.dtype) for row in rows]
    mean = before - sum(w * row for w, row in zip(weights, decoded, strict=True)) / sum(weights)
    pieces = mean.split([outer[f].numel() for f in fqns])
    return {f: piece.view_as(outer[f]) for f, piece in zip(fqns, pieces, strict=True)}


def apply(parameters, outer, velocity, means, lr, momentum, mix):
    for fqn, mean in means.items():
        difference = outer[fqn] - mean
        velocity[fqn] = momentum * velocity[fqn] + difference
        outer[fqn] = outer[fqn] - lr * (difference + momentum * velocity[fqn])
        for each in parameters:
            each[fqn].data.copy_(mix * each[fqn].data + (1 - mix) * outer[fqn])


def fragment_of(fqn, fragments):
    return int(fqn.split(".")[1]) % fragments if fqn.startswith("layers.") else 0


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        (table("diloco", every=2), {"every": 2, "lr": 0.7, "momentum": 0.9}),
        (
            table("diloco", every=3, outer_lr=0.4, outer_momentum=0.5),
            {"every": 3, "lr": 0.4, "momentum": 0.5},
        ),
        (
            table("streaming_diloco", every=3, fragments=3),
            {"every": 3, "lr": 0.7, "momentum": 0.9, "fragments": 3},
        ),
        (
            table("streaming_diloco", every=4, fragments=2, overlap=1),
            {"every": 4, "lr": 0.7, "momentum": 0.9, "fragments": 2, "overlap": 1, "mix": 0.5},
        ),
        (
            table("streaming_diloco", every=4, fragments=2, overlap=1, quantise='"int4"'),
            {"every": 4, "lr": 0.7, "momentum": 0.9, "fragments": 2, "overlap": 1, "mix": 0.5, "quantise": "int4"},
        ),
        (
            table("streaming_diloco", every=3, overlap=2, mix=0.0),
            {"every": 3, "lr": 0.7, "momentum": 0.9, "overlap": 2},
        ),
    ],
    ids=[
        "published",
        "another outer optimizer",
        "fragments",
        "fragments that overlap",
        "outer gradients of 4 bits",
        "overlap, nothing stays",
    ],
)
def test_real_ranks_are_the_simulation(text, setting):
    expected = simulated(**setting)
    found = run_ranks(trained, 2, PLAIN + text)[0]
    assert all(equal(one, other) for one, other in zip(expected, found, strict=True))


def test_islands_are_weighed_by_their_tokens_and_outer_gradients_are_encoded_once():
    """Three islands with other numbers of valid targets, and a codec."""
    text = table("diloco", every=2, quantise='"int8"', weigh='"tokens"')
    find = partial(trained, make=padded_for_three)
    found = run_ranks(find, 3, "[mesh]\nisland = 3\n" + text)
    setting = {"every": 2, "lr": 0.7, "momentum": 0.9, "quantise": "int8", "weigh": True}
    expected = simulated(**setting, make=padded_for_three, islands=3)
    equally = simulated(**{**setting, "weigh": False}, make=padded_for_three, islands=3)
    assert all(equal(one, other) for one, other in zip(expected, found[0], strict=True))
    assert distance(equally[-1], found[0][-1]) > 1e-6
    assert all(equal(found[0][1], other[1]) for other in found)


def padded_for_three(num_sequences, seed):
    return padded(num_sequences=9, seed=seed)


def evaluated(text, averaged=False):
    """Return weights, or moving averages, the loss of an evaluation with them, and whether they are as before."""
    torch.set_default_dtype(torch.float64)
    run = composed(text)
    optimizer = run.optimizer(torch.optim.SGD, lr=LR)
    ema = EMA(run, decay=0.5)
    tokens, targets = mine(run, 0)
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    ema.update(0)
    batch = unpadded(num_sequences=8, seed=99)
    with ema.applied() if averaged else nullcontext():
        own = {fqn: full(p.detach()).clone() for fqn, p in run.named_parameters()}
        loss = float(run.evaluate(batch[0], target=batch[1]).loss)
        after = {fqn: full(p.detach()).clone() for fqn, p in run.named_parameters()}
    run.close()
    return own, loss, equal(own, after)


def loss_of(weights):
    torch.set_default_dtype(torch.float64)
    model = seeded()
    model.load_state_dict(weights, strict=False)
    tokens, targets = unpadded(num_sequences=8, seed=99)
    loss, count = sum_loss(model.eval()(tokens), targets)
    torch.set_default_dtype(torch.float32)
    return float(loss.detach() / count)


@pytest.mark.parametrize("averaged", [False, True], ids=["weights", "moving averages"])
@pytest.mark.parametrize("more", ["", "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"], ids=["alone", "fsdp2"])
def test_evaluation_is_of_the_mean_of_islands(more, averaged):
    layout = PLAIN if not more else more.replace("[mesh]\n", PLAIN)
    ranks = run_ranks(evaluated, 4 if more else 2, layout + table("diloco", every=2), averaged)
    one, other = ranks[0], ranks[-1]
    mean = {fqn: (tensor + other[0][fqn]) / 2 for fqn, tensor in one[0].items()}
    assert not equal(one[0], other[0])
    for _, loss, is_put_back in ranks:
        assert abs(loss - loss_of(mean)) < 1e-13 and is_put_back
    alone = run_ranks(evaluated, 2, PLAIN + table("diloco", every=2, evaluate='"own"')) if not more else ()
    for own, loss, _ in alone:
        assert abs(loss - loss_of(own)) < 1e-13


@pytest.mark.parametrize(
    ("layout", "world_size"),
    [
        ("[mesh]\nisland = 2\ndp_shard = 2\n[sharding.fsdp2]\n", 4),
        ("[mesh]\nisland = 2\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 2\n", 4),
    ],
    ids=["fsdp2", "pipeline"],
)
def test_islands_of_several_ranks_are_those_of_one(layout, world_size):
    """Every island has the samples that it has alone, whatever it shards: but for the order of an island's sums."""
    text = table("streaming_diloco", every=2, fragments=2)
    alone = run_ranks(trained, 2, PLAIN + text)
    for rank, found in enumerate(run_ranks(trained, world_size, layout + text)):
        assert found[-1] and distance(found[-1], alone[rank // (world_size // 2)][-1]) < 1e-13


# ---- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        table("average", every=2),
        table("diloco", every=3),
        table("streaming_diloco", every=4, fragments=2, overlap=1),
        table("streaming_diloco", every=4, overlap=2, quantise='"int4"', weigh='"tokens"'),
    ],
    ids=["average", "diloco", "an exchange in flight", "an encoded one in flight"],
)
@pytest.mark.parametrize("at", [2, 3])
def test_a_resumed_run_is_the_undisturbed_one(text, at, tmp_path):
    undisturbed = run_ranks(trained, 2, PLAIN + text)
    saved = run_ranks(partial(trained, save=(tmp_path / "saved", at)), 2, PLAIN + text)
    resumed = run_ranks(partial(trained, load=tmp_path / "saved", first=at + 1), 2, PLAIN + text)
    for whole, one, other in zip(undisturbed, saved, resumed, strict=True):
        assert equal(whole[-1], one[-1]) and equal(whole[-1], other[-1])


def doubled(num_sequences, seed):
    """Return what gives two islands the same samples, and one island both."""
    return tuple(torch.cat([tensor, tensor]) for tensor in unpadded(num_sequences=num_sequences // 2, seed=seed))


def test_an_exchange_in_flight_goes_on_with_another_number_of_islands(tmp_path):
    """Islands with the same samples are one, whose parameters are their mean; it sums over twice the samples."""
    text = table("streaming_diloco", every=4, overlap=1)
    undisturbed = run_ranks(partial(trained, make=doubled, save=(tmp_path / "saved", 3)), 2, PLAIN + text)
    (alone,) = run_ranks(partial(trained, make=doubled, load=tmp_path / "saved", first=4), 1, ALONE + text)
    assert distance(undisturbed[0][-1], alone[-1]) < 1e-13


# ---- refusals --------------------------------------------------------------------------------------------------------


SPREAD = '[sharding.spread]\nuse = "third_party.island_plugins:Spread"\n'
OWNED = '[sharding.rival]\nuse = "third_party.island_plugins:Rival"\n'
CODED = '[communication.compression]\ngradients = "int8"\naxes = ["island"]\n'


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (table("average", every=2, outer_lr=0.5), "outer_lr has no effect"),
        (table("diloco", every=2, fragments=2), "fragments has no effect"),
        (table("average", every=2, quantise='"int8"'), "which has no outer gradient"),
        (table("streaming_diloco", every=4, mix=0.5), "mix has no effect without overlap"),
        (table("post_local", every=2), "post_local is average after a warm-up"),
        (table("average", every=2, warmup_steps=2), "post_local is average after a warm-up"),
        (table("streaming_diloco", every=4, fragments=2, overlap=2), "overlap has to be below every / fragments"),
        (table("streaming_diloco", every=8, fragments=4), "fragments = 4, and the model has 3 blocks"),
        (table("average", every=2, axis='"dp_shard"'), 'unknown key "axis"'),
        (table("average", every=2) + SPREAD, 'over "island", along which ranks train models of their own'),
        (table("average", every=2) + OWNED, 'both own the axis "island"; remove one of them'),
        (table("average", every=2) + CODED, "data parallelism sends nothing over island"),
    ],
)
def test_refusals(text, said):
    assert said in run_ranks(refusal, 2, PLAIN + text)[0]


def test_one_island_is_refused_unless_it_is_stated():
    (found,) = run_ranks(refusal, 1, table("diloco", every=2))
    assert found.startswith(":2:16: [communication.local_sgd] there is one island, and nobody to exchange with; "), (
        found
    )


def test_a_run_that_ends_before_islands_meet(tmp_path):
    """`every` beyond the steps of a run is found by check."""
    path = tmp_path / "run.toml"
    path.write_text(
        'composer3d = 1\nextends = "quickstart"\n[train]\nsteps = 40\n[mesh]\nisland = 2\ndp_shard = 1\n'
        '[communication.local_sgd]\nmethod = "diloco"\nevery = 50\n'
    )
    found = composer3d.check(path)
    assert not found.ok
    assert any("islands first meet after 50" in problem["message"] for problem in found.to_json()["problems"])
