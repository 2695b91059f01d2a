"""From a run's trace files to a page: read, measured, drawn, and looked at in a browser."""

from __future__ import annotations

import json
import re
import shutil
import time
from functools import partial

import pytest
import torch
from composer3d_plugins.profiling.opentelemetry.exporters import RotatedFile
from support.models import Net, composed, mine, padded, seeded, sum_loss
from support.servers import browser

from composer3d.cli import main
from composer3d.diagnostics.timeline import draw_page, measure, read_trace, statements
from composer3d.errors import ComposerError
from composer3d.testing import run_ranks


class Slow(Net):
    """A model whose forward delays one rank, by as much as a whole step takes on this machine."""

    is_slow, last_s, longest_s = False, None, 0.1

    def forward(self, tokens):
        if self.is_slow:
            if self.last_s is not None:
                self.longest_s = max(self.longest_s, min(time.perf_counter() - self.last_s, 2.0))
            time.sleep(self.longest_s)
            self.last_s = time.perf_counter()
        return super().forward(tokens)


def traced(text, folder, steps=4, slow=None, options=None):
    """Train with traces on a rank; the rank `slow` computes longer than the others."""
    table = f'[profiling.opentelemetry]\nfolder = "{folder}"\ndetail = "microbatch"\ninterval_s = 0.02\n'
    model = seeded(Net if slow is None else Slow, **(options or {}))
    run = composed(f"{text}\n[train]\nmicrobatch = 3\n{table}", model, loss_fn=sum_loss)
    if run.context.rank == slow:
        model.is_slow = True
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)
    tokens, targets = padded()
    for number in range(steps):
        with run.step(number):
            loss = run.forward_backward(mine(run, tokens), target=mine(run, targets))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        run.report(number, {"loss": float(loss)})
    run.close()


PIPELINE = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n'


@pytest.fixture(scope="module")
def pipelined(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run_ranks(partial(traced, options={"num_layers": 4}), 2, PIPELINE, folder / "traces")
    rows = [{"step": step, "loss": 3.0 - step, "tokens_per_s": 9.0 + step} for step in range(1, 5)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_the_bubble_is_measured_and_simulated(pipelined):
    trace = read_trace(pipelined)
    report = measure(trace)
    assert report.steps == (1, 2, 3) and set(report.ranks) == {0, 1}
    assert 0.0 < report.bubble.simulated < 0.6
    assert 0.0 < report.bubble.measured < 1.0
    again = [span for span in trace.ranks[0] if span.attributes.get("kind") == "F"]
    assert len(again) == 4 * 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"[" * 100_000,
        lambda data: b"{}\n",
        lambda data: b"null\n" + data,
        lambda data: data.replace(b'"startTimeUnixNano":"', b'"startTimeUnixNano":"x'),
        lambda data: data[: len(data) // 2] + b"\xff\xfe",
        lambda data: b"",
    ],
    ids=["deep", "empty-object", "null", "no-number", "truncated", "empty"],
)
@pytest.mark.parametrize("name", ["traces/rank-0.jsonl", "traces/rank-0.metrics.jsonl", "metrics.jsonl"])
def test_damaged_files_are_named_or_passed_over(pipelined, tmp_path, name, damage, capsys):
    run = shutil.copytree(pipelined, tmp_path / "run")
    (run / name).write_bytes(damage((run / name).read_bytes()))
    code = main(["timeline", str(run), "--html", str(tmp_path / "page.html")])
    said = capsys.readouterr()
    assert "Traceback" not in said.err and code in (0, 2)
    assert code == 0 or str(run) in said.err


@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(b"\xff\x00")])
def test_ranks_without_a_trace_are_told(pipelined, tmp_path, damage, capsys):
    run = shutil.copytree(pipelined, tmp_path / "run")
    (run / "environment.json").write_text('{"world_size": 2}')
    damage(run / "traces/rank-0.jsonl")
    told = "no spans of rank 0, whose trace files are missing, empty or damaged: figures leave it out"
    page = tmp_path / "page.html"
    assert main(["timeline", str(run), "--html", str(page)]) == 0
    assert told in capsys.readouterr().out.splitlines() and told in page.read_text()
    assert main(["timeline", str(run), "--html", str(page), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["missing"] == [0]


def test_lines_that_no_run_writes_are_named(tmp_path, capsys):
    write(tmp_path, 0, [span("step", "s", "", 0, 1, step=0)])
    row = json.loads((tmp_path / "rank-0.jsonl").read_text())
    row["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["endTimeUnixNano"] = str(10**39)
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write(json.dumps(row))
    assert main(["timeline", str(tmp_path)]) == 2
    assert "rank-0.jsonl:2: holds what no run writes (ValueError: a span from 0 to 1e+39 ns)" in capsys.readouterr().err
    for name, said in (("nothing", "there is no such folder"), ("rank-0.jsonl", "is a file, and no folder of a run")):
        assert main(["timeline", str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.rstrip().endswith(f"{name}: {said}")


def test_equal_actions_have_the_bubble_of_the_formula(tmp_path):
    """A trace written by hand: 1F1B of two ranks and two micro-batches; forwards take 1 ms, backwards 2 ms."""
    actions = {0: [("F", 0, 0, 1), ("F", 1, 1, 2), ("B", 0, 4, 6), ("B", 1, 7, 9)]}
    actions[1] = [("F", 0, 1, 2), ("B", 0, 2, 4), ("F", 1, 4, 5), ("B", 1, 5, 7)]
    for rank, found in actions.items():
        spans = [span("step", "s", "", 0, 9, step=1)]
        for number, (kind, microbatch, start, end) in enumerate(found):
            name = "forward" if kind == "F" else "backward"
            spans.append(span(name, f"a{number}", "s", start, end, kind=kind, microbatch=microbatch, stage=rank))
        write(tmp_path, rank, spans, pp=rank)
    report = measure(read_trace(tmp_path))
    assert report.bubble.measured == pytest.approx(1 / 3) == report.bubble.simulated
    assert report.ranks[0].computing == pytest.approx(6e-3) and report.straggler_ratio == pytest.approx(1.0)


def test_collectives_inside_are_not_computing(tmp_path):
    spans = [
        span("data_wait", "w", "", 0, 1, step=1),
        span("step", "s", "", 1, 11, step=1),
        span("forward", "f", "s", 1, 7),
        span("all_gather", "g", "f", 2, 4, axis="dp_shard", bytes=8),
        span("block", "b", "f", 4, 7, block="layers.0"),
        span("all_reduce", "i", "b", 5, 6, axis="tp"),
        span("wait", "x", "i", 5, 6, axis="tp"),
        span("all_reduce", "r", "s", 8, 9, axis="world", busy_ns=500_000, count=2),
        span("optimizer", "o", "s", 9, 11),
    ]
    write(tmp_path, 0, spans)
    report = measure(read_trace(tmp_path))
    (times,) = report.ranks.values()
    assert statements(report) == [
        "exposed communication: 35.0% of a step",
        "traffic of a step: all_gather over dp_shard, 1 of 8 B in all (every rank)",
    ]
    assert vars(times) == pytest.approx(
        {"step": 0.010, "computing": 0.003, "collectives": 0.0035, "optimizer": 0.002, "data_wait": 0.001}
    )


def span(name, number, parent, start_ms, end_ms, **attributes):
    def value(content):
        return {"intValue": str(content)} if isinstance(content, int) else {"stringValue": content}

    return {
        "traceId": "1" * 32,
        "spanId": number,
        "parentSpanId": parent,
        "name": name,
        "startTimeUnixNano": str(start_ms * 1_000_000),
        "endTimeUnixNano": str(end_ms * 1_000_000),
        "attributes": [{"key": key, "value": value(content)} for key, content in attributes.items()],
    }


def write(folder, rank, spans, instance="run", **mesh):
    attributes = [{"key": "service.instance.id", "value": {"stringValue": f"{instance}/rank{rank}"}}]
    attributes += [{"key": f"composer3d.mesh.{axis}", "value": {"intValue": str(n)}} for axis, n in mesh.items()]
    row = {"resourceSpans": [{"resource": {"attributes": attributes}, "scopeSpans": [{"spans": spans}]}]}
    with (folder / f"rank-{rank}.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_the_slow_rank_is_the_straggler(tmp_path):
    run_ranks(partial(traced, slow=1, steps=3), 2, "[sharding.fsdp2]\n", tmp_path)
    report = measure(read_trace(tmp_path))
    assert report.straggler == 1 and report.is_slow
    assert statements(report)[0].startswith("straggler: rank 1 computes longest, ")
    assert "<tr class=slow><th>rank 1</th>" in draw_page(read_trace(tmp_path), report, [2], title="t")


def test_merged_spans_are_filled_as_far_as_they_took(tmp_path):
    merged = [
        span("forward", "f", "s", 0, 6, count=2, busy_ns=3_000_000),
        span("all_gather", "g", "s", 6, 8, axis="dp_shard", count=4, busy_ns=500_000),
        span("optimizer", "o", "s", 8, 10),
    ]
    write(tmp_path, 0, [span("step", "s", "", 0, 10, step=3), *merged])
    trace = read_trace(tmp_path)
    page = draw_page(trace, measure(trace), [3], title="t")
    bars = re.findall(r'fill="(#7fb2e5|#f06292|#fbd3df)"( fill-opacity="0.35")? width="([\d.]+)"', page)
    assert [(color, bool(is_pale)) for color, is_pale, _ in bars] == [
        ("#7fb2e5", True),
        ("#7fb2e5", False),
        ("#fbd3df", False),
        ("#f06292", False),
    ]
    widths = [float(width) for *_, width in bars]
    assert widths == pytest.approx([1120 * part for part in (0.6, 0.3, 0.2, 0.05)], abs=0.01)
    assert "detail = &quot;microbatch&quot;" in page
    assert re.findall(r'text-anchor="middle">([\d.]+)</text>', page) == [str(number) for number in range(11)]


@pytest.mark.parametrize("num_kept", [1, 3])
def test_files_are_put_aside_when_they_are_full_and_the_last_ones_stay(num_kept, tmp_path):
    write(tmp_path, 0, [span("step", "s", "", 0, 1, step=0)])
    line = (tmp_path / "rank-0.jsonl").read_text()
    (tmp_path / "rank-0.jsonl").unlink()
    size = 2 * len(line) + 60  # two steps, whose times have more digits than the first one's
    file = RotatedFile(tmp_path / "rank-0.jsonl", max_bytes=size, num_kept=num_kept)
    for step in range(11):
        row = json.loads(line)
        row["resourceSpans"][0]["scopeSpans"][0]["spans"] = [span("step", "s", "", step, step + 1, step=step % 10)]
        file.write(json.dumps(row))
    file.close()
    names = ["rank-0.jsonl", "rank-0.jsonl.1", "rank-0.jsonl.2"][:num_kept]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    assert all(path.stat().st_size <= size for path in tmp_path.iterdir())
    # Two steps a file; the last one holds one.
    last = [step % 10 for step in range(11)][1 - 2 * num_kept :]
    assert [one.attributes["step"] for one in read_trace(tmp_path).ranks[0]] == last


def test_a_cut_off_line_and_an_older_start(tmp_path):
    write(tmp_path, 0, [span("step", "s", "", 0, 1, step=0)], instance="older")
    write(tmp_path, 0, [span("step", "t", "", 5, 6, step=7)], instance="newer")
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"resourceSpans": [{"reso')
    trace = read_trace(tmp_path)
    assert [one.attributes["step"] for one in trace.ranks[0]] == [7] and trace.truncated == ("rank-0.jsonl",)
    assert "was cut off" in draw_page(trace, measure(trace), [7], title="t")


def test_the_command_writes_a_page_that_needs_no_network(pipelined, tmp_path, capsys):
    page, picture = tmp_path / "page.html", tmp_path / "page.svg"
    assert main(["timeline", str(pipelined), "--html", str(page), "--svg", str(picture), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["steps"] == [1, 2, 3] and told["bubble"].keys() == {"measured", "simulated"}
    assert 0 < told["exposed"] < 1
    assert set(told["ranks"]) == {"0", "1"} and told["straggler"]["rank"] in (0, 1)
    text = page.read_text()
    assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"} and "<script" not in text
    assert 'id="rank-0"' in picture.read_text() and "simulated" in text and "loss: 2 to -1" in text
    assert main(["timeline", str(pipelined), "--html", str(page)]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0].removeprefix("no ") for line in shown[:-1]] == [
        "rank 0",
        "rank 1",
        "straggler",
        "exposed communication",
        *["traffic of a step"] * 3,
        "bubble",
    ]
    assert [each["op"] for each in told["traffic"]["0"]] == ["exchange", "receive", "send"]
    assert "exposed communication" in shown[0] and shown[-1] == str(page)


def test_a_folder_without_traces(tmp_path):
    with pytest.raises(ComposerError) as caught:
        read_trace(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path}: there are no trace files; a run leaves them in traces/ with [profiling.opentelemetry] "
        'exporter = "file", detail = "layer"'
    )


def package_of_missing():
    """Return Debian's name of what is not installed."""
    programs = {"chromium": "chromium", "chromedriver": "chromium-driver"}
    return next((package for program, package in programs.items() if shutil.which(program) is None), "")


@pytest.mark.skipif(bool(package_of_missing()), reason=f"needs Debian's package {package_of_missing()}")
def test_a_browser_shows_every_rank(pipelined, tmp_path):
    page = tmp_path / "page.html"
    assert main(["timeline", str(pipelined), "--html", str(page)]) == 0
    with browser(tmp_path) as chromium:
        chromium("url", {"url": page.as_uri()})

        def run(script):
            return chromium("execute/sync", {"script": f"return {script}", "args": []})

        boxes = "[...document.querySelectorAll('#rank-%d rect')].map(bar => bar.getBoundingClientRect().width)"
        for rank in (0, 1):
            widths = run(boxes % rank)
            assert len(widths) > 2 * 4 and min(widths) > 0
        titles = run("[...document.querySelectorAll('title')].map(title => title.textContent.split(' ')[0])")
        assert titles.count("forward") == titles.count("backward") == 2 * 2 * 4
        text = run("document.body.innerText")
        assert "bubble: " in text and "simulated" in text and "exposed communication: " in text
        titles = run("[...document.querySelectorAll('figcaption')].map(title => title.textContent)")
        assert titles == ["loss: 2 to -1", "tokens a second: 10 to 13", "resident memory, MiB"]
        points = run("[...document.querySelectorAll('figure polyline')].map(line => line.points.length)")
        assert points[:2] == [4, 4] and len(points) == 4 and min(points[2:]) >= 2  # of both ranks' memory
        # The page asked for nothing but itself.
        assert run("performance.getEntriesByType('resource').length") == 0
        # Nothing is wider than the window, and no text of the picture leaves it.
        assert run("document.documentElement.scrollWidth <= window.innerWidth")
        assert len(chromium("screenshot")) > 10_000
