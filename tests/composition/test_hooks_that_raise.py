"""What a plugin raises names the plugin, its table and its hook: in `check` where it can be known, else in the call."""

from __future__ import annotations

import json

import pytest
import torch
from support.models import Net, mine, sum_loss, unpadded, write_manifest
from support.raising_hooks import HOOKS, class_of

import composer3d
from composer3d.errors import HookError
from composer3d.runner.reporting.failures import FailureReport
from composer3d.testing import run_ranks

RETURNED = {
    "InSelect": 'select of the transform "odd" of odd',
    "InApply": 'apply of the transform "odd" of odd',
    "InRows": 'rows of the transform "odd" of odd',
    "InAction": 'the step action "odd" of odd',
}
# What a run calls with batches, weights or a checkpoint.
LATER = ("load_parameter", "place_batch", "observe_batch", "measure", "metrics", "close", "replicas")
QUICKLY = ("actions", "layout", "split", "step_actions", "dtypes", "state")
IN_CHECK = [
    pytest.param(hook, marks=() if hook.removeprefix("composer3d_") in QUICKLY else pytest.mark.slow)
    for hook in HOOKS
    if hook.removeprefix("composer3d_") not in LATER
]


def raised_by(reference):
    """Do all that calls hooks, with a plugin; return the kind and the text of the first error."""
    text = f'[train]\nmicrobatch = 3\n[sharding.fsdp2]\n[profiling.odd]\nuse = "{reference}"\n'
    run = None
    try:
        run = composer3d.compose(Net, write_manifest(text), loss_fn=sum_loss)
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        tokens, targets = (mine(run, tensor) for tensor in unpadded())
        with run.step(0):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
        run.report(0, {"loss": 0.5})
        hooks = run._assembled.hooks
        hooks.actions(run.context, 2)
        hooks.layout({"dp_shard": 1})
        run.close()
    except composer3d.ComposerError as error:
        if run is not None and "composer3d_close" not in reference:
            run.close(error)
        return type(error).__name__, str(error)
    return None


def all_raised(references):
    return {reference: raised_by(reference) for reference in references}


@pytest.fixture(scope="module")
def raised():
    references = [class_of(hook) for hook in HOOKS] + [f"support.raising_hooks:{name}" for name in RETURNED]
    return run_ranks(all_raised, 1, references)[0]


@pytest.mark.parametrize("hook", HOOKS)
def test_an_error_of_a_hook_names_plugin_table_and_hook(raised, hook):
    kind, text = raised[class_of(hook)]
    assert kind in ("HookError", "ManifestError")
    assert "[profiling.odd]" in text
    assert f"{hook} of odd raised KeyError: 'in {hook}', at " in text
    assert text.endswith("raising_hooks.py:2")


@pytest.mark.parametrize("name", RETURNED)
def test_so_does_that_of_a_function_that_a_hook_returned(raised, name):
    kind, text = raised[f"support.raising_hooks:{name}"]
    assert kind in ("HookError", "ManifestError")
    assert "[profiling.odd]" in text
    assert f"{RETURNED[name]} raised KeyError: 'in a function that a hook returned', at " in text


@pytest.fixture
def problems(tmp_path, monkeypatch):
    """Check a small run with a plugin; return its problems."""
    monkeypatch.chdir(tmp_path)

    def look(reference):
        (tmp_path / "run.toml").write_text(
            "composer3d = 1\nmodel = { args = { dim = 16, num_layers = 1 } }\n"
            'data = { use = "synthetic", seq_len = 8 }\ntrain.steps = 1\nmesh.dp_shard = 2\nsharding.fsdp2 = {}\n'
            f'[profiling.odd]\nuse = "{reference}"\n'
        )
        return composer3d.check("run.toml").to_json()["problems"]

    return look


@pytest.mark.parametrize("hook", IN_CHECK)
def test_check_reports_it_at_the_table(problems, hook):
    (problem,) = problems(class_of(hook))
    assert (problem["table"], problem["line"]) == ("profiling.odd", 7)
    assert problem["message"].startswith(f"{hook} of odd raised KeyError: 'in {hook}', at ")


def test_check_is_content_with_a_hook_that_needs_what_is_not_there(problems, tmp_path):
    (tmp_path / "needs_values.py").write_text(
        "from composer3d import StepAction, StepPoint, hookimpl, plugin\n"
        "@plugin(family='profiling')\n"
        "class Needs:\n"
        "    @hookimpl\n"
        "    def composer3d_step_actions(self, context):\n"
        "        weight = next(context.parts[0].module.parameters())\n"
        "        largest = float(weight.detach().to_local().abs().max())\n"
        "        return StepAction(name='odd', point=StepPoint.BEGIN, run=lambda state: print(largest))\n"
    )
    assert problems("needs_values:Needs") == []


def test_a_plugin_s_error_keeps_its_traceback_in_the_report_of_a_run(tmp_path):
    try:
        try:
            raise KeyError("inside")
        except KeyError as inner:
            raise HookError("x of odd raised it", path=("profiling", "odd"), place="r.toml:1", is_own=True) from inner
    except HookError as error:
        report = FailureReport.from_exception(error, rank=0, world_size=1, folder=tmp_path)
    assert (report.kind, report.message) == ("crash", "[profiling.odd] (r.toml:1): x of odd raised it")
    assert "KeyError: 'inside'" in report.traceback
    assert json.loads(report.to_text())["error"] == "HookError"
