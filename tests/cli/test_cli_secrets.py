"""Secrets of a manifest: where they may come from, and that they are nowhere else afterwards."""

from __future__ import annotations

import logging
import stat

import pytest
from support.collectors import collector
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from composer3d import PluginError, Secret
from composer3d.manifest.layers import parse
from composer3d.manifest.secret import HIDDEN, hide
from composer3d.processes.forking import limit_ranks
from composer3d.runner.launching.rank import _record

LITERAL, FROM_ENV, FROM_FILE, PASSWORD = "literal-4711", "environment-4712", "file-4713", "password-4714"
DATA = """
import torch


class Rows(torch.utils.data.Dataset):
    def __init__(self, url, api_key):
        self.key = api_key

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return torch.arange(index, index + 9) % 50

    def record(self):
        return {"api_key": self.key, "rows": 40}
"""
TABLES = f"""
[data.args]
url = "https://me:{PASSWORD}@example.org/rows"
api_key = "{LITERAL}"
[profiling.opentelemetry]
exporter = "otlp"
interval_s = 0.01
timeout_s = 2
endpoint = "URL"
[profiling.opentelemetry.headers]
authorization = "{LITERAL}"
x-tenant = {{ env = "COMPOSER3D_TEST_TENANT" }}
x-token = {{ file = "token.txt" }}
"""


def test_no_secret_is_left_in_a_run_s_folder_or_shown(edited, folder, monkeypatch, capfd):
    monkeypatch.setenv("COMPOSER3D_TEST_TENANT", FROM_ENV)
    (folder / "token.txt").write_text(FROM_FILE + "\n")
    (folder / "secret_rows.py").write_text(DATA)
    edited('use = "text.txt"', 'use = "secret_rows:Rows"\nvocab_size = 64')
    text = (folder / "run.toml").read_text().replace("dp_shard = 2", "dp_shard = 1")
    from composer3d.cli import main

    handler = logging.FileHandler(folder / "log")  # pytest takes the ranks' warnings
    logging.getLogger("composer3d_plugins").addHandler(handler)
    with collector("echo") as (url, stop), limit_ranks(1):
        endpoint = url.replace("http://", f"http://me:{PASSWORD}@")
        (folder / "run.toml").write_text(text + TABLES.replace("URL", endpoint))
        assert main(["run", "run.toml", "--set", "run.output=out", "--set", "checkpoint.every=1"]) == 0
        assert FROM_ENV in stop()  # what was sent is the secret
    logging.getLogger("composer3d_plugins").removeHandler(handler)
    handler.close()
    told = capfd.readouterr()
    warned = (folder / "log").read_text()
    files = [path for path in (folder / "out").rglob("*") if path.is_file()]
    written = {str(path): path.read_bytes().decode("latin-1") for path in files}
    assert any("manifest.toml" in name for name in written) and "spans are lost" in warned
    for text in (*written.values(), told.out, told.err, warned):
        assert not [secret for secret in (LITERAL, FROM_ENV, FROM_FILE, PASSWORD) if secret in text]
    manifest = (folder / "out" / "manifest.toml").read_text()
    assert f'authorization = "{HIDDEN}"' in manifest and 'env = "COMPOSER3D_TEST_TENANT"' in manifest
    assert f'url = "https://me:{HIDDEN}@example.org/rows"' in manifest
    states = [*(folder / "out" / "checkpoints").rglob("state.json")]
    assert states
    for path in (folder / "out" / "manifest.toml", folder / "out" / "environment.json", *states):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    # The record is a manifest as good as the one it was made of.
    (folder / "record.toml").write_text(manifest)
    assert main(["check", "record.toml"]) == 0


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ('headers = "literal-4711"', "profiling.opentelemetry.headers"),
        ('headers = { x = ["literal-4711"] }', "profiling.opentelemetry.headers.x"),
        ('headers = { x = { key = "literal-4711" } }', "profiling.opentelemetry.headers.x"),
        ('protocol = "http://me:literal-4711@x"', "protocol"),
        ('headers = { x = "literal-4711', "the line is not shown: it names a secret"),
    ],
)
def test_messages_hold_no_secret(edited, command, line, key):
    edited(new=f"[profiling.opentelemetry]\n{line}\n")
    code, out, err = command("check", "run.toml")
    assert code == 2 and key in out + err and "literal-4711" not in out + err


RAISING = """
import torch


class Rows(torch.utils.data.Dataset):
    def __init__(self, url, api_key, note):
        self.told = f"cannot connect to {url} with {api_key}, {note}"

    def __len__(self):
        return 40

    def __getitem__(self, index):
        if torch.distributed.is_initialized():
            raise ValueError(self.told)
        return torch.arange(index, index + 9) % 50
"""


def test_exceptions_of_a_users_code_are_shown_and_written_without_secrets(edited, folder, capfd):
    (folder / "raising_rows.py").write_text(RAISING)
    edited('use = "text.txt"', 'use = "raising_rows:Rows"\nvocab_size = 64')
    args = f"""[data.args]
url = "https://me:{PASSWORD}@example.org/rows?token={FROM_ENV}"
api_key = "{LITERAL}"
note = "Authorization: Bearer {FROM_FILE}"
"""
    text = (folder / "run.toml").read_text().replace("dp_shard = 2", "dp_shard = 1")
    (folder / "run.toml").write_text(text + args)
    from composer3d.cli import main

    with limit_ranks(1):
        assert main(["run", "run.toml", "--set", "run.output=out"]) != 0
    told = capfd.readouterr()
    names = ("error.json", "accounts/rank-0.json")
    for shown in (told.out + told.err, *((folder / "out" / name).read_text() for name in names)):
        assert "cannot connect to https://me:" in shown
        assert not [secret for secret in (LITERAL, FROM_ENV, FROM_FILE, PASSWORD) if secret in shown]
    for name in names:
        assert stat.S_IMODE((folder / "out" / name).stat().st_mode) == 0o600


@pytest.mark.parametrize("json", [[], ["--json"]], ids=["", "json"])
def test_what_a_factory_raises_is_shown_by_check_without_secrets(json, folder, command):
    (folder / "raising_model.py").write_text("def make(password):\n    raise ValueError(f'no login with {password}')\n")
    manifest = f'composer3d = 1\nmodel = {{ use = "raising_model:make", args = {{ password = "{LITERAL}" }} }}\n'
    (folder / "model.toml").write_text(f'{manifest}data = "text.txt"\n')
    code, out, err = command("check", "model.toml", "--world-size", "1", *json)
    assert code == 2 and f"no login with {HIDDEN}" in out + err and LITERAL not in out + err


def test_what_torchrun_prints_of_an_exception_has_no_secrets(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    try:
        raise ValueError(f"cannot connect to https://me:{PASSWORD}@example.org")
    except ValueError as error:
        _record(get_error_handler().record_exception, error)
    written = (tmp_path / "error.json").read_text()
    assert f"ValueError: cannot connect to https://me:{HIDDEN}@example.org" in written and PASSWORD not in written


def test_overrides_are_shown_without_their_secrets(folder, command):
    code, out, err = command("check", "run.toml", "--set", "profiling.opentelemetry.headers=literal-4711")
    assert code == 2 and "literal-4711" not in out + err
    assert f"--set profiling.opentelemetry.headers={HIDDEN}: " in out + err


def test_a_secret_is_shown_as_asterisks_and_found_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER3D_TEST_TENANT", FROM_ENV)
    (tmp_path / "token.txt").write_text(FROM_FILE + "\n")
    found = [Secret(LITERAL), Secret(env="COMPOSER3D_TEST_TENANT"), Secret(file="token.txt")]
    assert [secret.reveal(tmp_path) for secret in found] == [LITERAL, FROM_ENV, FROM_FILE]
    assert {repr(secret) for secret in found} | {f"{secret}" for secret in found} == {HIDDEN}


@pytest.mark.parametrize(
    ("secret", "message"),
    [
        (
            Secret(env="COMPOSER3D_NOT_SET"),
            'the environment variable "COMPOSER3D_NOT_SET" is not set; export it on every host',
        ),
        (Secret(file="not-there"), 'the file "not-there" of a secret cannot be read: No such file or directory'),
        (
            Secret(HIDDEN),
            'the record of a run holds no secrets; write { env = "NAME" } or { file = "PATH" }, which it holds',
        ),
    ],
    ids=["env", "file", "record"],
)
def test_refusals(secret, message, tmp_path):
    with pytest.raises(PluginError) as caught:
        secret.reveal(tmp_path)
    assert str(caught.value) == message


def test_what_only_looks_like_a_secret_is_kept():
    kept = {"pad_token": "</s>", "num_tokens": 3, "key": "x", "url": "https://example.org/a:b@c", "tokenizer": "bpe"}
    assert hide(kept) == kept
    lost = {"db_password": "x", "headers": {"a": "x"}, "API-Key": "x", "deep": [{"hf_token": "x"}]}
    assert str(hide(lost)).count(HIDDEN) == 4 and hide({"password": {"env": "NAME"}}) == {"password": {"env": "NAME"}}


def test_a_line_that_names_no_secret_is_shown():
    assert parse("steps = = 3", file="x").hint == "the line reads: steps = = 3"
