from __future__ import annotations

import fcntl
import os
import queue
import threading

import pytest

from composer3d.runner.data import prepare_once
from composer3d.runner.data.prepare import launch_key
from composer3d.testing import run_ranks


def test_one_rank_works_and_all_find_the_result(tmp_path):
    made = tmp_path / "made"

    def work():
        with (tmp_path / "workers").open("a") as file:
            file.write(os.environ["RANK"])
        made.write_text("result")

    def rank():
        said = []
        prepare_once(work, done=made.exists, lock_path=tmp_path / "new" / "lock", what="it", report=said.append, rank=7)
        return made.read_text(), said

    results = run_ranks(rank, 4, init=False)
    assert [text for text, _ in results] == ["result"] * 4 and len((tmp_path / "workers").read_text()) == 1
    assert sum("rank 7 prepares it" in said for _, said in results) == 1


def test_who_waits_says_so_and_does_not_do_the_work_again(tmp_path):
    made, said = tmp_path / "made", queue.Queue()

    def work():
        raise AssertionError("the work was done already")

    waiting = threading.Thread(
        target=prepare_once,
        args=(work,),
        kwargs={"done": made.exists, "lock_path": tmp_path / "lock", "what": "the text", "report": said.put, "rank": 1},
    )
    with (tmp_path / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        assert said.get(timeout=1200) == "rank 1 waits for the text to be prepared"
        made.touch()
    waiting.join(timeout=1200)
    assert not waiting.is_alive() and said.empty()


def test_after_a_failure_the_next_one_does_the_work(tmp_path):
    made = tmp_path / "made"

    def fail():
        raise RuntimeError("no space")

    said = []
    keys = {"done": made.exists, "lock_path": tmp_path / "lock", "what": "it", "report": said.append}
    with pytest.raises(RuntimeError, match="no space"):
        prepare_once(fail, **keys)
    prepare_once(made.touch, rank=1, **keys)
    prepare_once(fail, rank=2, **keys)
    assert said == ["rank 0 prepares it", "rank 1 prepares it"]


def test_the_ranks_of_a_launch_share_its_key():
    ours = launch_key()
    first, second = run_ranks(launch_key, 2, init=False)
    assert first == second != ours and first.startswith(f"{os.getpid()} ")
