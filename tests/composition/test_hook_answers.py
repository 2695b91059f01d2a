"""An answer of a hook that is none names plugin, table and hook, what was returned, and what is allowed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.models import Net, mine, sum_loss, unpadded, write_manifest
from torch import nn

import composer3d
from composer3d import (
    Batch,
    Dtypes,
    GroupOptions,
    LayoutTraits,
    Metric,
    ParameterMesh,
    Part,
    Phase,
    ReplicaPolicy,
    Split,
    StepAction,
    StepPoint,
    Transform,
    hookimpl,
    plugin,
)
from composer3d.errors import HookError
from composer3d.hooks import Hooks
from composer3d.hooks.answers import expected_of
from composer3d.hookspecs import HookSpecs
from composer3d.registry import Registered
from composer3d.testing import run_ranks

HOOKS = [name for name in vars(HookSpecs) if name.startswith("composer3d_")]
LINEAR = nn.Linear(3, 2)
PART = Part(module=LINEAR)
BATCH = Batch(args=(torch.zeros(4, 2),), target={"labels": torch.zeros(4)})
TRANSFORM = Transform(name="t", phase=Phase.CONVERT, select=lambda model, context: [], apply=lambda *_: [])
ACTION = StepAction(name="a", point=StepPoint.BEGIN, run=print)
CONTEXT = SimpleNamespace(parts=(PART,), claimants=lambda what: [])
GIVEN = {
    "context": CONTEXT,
    "batch": BATCH,
    "fqn": "weight",
    "tensor": torch.zeros(2, 3),
    "cls": torch.optim.SGD,
    "groups": [{"params": list(LINEAR.parameters()), "lr": 0.1}],
}
A_SCALER = "a GradScaler (an object with scale, unscale_ and update)"
A_STATE = "a Stateful (an object with state_dict and load_state_dict)"
A_RECORDER = "a Recorder (an object with begin and end) or None"
TRANSFORMS = "a Transform, a list of which every item is a Transform or None"
POINTS = "StepPoint.BEGIN, StepPoint.BEFORE_MICROBATCH,"


def answering(hook, answer):
    """Return an implementation that gives one answer, as composing calls it."""
    method = hookimpl(lambda self: answer)
    method = hookimpl(type(method)(method.__code__, {}, hook, None, method.__closure__))
    instance = plugin(family="profiling")(type("Made", (), {hook: method, "__doc__": "Made for a test."}))()
    ((_, function),) = Hooks([Registered("odd", instance, "run.toml:3")]).asked(hook)
    return lambda: function(**GIVEN)


class Half:
    """Has one method of two."""

    def begin(self, name, attributes):
        return None

    def state_dict(self):
        return {}


NONSENSE = [
    ("shard", 7, f"7, not {TRANSFORMS}"),
    ("convert", [TRANSFORM, 1], "1 as item 1, not a Transform"),
    ("reschedule", replace(TRANSFORM, phase=3), "3 as phase, not Phase.SPLIT, Phase.CONVERT, "),
    ("collectives", Transform, f"the class Transform, not {TRANSFORMS}"),
    ("parameter_mesh", object(), "a value of type object, not a ParameterMesh or None"),
    ("parameter_mesh", ParameterMesh(mesh=None), "None as mesh, not a DeviceMesh"),
    ("offload_policy", object(), "a value of type object, not an OffloadPolicy of torch.distributed.fsdp"),
    ("place_batch", BATCH.args, "a value of type tuple, not a Batch or None"),
    ("place_batch", Batch(args=[1]), "a value of type list as args, not a tuple"),
    ("place_batch", replace(BATCH, args=(torch.zeros(2, 2),)), "2 of 4 samples, not all 4 (a plugin that leaves"),
    ("split", object(), "a value of type object, not a Split or None"),
    ("split", Split(parts=()), "no parts, not at least one"),
    ("split", Split(parts=(LINEAR,)), "a value of type Linear as item 0 of parts, not a Part"),
    ("split", Split(parts=(replace(PART, index=2),)), "2 as index of item 0 of parts, not a stage of 1, counted from"),
    ("schedule", object(), "a value of type object, not a Schedule (an object with train and evaluate) or None"),
    ("actions", [[("F", 0)]], "a value of type tuple as item 0 of item 0, not an Action"),
    ("layout", LayoutTraits(zero="3"), "'3' as zero, not a whole number or None"),
    ("layout", LayoutTraits(recompute="some"), '\'some\' as recompute, not "none", "selective", "full" or None'),
    ("step_actions", replace(ACTION, point="NIX"), f"'NIX' as point, not {POINTS}"),
    ("step_actions", (ACTION, replace(ACTION, run=None)), "None as run of item 1, not a function"),
    ("dtypes", "bfloat16", "'bfloat16', not a Dtypes or None"),
    ("dtypes", Dtypes(param="bfloat16"), "'bfloat16' as param, not a dtype or None"),
    ("dtypes", Dtypes(reduce=torch.int8), "torch.int8 as reduce, not a floating-point dtype"),
    ("load_parameter", np.zeros(3), "a value of type ndarray, not a Tensor or None"),
    ("grad_scaler", Half(), f"a value of type Half, not {A_SCALER} or None"),
    ("optimizer", torch.optim.SGD, "the class SGD, not an Optimizer or None"),
    ("optimizer", {"lr": 0.1}, "a value of type dict, not an Optimizer or None"),
    (
        "optimizer",
        torch.optim.SGD([LINEAR.bias]),
        'a SGD without 1 of 2 parameters, among them "weight", not an optimizer that steps all of `groups`',
    ),
    ("group_options", {"backend": "gloo"}, "a value of type dict, not a GroupOptions or None"),
    ("group_options", GroupOptions(backend="nix"), "'nix' as backend, not \"gloo\""),
    ("group_options", GroupOptions(timeout_s=float("nan")), "nan as timeout_s, not seconds above 0, at most 1,000,000"),
    ("group_options", GroupOptions(timeout_s="3"), "'3' as timeout_s, not a number or None"),
    ("replicas", {"minimum": 1}, "a value of type dict, not a ReplicaPolicy or None"),
    ("replicas", ReplicaPolicy(minimum="1"), "'1' as minimum, not a whole number"),
    ("recorder", Half(), f"a value of type Half, not {A_RECORDER}"),
    ("observe_batch", BATCH, "a value of type Batch, not None"),
    ("measure", Metric(name="q", value=1.0), "a value of type Metric, not a list of which every item is a Metric or"),
    ("measure", [Metric(name="q", value="a")], "'a' as value of item 0, not a number"),
    ("measure", [Metric(name="q", value=torch.ones(2))], "a value of type Tensor as value of item 0, not a number"),
    (
        "measure",
        [Metric(name="q", value=1.0, reduction="median")],
        '\'median\' as reduction of item 0, not "sum", "max", "mean" or "rank0"',
    ),
    ("measure", [Metric(name="\n\x00", value=1.0)], r"'\n\x00' as name of item 0, not a text that can be shown"),
    ("metrics", {}, "a value of type dict, not None"),
    ("configure", True, "True, not None"),
    ("close", 0, "0, not None"),
    ("state", Half(), f"a value of type Half, not a dictionary of which every item is {A_STATE} or None"),
    ("state", {"a": Half()}, f"a value of type Half as entry 'a', not {A_STATE}"),
    ("state", {1: torch.optim.SGD([LINEAR.bias])}, "1 as key 1, not text"),
]


@pytest.mark.parametrize(("hook", "answer", "message"), NONSENSE)
def test_an_answer_that_is_none_is_refused(hook, answer, message):
    with pytest.raises(HookError) as caught:
        answering(f"composer3d_{hook}", answer)()
    assert str(caught.value).startswith(f"[profiling.odd] (run.toml:3): composer3d_{hook} of odd returned {message}")


def test_every_hook_has_nonsense_above():
    assert {f"composer3d_{hook}" for hook, *_ in NONSENSE} == {*HOOKS}


@pytest.mark.parametrize("hook", HOOKS)
def test_the_type_of_every_answer_is_known(hook):
    assert expected_of(hook) is not None
    assert answering(hook, None)() is None


USED = [
    ("shard", ()),
    ("convert", [TRANSFORM]),
    ("measure", [Metric(name=name, value=value) for name, value in enumerate([])]),
    ("measure", [Metric(name="a", value=np.float32(1)), Metric(name="b", value=torch.tensor(2.0))]),
    ("measure", [Metric(name="a", value=float("nan"), reduction="max"), Metric(name="b", value=3)]),
    ("group_options", GroupOptions(backend="cpu:gloo", timeout_s=7)),
    ("place_batch", replace(BATCH, args=(torch.zeros(8, 1),))),
    ("dtypes", Dtypes(param=torch.float8_e4m3fn, output=torch.float64)),
    ("optimizer", torch.optim.SGD([{"params": [LINEAR.bias]}, {"params": [LINEAR.weight]}])),
    ("state", {"layer": LINEAR}),
]


@pytest.mark.parametrize(("hook", "answer"), USED)
def test_what_can_be_used_passes(hook, answer):
    assert answering(f"composer3d_{hook}", answer)() is answer


# ---- in a composition ------------------------------------------------------------------------------------------------


@plugin(family="precision")
@dataclass(frozen=True, kw_only=True)
class Odd:
    """Answers one hook with nonsense.

    Args:
        what: Is nonsense.
    """

    what: str

    @hookimpl
    def composer3d_grad_scaler(self, context):
        return torch.amp.GradScaler("cpu", init_scale=2.0) if self.what == "scaler" else None

    @hookimpl
    def composer3d_state(self, context):
        return {"odd": SimpleNamespace(state_dict=lambda: 5, load_state_dict=print)} if self.what == "state" else None

    @hookimpl
    def composer3d_step_actions(self, context):
        return StepAction(name="veto", point=StepPoint.DECIDE, run=lambda state: 5 if self.what == "veto" else None)

    @hookimpl
    def composer3d_convert(self, context):
        def freeze(model, fqns, context):
            model.requires_grad_(False)
            return fqns

        applied = {"frozen": freeze, "text": lambda *_: "layers", "count": lambda *_: 3}.get(self.what)

        def replace_layers(model, context):
            model.layers = nn.Identity()
            return ["layers"]

        if self.what == "changing":
            return Transform(name="odd", phase=Phase.CONVERT, select=replace_layers, apply=freeze)
        selected = {"selected": "layers", "numbers": [1]}.get(self.what, ["layers"])
        if applied is None and self.what not in ("selected", "numbers"):
            return None
        return Transform(name="odd", phase=Phase.CONVERT, select=lambda *_: selected, apply=applied or freeze)

    @hookimpl
    def composer3d_metrics(self, context, step, metrics):
        metrics.clear()

    @hookimpl
    def composer3d_observe_batch(self, context, batch):
        {"arguments": batch.args[0], "targets": batch.target}.get(self.what, torch.ones(1)).zero_()


def train(what):
    text = f'[train]\nmicrobatch = 3\n[sharding.fsdp2]\n[precision.odd]\nuse = "{__name__}:Odd"\nwhat = "{what}"\n'
    run = None
    try:
        run = composer3d.compose(Net, write_manifest(text), loss_fn=sum_loss)
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.1)
        tokens, targets = (mine(run, tensor) for tensor in unpadded())
        with run.step(0):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
        reported = run.report(0, {"loss": 0.5})
        run.save(run.context.output / "step-1")
    except composer3d.ComposerError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        if run is not None:
            run.close()
    return reported


NAMES = "not a list of which every item is text or None"
WROTE = "composer3d_observe_batch of odd wrote into the batch, which it only looks at: what trains on another one "
LATER = {
    "arguments": f"{WROTE}returns it from composer3d_place_batch",
    "targets": f"{WROTE}returns it from composer3d_place_batch",
    "scaler": "composer3d_grad_scaler's unscale_ of odd returned None, not True or False",
    "state": "composer3d_state's state_dict of odd returned 5, not a dictionary",
    "veto": 'the step action "veto" of odd returned 5, not text or None',
    "selected": "select of the transform \"odd\" of odd returned 'layers', " + NAMES,
    "numbers": 'select of the transform "odd" of odd returned 1 as item 0, not text',
    "text": "apply of the transform \"odd\" of odd returned 'layers', " + NAMES,
    "count": 'apply of the transform "odd" of odd returned 3, ' + NAMES,
    "changing": "odd changes the model in select, which only chooses; do so in apply",
    "frozen": "odd leaves no parameter to train: it froze all 17 that were left",
}


@pytest.fixture(scope="module")
def trained():
    return run_ranks(lambda: {what: train(what) for what in [*LATER, "nothing"]}, 1)[0]


@pytest.mark.parametrize("what", LATER)
def test_what_a_plugin_s_objects_and_functions_return_is_checked_too(trained, what):
    kind, _, text = trained[what].partition(": ")
    assert text.endswith(LATER[what])
    assert kind in ("HookError", "ManifestError", "TransformError") and "[precision.odd]" in text


def test_a_plugin_that_changes_metrics_changes_its_own(trained):
    assert trained["nothing"] == {"loss": 0.5}
