from __future__ import annotations

import json
from collections import Counter
from functools import partial

import pytest
import torch
from support.models import Net, assert_unchanged, composed, mean_loss, padded, sum_loss
from support.telemetry import FSDP, table, train
from support.trace_files import read, tree

from composer3d import ManifestError
from composer3d.testing import count_collectives, run_ranks

# ---- numerics and collectives ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "detail"),
    [("[sharding.ddp]\n", "phase"), (FSDP, "phase"), ("[mesh]\ndp_replicate = 2\n" + FSDP, "layer")],
)
def test_gradients_equal_one_device_and_collectives_stay(tmp_path, layout, detail):
    world_size = 4 if "dp_replicate" in layout else 2
    assert_unchanged(world_size, layout, table(tmp_path, detail=detail), microbatch=1)


def starting(text):
    with count_collectives() as collectives:
        composed(text).close()
    return collectives.count("broadcast"), collectives.count()


def test_the_start_costs_the_broadcast_of_the_traces_name(tmp_path):
    """An object travels as its size and its bytes."""

    def both():
        return starting(FSDP + table(tmp_path)), starting(FSDP)

    for (broadcasts, total), (before, all_before) in run_ranks(both, 2):
        assert (broadcasts - before, total - all_before) == (2, 2)


# ---- what is traced --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """Return the folder of the trace of two steps on two ranks."""
    folder = tmp_path_factory.mktemp("traces")
    run_ranks(train, 2, FSDP + table(folder))
    return folder


def test_one_trace_over_all_ranks(traced):
    (zero, first), (one, second) = (read(traced / f"rank-{rank}.jsonl") for rank in (0, 1))
    (run,) = [span for span in first if span.name == "run"]
    assert run.parent == "" and [span.name for span in second if span.name == "run"] == []
    assert {span.trace for span in first + second} == {run.trace}
    assert [resource["composer3d.mesh.dp_shard"] for resource in (zero, one)] == [0, 1]
    assert zero["composer3d.manifest.sha256"] == one["composer3d.manifest.sha256"]
    assert one["composer3d.rank"] == 1 and one["host.name"] and zero["process.pid"] != one["process.pid"]
    for spans in (first, second):
        steps = [span for span in spans if span.name == "step"]
        assert [span.attributes for span in steps] == [{"step": 0}, {"step": 1}]
        assert {span.parent for span in steps} == {run.id}
        forward = ("forward", [("all_gather", [])])
        backward = ("backward", [("all_gather", []), ("reduce_scatter", [])])
        assert tree(spans, steps[0]) == (
            "step",
            [
                ("all_reduce counts", []),
                ("forward_backward", [forward, backward]),
                ("all_reduce loss", []),
                ("all_reduce norm", []),
                ("optimizer", []),
            ],
        )


def test_collectives_of_a_group_are_one_span_with_their_bytes(traced):
    _, spans = read(traced / "rank-0.jsonl")
    # Rows are cut in two, and filled up where they are odd.
    padded_bytes = sum(2 * -(-p.shape[0] // 2) * p[0].numel() for p in Net().parameters()) * 4
    (gathers, *_) = [span for span in spans if span.name == "all_gather"]
    # 2 micro-batches, 4 units each.
    assert gathers.attributes["count"] == 2 * 4 and gathers.attributes["axis"] == "dp_shard"
    assert gathers.attributes["bytes"] == 2 * padded_bytes
    assert 0 < gathers.attributes["busy_ns"] <= gathers.end - gathers.start
    (scatters, *_) = [span for span in spans if span.name == "reduce_scatter"]
    assert scatters.attributes["count"] == 2 * 4 and "unit" not in scatters.attributes


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_every_action_of_a_pipeline(tmp_path, schedule):
    text = f'[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "{schedule}"\n'
    results = run_ranks(
        partial(train, steps=1, options={"num_layers": 4}), 2, text + table(tmp_path, detail="microbatch")
    )
    stages = 2 if schedule == "1F1B" else 4
    seen = Counter()
    for rank, (counts, _) in enumerate(results):
        _, spans = read(tmp_path / f"rank-{rank}.jsonl")
        actions = [span.attributes for span in spans if "kind" in span.attributes]
        seen.update((a["stage"], a["microbatch"], a["kind"]) for a in actions)
        assert counts["made"] == counts["delivered"] == len(spans)
    forwards = {(stage, microbatch) for stage, microbatch, kind in seen if kind == "F"}
    assert forwards == {(stage, microbatch) for stage in range(stages) for microbatch in range(4)}
    backwards = {(stage, microbatch) for stage, microbatch, kind in seen if kind in "BI"}
    assert backwards == forwards and set(seen.values()) == {1}
    assert any(kind == "W" for *_, kind in seen) == (schedule != "1F1B")


def test_every_block(tmp_path):
    run_ranks(partial(train, steps=1), 1, table(tmp_path, detail="layer"))
    _, spans = read(tmp_path / "rank-0.jsonl")
    by_id = {span.id: span for span in spans}
    for name, inside, count in (("block", "forward", 4), ("block_backward", "backward", 4)):
        blocks = [span for span in spans if span.name == name]
        assert Counter(span.attributes["block"] for span in blocks) == {f"layers.{n}": count for n in range(3)}
        assert {by_id[span.parent].name for span in blocks} == {inside}
    (first, *_) = [span for span in spans if span.name == "backward"]
    order = [span for span in spans if span.parent == first.id]
    assert [span.attributes["block"] for span in sorted(order, key=lambda span: span.start)] == [
        "layers.2",
        "layers.1",
        "layers.0",
    ]


def test_a_recomputed_block_has_its_recomputation_in_its_backward(tmp_path):
    text = "[scheduling.activation_checkpoint]\n" + table(tmp_path, detail="layer")
    run_ranks(partial(train, steps=1, microbatch=12), 1, text)
    _, spans = read(tmp_path / "rank-0.jsonl")
    for name in ("block", "block_backward"):
        found = Counter(span.attributes["block"] for span in spans if span.name == name)
        assert found == {f"layers.{n}": 1 for n in range(3)}


def test_details_that_are_not_asked_for(tmp_path):
    run_ranks(partial(train, steps=4), 1, table(tmp_path / "a", detail="step"))
    _, spans = read(tmp_path / "a" / "rank-0.jsonl")
    assert Counter(span.name for span in spans) == {"step": 4, "run": 1}
    run_ranks(partial(train, steps=4), 1, table(tmp_path / "b", every=2))
    _, spans = read(tmp_path / "b" / "rank-0.jsonl")
    steps = {span.id: span.attributes["step"] for span in spans if span.name == "step"}
    assert {steps[span.parent] for span in spans if span.name == "optimizer"} == {0, 2} and len(steps) == 4


def test_the_launchers_trace_is_the_parent(tmp_path, monkeypatch):
    monkeypatch.setenv("TRACEPARENT", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    run_ranks(train, 2, FSDP + table(tmp_path))
    spans = [span for rank in (0, 1) for span in read(tmp_path / f"rank-{rank}.jsonl")[1]]
    assert {span.trace for span in spans} == {"0af7651916cd43dd8448eb211c80319c"}
    assert [span.parent for span in spans if span.name == "run"] == ["b7ad6b7169203331"]


def test_long_runs_rotate_with_links(tmp_path):
    run_ranks(partial(train, steps=5), 2, FSDP + table(tmp_path, rotate_steps=2))
    spans = [span for rank in (0, 1) for span in read(tmp_path / f"rank-{rank}.jsonl")[1]]
    runs = sorted((span for span in spans if span.name == "run"), key=lambda span: span.attributes["segment"])
    assert len({span.trace for span in runs}) == 3
    first = {"traceId": runs[0].trace, "spanId": runs[0].id}
    assert [span.links for span in runs] == [[], [first], [first]]
    for number, run in enumerate(runs):
        inside = [span for span in spans if span.name == "step" and span.parent == run.id]
        assert sorted(span.attributes["step"] for span in inside) == sorted(
            step for step in range(5) for _ in range(2) if step // 2 == number
        )
        assert {span.trace for span in inside} == {run.trace}


def own_loop(folder, text):
    run = composed(text, loss_fn=mean_loss)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = padded()
    for x, y in run.steps([(tokens, targets)] * 2):
        loss, count = sum_loss(run.model(x), y)
        run.backward((loss, count))
        optimizer.step()
    run.save(folder / "checkpoint")
    run.close(RuntimeError("the end"))


def test_a_loop_of_ones_own(tmp_path):
    run_ranks(own_loop, 1, tmp_path, table(tmp_path))
    _, spans = read(tmp_path / "rank-0.jsonl")
    (run,) = [span for span in spans if span.name == "run"]
    (_, step) = [span for span in spans if span.name == "step"]
    assert tree(spans, step) == (
        "step",
        [("forward", []), ("all_reduce counts", []), ("backward", []), ("all_reduce loss", []), ("optimizer", [])],
    )
    around = Counter(span.name for span in spans if span.parent == run.id)
    assert around == {"step": 2, "data_wait": 3, "checkpoint": 1}


# ---- state and refusals ----------------------------------------------------------------------------------------------


def test_nothing_is_opened_outside_a_run(tmp_path):
    def checked():
        run = composed(table(tmp_path / "none"), purpose="verify")
        state, recorders = dict(run.context.state), run.context.has_recorders
        run.report(0, {"loss": 1.0})
        run.close()
        return [type(value).__name__ for value in state.values()], recorders

    assert run_ranks(checked, 1) == [([], False)] and not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"endpoint": "http://x"},
            'endpoint has no effect with exporter = "file"; write exporter = "otlp"',
        ),
        (
            {"exporter": "console", "headers": {"key": "x"}},
            'headers has no effect with exporter = "console"; write exporter = "otlp"',
        ),
        (
            {"exporter": "otlp", "folder": "x"},
            'folder has no effect with exporter = "otlp"; write exporter = "file"',
        ),
    ],
)
def test_refusals(options, message):
    def refused():
        text = "[profiling.opentelemetry]\n" + "".join(
            f'{key} = {{ key = "x" }}\n' if isinstance(value, dict) else f"{key} = {json.dumps(value)}\n"
            for key, value in options.items()
        )
        with pytest.raises(ManifestError) as caught:
            composed(text)
        return str(caught.value)

    (text,) = run_ranks(refused, 1)
    assert text.endswith(f"run.toml:2:12: [profiling.opentelemetry] {message}")


def test_an_exporter_that_is_not_installed_is_named(monkeypatch):
    import composer3d_plugins.profiling.opentelemetry as plugin

    def refused():
        monkeypatch.setattr(plugin, "_MODULES", {"http": "opentelemetry.not_there.at_all"})
        with pytest.raises(ManifestError) as caught:
            composed(table(exporter="otlp"))
        return str(caught.value)

    assert run_ranks(refused, 1)[0].endswith(
        'the OTLP exporter for http is not installed; pip install "composer3d[otlp]"'
    )
