"""`self_test`: the network, proofs of the covering set, and step times, each in a process of its own, until time is up.

What fails or hangs in one item is that item's verdict; the rest goes on.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from composer3d.processes import temporary_folder
from composer3d.selftest.machine_facts import machine_facts, scrubbed
from composer3d.selftest.proof_rows import ProofRow, proof_rows
from composer3d.selftest.step_ratio import AUTHORS, ratio_of

__all__ = ["SelfTest", "SelfTestItem", "self_test"]

_MAX_CPU_RANKS = 8
_NETWORK_SHARE = 0.3  # of all the time at most: on a busy machine nothing would be proven
_ITEM_S = 300.0  # an item that takes longer hangs
_NETWORK = 'composer3d = 1\nmodel.use = "composer3d.models:llama"\ntrain.steps = 1\nrun.device = "{device}"\n'
_DETAIL = 1500  # characters of a failure's text


@dataclass(frozen=True, kw_only=True)
class SelfTestItem:
    """Outcome of an item.

    Args:
        what: network, proof or ratio.
        device: cpu or cuda.
        outcome: holds; differs, which is a defect; failed; or cut off, where time was up.
        text: In words, without names of hosts, users or paths.
        seconds: Wall time.
        pairs: Of a proof, the share of all pairs of options that are held so far.
    """

    what: str
    device: str
    outcome: str
    text: str
    seconds: float
    pairs: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SelfTest:
    """The report of a self-test.

    Args:
        machine: From `machine_facts`.
        items: In order.
        left: Proofs that time did not suffice for.
        absent: Plugins that this machine cannot import.
    """

    machine: dict[str, Any]
    items: tuple[SelfTestItem, ...]
    left: int
    absent: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether something was proven, and everything that came to its end holds."""
        outcomes = {item.outcome for item in self.items}
        return not outcomes & {"differs", "failed"} and any(
            item.what == "proof" and item.outcome == "holds" for item in self.items
        )

    def to_json(self) -> dict[str, Any]:
        """Return what `composer3d selftest --json` prints."""
        return {"ok": self.ok, **asdict(self)}

    @property
    def summary(self) -> str:
        """The result in a sentence."""
        proofs = [item for item in self.items if item.what == "proof"]
        held = [item for item in proofs if item.outcome == "holds"]
        pairs = max((item.pairs for item in held), default=0.0)
        wrong = sum(item.outcome in ("differs", "failed") for item in self.items)
        parts = [f"{len(held)} of {len(proofs)} compositions proven", f"{pairs:.0%} of all pairs of options"]
        parts = parts if proofs else ["no composition was begun before time was up"]
        parts += [f"{wrong} items do not hold"] if wrong else []
        parts += [f"{self.left} more need more minutes"] if self.left else []
        return ", ".join(parts)


def self_test(
    *, minutes: float, with_host: bool = False, tell: Callable[[SelfTestItem], None] = lambda item: None
) -> SelfTest:
    """Prove compositions on CPU ranks and GPUs, measure links, and on a GPU time steps beside hand-written ones.

    Args:
        minutes: Until no further item is begun, and the one under way is ended.
        with_host: Put the machine's name into the report.
        tell: Called with each item as it ends.
    """
    ends, items = time.monotonic() + 60 * minutes, []
    machine = machine_facts(with_host=with_host)
    num_gpus = len(machine["gpus"])
    devices = [("cuda", num_gpus)] if num_gpus else []
    devices += [("cpu", _MAX_CPU_RANKS)]
    queues = {device: proof_rows(device=device, max_ranks=ranks) for device, ranks in devices}
    with temporary_folder("selftest") as folder:

        def add(item: SelfTestItem) -> None:
            items.append(item)
            tell(item)

        for device, ranks in devices:
            if ranks > 1:
                until = min(ends, time.monotonic() + _NETWORK_SHARE * 60 * minutes)
                add(_network(Path(folder), device, min(ranks, 2) if device == "cpu" else ranks, until))
        if num_gpus:  # what a CPU's step takes is mostly bookkeeping
            add(_ratio("cuda", ends))
        left = _prove_all(Path(folder), queues, ends, add)
    absent = sorted({name for rows in queues.values() for row in rows for name in row.absent})
    return SelfTest(machine=machine, items=tuple(items), left=left, absent=tuple(absent))


def _prove_all(
    folder: Path, queues: dict[str, list[ProofRow]], ends: float, add: Callable[[SelfTestItem], None]
) -> int:
    """Prove rows, of each device in turns, until time is up; return how many are left."""
    while any(queues.values()):
        for device, rows in queues.items():
            if not rows:
                continue
            if time.monotonic() >= ends:
                return sum(map(len, queues.values()))
            row = rows.pop(0)
            path = folder / "row.toml"
            path.write_text(row.manifest, encoding="utf-8")
            world = f"{row.ranks} rank{'s' if row.ranks > 1 else ''}, {row.plugins} plugins"
            add(_run("proof", device, world, ["-m", "composer3d", "verify", str(path)], ends, pairs=row.pairs))
    return 0


def _network(folder: Path, device: str, ranks: int, ends: float) -> SelfTestItem:
    """Measure latency and bandwidth between ranks on one axis."""
    path = folder / "network.toml"
    path.write_text(_NETWORK.format(device=device) + _shards(ranks), encoding="utf-8")
    command = ["-m", "composer3d", "doctor", str(path), "--network"]
    return _run("network", device, f"{ranks} ranks", command, ends, shows=True)


def _shards(ranks: int) -> str:
    """Return tables that shard parameters over so many ranks, those of the timed composition."""
    from importlib import resources

    text = resources.files("composer3d").joinpath("selftest", "step_ratio.toml").read_text(encoding="utf-8")
    return f"mesh.dp_shard = {ranks}\n" + text.split("composer3d = 1\n")[1]


def _ratio(device: str, ends: float) -> SelfTestItem:
    """Time steps beside hand-written ones."""
    began, measured = time.monotonic(), []
    for author in AUTHORS:
        item = _run("ratio", device, author, ["-m", "composer3d.selftest.step_ratio", author, device], ends, shows=True)
        if item.outcome != "holds":
            return item
        measured.append(json.loads(item.text.splitlines()[-1]))
    found = ratio_of(measured)
    text = (
        f"{found['ratio']:.3f} of the tokens a second of a hand-written loop (that against itself: "
        f"{found['control']:.3f}), losses apart by {found['loss_apart']:.1g} of their value"
    )
    outcome = "holds" if found["loss_apart"] <= 1e-3 else "differs"
    seconds = round(time.monotonic() - began, 1)
    return SelfTestItem(what="ratio", device=device, outcome=outcome, text=text, seconds=seconds)


def _run(
    what: str, device: str, about: str, command: Sequence[str], ends: float, *, shows: bool = False, pairs: float = 0.0
) -> SelfTestItem:
    """Run a Python command in a process group of its own; at the end of the time all of it is ended."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "NO_COLOR": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    )
    left = max(min(ends - began, _ITEM_S), 0.1)
    try:
        out, err = process.communicate(timeout=left)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        is_hanging = left == _ITEM_S
        outcome, text = ("failed", f"{about}: no answer in {left:.0f} s") if is_hanging else ("cut off", about)
    else:
        # Only a proof says by its exit code that something differs.
        outcome = "holds" if process.returncode == 0 else "failed"
        outcome = "differs" if process.returncode == 1 and what == "proof" else outcome
        text = out.strip() if outcome == "holds" and shows else about
        text += "" if outcome == "holds" else "\n" + (out + err).strip()[-_DETAIL:]
    seconds = time.monotonic() - began
    return SelfTestItem(
        what=what, device=device, outcome=outcome, text=scrubbed(text), seconds=round(seconds, 1), pairs=pairs
    )
