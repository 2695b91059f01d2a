"""The conformance suite finds every fault under its heading, with its name, and lets built-ins pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support import nonconforming_plugins as faulty

import composer3d
from composer3d.registry import Catalogue
from composer3d.testing.conformance import (
    HEADINGS,
    Conformance,
    NonConformance,
    accepted_options,
    conformance_checks,
    run_conformance,
)
from composer3d.testing.conformance.conformance_case import Written
from composer3d.testing.conformance.paired_payloads import Sent, out_of_order, sent_on_equal_batches

# Heading, plugin, verdict, and a part of the message.
FAULTS = [
    ("effect", Conformance(plugin=faulty.DoesNothing), "does nothing", "are those without it"),
    (
        "collectives",
        Conformance(plugin=faulty.Undeclared),
        "undeclared collectives",
        '1 all_reduce over dp_shard in a step, and the docstring says "none."',
    ),
    (
        "collectives",
        Conformance(plugin=faulty.PlannedOtherwise, collectives={("all_reduce", "dp_shard"): 2}),
        "undeclared collectives",
        "+1 all_reduce over dp_shard beside +2 all_reduce over dp_shard as stated",
    ),
    (
        "collectives",
        Conformance(plugin=faulty.Swapped),
        "collectives out of order",
        "step 0, what rank 0 puts into number 1 (norm, norms[0]), at nonconforming_plugins.py:",
    ),
    (
        "collectives",
        Conformance(plugin=faulty.SwappedBroadcast),
        "collectives out of order",
        "step 0, what rank 0 takes as number 1 (norm, norms[0]), at nonconforming_plugins.py:",
    ),
    ("numerics", Conformance(plugin=faulty.WrongGradients), "wrong numbers", "gradients differ by more than"),
    ("state", Conformance(plugin=faulty.LostState), "lost state", "in the step after a load"),
    ("state", Conformance(plugin=faulty.LostEverySecond), "lost state", "in the step after a load"),
    ("order", Conformance(plugin=faulty.OrderDependent), "depends on order", "as a table whose name sorts first"),
    (
        "plan",
        Conformance(plugin=faulty.PlannedOtherwise),
        "planned otherwise than run",
        "all_reduce over dp_shard: planned (3, 168), happened (4, 172)",
    ),
    ("purpose", Conformance(plugin=faulty.OpensFiles), "opens files outside of runs", "/dev/null with purpose check"),
    ("refusals", Conformance(plugin=faulty.FailsLater), "fails after check", "fail is not implemented"),
    (
        "refusals",
        Conformance(plugin=faulty.Clamped, refused=[({"limit": 5.0}, "clamps nothing")]),
        "accepts what cannot be",
        "{'limit': 5.0}: accepted; not clamps nothing",
    ),
    ("overhead", Conformance(plugin=faulty.Slow, max_overhead=1.5), "too slow", "of the CPU time of a step without it"),
    ("matrix", Conformance(plugin=faulty.FailsBeside, matrix_minutes=60.0), "fails beside another", "no_such_option"),
]
FAST = ("effect", "purpose")


def names(entry):
    return f"{entry[1].plugin.__name__}-{entry[0]}"


def cases(entries, fast):
    return [
        pytest.param(*entry, id=names(entry), marks=() if entry[0] in fast else pytest.mark.slow) for entry in entries
    ]


@pytest.mark.parametrize(("heading", "case", "verdict", "said"), cases(FAULTS, FAST))
def test_a_fault_is_found_under_its_heading(heading, case, verdict, said):
    (check,) = conformance_checks(case, headings=[heading])
    with pytest.raises(NonConformance) as caught:
        check()
    assert caught.value.verdict == verdict
    assert said in str(caught.value)


def sent(values, names, place, *, is_nothing=False, ranks=(0, 1), step=0):
    return Sent(
        step=step,
        op="all_reduce",
        axis="dp_shard",
        ranks=ranks,
        size="torch.float32 (1,)",
        values=values,
        names=names,
        place=place,
        is_nothing=is_nothing,
    )


FIRST, SECOND = sent("1.5", "a", "own.py:1 in add"), sent("2.5", "b", "own.py:1 in add")


@pytest.mark.parametrize(
    "one",
    [
        pytest.param([FIRST, SECOND], id="values"),
        pytest.param([replace(FIRST, values=""), replace(SECOND, values="")], id="names"),
        pytest.param([sent("", "", "own.py:1 in add"), sent("", "", "own.py:2 in add")], id="lines"),
        pytest.param([FIRST, SECOND, sent("3.5", "c", "own.py:1 in add")], id="three"),
    ],
)
def test_collectives_in_another_order_are_told(one):
    other = [*one[1:], one[0]]
    assert out_of_order([one, one]) == ""
    assert "what rank 0 puts into number 1" in out_of_order([one, other])
    assert f"rank 1 puts into number {len(one)}: each is reduced with another one" in out_of_order([one, other])
    # Of another group, or of another step, they are others.
    assert out_of_order([one, [replace(each, ranks=(1, 2)) for each in other], []]) == ""
    assert out_of_order([one, [replace(each, step=1) for each in other]]) == ""


def test_what_each_rank_adds_in_its_turn_is_in_order():
    own, nothing = sent("1.5", "own", "own.py:1 in add"), sent("", "zeros", "own.py:2 in add", is_nothing=True)
    assert out_of_order([[own, nothing], [nothing, own]]) == ""
    # Numbers of a rank's own, which are no other rank's.
    assert out_of_order([[replace(FIRST, values="1"), SECOND], [replace(FIRST, values="3"), SECOND]]) == ""


def broadcast(names, source, place="own.py:1 in share"):
    return replace(sent("", names, place), op="broadcast", source=source)


def test_broadcasts_in_another_order_are_told():
    one, other = broadcast("a", 0), broadcast("b", 0)
    assert out_of_order([[one, other], [one, other]]) == ""
    said = out_of_order([[one, other], [other, one]])
    assert "what rank 0 takes as number 1 (a), at own.py:1 in share, rank 1 takes as number 2" in said
    assert said.endswith("each is given the values of another one")
    # Ranks that take turns share what is theirs, and receive into a buffer.
    turns = [broadcast("mine", 0), broadcast("buffer", 1)], [broadcast("buffer", 0), broadcast("mine", 1)]
    assert out_of_order(turns) == ""


@pytest.mark.parametrize(
    ("plugin", "num_sent"), [pytest.param(faulty.CountsOperators, 0), pytest.param(faulty.SumsInBackward, 4)]
)
def test_what_a_plugin_sees_on_its_way_it_has_not_sent(plugin, num_sent, tmp_path):
    written = Written.of(Conformance(plugin=plugin), tmp_path)
    sent = sent_on_equal_batches(written.manifest({}), plugin, world_size=2)
    assert [len(rows) for rows in sent] == [num_sent, num_sent]  # 2 micro-batches of 2 steps
    assert {row.op for rows in sent for row in rows} <= {"all_reduce"}


def test_a_table_that_check_refuses_is_one_finding():
    case = Conformance(plugin=faulty.Clamped, options=[{"limit": -1.0}, {"limit": 0.0}])
    found = list(run_conformance(case))
    assert [(finding.heading, finding.verdict, finding.options) for finding in found] == [
        (HEADINGS[0], "refused options", "{ limit = -1.0 }"),
        (HEADINGS[0], "refused options", "{ limit = 0.0 }"),
    ]
    assert found[0].detail == (
        "[precision.clamped] precision.clamped.limit must be greater than 0.0, not -1.0\n"
        "state options that are accepted, and beside them tables that it needs"
    )
    (check,) = conformance_checks(replace(case, options=[{"limit": 0.0}]), headings=["matrix"])
    with pytest.raises(NonConformance, match="^refused options: .*must be greater"):
        check()


@pytest.mark.parametrize(
    ("name", "table", "why"),
    [
        ("mixed", {}, ""),
        ("local_sgd", {"every": 1}, "islands first meet after 100"),
        ("compression", {"gradients": "int8"}, "neither gradients nor weights are to be compressed"),
        ("async_tensor_parallel", {}, "no plugin of this manifest shards over tp"),
        ("expert_parallel", {}, ""),
    ],
)
def test_options_that_are_accepted_are_found(name, table, why):
    found, refused = accepted_options(Conformance(plugin=Catalogue.installed().load(name), name=name))
    assert found == table and why in refused and bool(why) == bool(refused)


def test_an_axis_of_experts_is_carved_out_of_the_data_axis(tmp_path):
    plugin = Catalogue.installed().load("expert_parallel")
    written = Written.of(Conformance(plugin=plugin, name="expert_parallel"), tmp_path)
    assert (written.degrees, written.world_size, written.owned) == ({"dp_shard": 2, "ep": 2}, 2, ("ep",))
    result = composer3d.check(written.manifest({}))
    assert result.ok, result


def test_every_heading_has_a_fault_that_it_finds():
    assert {heading for heading, *_ in FAULTS} == set(HEADINGS)


CONFORMING = Conformance(plugin=faulty.Clamped, options=({}, {"limit": 0.01}), max_overhead=3.0, matrix_minutes=0.1)


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, id=str(check), marks=() if str(check) == "effect: defaults" else pytest.mark.slow)
        for check in conformance_checks(CONFORMING)
    ],
)
def test_a_plugin_that_conforms_passes(check):
    assert check()


@pytest.mark.parametrize(
    ("name", "beside", "headings"),
    [
        ("activation_checkpoint", "", ("effect",)),
        ("process_groups", "", ("effect",)),
        *(
            pytest.param(name, "", HEADINGS[:-1], marks=pytest.mark.slow)
            for name in ("tensor_parallel", "fsdp2", "ddp", "mixed", "pipeline", "throughput", "low_bit_optimizer")
        ),
    ],
)
def test_built_ins_conform(name, beside, headings):
    case = Conformance(plugin=Catalogue.installed().load(name), name=name, beside=beside)
    assert [
        f"{found.heading}: {found.detail}" for found in run_conformance(case, headings=headings) if not found.ok
    ] == []
