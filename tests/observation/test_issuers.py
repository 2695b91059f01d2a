"""Who issued a collective is read off its recorded stack: a plugin, a line of a loop or model, or an axis' owner."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support import voting_plugins
from support.models import composed, mine, padded
from support.plugins import Journal

import composer3d
from composer3d import StepError, torch_compat
from composer3d.observation.issuers import Issuer, issuer_of, sources_of
from composer3d.testing import run_ranks

TIMEOUT_S = 2.0
CORE, TORCH = Path(composer3d.__file__).parent, Path(torch.__file__).parent
CALL = ("all_reduce", f"{TORCH}/distributed/distributed_c10d.py")
WRAPPED = ("wrapper", f"{TORCH}/distributed/c10d_logger.py")
MODULE = ("_call_impl", f"{TORCH}/nn/modules/module.py")
HOOK = ("call", f"{CORE}/hooks/blame.py")
MODE = ("handle_torch_function", f"{TORCH}/overrides.py")
ENGINE = ("step", f"{CORE}/step/engine.py")
OWN, BESIDE, LOOP = ("vote", "/runs/own.py"), ("cast", "/runs/beside.py"), ("train", "/runs/loop.py")
SOURCES = {"/runs/own.py": "own", "/site-packages/pkg/": "packed"}


def frames(*places):
    return [{"name": name, "filename": file, "line": line} for line, (name, file) in enumerate(places, 1)]


@pytest.mark.parametrize(
    ("places", "issuer"),
    [
        pytest.param([CALL, WRAPPED, OWN, HOOK, ENGINE, LOOP], Issuer("own", "own.py:3 in vote"), id="a plugin"),
        pytest.param(
            [CALL, ("send", "/site-packages/pkg/inner/wire.py"), MODULE, LOOP],
            Issuer("packed", "wire.py:2 in send"),
            id="a plugin's package",
        ),
        pytest.param([CALL, BESIDE, OWN, HOOK, ENGINE], Issuer("own", "beside.py:2 in cast"), id="beside a plugin"),
        pytest.param([CALL, BESIDE, OWN, ENGINE], Issuer("", "beside.py:2 in cast"), id="a function of nobody's"),
        pytest.param([CALL, LOOP], Issuer("", "loop.py:2 in train"), id="a loop"),
        pytest.param(
            [CALL, ("forward", "/runs/model.py"), MODULE, OWN, HOOK], Issuer("", "model.py:2 in forward"), id="a model"
        ),
        pytest.param([CALL, ENGINE, LOOP], Issuer("composer3d"), id="the core"),
        pytest.param(
            [CALL, ("all_gather_json", f"{CORE}/processes/json_exchange.py"), OWN, HOOK],
            Issuer("own", "own.py:3 in vote"),
            id="through the core",
        ),
        pytest.param(
            [CALL, ("foreach_all_gather", f"{TORCH}/distributed/fsdp/_fully_shard/collectives.py"), MODULE, LOOP],
            Issuer(""),
            id="fully_shard",
        ),
        pytest.param(
            [CALL, ("_call", f"{CORE}/step/engine.py"), MODE, CALL, WRAPPED, OWN, HOOK],
            Issuer("own", "own.py:6 in vote"),
            id="through a mode",
        ),
        pytest.param([("run_backward", f"{TORCH}/autograd/graph.py"), OWN, HOOK], Issuer(""), id="a backward"),
        pytest.param([], None, id="no stack"),
        pytest.param([CALL], None, id="torch alone"),
    ],
)
def test_issuers_of_stacks(places, issuer):
    assert issuer_of(frames(*places), SOURCES) == issuer


def test_sources_are_files_and_packages():
    installed = composer3d.registry.Catalogue.installed()
    plugins = [
        SimpleNamespace(name="journal", instance=Journal()),
        SimpleNamespace(name="again", instance=Journal()),
        SimpleNamespace(name="compression", instance=installed.load("compression")(gradients="int8")),
    ]
    found = sources_of(plugins)
    assert {Path(source).name: name for source, name in found.items()} == {
        "plugins.py": "journal or again",
        "compression": "compression",
    }
    assert [source.endswith("/") for source in found] == [False, True]


def voting(text):
    """Run two steps, in the second of which one rank does not vote as the other; return what each is told."""

    def wait():
        store, deadline = torch_compat.default_store(), time.monotonic() + 250
        while not store.check(["composer3d/flight/1/message"]) and time.monotonic() < deadline:
            time.sleep(0.05)
        raise RuntimeError("Timed out waiting for nothing")

    voting_plugins.Voting.wait = staticmethod(wait)
    run = composed(text)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    for group in (None, run.mesh.get_group("dp_shard")):
        torch_compat.set_group_timeout(group, timedelta(seconds=TIMEOUT_S))
    with pytest.raises(StepError) as caught, run.step(1):
        run.forward_backward(tokens, target=targets)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(
            'fault = "absent"',
            r"dp_shard \(ranks 0 and 1; voting, voting_plugins.py:\d+ in _vote\): rank 1 \(dp_shard 1\) did not run "
            r"all_reduce of \[5\], in which rank 0 waited\n",
            id="absent",
        ),
        pytest.param(
            'fault = "absent"\nhelps = true',
            r"dp_shard \(ranks 0 and 1; voting, ballots.py:\d+ in cast\): rank 1",
            id="a module beside it",
        ),
        pytest.param(
            'fault = "other"',
            r"dp_shard \(ranks 0 and 1; voting\): rank 1 \(dp_shard 1\) ran all_gather of \[5\] \(voting, "
            r"voting_plugins.py:\d+ in _vote\), while rank 0 ran all_reduce of \[5\] \(voting, "
            r"voting_plugins.py:\d+ in _vote\)\n",
            id="other",
        ),
    ],
)
def test_a_plugins_own_collective_is_told_as_its_own(options, said):
    text = f'[sharding.fsdp2]\n[profiling.voting]\nuse = "support.voting_plugins:Voting"\n{options}\n'
    told = run_ranks(voting, 2, text)
    assert told[0] == told[1]
    assert re.search(rf"\ncollective \d+ over {said}", told[0]), told[0]
    assert not re.search(r"all_(reduce|gather) of \[5\] over dp_shard \(fsdp2", told[0]), told[0]
