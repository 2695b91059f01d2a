from __future__ import annotations

import gc
import subprocess
import sys
import weakref

import pytest

from composer3d.processes import collect_new_objects, scanning_new_objects_only
from composer3d.testing import run_ranks


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return weakref.ref(node)


def new_objects_are_scanned_and_older_ones_not():
    gc.unfreeze()  # what the fork froze
    gc.disable()
    dead, old = cycle(), Node()
    old.itself, older = old, weakref.ref(old)
    with scanning_new_objects_only():
        before = dead() is None
        del old
        new = cycle()
        gc.collect()
        inside = (new() is None, older() is None)
    gc.collect()
    return before, inside, older() is None, gc.get_freeze_count()


def test_garbage_is_collected_before_and_new_objects_meanwhile():
    gc.collect()  # the rank would free what earlier tests have left, a group of another process's among it
    assert run_ranks(new_objects_are_scanned_and_older_ones_not, 1, init=False) == [(True, (True, False), True, 0)]


def what_died_before_stays_where_nothing_is_collected():
    gc.unfreeze()
    gc.disable()
    dead = cycle()
    with scanning_new_objects_only(collects=False):
        gc.collect()
        inside = dead() is None
    gc.collect()
    return inside, dead() is None


def test_the_first_collection_may_be_left_out():
    gc.collect()
    assert run_ranks(what_died_before_stays_where_nothing_is_collected, 1, init=False) == [(False, True)]


def what_is_collected_inside_is_scanned_no_more():
    gc.unfreeze()
    gc.disable()
    dead = cycle()
    collect_new_objects()
    found = [dead() is None, gc.get_freeze_count() == 0]
    with scanning_new_objects_only():
        kept = Node()
        kept.itself, left = kept, weakref.ref(kept)
        collect_new_objects()
        del kept
        gc.collect()
        found.append(left() is not None)
    gc.collect()
    return [*found, left() is None]


def test_what_a_collection_leaves_is_scanned_no_more_inside():
    gc.collect()
    assert run_ranks(what_is_collected_inside_is_scanned_no_more, 1, init=False) == [[True, True, True, True]]


CYCLE = """
import atexit, sys
class Node:
    def __del__(self):
        print("collected")
node = Node()
node.itself = node
atexit.register(print, "ended")
"""


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("", ["ended", "collected"]),
        ("from composer3d.processes import end_without_collecting as end\nend()\nend()", ["ended"]),
        *(
            (f"from composer3d.cli import main\nmain(['{command}', 'none.toml', '--world-size=1'])", ["ended"])
            for command in ("plan", "suggest", "check")
        ),
    ],
)
def test_a_command_that_only_computes_ends_without_a_last_collection(code, output, tmp_path):
    started = subprocess.run(
        [sys.executable, "-c", CYCLE + code], cwd=tmp_path, stdout=subprocess.PIPE, text=True, check=True, timeout=100
    )
    assert started.stdout.split() == output


def frozen_objects_stay_frozen():
    gc.unfreeze()
    gc.freeze()
    before = gc.get_freeze_count()
    with pytest.raises(ValueError, match="inside"), scanning_new_objects_only():
        raise ValueError("inside")
    return gc.get_freeze_count() >= before > 0


def test_a_process_that_had_frozen_objects_keeps_them():
    assert run_ranks(frozen_objects_stay_frozen, 1, init=False) == [True]
