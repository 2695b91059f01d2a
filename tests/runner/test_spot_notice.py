"""Notices that a machine will be taken away: a file that appears, an address that answers."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from support.training import MANIFEST, start, write

import composer3d
from composer3d import checkpoint
from composer3d.runner.launching.spot_notice import Notice, NoticeTable


def test_a_run_with_a_notice_saves_and_stops(tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("TERMINATE")
    path = write(tmp_path, MANIFEST)
    outcome = start(path, 2, "train.steps=100000", f'run.notice.at="{taken}"')
    assert outcome["status"] == "preempted" and 0 < outcome["step"] < 100000
    assert checkpoint.latest(tmp_path / "out" / "checkpoints").name == f"step-{outcome['step']}"


class Cloud:
    """An address that gives answers one after another, the last one again and again."""

    def __init__(self, *answers):
        asked, answers = [], list(answers)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                asked.append(self.headers.get("Metadata-Flavor"))
                code, text = answers.pop(0) if len(answers) > 1 else answers[0]
                self.send_response(code)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *unused):
                pass

        self.asked = asked
        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)

    def __enter__(self):
        self.thread.start()
        return self.asked, f"http://127.0.0.1:{self.server.server_port}/preempted"

    def __exit__(self, *unused):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def noticed(**options):
    """Wait until a notice is seen, at most for 120 s; return whether one was."""
    seen = threading.Event()
    notice = Notice(NoticeTable(every_s=0.01, **options), seen.set, folder=Path())
    try:
        return seen.wait(120)
    finally:
        notice.close()


def test_an_address_that_is_not_found_is_no_notice_yet():
    with Cloud((404, ""), (404, ""), (200, "{}")) as (asked, address):
        assert noticed(at=address)
        assert len(asked) == 3


def test_of_an_address_that_always_answers_a_word_counts(monkeypatch):
    monkeypatch.setenv("COMPOSER3D_TEST_FLAVOR", "Google")
    with Cloud((200, "FALSE"), (500, "TRUE"), (200, "TRUE")) as (asked, address):
        assert noticed(at=address, contains="TRUE", headers={"Metadata-Flavor": {"env": "COMPOSER3D_TEST_FLAVOR"}})
        assert asked == ["Google"] * 3


def test_an_address_that_does_not_answer_is_named_without_its_password(caplog):
    address, seen = "http://me:word-4711@127.0.0.1:9/taken?token=word-4712", threading.Event()
    notice = Notice(NoticeTable(at=address, every_s=0.01), seen.set, folder=Path())
    while not caplog.messages:
        assert not seen.wait(0.01)
    notice.close()
    (message,) = caplog.messages
    assert "127.0.0.1:9/taken?token=**********" in message and "word-47" not in message


def test_a_file_counts_once_it_is_there_and_holds_the_word(tmp_path):
    taken, seen = tmp_path / "taken", threading.Event()
    taken.write_text("FALSE")
    notice = Notice(NoticeTable(at=str(taken), contains="TRUE", every_s=0.01), seen.set, folder=Path())
    assert not seen.wait(0.05)
    taken.write_text("TRUE")
    assert seen.wait(120)
    notice.close()


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ('"ftp://x"', 'at = "ftp://x" is neither a file nor an address that begins with http:// or https://'),
        ('{ at = "/x", headers = { a = "b" } }', "run.notice: headers are of an address, and at names a file; remove"),
        ("{ every_s = 1.0 }", 'needs the key "at"'),
    ],
)
def test_what_is_no_place_is_refused(stated, message, tmp_path):
    found = composer3d.check(write(tmp_path, MANIFEST), overrides=[f"run.notice={stated}"]).problems
    assert [message in problem.message for problem in found] == [True]
