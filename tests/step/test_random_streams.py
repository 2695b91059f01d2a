from __future__ import annotations

import itertools

import torch
from support.models import composed, mine, seeded, sum_loss, unpadded

from composer3d.mesh import AXES, resolve
from composer3d.step.random_numbers.random_streams import Streams
from composer3d.testing import run_ranks

FSDP = "[sharding.fsdp2]\n[train]\nmicrobatch = 3\n"
LOCKSTEP = '[mesh]\ntp = 2\n[sharding.lockstep]\nuse = "support.plugins:Lockstep"\n'


def probe(run):
    """Let every forward of the model write down what a dropout in it would draw."""
    drawn = []
    run.model.layers[0].register_forward_hook(lambda *_: drawn.append(tuple(torch.rand(2).tolist())))
    return drawn


def draws(text, steps, loop_seed=0, calls=2):
    """Run steps; return what each forward drew, by (step, call, micro-batch), and whether the loop's state stayed."""
    run = composed(text, seeded(dropout=0.3))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    drawn = probe(run)
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    torch.manual_seed(loop_seed)
    untouched, keys, losses = [], [], []
    for number in steps:
        state = torch.get_rng_state()
        with run.step(number):
            for call in range(calls):
                losses.append(float(run.forward_backward(tokens, target=targets)))
                untouched.append(torch.equal(torch.get_rng_state(), state))
                keys += [(number, call, index) for index in range(len(drawn) - len(keys))]
            optimizer.step()
            optimizer.zero_grad()
        untouched.append(torch.equal(torch.get_rng_state(), state))
    return dict(zip(keys, drawn, strict=True)), all(untouched), losses


def test_every_forward_draws_its_own_numbers_and_the_loops_state_stays():
    (first, untouched, _), (second, also_untouched, _) = run_ranks(draws, 2, FSDP, [0, 1])
    assert set(first) == set(second) == set(itertools.product((0, 1), (0, 1), (0, 1)))
    everything = [*first.values(), *second.values()]
    assert len(set(everything)) == len(everything) == 16
    assert untouched and also_untouched


def test_the_same_numbers_again_whatever_the_loop_draws_and_where_it_starts():
    (whole, _, losses), _ = run_ranks(draws, 2, FSDP, [0, 1, 2])
    (again, _, same_losses), _ = run_ranks(draws, 2, FSDP, [0, 1, 2], 17)
    assert again == whole
    assert same_losses == losses
    (resumed, _, _), _ = run_ranks(draws, 2, FSDP, [2])
    assert resumed == {key: value for key, value in whole.items() if key[0] == 2}


def test_another_seed_gives_other_numbers():
    (one, _, _), (other, _, _) = (run_ranks(draws, 1, f"[train]\nseed = {seed}\n", [0])[0] for seed in (0, 1))
    assert one.keys() == other.keys()
    assert not {*one.values()} & {*other.values()}


def test_ranks_along_tp_draw_the_same_and_others_do_not():
    results = [drawn for drawn, *_ in run_ranks(draws, 4, LOCKSTEP + FSDP, [0], 0, 1)]
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert not {*results[0].values()} & {*results[2].values()}


def own_forward(num_forwards):
    """Draw in a loop with its own forward: several forwards before one backward, and numbers of the loop's between."""
    run = composed("")
    drawn = probe(run)
    tokens, targets = unpadded()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    for number in range(2):
        with run.step(number, target=targets):
            logits = sum(run.model(tokens) for _ in range(num_forwards)) / num_forwards
            run.backward(sum_loss(logits, targets), last=False)
            run.backward(sum_loss(run.model(tokens), targets))
    untouched = torch.equal(torch.rand(3), expected)
    run.model(tokens)
    after = torch.rand(3)
    return drawn, untouched, after


def test_a_loop_with_its_own_forward_draws_from_the_streams_too():
    drawn, untouched, after = run_ranks(own_forward, 1, 2)[0]
    assert len(set(drawn)) == len(drawn) == 7
    assert untouched
    # Another number of forwards a step, but the same loop: outside steps its own state decides.
    other, _, same = run_ranks(own_forward, 1, 1)[0]
    assert other[-1] == drawn[-1] and torch.equal(after, same)
    assert other[0] == drawn[0]


def after_an_error():
    run = composed("")
    tokens, targets = unpadded()
    state = torch.get_rng_state()
    run.model.layers[1].register_forward_hook(lambda *_: 1 / 0)
    try:
        with run.step(0):
            run.forward_backward(tokens, target=targets)
    except ZeroDivisionError:
        return torch.equal(torch.get_rng_state(), state)


def test_an_error_in_a_step_gives_the_state_back():
    assert run_ranks(after_an_error, 1) == [True]


def streams_of(rank, *, seed=0, **degrees):
    layout = resolve({"dp_shard": 2, "tp": 2, **degrees}, axes=AXES, world_size=None, default=None)
    return Streams(seed=seed, layout=layout, rank=rank, device=torch.device("cpu"))


def in_a_region(rank, site=0, place=(3, 1)):
    """Return what is drawn before, inside and after a sharded region of one micro-batch."""
    streams = streams_of(rank)
    streams.enter(*place)
    before = torch.rand(2)
    with streams.sharded(site):
        inside = torch.rand(2)
    after = torch.rand(2)
    streams.leave()
    return before.tolist(), inside.tolist(), after.tolist()


def test_sharded_regions_draw_other_numbers_on_every_rank_along_tp():
    regions = [in_a_region(rank) for rank in range(4)]
    # Ranks are (dp, tp) = (0, 0), (0, 1), (1, 0), (1, 1).
    assert regions[0][0] == regions[1][0] != regions[2][0] == regions[3][0]
    assert regions[0][2] == regions[1][2] != regions[2][2] == regions[3][2]
    assert len({tuple(inside) for _, inside, _ in regions}) == 4


def test_a_site_that_draws_twice_draws_other_numbers_and_a_recomputation_the_same():
    def twice(streams):
        drawn = []
        for _ in range(2):
            with streams.sharded(0):
                drawn.append(tuple(torch.rand(4).tolist()))
        return [*drawn, tuple(torch.rand(4).tolist())]

    found = []
    for rank in (0, 1):
        streams = streams_of(rank)
        streams.enter(3, 1)
        state = torch.get_rng_state()
        found.append(twice(streams))
        # What torch's checkpoint does before it computes again.
        torch.set_rng_state(state)
        assert twice(streams) == found[-1]
        streams.leave()
    (one, again, after), (other, _, also_after) = found
    assert len({one, again, other}) == 3
    assert after == also_after


def test_a_sharded_region_outside_of_micro_batches_leaves_the_loops_own_stream_where_it_was():
    torch.manual_seed(0)
    whole = torch.rand(4)
    torch.manual_seed(0)
    with streams_of(1).sharded(0):
        torch.rand(4)
    assert torch.equal(torch.rand(4), whole)


def test_sharded_regions_are_told_apart_by_site_step_and_micro_batch():
    insides = [
        tuple(in_a_region(1, site, place)[1]) for site, place in itertools.product((0, 1), ((3, 1), (3, 2), (4, 1)))
    ]
    assert len(set(insides)) == 6
    assert tuple(in_a_region(1)[1]) == insides[0]


def test_stages_of_a_rank_are_told_apart_and_found_again():
    streams = Streams(
        seed=0, layout=resolve({}, axes=AXES, world_size=1, default=None), rank=0, device=torch.device("cpu")
    )
    draws = []
    for place in ((3, 1, 0), (3, 1, 2), (3, 1, 0)):
        streams.enter(*place)
        draws.append(torch.rand(4))
    streams.leave()
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], draws[1])


def test_leaving_without_entering_changes_nothing():
    state = torch.get_rng_state()
    streams_of(0).leave()
    assert torch.equal(torch.get_rng_state(), state)
