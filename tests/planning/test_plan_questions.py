"""Questions to a plan: several manifests, another cluster, failures, money."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stdout

import pytest

import composer3d
from composer3d.cli import main
from composer3d.errors import ComposerError
from composer3d.planning import Failures

TEXT = """composer3d = 1
[model.args]
num_layers = 2
[data]
use = "synthetic"
seq_len = 16
[train]
steps = 2
microbatch = 8
[sharding.fsdp2]
zero = 2
"""
OPTIONS = ["--world-size", "16", "--hardware", "h100", "--what-if", "network=0.1x", "--what-if", "latency=4x"]
RUN = ["--tokens", "1e9", "--price", "2.5 EUR", "--failures", "50000", "--storage", "20GB"]


def planned(*arguments):
    out = io.StringIO()
    with redirect_stdout(out):
        code = main(["plan", *map(str, arguments)])
    return code, out.getvalue()


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "run.toml"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def answers(manifest):
    """The text and the JSON of one plan with every question."""
    code, text = planned(manifest, *OPTIONS, *RUN, "--json")
    assert code == 0
    return json.loads(text)["time"]


def test_another_cluster_is_compared_with_the_one_that_is_there(answers):
    what_if = answers["what_if"]
    assert what_if["factors"] == {"network": 0.1, "latency": 4.0} and what_if["hardware"] == "h100"
    assert answers["hardware"] == "h100 with network 0.1x, latency 4x"
    assert what_if["times"] == pytest.approx(answers["step_s"]["value"] / what_if["step_s"]["value"])
    assert what_if["times"] > 1.0  # 16 ranks on two nodes exchange over the network


def test_a_step_is_as_sensitive_to_a_part_as_another_plan_says(answers, manifest):
    rows = {row["part"]: row["times"] for row in answers["sensitivity"]}
    assert set(rows) == {"flops", "memory", "links", "network", "latency", "launch"}
    assert all(times >= 1.0 for times in rows.values())
    code, text = planned(manifest, *OPTIONS[:-4], "--what-if", "network=0.05x", "--what-if", "latency=4x", "--json")
    slower = json.loads(text)["time"]["step_s"]["value"]
    assert code == 0 and slower / answers["step_s"]["value"] == pytest.approx(rows["network"])


def test_failures_cost_what_their_formula_says(answers):
    failures = answers["failures"]
    assert failures["failure_s"] == pytest.approx(50000 * 3600 / 16)
    assert failures["save_s"] == pytest.approx(failures["checkpoint_bytes"] / 20e9)
    assert failures["interval_s"] == pytest.approx(
        max(answers["step_s"]["value"], math.sqrt(2 * failures["save_s"] * failures["failure_s"]) - failures["save_s"])
    )
    assert 0.9 < failures["goodput"]["value"] < 1.0


def test_a_checkpoint_has_weights_and_both_moments_once(answers, manifest):
    import composer3d

    counted = composer3d.plan(manifest, world_size=1).plan.ranks[0].trace.memory
    assert answers["failures"]["checkpoint_bytes"] == pytest.approx(counted.parameters + counted.optimizer, rel=1e-3)
    assert counted.optimizer == pytest.approx(2 * counted.parameters, rel=1e-3)


def test_money_and_energy_are_of_device_hours(answers):
    run = answers["training"]
    assert run["currency"] == "EUR "
    assert run["cost"]["value"] == pytest.approx(2.5 * run["device_hours"]["value"])
    assert run["energy_mwh"]["value"] == pytest.approx(700e-6 * run["device_hours"]["value"])
    longer, goodput = run["with_failures"], answers["failures"]["goodput"]["value"]
    assert longer["cost"]["value"] == pytest.approx(run["cost"]["value"] / goodput)


def test_the_convention_of_megatron_counts_half_of_the_attention(answers):
    assert 0.5 * answers["mfu"]["value"] < answers["mfu_causal"]["value"] < answers["mfu"]["value"]


def test_the_screen_answers_the_same_questions(manifest):
    code, text = planned(manifest, *OPTIONS, *RUN, "--memory", "80GiB")
    text = text.replace("\n", " ")
    assert code == 0
    for told in (
        "GiB are left",
        "on h100 as it is: ",
        "a step with half the speed of one part takes [modelled]: ",
        "communication of the slowest rank [modelled]: ",
        "cost EUR ",
        "at the devices' rated power",
        "; goodput ",
        "as Megatron-Bridge counts",
    ):
        assert told in text, (told, text)


def test_several_manifests_are_rows_of_a_table(manifest, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text(TEXT.replace("zero = 2", "zero = 3"))
    code, text = planned(manifest, other, "--world-size", "2", "--hardware", "h100", *RUN, "--restart", "0")
    head, *rows = text.splitlines()
    assert {"days", "cost", "goodput"} <= set(head.split()) and all("EUR" in row for row in rows)
    assert code == 0 and [row.split()[0] for row in rows] == [str(manifest), str(other)]
    assert all(
        name in " ".join(head.split()) for name in ("manifest", "peak", "device", "verdict", "step", "MFU", "bubble")
    )
    code, text = planned(manifest, other, "--world-size", "2", "--json")
    plans = json.loads(text)["plans"]
    assert code == 0 and [plan["manifest"] for plan in plans] == [str(manifest), str(other)]
    assert plans[0]["ranks"][0]["memory"] != plans[1]["ranks"][0]["memory"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--what-if", "network=0.5x"], "--what-if: it needs --hardware"),
        (["--failures", "50000", "--hardware", "h100"], "--failures needs --storage, such as 20GB"),
        (["--failures", "50000", "--storage", "1GB"], "--failures: it needs --hardware"),
        (["--restart", "60", "--hardware", "h100"], "--storage and --restart need --failures"),
        (["--hardware", "h100", "--what-if", "netwrok=2x"], 'no part "netwrok"; did you mean "network"'),
        (
            ["--hardware", "h100", "--what-if", "flops=2x", "--what-if", "flops=3x"],
            "flops is given two factors, 2x and 3x; state it once",
        ),
        (
            ["--hardware", "h100", "--what-if", "network=0x"],
            '"network=0x" has no number above 0 as its factor; write for example network=0.5x',
        ),
        (["--hardware", "h100", "--failures", "5e4", "--storage", "20"], '"20" has no unit; write for example 20GB'),
        (["--hardware", "h100", "--failures", "0", "--storage", "2GB"], '"0" is not a number above 0, such as 2000'),
        (["quickstart-ddp", "--html", "page.html"], "--html is of one manifest, and 2 are given"),
        (["quickstart"], "quickstart is given twice"),
    ],
)
def test_refusals(options, told, capsys):
    assert main(["plan", "quickstart", *options]) == 2
    assert told in capsys.readouterr().err


def test_failures_that_are_none_are_refused_before_anything_is_traced():
    with pytest.raises(ComposerError, match=r"^plan\(failures=Failures\(hours=0.0.*: it must be a composer3d"):
        composer3d.plan("quickstart", hardware="h100", failures=Failures(hours=0.0, storage=1e9))


@pytest.mark.parametrize("price", ["2.5.1", "EUR", "$2 EUR", "-1", "0"])
def test_what_is_no_price(price, capsys):
    assert main(["plan", "quickstart", "--hardware", "h100", "--tokens", "1e9", f"--price={price}"]) == 2
    assert "--price" in capsys.readouterr().err
