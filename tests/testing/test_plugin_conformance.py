"""The conformance suite finds every fault under its heading, with its name, and lets built-ins pass."""

from __future__ import annotations

import pytest
from support import nonconforming_plugins as faulty

from composer3d.registry import Catalogue
from composer3d.testing.conformance import HEADINGS, Conformance, NonConformance, conformance_checks, run_conformance

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
    ("numerics", Conformance(plugin=faulty.WrongGradients), "wrong numbers", "gradients differ by more than"),
    ("state", Conformance(plugin=faulty.LostState), "lost state", "in the step after a load"),
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
