from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
import urllib.request
from functools import partial

import pytest
from support.models import composed, one_step
from support.reporting import train

from composer3d import PluginError
from composer3d.testing import run_ranks

FSDP, TABLE = "[sharding.fsdp2]\n", '[profiling.prometheus]\nport = 0\naddress = "127.0.0.1"\n'


def test_gradients_equal_one_device_and_collectives_stay():
    (*errors, counted) = run_ranks(partial(one_step, microbatch=3), 2, FSDP + TABLE)[0]
    assert max(errors) < 1e-12
    assert counted == run_ranks(partial(one_step, microbatch=3), 2, FSDP)[0][-1]


def scraped(run):
    (node,) = [value for value in run.context.state.values() if hasattr(value, "port")]
    if node.port is None:
        return None
    with urllib.request.urlopen(f"http://127.0.0.1:{node.port}/metrics", timeout=10) as answer:
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


def printed(what):
    command = [sys.executable, "-m", "composer3d_plugins.profiling.prometheus", what]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout


def test_the_dashboard_shows_metrics_that_there_are():
    panels = json.loads(printed("dashboard"))["panels"]
    assert len(panels) == 8 and all(panel["targets"][0]["expr"].count("composer3d_") == 1 for panel in panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool, of Debian's package prometheus")
def test_prometheus_accepts_the_rules(tmp_path):
    path = tmp_path / "rules.yml"
    path.write_text(printed("rules"))
    done = subprocess.run(["promtool", "check", "rules", str(path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "4 rules found" in done.stdout + done.stderr
