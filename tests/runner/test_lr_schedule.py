from __future__ import annotations

import math
from pathlib import Path

import pytest

from composer3d.checking.called import schedule_callable_problems
from composer3d.checking.sizes import schedule_problems
from composer3d.errors import ManifestError, ReferenceFailure
from composer3d.manifest import read, read_text, type_manifest
from composer3d.runner import TABLES
from composer3d.runner.objective.batch_size import BatchSize
from composer3d.runner.objective.lr_schedule import LRSchedule, multiplier_of
from composer3d.runner.objective.lr_schedule_table import LRScheduleTable
from composer3d.runner.runner_tables import BatchRampTable
from composer3d.verification.manifest_run import subject_of

WITHOUT = "warmup_start, warmup_shape and warmup_delay are of a warm-up"


def values(num_steps, **keys):
    f = multiplier_of(LRScheduleTable(**keys), num_steps=num_steps, folder=Path(__file__).parent)
    return [f(step) for step in range(num_steps)]


def test_linear_rises_then_falls_to_the_ratio():
    assert values(6, use="linear", warmup=2, min_ratio=0.0) == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert values(6, use="linear", warmup=2, min_ratio=0.2) == pytest.approx([0.5, 1.0, 1.0, 0.8, 0.6, 0.4])


def test_cosine_falls_along_half_a_wave():
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in range(4)]
    assert values(4, use="cosine", warmup=0) == pytest.approx(expected)


def test_cosine_with_five_percent_warmup_is_the_default():
    assert values(40) == values(40, use="cosine", warmup=2, min_ratio=0.1)
    assert values(40)[:3] == [0.5, 1.0, 1.0]


def test_constant_is_constant():
    assert values(40, use="constant") == [1.0] * 40
    assert values(4, use="constant", warmup=0.5) == [0.5, 1.0, 1.0, 1.0]


def test_wsd_is_stable_then_decays_over_the_last_part():
    assert values(10, use="wsd", warmup=2, decay=4, min_ratio=0.0) == [0.5] + [1.0] * 6 + [0.75, 0.5, 0.25]
    assert values(10, use="wsd", warmup=0, min_ratio=0.0) == [1.0] * 9 + [0.5]


def test_a_step_after_the_end_keeps_the_ratio():
    f = multiplier_of(LRScheduleTable(use="linear", min_ratio=0.25), num_steps=4, folder=Path())
    assert f(100) == 0.25


def halves(step, num_steps):
    return 1.0 if step < num_steps // 2 else 0.5


def test_a_callable_is_the_multiple_itself():
    assert values(4, use="test_lr_schedule:halves") == [1.0, 1.0, 0.5, 0.5]
    with pytest.raises(ReferenceFailure, match='module "test_lr_schedule" has no "thirds"'):
        values(4, use="test_lr_schedule:thirds")


def power_of(step, num_steps, *, base):
    return base**-step


def test_a_callable_takes_arguments():
    assert values(3, use="test_lr_schedule:power_of", args={"base": 2}) == [1.0, 0.5, 0.25]


# Of transformers, by its own functions: with warm-up, 13 steps of 3 of warm-up.
TRANSFORMERS = {
    "linear": ({}, {"use": "linear", "min_ratio": 0.0}),
    "cosine": ({}, {"use": "cosine", "min_ratio": 0.0}),
    "cosine_with_restarts": ({"num_cycles": 3}, {"use": "cosine", "cycles": 3, "min_ratio": 0.0}),
    "polynomial": (
        {"lr_end": 1e-2, "power": 2.0},
        {"use": "polynomial", "power": 2.0, "min_ratio": 1e-2},
    ),
    "inverse_sqrt": ({}, {"use": "inverse_sqrt"}),
    "inverse_sqrt ": ({"timescale": 50}, {"use": "inverse_sqrt", "timescale": 50}),
    "constant_with_warmup": ({}, {"use": "constant"}),
    "cosine_with_min_lr": ({"min_lr_rate": 0.2}, {"use": "cosine", "min_ratio": 0.2}),
    "warmup_stable_decay": (
        {"num_decay_steps": 4, "warmup_type": "1-sqrt", "decay_type": "1-sqrt"},
        {"use": "sqrt", "warmup_shape": "sqrt", "decay": 4, "min_ratio": 0.0},
    ),
    "warmup_stable_decay ": (
        {"num_decay_steps": 4, "num_stable_steps": 2, "warmup_type": "cosine", "min_lr_ratio": 0.1},
        {
            "use": "cosine",
            "warmup_shape": "cosine",
            "warmup_start": 0.1,
            "decay": 4,
            "decay_end": 9,
            "min_ratio": 0.1,
        },
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_rates_that_begin_at_0_are_those_of_transformers(name):
    import torch
    from transformers import get_scheduler

    arguments, keys = TRANSFORMERS[name]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    steps = None if "num_stable_steps" in arguments else 13
    counts = {"num_warmup_steps": 3, "num_training_steps": steps}
    theirs = get_scheduler(name.strip(), optimizer, **counts, scheduler_specific_kwargs=arguments)
    rates = []
    for _ in range(13):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    ours = values(13, warmup=3, **{"warmup_start": 0.0} | keys)
    assert ours == pytest.approx(rates, abs=1e-15, rel=1e-13)
    assert rates[0] == keys.get("warmup_start", 0.0) and rates[3] == 1.0


def test_a_logarithmic_warmup_reaches_the_rate_in_its_last_step_and_can_come_later():
    rising = [math.log(step + 1, 4) for step in range(4)]
    assert values(5, use="constant", warmup=4, warmup_shape="log") == pytest.approx([*rising, 1.0])
    late = values(7, use="constant", warmup=4, warmup_shape="log", warmup_delay=2)
    assert late == pytest.approx([0.0, 0.0, *rising, 1.0])


def test_a_quadratic_warmup():
    assert values(4, use="constant", warmup=4, warmup_shape="quadratic") == [0.0, 1 / 16, 1 / 4, 9 / 16]


def test_the_fall_ends_before_the_run_or_after_it():
    early = values(8, use="linear", warmup=0, decay_end=4, min_ratio=0.0)
    assert early == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0, 0.0, 0.0]
    assert values(4, use="linear", warmup=0, decay_end=8, min_ratio=0.0) == [1.0, 0.875, 0.75, 0.625]
    assert values(8, use="linear", warmup=0, decay_end=0.5, min_ratio=0.0) == early


def test_an_exponential_fall_after_a_plateau():
    falls = [2 * 0.5 ** (step / 4) - 1 for step in range(4)]
    assert values(8, use="exponential", warmup=0, decay=4, min_ratio=0.0) == pytest.approx([1.0] * 4 + falls)


class Groups:
    """Stands for an optimizer: a schedule sees nothing but its groups."""

    def __init__(self, *rates):
        self.param_groups = [{"lr": rate} for rate in rates]


def test_every_group_has_its_own_rate_and_a_resumed_schedule_the_step_s():
    optimizer = Groups(1.0, 0.5)
    schedule = LRSchedule(optimizer, lambda step: 1 / (step + 1))
    assert schedule.apply(3) == 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.125]
    resumed = Groups(1.0, 0.5)
    LRSchedule(resumed, lambda step: 1 / (step + 1)).load_state_dict(schedule.state_dict())
    assert resumed.param_groups == optimizer.param_groups


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('use = "linear"\nname = "cosine"', 5, "use and name are two names for one key; remove one of them"),
        (
            'name = "cosin"',
            3,
            '"cosin" is not cosine, linear, wsd, polynomial, sqrt, exponential, inverse_sqrt, constant or '
            '"module:callable"; did you mean "cosine"?',
        ),
        (
            'use = "constant"\ndecay = 0.1',
            5,
            'decay is for cosine, linear, wsd, polynomial, sqrt, exponential, and this is "constant"',
        ),
        ("power = 2", 4, 'power is for polynomial, and this is "cosine"'),
        ('use = "linear"\ncycles = 2', 5, 'cycles is for cosine, and this is "linear"'),
        ("args = { a = 1 }", 4, 'args is for a callable, and this is "cosine"'),
        ("warmup = 0\nwarmup_start = 0.0", 4, f"{WITHOUT}, and there is none"),
        ('use = "constant"\nwarmup_delay = 1', 3, f"{WITHOUT}, and there is none"),
        ("warmup = 1.5", 4, "warmup = 1.5 is neither a number of steps (an integer) nor a fraction of the run"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(text, line, message):
    document = read_text(f"composer3d = 1\ntrain.steps = 1\n[lr_schedule]\n{text}\n")
    with pytest.raises(ManifestError) as caught:
        type_manifest(document, tables=TABLES)
    assert str(caught.value) == f"<text>:{line}:{1 if line > 3 else 2}: [lr_schedule] {message}"


def test_name_is_another_name_for_use():
    document = read_text("composer3d = 1\ntrain.steps = 1\n", overrides=["lr_schedule.name=constant"])
    assert type_manifest(document, tables=TABLES).tables["lr_schedule"].kind == "constant"


MANIFEST = """composer3d = 1
[model]
use = "composer3d.models:llama"
args = { dim = 16, num_layers = 1, num_heads = 2 }
[data]
use = "synthetic"
seq_len = 8
vocab_size = 32
[train]
steps = 8
[lr_schedule]
"""


def test_a_proof_of_steps_begins_at_the_first_that_has_a_rate(tmp_path):
    text = 'use = "constant"\nwarmup = 4\nwarmup_start = 0.0\nwarmup_delay = 1\n'
    (tmp_path / "run.toml").write_text(MANIFEST + text)
    subject = subject_of(str(tmp_path / "run.toml"), (), None, "cpu", scratch=tmp_path)
    assert subject.make_schedule is not None
    schedule = subject.make_schedule(None, Groups(1.0))
    assert [schedule.apply(step) for step in range(4)] == [0.25, 0.5, 0.75, 1.0]


def test_check_calls_a_schedule_with_its_arguments(tmp_path):
    (tmp_path / "own_rates.py").write_text("def falls(step, steps, *, base):\n    return base**-step\n")

    def problems(arguments):
        text = f'use = "own_rates:falls"\nargs = {arguments}\n'
        (tmp_path / "run.toml").write_text(MANIFEST + text)
        return schedule_callable_problems(type_manifest(read(tmp_path / "run.toml"), tables=TABLES))

    assert problems("{ base = 2 }") == []
    assert "unexpected keyword argument 'bas'" in problems("{ bas = 2 }")[0].message


def over_samples(**keys):
    return LRScheduleTable(unit="samples", **keys)


def test_a_schedule_over_samples_follows_a_batch_that_grows():
    train = TABLES["train"](steps=6, global_batch=8, batch_ramp=BatchRampTable(start=2, step=2, every=1))
    sizes = BatchSize(train, degree=1)
    consumed = [0, 2, 6, 12, 20, 28]
    assert [sizes.position_of(step) for step in range(6)] == consumed
    table = over_samples(use="linear", warmup=6, decay_end=26, min_ratio=0.0)
    f = multiplier_of(table, num_steps=6, folder=Path(), sizes=sizes)
    assert [f(step) for step in range(6)] == pytest.approx([0, 1 / 3, 1, 14 / 20, 6 / 20, 0])
    # A fraction is one of the run's samples.
    f = multiplier_of(over_samples(use="wsd", warmup=0.5, decay=0.25), num_steps=6, folder=Path(), sizes=sizes)
    assert [f(step) for step in range(6)] == pytest.approx([n / 18 for n in consumed[:4]] + [1, 1 - 0.9 / 9])


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ('unit = "samples"\nuse = "test_lr_schedule:halves"', 'unit is for cosine, .*, constant, and this is "test_lr'),
        (
            'unit = "samples"\nwarmup = 2\nwarmup_delay = 1',
            "warmup_delay counts steps, and this schedule counts samples",
        ),
        ('unit = "tokens"', "unit"),
    ],
)
def test_what_a_schedule_over_samples_cannot_have(keys, said):
    with pytest.raises(ManifestError, match=said):
        type_manifest(read_text(f"composer3d = 1\n[lr_schedule]\n{keys}\n"), tables=TABLES)


@pytest.mark.parametrize(
    ("train", "schedule", "said"),
    [
        ("steps = 10\naccumulate = 2", 'unit = "samples"', "learning rates would depend on the number of ranks"),
        ("steps = 10\nglobal_batch = 4", 'unit = "samples"\nwarmup = 41', "warmup = 41 samples is longer than the run"),
        ("steps = 10\nglobal_batch = 4", 'unit = "samples"\nwarmup = 40', None),
        ("steps = 10", "warmup = 12\ndecay_end = 11", "warmup = 12 steps is longer than the run"),
        ("steps = 10", "warmup = 12\ndecay_end = 20", None),
    ],
)
def test_a_warmup_is_compared_with_the_run_and_with_the_end_of_the_fall(train, schedule, said):
    text = f"composer3d = 1\n[train]\n{train}\n[lr_schedule]\n{schedule}\n"
    problems = schedule_problems(type_manifest(read_text(text), tables=TABLES))
    assert (said is None and not problems) or said in str(problems[0])
