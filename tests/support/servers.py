"""Programs that serve: started on a free port of this machine's loopback, stopped by their process."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no name leads anywhere: there is no network
    "--window-size=1300,900",
)
LIMIT_S = 600


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


@contextmanager
def serving(command, log, ready):
    """Start a program; yield once `ready()` does not fail any more, and end it.

    Args:
        command: The program.
        log: File of its output.
        ready: Asks it something.
    """
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                ready()
                break
            except (urllib.error.URLError, ConnectionError):
                assert process.poll() is None and time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
        yield
    finally:
        process.terminate()
        try:
            process.wait(200)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(200)


def ask(url, content=None, method=None):
    """Send JSON and return the response."""
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    # A proxy of the environment is not for this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=LIMIT_S) as answer:
        return json.loads(answer.read() or "null")


@contextmanager
def browser(folder):
    """Start Chromium with nothing of a user's; yield a function that sends it a command of WebDriver's.

    Args:
        folder: For its profile.
    """
    port = free_port()
    base = f"http://127.0.0.1:{port}"
    with serving(["chromedriver", f"--port={port}"], folder / "chromedriver.log", lambda: ask(f"{base}/status")):
        session = f"{base}/session/{_begun(base, folder)}"
        try:
            yield lambda path, content=None: ask(f"{session}/{path}", content)["value"]
        finally:
            ask(session, method="DELETE")


def _begun(base, folder):
    """Return the name of a session; the driver gives a browser a minute to start, which a busy machine may not have."""
    for number in range(4):
        arguments = [*FLAGS, f"--user-data-dir={folder / f'profile-{number}'}"]
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": {"args": arguments}}}}
        try:
            return ask(f"{base}/session", wanted)["value"]["sessionId"]
        except urllib.error.HTTPError as error:
            told = error.read().decode()
    raise AssertionError(told)


@contextmanager
def prometheus(folder, port, rules):
    """Start Prometheus, which scrapes a port every second; yield a function that asks its API.

    Args:
        folder: For its data.
        port: Of this machine, that it scrapes.
        rules: File of rules that it evaluates every second.
    """
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "scrape_configs": [{"job_name": "run", "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}],
        "rule_files": [str(rules)],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    api = f"http://{address}/api/v1"
    with serving(command, folder / "prometheus.log", lambda: ask(f"{api}/status/buildinfo")):
        yield lambda path: ask(f"{api}/{path}")["data"]
