"""The time of a plan, from the command line."""

from __future__ import annotations

import json
import math
import re

import pytest

from composer3d.cli import main

SMALL = ["--set", "data.seq_len=16", "--set", "model.args.num_layers=2", "--set", "train.microbatch=8"]


def plan(*options):
    from contextlib import redirect_stdout
    from io import StringIO

    written = StringIO()
    with redirect_stdout(written):
        code = main(["plan", "quickstart", *SMALL, *options])
    return code, written.getvalue()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    return tmp_path_factory.mktemp("plan") / "page.html"


@pytest.fixture(scope="module")
def found(page):
    code, text = plan("--hardware", "a100-80/efa-400", "--tokens", "1e9", "--price", "2", "--json", "--html", str(page))
    assert code == 0
    return json.loads(text)


def test_the_page_draws_a_step_by_phase_and_its_communication(found, page):
    time, drawing = found["time"], page.read_text().partition("<h2>Time of a step</h2>")[2].partition("</svg>")[0]
    bars = [
        (float(width), name, float(seconds))
        for width, name, seconds in re.findall(r'width="([\d.]+)"[^>]*><title>([^:]+): (\S+) s', drawing)
    ]
    phases = {name: (width, seconds) for width, name, seconds in bars[:4]}
    assert list(phases) == ["computing", "optimizer", "communication exposed", "bubble"]
    assert sum(seconds for _, seconds in phases.values()) == pytest.approx(time["step_s"]["value"], rel=1e-2)
    scale = sum(width for width, _ in phases.values()) / time["step_s"]["value"]
    assert all(width == pytest.approx(seconds * scale, rel=1e-2, abs=0.1) for width, seconds in phases.values())
    told = {}
    for width, name, seconds in bars[4:]:
        assert width == pytest.approx(seconds * scale, rel=1e-2, abs=0.1)
        told[name] = told.get(name, 0.0) + seconds
    assert told == {
        f"{row['op']} over {row['axis'] or 'the world'}": pytest.approx(row["seconds"], rel=1e-2)
        for row in time["communication"]
    }


def test_a_step_takes_at_least_what_its_flops_take_at_the_peak(found):
    time = found["time"]
    assert time["hardware"] == "a100-80/efa-400"
    assert time["tokens"] == 16 * 16  # global batch times length
    flops = found["ranks"][0]["flops"]
    assert time["step_s"]["value"] > flops / time["peak_flops"]
    assert time["hfu"]["value"] == pytest.approx(flops / time["step_s"]["value"] / time["peak_flops"])
    # Nothing is computed again: the backward's two products for each of the forward's are all there is besides.
    assert 0.5 * time["hfu"]["value"] < time["mfu"]["value"] <= 1.5 * time["hfu"]["value"]


def test_every_figure_of_time_has_bounds_and_says_how_it_is_known(found):
    time = found["time"]
    figures = [value for value in time.values() if isinstance(value, dict) and "value" in value]
    assert len(figures) >= 8
    for figure in figures:
        assert figure["known"] == "modelled"
        assert figure["low"] <= figure["value"] <= figure["high"]


def test_days_and_cost_are_those_of_the_tokens(found):
    run, step = found["time"]["training"], found["time"]["step_s"]["value"]
    assert run["num_steps"] == math.ceil(1e9 / 256)
    assert run["days"]["value"] == pytest.approx(run["num_steps"] * step / 86400)
    assert run["device_hours"]["value"] == pytest.approx(run["days"]["value"] * 24 * 2)
    assert run["cost"]["value"] == pytest.approx(2 * run["device_hours"]["value"])


def test_memory_is_that_of_the_hardware_and_its_layout_is_examined(found):
    assert found["verdict"] == "fits"
    assert 79 < found["memory_bytes"] / 2**30 < 80
    assert all(row["memory"]["context"] > 2**30 for row in found["ranks"])
    assert isinstance(found["advice"], list)


def test_the_screen_shows_time():
    code, text = plan("--hardware", "h100", "--tokens", "1e14", "--price", "2")
    assert code == 0
    assert "on h100: a step of 256 tokens takes " in text
    assert "[modelled]" in text and "the run: 390,625,000,000 steps, " in text.replace("\n", " ")
    # Numbers as people write them: no exponents, thousands apart.
    assert re.search(r"cost \$\d{1,3}(,\d{3})+ \(\$\d", text.replace("\n", " ")), text
    assert not re.search(r"\de\+\d\d (tokens|days|device)", text), text


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--tokens", "1e9"], "--hardware: --tokens, --samples and --price need it"),
        (["--hardware", "h100", "--price", "2"], "--price: it needs --tokens, or --samples"),
        (["--hardware", "h200x"], 'no hardware "h200x"'),
    ],
)
def test_refusals(options, told, capsys):
    assert main(["plan", "quickstart", *options]) == 2
    assert told in capsys.readouterr().err
