from __future__ import annotations

import functools
import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from functools import partial
from urllib.parse import urlencode

import pytest
from composer3d_plugins.profiling.prometheus import Prometheus
from support.models import assert_unchanged, composed, padded, seeded
from support.profiled_steps import train
from support.servers import prometheus

from composer3d import ManifestError, PluginError
from composer3d.testing import run_ranks

FSDP, TABLE = "[sharding.fsdp2]\n", '[profiling.prometheus]\nport = 0\naddress = "127.0.0.1"\n'


def test_gradients_equal_one_device_and_collectives_stay():
    assert_unchanged(2, FSDP, TABLE)


def scraped(run):
    (node,) = [value for value in run.context.state.values() if hasattr(value, "port")]
    if node.port is None:
        return None
    with urllib.request.urlopen(f"http://127.0.0.1:{node.port}/metrics", timeout=120) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, value in (line.split() for line in lines if not line.startswith("#"))}


def test_the_first_rank_of_a_node_serves_the_last_row():
    (rows, found), (_, other) = run_ranks(partial(train, inside=scraped), 2, FSDP + TABLE)
    assert other is None
    shown = {name.removeprefix("composer3d_"): value for name, value in found.items()}
    assert shown["loss"] == pytest.approx(rows[-1]["loss"]) and shown["tokens_per_s"] == 5.0 and shown["step"] == 2
    assert shown["computing_max_s"] >= shown["computing_mean_s"] > 0 and shown["loss_is_finite"] == 1
    assert 0 < shown["memory_used_ratio"] < 1 and shown["last_step_timestamp_seconds"] > 1e9


def test_refuses_a_port_that_is_taken():
    def refused():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(PluginError) as caught:
                composed(TABLE.replace("port = 0", f"port = {port}"))
            return str(caught.value).replace(str(port), "N")

    assert run_ranks(refused, 1)[0].endswith(
        "port N cannot be served: Address already in use; name another one as port, or 0 for any that is free"
    )


@pytest.mark.parametrize("address", ["", "300.1.1.1", "a b", "host:80", "http://x", "x/y", "-x"])
def test_refuses_an_address_that_is_none(address):
    with pytest.raises(ValueError, match="is neither an IP address nor the name of a host"):
        Prometheus(address=address)


def test_takes_addresses_and_names():
    for address in ("127.0.0.1", "0.0.0.0", "::1", "localhost", "node-3.cluster.example"):
        assert Prometheus(address=address).address == address


@functools.cache
def printed(what):
    command = [sys.executable, "-m", "composer3d_plugins.profiling.prometheus", what]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=1200).stdout


def test_the_dashboard_shows_metrics_that_there_are():
    panels = json.loads(printed("dashboard"))["panels"]
    assert len(panels) == 8 and all(panel["targets"][0]["expr"].count("composer3d_") == 1 for panel in panels)


def scraped_by_prometheus(folder, rules):
    """Train on a rank with a loss that becomes NaN; return what a real Prometheus has of it."""
    run = composed(TABLE, seeded())
    (node,) = [value for value in run.context.state.values() if hasattr(value, "port")]
    with run.step(0):
        run.forward_backward(*padded()[:1], target=padded()[1])
    row = {"loss": float("nan"), "grad_norm": 2.0, "tokens_per_s": 5.0, "step_time_s": 0.1}
    run.report(0, {**row, "data_wait_s": 0.01, "skipped_steps": 0})
    with prometheus(folder, node.port, rules) as api:
        deadline = time.monotonic() + 100
        while not (alerts := api("alerts")["alerts"]) or alerts[0]["state"] != "firing":
            assert time.monotonic() < deadline, api("targets")
            time.sleep(0.1)
        queries = [panel["targets"][0]["expr"] for panel in json.loads(printed("dashboard"))["panels"]]
        found = {query: api(f"query?{urlencode({'query': query})}")["result"] for query in queries}
        groups = api("rules")["groups"]
    run.close()
    return [alert["labels"]["alertname"] for alert in alerts], found, [rule["health"] for rule in groups[0]["rules"]]


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
def test_a_real_prometheus_scrapes_shows_and_alerts(tmp_path):
    rules = tmp_path / "rules.yml"
    rules.write_text(printed("rules"))
    alerts, found, health = run_ranks(scraped_by_prometheus, 1, tmp_path, rules)[0]
    assert "Composer3dLossNotFinite" in alerts and set(health) == {"ok"} and len(health) == 5
    values = {query: [float(row["value"][1]) for row in rows] for query, rows in found.items()}
    assert len(values) == 8 and all(values.values())
    assert values["composer3d_grad_norm"] == [2.0] and values["{__name__=~'composer3d_(tokens|samples)_per_s'}"] == [
        5.0
    ]


def test_refuses_to_run_without_the_library(monkeypatch):
    def refused():
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(ManifestError) as caught:
            composed(TABLE)
        return str(caught.value)

    assert run_ranks(refused, 1)[0].endswith('prometheus_client is not installed; pip install "composer3d[prometheus]"')


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_prometheus_accepts_the_rules(tmp_path):
    path = tmp_path / "rules.yml"
    path.write_text(printed("rules"))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0 and "5 rules found" in done.stdout + done.stderr


HEALTHY = {
    "last_step_timestamp_seconds": "0+60x20",
    "loss_is_finite": "1x20",
    "computing_max_s": "1.1x20",
    "computing_mean_s": "1x20",
    "memory_used_ratio": "0.5x20",
}


def expected(alert, change, minutes):
    """Return a test of promtool's: a run, a sample a minute, and the alerts that there are at a time."""
    told = {rule["alert"]: rule["annotations"] for rule in json.loads(printed("rules"))["groups"][0]["rules"]}
    series = [{"series": f"composer3d_{name}", "values": row} for name, row in {**HEALTHY, **change}.items()]
    return {
        "interval": "1m",
        "input_series": series,
        "alert_rule_test": [
            {
                "eval_time": f"{minutes}m",
                "alertname": name,
                "exp_alerts": [{"exp_annotations": told[name]}] if name == alert else [],
            }
            for name in told
        ],
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_every_rule_fires_when_it_should_and_no_other(tmp_path):
    (tmp_path / "rules.yml").write_text(printed("rules"))
    cases = [
        expected(None, {}, 15),
        expected("Composer3dStalled", {"last_step_timestamp_seconds": "0+60x5 300x15"}, 12),
        expected(None, {"last_step_timestamp_seconds": "0+60x5 300x15"}, 9),
        expected("Composer3dLossNotFinite", {"loss_is_finite": "1x3 0x9"}, 5),
        expected("Composer3dStraggler", {"computing_max_s": "1.6x20"}, 15),
        expected("Composer3dMemory", {"memory_used_ratio": "0.97x20"}, 15),
    ]
    (tmp_path / "test.yml").write_text(json.dumps({"rule_files": ["rules.yml"], "tests": cases}))
    command = ["promtool", "test", "rules", str(tmp_path / "test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
