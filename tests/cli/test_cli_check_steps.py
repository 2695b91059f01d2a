"""What `composer3d check` says of every step: actions, the optimizer, and gradients that travel, in their order."""

from __future__ import annotations

import pytest
from support.cli_reports import report

ACTING = '''
from composer3d import StepAction, StepPoint, hookimpl, plugin


@plugin(family="profiling")
class Acting:
    """Act where the manifest says. Memory: none. Collectives: none."""

    name: str = "acting"
    needs: str = ""

    @hookimpl
    def composer3d_step_actions(self, context):
        if self.needs == "mesh":
            context.mesh
        if self.needs == "memory":
            context.state[self]
        first = StepAction(name=self.name, point=StepPoint.AFTER_OPTIMIZER, run=print)
        second = StepAction(name="second", point=StepPoint.AFTER_OPTIMIZER, run=print, before=(self.name,))
        return [first, second, StepAction(name="begin", point=StepPoint.BEGIN, run=print)]
'''


@pytest.fixture
def acting(folder, edited):
    (folder / "acting.py").write_text(ACTING)

    def write(options="", optimizer=""):
        table = f'[sharding.fsdp2]\n[profiling.acting]\nuse = "acting:Acting"\n{options}{optimizer}\n'
        edited("[sharding.fsdp2]\n", table)

    return write


def steps(told):
    return [(row["point"], row["name"], row["plugin"]) for row in told["step"]]


def test_actions_and_the_optimizer_stand_in_the_order_in_which_they_apply(acting, command):
    acting('name = "zero"\n', "[precision.low_bit_optimizer]\n")
    code, told = report(command, "run.toml")
    assert (code, steps(told)) == (
        0,
        [
            ("BEGIN", "begin", "[profiling.acting]"),
            ("BEFORE_MICROBATCH", "fsdp2", "[sharding.fsdp2]"),
            ("OPTIMIZER", "AdamW", "[precision.low_bit_optimizer]"),
            ("AFTER_OPTIMIZER", "second", "[profiling.acting]"),
            ("AFTER_OPTIMIZER", "zero", "[profiling.acting]"),
        ],
    )


def test_an_optimizer_that_steps_in_the_backward_stands_there(acting, command):
    acting()
    changes = ("optimizer.in_backward=true", "train.grad_clip=inf", "train.global_batch=2")
    told = report(command, "run.toml", *(f"--set={change}" for change in changes))[1]
    assert [row[:2] for row in steps(told)][1:3] == [("BEFORE_MICROBATCH", "fsdp2"), ("BACKWARD", "AdamW")]


@pytest.mark.parametrize(("needs", "why"), [("mesh", "the mesh exists only inside"), ("memory", "KeyError")])
def test_actions_that_need_more_than_a_check_has_are_said_to(acting, command, needs, why):
    acting(f'needs = "{needs}"\n')
    code, told = report(command, "run.toml")
    assert (code, steps(told)[-1]) == (0, ("?", "acting", "[profiling.acting]"))
    assert told["step"][-1]["note"].startswith(f"declared when the run is composed: {why}")


def test_actions_that_cannot_be_ordered_are_a_problem(acting, command):
    acting('name = "second"\n')
    code, told = report(command, "run.toml")
    assert (code, told["ok"]) == (2, False)
    assert [problem["message"] for problem in told["problems"]] == ['two plugins declare "second"; names must differ']


def test_gradients_that_travel_do_so_in_every_step(edited, command):
    edited("[sharding.fsdp2]", '[sharding.fsdp2]\n[sharding.cpu_offload]\nmode = "gradients"')
    told = report(command, "run.toml")[1]
    assert [row[:2] for row in steps(told) if "cpu_offload" in row[2]] == [
        ("AFTER_MICROBATCH", "cpu_offload.away"),
        ("GRADIENTS_LOCAL", "cpu_offload.back"),
    ]
