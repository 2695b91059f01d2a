"""Every hook is called, with what its documentation says, when it says so, and its answer has its effect."""

from __future__ import annotations

import pytest
import torch
from support.models import Net, mine, sum_loss, unpadded, write_manifest
from third_party.every_hook import LAYOUTS, OVERFLOW_STEP, SCALE, VETO_STEP, log_of

import composer3d
from composer3d import StepError, StepPoint
from composer3d.errors import HookError
from composer3d.hookspecs import HookSpecs
from composer3d.testing import count_collectives, gather_full, run_ranks

HOOKS = [name for name in vars(HookSpecs) if name.startswith("composer3d_")]
PLUGIN = '[profiling.every]\nuse = "third_party.every_hook:Every"\n'
TEXT = "[train]\nmicrobatch = 3\n[sharding.fsdp2]\n"
STEPS = 4


def weights(run):
    return gather_full(run.named_parameters())


def one_step(run, optimizer, number):
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    with run.step(number) as state:
        with count_collectives(run.mesh) as collectives:
            loss = run.forward_backward(tokens, target=targets)
        norm = run.clip_grad_norm_(1e9)
        gradients = gather_full((name, p.grad) for name, p in run.named_parameters())
        optimizer.step()
        optimizer.zero_grad()
    counted = {op: count for (op, axis), (count, _) in collectives.summary().items() if axis == "dp_shard"}
    seen = {"loss": loss, "norm": norm, "gradients": gradients, "collectives": counted}
    return {**seen, "vetoes": state.vetoes, "metrics": state.metrics}


def every_hook(folder):
    """Compose with the plugin and run through all that a composition can do; return what was seen."""
    run = composer3d.compose(Net, write_manifest(TEXT + PLUGIN), loss_fn=sum_loss)
    log = log_of(run.context)
    group = run.mesh["dp_shard"].get_group()
    seen = {
        "norm": type(run.parts[0].module.norm).__name__,
        "keep_unsharded": run.context.split.keep_unsharded,
        "timeout_s": group._get_backend(torch.device("cpu")).options._timeout.total_seconds(),
        "plan": [(row.phase, row.name, row.fqns) for row in run.plan],
        "weights": [weights(run)],
    }
    with pytest.raises(StepError, match="runs the forward itself"):
        _ = run.model
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.1, groups=[{"match": "norm", "lr": 0.2}])
    seen["optimizer"] = [cls.__name__ for cls in type(optimizer).__mro__[:2]]
    seen["lrs"] = sorted({group["lr"] for group in optimizer.param_groups})
    seen["steps"] = []
    for number in range(STEPS):
        seen["steps"].append(one_step(run, optimizer, number))
        seen["weights"].append(weights(run))
    with count_collectives(run.mesh) as collectives:
        seen["reported"] = run.report(7, {"loss": 0.5})
    seen["report_collectives"] = {key: count for key, (count, _) in collectives.summary().items()}
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    seen["evaluation"] = float(run.evaluate(tokens, target=targets).loss)
    # Asked by whoever simulates a step.
    seen["layout"] = run._assembled.hooks.layout({"dp_shard": 2})
    log.calls += [("layout", degrees) for degrees in LAYOUTS]
    seen["actions"] = run._assembled.hooks.actions(run.context, 2)
    (counter,) = [value for value in run.context.state.values() if hasattr(value, "count")]
    counter.count, counter.tensor = 5, torch.arange(3.0)
    run.save(folder / "step-4")
    counter.count, counter.tensor = 6, torch.zeros(3)
    seen["points_before_load"] = len(log.points)
    run.load(folder / "step-4")
    seen["counter"] = (counter.count, counter.tensor.tolist())
    run.close(ValueError("the loop ended"))
    return {**seen, **vars(log)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    return run_ranks(every_hook, 2, tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="module")
def reference():
    """One device: the weights that a seed gives, with the bias that the plugin changes, and what it computes."""

    def alone():
        run = composer3d.compose(Net, write_manifest("[sharding.fsdp2]\n"), loss_fn=sum_loss)
        initial = weights(run)
        run.close()
        changed = {**initial, "out.bias": initial["out.bias"] + 1.0}
        model = Net()
        model.load_state_dict(changed)
        tokens, targets = unpadded()
        loss, count = sum_loss(model(tokens[:, :4]).double(), targets[:, :4])
        (loss / count).backward()
        return initial, changed, float((loss / count).detach()), {name: p.grad for name, p in model.named_parameters()}

    return run_ranks(alone, 1)[0]


def calls(seen, hook):
    return [given for name, given in seen["calls"] if name == hook]


def first(seen, *hooks):
    return min(index for index, (name, _) in enumerate(seen["calls"]) if name in hooks)


def last(seen, *hooks):
    return max(index for index, (name, _) in enumerate(seen["calls"]) if name in hooks)


# ---- every hook, when ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_is_called(ranks, hook):
    for seen in ranks:
        assert calls(seen, hook.removeprefix("composer3d_"))


def test_a_layout_is_described_by_all_plugins(ranks):
    for seen in ranks:
        assert calls(seen, "layout") == [{"dp_shard": 2}]
        assert (seen["layout"].zero, seen["layout"].is_compiled, seen["layout"].schedule) == (3, True, None)


def test_actions_are_the_plugins(ranks):
    for seen in ranks:
        assert seen["actions"] == [[(0, "F", 0), (0, "B", 0), (0, "F", 1), (0, "B", 1)]]


def test_hooks_are_called_in_the_documented_order(ranks):
    stages = [
        ("configure",),
        ("convert", "shard", "reschedule", "collectives"),
        ("select",),
        ("group_options",),
        ("split",),
        ("apply", "dtypes", "offload_policy", "parameter_mesh", "asked", "load_parameter"),
        ("schedule", "grad_scaler", "step_actions", "recorder", "state"),
        ("optimizer",),
        ("place_batch", "observe_batch"),
        ("close",),
    ]
    for seen in ranks:
        for stage, following in zip(stages, stages[1:], strict=False):
            assert last(seen, *stage) < first(seen, *following), (stage, following)


def test_transforms_are_selected_and_applied_by_phase(ranks):
    phases = ["CONVERT", "TENSOR", "RECOMPUTE", "COMMUNICATE", "MATERIALISE"]
    for seen in ranks:
        assert [given["phase"] for given in calls(seen, "select")] == phases
        assert all(given["on_meta"] for given in calls(seen, "select"))
        applied = calls(seen, "apply")
        assert [(given["phase"], given["fqns"]) for given in applied] == [
            ("CONVERT", ["norm"]),
            ("TENSOR", ["out.weight"]),
            ("RECOMPUTE", ["layers.0"]),
            ("COMMUNICATE", [""]),
            ("MATERIALISE", ["out"]),
        ]
        # Weights come just before the last phase.
        assert [given["on_meta"] for given in applied] == [True, True, True, True, False]
        places = [index for index, (name, _) in enumerate(seen["calls"]) if name == "apply"]
        assert places[3] < first(seen, "load_parameter") <= last(seen, "load_parameter") < places[4]
        assert [row[:2] for row in seen["plan"]] == [
            ("CONVERT", "every.convert"),
            ("TENSOR", "every.tensor"),
            ("RECOMPUTE", "every.recompute"),
            ("DATA", "fsdp2"),
            ("COMMUNICATE", "every.communicate"),
            ("MATERIALISE", "every.materialise"),
        ]


def test_the_mesh_is_there_when_it_is_said_to_be(ranks):
    for rank, seen in enumerate(ranks):
        assert calls(seen, "configure") == [{"mesh": False, "place": ("run", 2, rank)}]
        early = ("convert", "shard", "reschedule", "collectives", "group_options")
        assert all(given["mesh"] is False for hook in early for given in calls(seen, hook))
        assert calls(seen, "split") == [{"whole": True, "on_meta": True, "mesh": True}]


# ---- what answers do while composing ---------------------------------------------------------------------------------


def test_conversion_swaps_the_module(ranks):
    assert [seen["norm"] for seen in ranks] == ["Converted", "Converted"]


def test_options_of_every_group_are_asked_for_and_applied(ranks):
    for seen in ranks:
        axes = [given["axis"] for given in calls(seen, "group_options")]
        assert axes == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
        assert seen["timeout_s"] == 11.0


def test_units_ask_for_dtypes_and_offloading(ranks):
    units = ["layers.0", "layers.1", "layers.2", ""]
    for seen in ranks:
        assert [given["fqn"] for given in calls(seen, "dtypes")] == units
        assert [given["fqn"] for given in calls(seen, "offload_policy")] == units
        # The output dtype of the root is that of the loss.
        assert seen["steps"][0]["loss"].dtype == torch.float64


def test_a_parameter_can_live_on_another_mesh(ranks):
    for seen in ranks:
        # By the test's own transform, and once of every other parameter by the data-parallel plugin.
        asked = [given["fqn"] for given in calls(seen, "parameter_mesh")]
        assert asked[:2] == ["layers.0.up.weight", "tok.weight"] and len({*asked}) == len(asked) == 17
        assert calls(seen, "asked") == [{"parameter_mesh": (True, 0), "other": None}]


def test_parameters_change_as_they_are_loaded(ranks, reference):
    initial, changed, *_ = reference
    shapes = {name: tuple(tensor.shape) for name, tensor in initial.items()}
    for seen in ranks:
        found = {given["fqn"]: given["shape"] for given in calls(seen, "load_parameter")}
        assert found == shapes
        assert {given["device"] for given in calls(seen, "load_parameter")} == {"cpu"}
        for name, tensor in changed.items():
            assert torch.equal(seen["weights"][0][name], tensor), name


def test_the_split_is_what_the_schedule_gets(ranks):
    for seen in ranks:
        assert seen["keep_unsharded"] is True
        assert calls(seen, "schedule") == [{"parts": True, "on_meta": False}]
        # Kept from forward to backward: one all-gather a unit and micro-batch, where zero = 3 has two for the blocks.
        assert [step["collectives"]["all_gather"] for step in seen["steps"]] == [4 * 2] * STEPS


def test_the_optimizer_is_replaced(ranks):
    for seen in ranks:
        (given,) = calls(seen, "optimizer")
        assert given["cls"] == "AdamW"
        assert set(map(tuple, given["groups"])) == {("lr",)}
        assert seen["optimizer"] == ["ReplacedSGD", "ReplacedSGD"]
        assert seen["lrs"] == [0.1, 0.2]


# ---- what answers do in steps ----------------------------------------------------------------------------------------


def test_the_batch_is_placed_and_gradients_are_those_of_one_device(ranks, reference):
    *_, loss, gradients = reference
    for seen in ranks:
        assert calls(seen, "place_batch")[0] == {"shape": (6, 5)}
        assert calls(seen, "observe_batch")[0] == {"shape": (6, 4)}  # as it was placed
        step = seen["steps"][0]
        assert float(step["loss"]) == pytest.approx(loss, rel=1e-6)
        for name, gradient in gradients.items():
            torch.testing.assert_close(step["gradients"][name], gradient, rtol=1e-4, atol=1e-6)


def expected_points(step, skipped):
    before = [("BEGIN", None), ("BEFORE_MICROBATCH", 1, False), ("AFTER_MICROBATCH", 1)]
    before += [("BEFORE_MICROBATCH", 0, True), ("AFTER_MICROBATCH", 0)]
    before += [(name, None) for name in ("AFTER_BATCH", "GRADIENTS_LOCAL", "GRADIENTS_REDUCED", "UNSCALED", "DECIDE")]
    optimizer = ("BEFORE_OPTIMIZER", "AFTER_OPTIMIZER", "PARAMETERS_SYNCHRONISED", "PARAMETERS_FINAL")
    after = [] if skipped else [(name, None) for name in optimizer]
    return [(step, *point) for point in [*before, *after, ("END", None)]]


def test_step_actions_run_at_every_point_in_order(ranks):
    assert [point.name for point in StepPoint] == list(
        dict.fromkeys(name for _, name, *_ in expected_points(0, skipped=False))
    )
    for seen in ranks:
        steps = seen["points"][: seen["points_before_load"]]
        for number in range(STEPS):
            found = [point for point in steps if point[0] == number]
            assert found == expected_points(number, skipped=number in (VETO_STEP, OVERFLOW_STEP))
        assert seen["steps"][0]["metrics"]["noted"] == 1.0


def test_a_load_makes_the_parameters_final(ranks):
    for seen in ranks:
        assert seen["points"][seen["points_before_load"] :] == [(-1, "PARAMETERS_FINAL", None)]


def test_one_rank_s_veto_counts_on_all(ranks):
    for seen in ranks:
        assert [step["vetoes"] for step in seen["steps"]] == [(), ("every.veto",), ("grad_scaler",), ()]
        changes = [
            any(not torch.equal(before[name], after[name]) for name in before)
            for before, after in zip(seen["weights"], seen["weights"][1:], strict=False)
        ]
        assert changes == [True, False, False, True]
    assert all(torch.equal(ranks[0]["weights"][-1][name], tensor) for name, tensor in ranks[1]["weights"][-1].items())


def test_the_scaler_scales_unscales_and_hears_what_was_agreed(ranks):
    for rank, seen in enumerate(ranks):
        assert [kind for kind, _ in seen["scaler"]] == ["unscale", "update"] * STEPS
        # A step that another plugin vetoed says nothing about the scale.
        assert [skipped for kind, skipped in seen["scaler"] if kind == "update"] == [False, False, True, False]
        scaled = [value for kind, value in seen["scaler"] if kind == "unscale"]
        # Only rank 1 overflows, both skip.
        assert (scaled[OVERFLOW_STEP] == float("inf")) == (rank == 1)
        largest = max(float(gradient.abs().max()) for gradient in seen["steps"][0]["gradients"].values())
        assert scaled[0] <= largest * SCALE * (1 + 1e-5)
    largest_of_ranks = max(seen["scaler"][0][1] for seen in ranks)
    assert largest_of_ranks == pytest.approx(largest * SCALE, rel=1e-5)


def test_metrics_are_reduced_in_one_collective_and_handed_over(ranks):
    # Ranks measure 8 and 9 at step 7.
    expected = {"loss": 0.5, "sum": 17.0, "max": 9.0, "mean": 8.5, "rank0": 8.0}
    for seen in ranks:
        assert seen["reported"] == expected
        assert seen["metrics"] == [expected]
        assert calls(seen, "measure") == calls(seen, "metrics") == [{"step": 7}]
        assert list(seen["report_collectives"].values()) == [1]


def test_state_is_saved_under_the_plugin_and_loaded(ranks):
    for seen in ranks:
        assert seen["counter"] == (5, [0.0, 1.0, 2.0])


def test_close_hears_what_ended_the_run(ranks):
    for seen in ranks:
        assert calls(seen, "close") == [{"error": "ValueError('the loop ended')"}]


# ---- spans of the core -----------------------------------------------------------------------------------------------


def close_beside_one_that_fails():
    # "broken" is closed before "every", by name.
    failing = '[profiling.broken]\nuse = "support.refused_plugins:FailsToClose"\n'
    run = composer3d.compose(Net, write_manifest(TEXT + PLUGIN + failing), loss_fn=sum_loss)
    log = log_of(run.context)
    with pytest.raises(HookError, match="composer3d_close of broken raised OSError: the disk is full, at "):
        run.close()
    run.close()
    return [given for hook, given in log.calls if hook == "close"]


def test_one_that_fails_to_close_keeps_no_other_from_closing():
    assert run_ranks(close_beside_one_that_fails, 1) == [[{"error": "None"}]]


def spans_of_a_step():
    """Run with what the core does itself."""
    run = composer3d.compose(Net, write_manifest(TEXT + PLUGIN + "takes_over = false\n"), loss_fn=sum_loss)
    log = log_of(run.context)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    log.spans.clear()
    one_step(run, optimizer, 3)
    with pytest.raises(ZeroDivisionError), run.step(4):
        raise ZeroDivisionError
    run.close()
    return log.spans


def test_spans_are_nested_and_named():
    inner = [
        ("begin", 3, "forward", {"microbatch": 0}),
        ("end", 3, "forward"),
        ("begin", 3, "backward", {"microbatch": 0}),
        ("end", 3, "backward"),
        ("begin", 3, "forward", {"microbatch": 1}),
        ("end", 3, "forward"),
        ("begin", 3, "backward", {"microbatch": 1}),
        ("end", 3, "backward"),
    ]
    for spans in run_ranks(spans_of_a_step, 2):
        # Those of collectives are in test_spans.py.
        phases = [span for span in spans if span[2] not in ("all_gather", "all_reduce", "reduce_scatter")]
        assert phases == [
            ("begin", 1, "step", {"step": 3}),
            ("begin", 2, "forward_backward", {"microbatches": 2}),
            *inner,
            ("end", 2, "forward_backward"),
            ("begin", 2, "optimizer", {}),
            ("end", 2, "optimizer"),
            ("end", 1, "step"),
            # A span ends with an error too.
            ("begin", 1, "step", {"step": 4}),
            ("end", 1, "step"),
        ]
