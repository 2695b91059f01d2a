"""The search: what it picks, what it keeps, and that rules of thumb come out of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from decoder_shape import ModelShape
from support.decoder_costs import DecoderCosts

from composer3d.errors import ComposerError
from composer3d.planning.formulas.layout_numbers import Precision, Setup
from composer3d.planning.hardware.hardware_file import load_hardware
from composer3d.planning.suggesting.pinned import kept
from composer3d.planning.suggesting.search import Choices, divisors, nearest_worlds, search
from composer3d.planning.suggesting.suggest import suggest
from composer3d.planning.suggesting.trials import NUM_PLANNED, Planned

GIB = 2**30
H100 = load_hardware("h100")
LLAMA_1B = ModelShape(
    num_layers=16, hidden=2048, num_heads=32, num_kv_heads=8, head_dim=64, ffn=8192, vocab_size=128256, tied=True
)
LLAMA_8B = ModelShape(
    num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336, vocab_size=128256
)
RUN = Setup(seq_len=4096, global_batch=64)


def found(shape, base, world_size, *, hardware=H100, **options):
    return search(DecoderCosts(shape, hardware), base, hardware, world_size=world_size, **options)


def best(shape, base, world_size, *, hardware=H100, **options):
    return found(shape, base, world_size, hardware=hardware, **options).best[0].setup


def test_a_model_that_fits_one_device_is_only_copied_or_its_state_shared():
    setup = best(LLAMA_1B, RUN, 8)
    assert (setup.tp, setup.pp, setup.recompute) == (1, 1, "none")
    assert setup.zero <= 2


def test_a_model_that_does_not_fit_is_sharded():
    setup = best(LLAMA_8B, replace(RUN, seq_len=8192, global_batch=16), 8)
    assert setup.zero == 3 or setup.tp > 1 or setup.pp > 1
    assert setup.world_size == 8


def test_tensor_parallelism_stays_inside_nodes_and_slow_networks_make_pipelines():
    small_nodes = H100.with_nodes(4)
    batch = replace(RUN, global_batch=32)
    for candidate in found(LLAMA_8B, batch, 16, hardware=small_nodes).best[:5]:
        assert candidate.setup.tp <= 4
    ethernet = load_hardware("a100-40/ethernet-25")
    slow = best(LLAMA_8B, batch, 32, hardware=ethernet)
    assert slow.pp > 1
    assert slow.tp <= 8


def test_what_does_not_fit_is_not_proposed():
    two = found(LLAMA_8B, RUN, 2)
    assert all(candidate.verdict(H100.device.memory_bytes) == "fits" for candidate in two.best)
    nothing = found(LLAMA_8B, RUN, 1, memory_bytes=8 * 2**30)
    assert nothing.best == ()
    assert nothing.num_fitting == 0
    assert nothing.smallest.setup.offload


def test_micro_batches_are_all_divisors_of_a_ranks_samples():
    tried = []
    found(LLAMA_8B, replace(RUN, global_batch=48), 8, keep=lambda setup: tried.append(setup) or True)
    assert {each.microbatch for each in tried if each.data_parallel == 8} >= {1, 2, 3, 6}


def test_divisors():
    for number in (1, 2, 36, 97, 1000):
        assert divisors(number) == [each for each in range(1, number + 1) if number % each == 0]
    assert len(divisors(10**12)) == 169


@pytest.mark.parametrize(("world_size", "worlds"), [(7, [6, 8]), (1000, [48]), (10**12, [48])])
def test_the_nearest_worlds_that_divide_are_found_however_large_the_world_is(world_size, worlds):
    options = {"keep": lambda setup: True, "choices": Choices()}
    assert nearest_worlds(12, replace(RUN, global_batch=48), H100, world_size, **options) == worlds


def test_every_layout_divides():
    for candidate in found(LLAMA_8B, RUN, 16).best:
        setup = candidate.setup
        assert setup.world_size == 16
        assert setup.global_batch % (setup.microbatch * setup.data_parallel) == 0
        assert LLAMA_8B.num_heads % setup.tp == LLAMA_8B.num_kv_heads % setup.tp == 0
        assert setup.num_microbatches >= setup.pp


@pytest.mark.parametrize(
    ("pins", "holds"),
    [
        (["tp=4"], lambda setup: setup.tp == 4),
        (["tp>=2", "pp<=2"], lambda setup: setup.tp >= 2 and setup.pp <= 2),
        (["recompute=full"], lambda setup: setup.recompute == "full"),
        (["zero"], lambda setup: setup.zero == 3),
        (["schedule=Interleaved1F1B"], lambda setup: setup.schedule == "Interleaved1F1B" and setup.pp > 1),
        (["microbatch = 2", "offload=true"], lambda setup: setup.microbatch == 2 and setup.offload),
    ],
)
def test_pins_are_kept(pins, holds):
    pinned = found(LLAMA_1B, RUN, 8, keep=kept(pins, RUN))
    assert pinned.best
    assert all(holds(candidate.setup) for candidate in pinned.best)


@pytest.mark.parametrize(
    ("pin", "message"),
    [
        ("tp=x", '"tp=x" holds of no layout: tp is a whole number of at least 1'),
        ("tp<=0", '"tp<=0" holds of no layout: tp is a whole number of at least 1'),
        ("zero=-1", '"zero=-1" pins nothing'),
        ("tpp=2", '"tpp" cannot be kept; did you mean "tp"?'),
        ("recompute<=2", '"recompute<=2" compares what is no number'),
        ("tp==2", '"tp==2" pins nothing'),
        ("tp<=x", '"tp<=x" holds of no layout'),
        ("recompute=sometimes", '"recompute=sometimes" holds of no layout: recompute is full or none or selective'),
        (
            "schedule=GPipe2",
            '"schedule=GPipe2" holds of no layout: schedule is 1F1B or Interleaved1F1B or ZBVZeroBubble',
        ),
        ("offload=maybe", '"offload=maybe" holds of no layout: offload is false or true'),
        ("precision=int3", '"precision=int3" holds of no layout: precision is '),
    ],
)
def test_pins_that_mean_nothing(pin, message):
    with pytest.raises(ComposerError) as caught:
        kept([pin], RUN, Choices().words)
    assert str(caught.value).startswith(f"keep: {message}")


def planned_by(costs, needs_gib=None):
    """Return a plan by other costs, or with a need of its own."""

    def plan(setup):
        total = int((needs_gib(setup) if needs_gib else 40) * GIB)
        seconds = {"step_s": costs.step_s(setup), "compute_s": 1.0, "exposed_s": 0.0, "bubble_s": 0.0}
        return Planned(peak=total - GIB, total=total, time={name: {"value": value} for name, value in seconds.items()})

    return plan


def suggested(own, pins, plan, *, shape=LLAMA_1B, given=None):
    return suggest(
        DecoderCosts(shape, H100),
        own,
        H100,
        world_size=8,
        memory_bytes=H100.device.memory_bytes,
        keep=kept(pins, own),
        plan=plan,
        given=given,
    )


def test_a_sequence_is_sharded_where_one_of_it_fits_no_device():
    long = Setup(seq_len=2**18, global_batch=8)
    costs = DecoderCosts(LLAMA_8B, H100)
    # Of 92.6 GiB that the leanest layout needs without cp and 91.0 with two ranks of it, 92 % of this are between.
    options = {"world_size": 8, "memory_bytes": 99.8 * GIB, "keep": kept([], long)}
    for choices, offers in ((Choices(), False), (Choices(cp=True), True)):
        pinned = options | {"keep": kept(["cp<=2"], long)}
        made, searched, _ = suggest(costs, long, H100, plan=planned_by(costs), choices=choices, **pinned)
        assert bool(searched.num_fitting) is offers
        # The least degree with which something fits; without one, what nearly fills the device.
        assert {each.candidate.setup.cp for each in made} == ({2} if offers else {1})
    # Four ranks of a sequence need less recomputation: what is more than the least is asked for while it is faster.
    made, *_ = suggest(costs, long, H100, plan=planned_by(costs), choices=Choices(cp=True), **options)
    assert [each.candidate.setup.cp for each in made][0] == 4
    assert {each.candidate.setup.cp for each in made} == {2, 4}
    small = DecoderCosts(LLAMA_1B, H100)
    made, *_ = suggest(small, RUN, H100, plan=planned_by(small), choices=Choices(cp=True), **options)
    assert {each.candidate.setup.cp for each in made} == {1}


def test_suggestions_differ_and_check_has_the_last_word():
    asked = []
    as_planned = planned_by(DecoderCosts(LLAMA_1B, H100))

    def plan(setup):
        asked.append(setup)
        if setup.pp > 1:
            raise ComposerError("no pipelines here")
        return as_planned(setup)

    own = replace(RUN, dp_shard=8, recompute="full")
    proposed, searched, refused = suggested(own, ["tp<=2"], plan, given=as_planned(own))
    setups = [suggestion.candidate.setup for suggestion in proposed]
    assert 2 <= len(setups) <= 5
    assert len(set(setups)) == len(setups)
    assert all(setup.pp == 1 and setup.tp <= 2 for setup in setups)
    assert set(setups) <= set(asked)
    assert set(refused) <= {"no pipelines here"}
    # What computes in a lower precision than was asked for comes last.
    dtypes = [setup.precision.dtype for setup in setups]
    assert dtypes == sorted(dtypes, key=lambda dtype: dtype.startswith("float8"))
    assert dtypes[-1].startswith("float8")
    assert any("x the speed of the given manifest" in reason for reason in proposed[0].reasons)
    assert searched.num_tried >= searched.num_fitting > 0


def test_float8_is_planned_only_where_it_is_faster_by_the_costs_of_the_search():
    class Casting(DecoderCosts):
        factor = 1.0

        def step_s(self, setup):
            return super().step_s(setup) * (self.factor if setup.precision.dtype.startswith("float8") else 1.0)

    own, asked = replace(RUN, dp_shard=8), []
    options = {"world_size": 8, "memory_bytes": H100.device.memory_bytes, "keep": kept(["tp=1", "pp=1"], own)}
    for factor in (1.0, 10.0):
        costs, seen = Casting(LLAMA_1B, H100), []
        costs.factor = factor
        as_planned = planned_by(costs)
        suggest(
            costs, own, H100, plan=lambda setup, seen=seen, of=as_planned: seen.append(setup) or of(setup), **options
        )
        asked.append(any(setup.precision.dtype.startswith("float8") for setup in seen))
    assert asked == [True, False]


def test_what_does_not_fit_by_the_plan_is_not_proposed_and_corrects_the_costs():
    planned = []
    # Costs that know nothing of what is kept: only full recomputation fits.
    as_planned = planned_by(
        DecoderCosts(LLAMA_1B, H100), needs_gib=lambda setup: 30 if setup.recompute == "full" else 100
    )

    def plan(setup):
        planned.append(setup)
        return as_planned(setup)

    own = replace(RUN, dp_shard=8)
    proposed, _, refused = suggested(own, ["tp<=2", "pp=1"], plan, given=as_planned(own))
    assert proposed
    assert all(suggestion.candidate.setup.recompute == "full" for suggestion in proposed)
    assert all(suggestion.reasons[0].startswith("30.0 of 79.1 GiB (38%), by the plan") for suggestion in proposed)
    assert proposed[0].reasons[1] == "the given manifest needs 100.0 GiB and does not fit"
    assert any(reason.startswith("needs 100.0 of 79.1 GiB by the plan, and ") for reason in refused)
    # One plan shows what is wrong with all layouts of its kind.
    assert len(planned) <= NUM_PLANNED + 1


def test_micro_batches_grow_as_long_as_the_plan_says_that_they_are_faster():
    costs, own, asked = DecoderCosts(LLAMA_1B, H100), replace(RUN, dp_shard=8), []
    as_planned = planned_by(costs)
    speeds = {1: 1.0, 2: 0.7, 4: 0.8}

    def plan(setup):
        asked.append(setup.microbatch)
        made = as_planned(setup)
        return replace(made, time=made.time | {"step_s": {"value": speeds[setup.microbatch]}})

    def sizes(*pins):
        asked.clear()
        given = {"world_size": 8, "memory_bytes": 79 * GIB, "plan": plan}
        made, *_ = suggest(
            costs, own, H100, keep=kept(["tp=1", "pp=1", "zero=3", "recompute=none", *pins], own), **given
        )
        return [each.candidate.setup.microbatch for each in made if each.candidate.setup.precision.dtype == "bfloat16"]

    assert sizes("microbatch<=1") == [1]
    found = sizes("precision", "dp_shard=8")
    assert found == [2]
    assert {1, 4} <= {*asked}  # which were slower


def test_compressed_communication_is_another_run_and_asked_for_where_a_step_waits():
    costs, own = DecoderCosts(LLAMA_1B, H100), replace(RUN, dp_shard=8)
    as_planned = planned_by(costs)

    every = Choices(compression=("gradients", "weights", "both"))

    def suggested_of(waits, *pins, choices=every, gain=0.5):
        def plan(setup):
            made = as_planned(setup)
            seconds = made.time["step_s"]["value"] * (1.0 if setup.compression == "none" else gain)
            return replace(
                made, time=made.time | {"step_s": {"value": seconds}, "exposed_s": {"value": waits * seconds}}
            )

        keep = kept(["tp=1", "pp=1", "precision", "dp_shard=8", *pins], own)
        options = {"world_size": 8, "memory_bytes": H100.device.memory_bytes, "keep": keep, "choices": choices}
        made, *_ = suggest(costs, own, H100, plan=plan, **options)
        return {each.candidate.setup.compression: each.reasons for each in made}, made[-1].candidate.setup.compression

    found, last = suggested_of(0.2, "zero=3")
    assert last == "both"
    assert found["both"][-1] == "another run than was asked for: it sends gradients and weights compressed"
    assert not any("another run" in reason for reason in found["none"])
    assert suggested_of(0.2, "zero=1")[1] == "gradients"
    assert set(suggested_of(0.01)[0]) == {"none"}
    assert set(suggested_of(0.2, gain=1.1)[0]) == {"none"}
    assert set(suggested_of(0.2, "compression")[0]) == {"none"}
    assert set(suggested_of(0.2, choices=Choices())[0]) == {"none"}


def test_experts_are_sharded_over_more_ranks_as_long_as_the_plan_says_that_it_is_faster():
    costs, asked = DecoderCosts(LLAMA_1B, H100), []
    as_planned = planned_by(costs)
    speeds = {1: 1.0, 2: 0.8, 4: 0.7, 8: 0.9}

    def plan(setup):
        asked.append(setup.ep)
        made = as_planned(setup)
        return replace(made, time=made.time | {"step_s": {"value": speeds[setup.ep]}})

    def suggested_with(plan, *pins):
        options = {"world_size": 8, "memory_bytes": 79 * GIB, "keep": kept(["tp=1", "pp=1", *pins], RUN)}
        own = replace(RUN, dp_shard=8)
        made, _, refused = suggest(costs, own, H100, plan=plan, choices=Choices(ep=True), **options)
        return [each.candidate.setup.ep for each in made], refused

    pins = ["zero=3", "dp_replicate=1"]
    found, _ = suggested_with(plan, *pins)
    assert found[0] == 4
    assert max(asked) == 8  # which was slower
    assert set(suggested_with(plan, *pins, "ep")[0]) == {1}
    assert suggested_with(plan, *pins, "ep<=2")[0][0] == 2

    def dense(setup):
        if setup.ep > 1:
            raise ComposerError("there are no experts")
        return as_planned(setup)

    found, refused = suggested_with(dense, *pins)
    assert set(found) == {1}
    assert refused == ()


def test_precision_is_searched_where_it_is_not_pinned():
    own = replace(RUN, dp_shard=8, precision=Precision(dtype="float32", compute_bytes=4, gather_bytes=4))

    def dtypes(*pins):
        proposed, _, _ = suggested(own, pins, planned_by(DecoderCosts(LLAMA_1B, H100)))
        return {suggestion.candidate.setup.precision.dtype for suggestion in proposed}

    assert "bfloat16" in dtypes()
    assert dtypes("precision") == {"float32"}


def test_the_fastest_that_computes_what_was_asked_for_is_proposed_however_many_others_are_faster():
    class Slow(DecoderCosts):
        def step_s(self, setup):
            return super().step_s(setup) * (20.0 if setup.precision.dtype == "float32" else 1.0)

    own = replace(RUN, dp_shard=8, precision=Precision(dtype="float32", compute_bytes=4, gather_bytes=4))
    costs = Slow(LLAMA_1B, H100)
    options = {"world_size": 8, "memory_bytes": H100.device.memory_bytes, "keep": kept([], own)}
    as_planned = planned_by(costs)

    def proposed(refuses):
        def plan(setup):
            if setup.precision.dtype == refuses:
                raise ComposerError("not here")
            return as_planned(setup)

        made, *_ = suggest(costs, own, H100, plan=plan, **options)
        return [each.candidate.setup.precision.dtype for each in made]

    first, *others = proposed("none")
    assert first == "float32"
    assert {*others} == {"bfloat16", "float8_e4m3fn"}
    assert {*proposed("float32")} == {*others}


def test_tensor_parallel_degrees_are_asked_from_the_least_on_until_they_are_slower():
    class Counted(DecoderCosts):
        asked: list[int] = []

        def can(self, setup):
            self.asked.append(setup.tp)
            return super().can(setup)

        def step_s(self, setup):
            return abs(setup.tp - 2) + super().step_s(setup) * 1e-6

    costs = Counted(LLAMA_1B, H100)
    best = search(costs, RUN, H100, world_size=32).best[0].setup
    assert best.tp == 2
    assert sorted(set(costs.asked)) == [1, 2, 4]
