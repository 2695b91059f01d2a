"""Bytes, errors and losses of compressed gradients and weights, on four ranks that share a loopback of their own.

A byte model of 135,808 parameters (two blocks of width 64) trains on Python's own documentation, with the same seed
whatever travels. Told of each method: the bytes that all ranks together put on the loopback in a step, headers
included, where a network namespace is to be had, and by axis the payloads that the observer of collectives counts; the
distance of the first step's gradient from that of float32, relative to its norm; the mean loss of the last ten steps;
the CPU time of a step. With --bandwidth, instead, the time of a step where the loopback carries so much and no more (a
token bucket of `tc`), for the quickstart's model widened to 10 million parameters, beside that in float32.

communication: bf16 on the wire is to have at most half the error of torch's bf16 at fewer bytes, and int8 weights with
int4 gradients at most a fifth of the bytes of torch's float32. At 1 Gbit/s steps over shards with int8 on the wire
(gradients and weights) are to take at most half the time of those in float32.

Usage: python benchmarks/communication.py [--quick] [--steps 200] [--bandwidth MBIT] [--json]
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import json
import os
import socket
import statistics
import struct
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from composer3d_plugins.communication.compression.frozen_adam import FrozenAdamW
from harness import conditions, fail, note, say, say_rows
from torch import Tensor, nn

import composer3d
from composer3d.models.llama import llama
from composer3d.testing import count_collectives, full, run_ranks

RANKS, LENGTH, BATCH, DIM = 4, 64, 8, 64
MIB = 2**20
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
NODES = "mesh.gpus_per_node = 1\n"  # the links are those between nodes
SHARDS = NODES + "[sharding.fsdp2]\n"
REPLICAS = NODES + "[sharding.ddp]\n"
BOTH = "[mesh]\ngpus_per_node = 1\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n"
CODED = "[communication.compression]\n"
# By layout; the first of each is what errors are told of.
METHODS = {
    "shards": {
        "float32": SHARDS,
        "bf16 of torch": SHARDS + '[precision.mixed]\nparam_dtype = "float32"\nreduce_dtype = "bfloat16"\n',
        "bf16": SHARDS + CODED + 'gradients = "bf16"\n',
        "int8": SHARDS + CODED + 'gradients = "int8"\n',
        "fp8": SHARDS + CODED + 'gradients = "fp8"\n',
        "int4": SHARDS + CODED + 'gradients = "int4"\n',
        "int4, int8 weights": SHARDS + CODED + 'gradients = "int4"\nweights = "int8"\n',
    },
    "replicas": {
        "float32": REPLICAS,
        "bf16": REPLICAS + CODED + 'gradients = "bf16"\n',
        "int8": REPLICAS + CODED + 'gradients = "int8"\n',
        "int4 with feedback": REPLICAS + CODED + 'gradients = "int4"\nerror_feedback = true\n',
        "PowerSGD, rank 4": REPLICAS + CODED + 'gradients = "powersgd"\n',
        "largest 1 %": REPLICAS + CODED + 'gradients = "topk"\n',
        "signs": REPLICAS + CODED + 'gradients = "onebit"\nstart_step = {warmup}\n',
    },
    "shards and replicas": {
        "float32": BOTH,
        "int8, int8": BOTH + CODED + 'gradients = "int8"\n',
        "float32, int4": BOTH + CODED + 'gradients = "int4"\naxes = ["dp_replicate"]\n',
    },
}
# By layout, at a limited bandwidth: the first of each is what the others are compared with.
LIMITED = {
    "shards": {
        "float32": SHARDS,
        "int8 gradients": SHARDS + CODED + 'gradients = "int8"\n',
        "int8": SHARDS + CODED + 'gradients = "int8"\nweights = "int8"\n',
    },
    "replicas": {
        "float32": REPLICAS,
        "int8": REPLICAS + CODED + 'gradients = "int8"\n',
    },
}
QUICKSTART = {"num_layers": 4, "num_heads": 4}
WIDE = 448  # 10.0 million parameters in the quickstart's model
QUICK = ("float32", "bf16 of torch", "bf16", "int4, int8 weights", "PowerSGD, rank 4", "int8, int8")


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.first, self.second, self.heads = nn.LayerNorm(dim), nn.LayerNorm(dim), heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        size, length, dim = x.shape
        q, k, v = self.qkv(self.first(x)).view(size, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(size, length, dim)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.second(x))))


class Bytes(nn.Module):
    """A language model of bytes."""

    def __init__(self, dim: int = DIM, num_layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, dim), nn.Embedding(LENGTH, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) + 0.0


def text() -> Tensor:
    """Return Python's topics as bytes."""
    from pydoc_data.topics import topics

    return torch.frombuffer(bytearray("\n".join(topics[key] for key in sorted(topics)).encode()), dtype=torch.uint8)


def batch(data: Tensor, step: int, first: int, size: int) -> tuple[Tensor, Tensor]:
    """Return sequences of a step and what follows them; a function of the step alone."""
    rows = []
    for index in range(first, first + size):
        generator = torch.Generator().manual_seed(step * 4096 + index)
        at = int(torch.randint(0, len(data) - LENGTH - 1, (1,), generator=generator))
        rows.append(data[at : at + LENGTH + 1].long())
    both = torch.stack(rows)
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over tokens, and their number."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return total, torch.tensor(targets.numel())


def sent_bytes() -> int:
    """Return what has left through the loopback of this namespace."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith("lo:"))


def trained(manifest: str, num_steps: int, warmup: int, dim: int, is_alone: bool) -> dict[str, Any]:
    """Train on a rank; return losses, the first gradient, bytes of a step, CPU and elapsed time."""
    import torch.distributed as dist

    torch.manual_seed(0)
    data, is_frozen = text(), "onebit" in Path(manifest).read_text()
    model = Bytes() if dim == DIM else llama(dim=dim, **QUICKSTART)
    run = composer3d.compose(model, manifest, loss_fn=loss_of)
    if is_frozen:
        optimizer = run.optimizer(FrozenAdamW, lr=1e-3, freeze_step=warmup)
    else:
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3)
    # At a limited bandwidth one sequence a rank: what is compared is what travels.
    size = (BATCH if dim == DIM else RANKS) // run.context.data_parallel_degree
    losses, cpu_s, elapsed_s, on_wire = [], [], [], 0
    first: dict[str, Tensor] = {}
    counted: dict[str, int] = {}
    looked_at = max(1, warmup if is_frozen else 1)
    for step in range(num_steps):
        tokens, targets = batch(data, step, run.context.data_parallel_rank * size, size)
        is_counted = step == looked_at
        if is_counted and is_alone:
            dist.barrier()
            before = sent_bytes()
        begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
        with count_collectives(run.mesh) as collectives, run.step(step):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            if step == (warmup if is_frozen else 0):
                first = {name: full(p.grad).clone() for name, p in run.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        elapsed_s.append(time.perf_counter() - begin_s)
        cpu_s.append(time.process_time() - begin_cpu_s)
        if is_counted:
            for row in collectives.rows:
                if row.axis != "world":
                    counted[f"{row.op} {row.axis}"] = counted.get(f"{row.op} {row.axis}", 0) + row.bytes
            if is_alone:
                dist.barrier()
                on_wire = sent_bytes() - before
    run.close()
    flat = torch.cat([first[name].flatten() for name in sorted(first)]) if first else torch.zeros(0)
    return {
        "losses": losses,
        "gradient": flat.tolist() if run.context.rank == 0 else [],
        "counted": counted,
        "on_wire": on_wire,
        "cpu_s": statistics.median(cpu_s[2:] or cpu_s),
        "elapsed_s": statistics.median(elapsed_s[2:] or elapsed_s),
    }


def own_loopback() -> bool:
    """Take a network namespace with a loopback that nobody else uses; return whether there is one."""
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_NETWORK):
        note(f"no network namespace of its own ({os.strerror(ctypes.get_errno())}): bytes are the observer's alone")
        return False
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as each:
        flags = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # up, running
        fcntl.ioctl(each, 0x8914, flags)  # SIOCSIFFLAGS
    return True


def measured(layout: str, methods: dict[str, str], run: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row a method of a layout."""
    rows: list[dict[str, Any]] = []
    exact: Tensor | None = None
    for method, manifest in methods.items():
        note(f"{layout}: {method}")
        found = run(manifest)
        gradient = torch.tensor(found["gradient"])
        exact = gradient if exact is None else exact
        # Signs begin late, when the run is another one: their error is not told.
        is_first = "onebit" not in manifest
        row = {
            "name": f"{layout}: {method}",
            "error": float(f"{float((gradient - exact).norm() / exact.norm()):.2g}") if is_first else None,
            "mib_on_wire": round(found["on_wire"] / MIB, 3) if found["on_wire"] else None,
            "payload_bytes": found["counted"],
            "loss": round(statistics.fmean(found["losses"][-10:]), 4),
            "cpu_ms": round(found["cpu_s"] * 1e3, 1),
        }
        rows.append(row)
        note(f"  error {row['error']}, MiB {row['mib_on_wire']}, loss {row['loss']}")
    return rows


def limited(mbit: int, run: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the time of a step by method where the loopback carries so many Mbit/s, and that of float32 over it."""
    bucket = ["tc", "qdisc", "replace", "dev", "lo", "root", "tbf"]
    bucket += ["rate", f"{mbit}mbit", "burst", "256kb", "latency", "400ms"]
    try:
        done = subprocess.run(bucket, capture_output=True, text=True, timeout=10)
    except FileNotFoundError:
        fail("tc is not installed: no token bucket, so no bandwidth is limited")
    if done.returncode:
        fail(f"{' '.join(bucket)}: {done.stderr.strip()}: no token bucket, so no bandwidth is limited")
    rows = []
    for layout, methods in LIMITED.items():
        plain_s = 0.0
        for method, manifest in methods.items():
            note(f"{layout}: {method}, {mbit} Mbit/s")
            found = run(manifest)
            plain_s = plain_s or found["elapsed_s"]
            rows.append(
                {
                    "name": f"{layout}: {method}",
                    "step_s": round(found["elapsed_s"], 3),
                    "times_faster": round(plain_s / found["elapsed_s"], 2),
                    "mib_on_wire": round(found["on_wire"] / MIB, 1),
                    "cpu_s": round(found["cpu_s"], 3),
                }
            )
    return rows


def limited_summary(report: dict[str, Any]) -> str:
    """Return the table of step times at a limited bandwidth, in Markdown, and the conditions."""
    lines = [
        f"| what travels over 4 ranks, {report['mbit']} Mbit/s | step, s | times faster | MiB of a step | CPU, s |",
        "|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        cells = (row["step_s"], row["times_faster"], row["mib_on_wire"], row["cpu_s"])
        lines.append(f"| {row['name']} | {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", *_stated(report["conditions"])]) + "\n"


def _stated(stated: dict[str, Any]) -> list[str]:
    load = f"load {stated['load_1min_before']} before, {stated['load_1min_after']} after"
    return [
        f"Run on {stated['date']}, {load}: {stated['machine']};",
        f"Python {stated['python']}, torch {stated['torch']}.",
    ]


def summary(report: dict[str, Any]) -> str:
    """Return the table of methods, in Markdown, and the conditions."""
    lines = [
        "| what travels over 4 ranks | error of a gradient | MiB of a step | loss | CPU of a step, ms |",
        "|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        if "error" in row:
            cells = ("-" if row[key] is None else str(row[key]) for key in ("error", "mib_on_wire", "loss", "cpu_ms"))
            lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    stated = report["conditions"]
    lines += [
        "",
        f"Losses are means of the last ten of {report['steps']} steps, one seed. Run on {stated['date']} beside",
    ]
    lines += [f"other work: {stated['machine']}; Python {stated['python']}, torch {stated['torch']}."]
    return "\n".join(lines) + "\n"


def _report_limited(mbit: int, run: Callable[[str], dict[str, Any]], stated: dict[str, Any], is_json: bool) -> None:
    rows = limited(mbit, run)
    if is_json:
        after = {"load_1min_after": round(os.getloadavg()[0], 2)}
        say(json.dumps({"mbit": mbit, "rows": rows, "conditions": {**stated, **after}}, indent=1))
    else:
        say_rows(rows, stated, as_json=False)
    ratio = next(row["times_faster"] for row in rows if row["name"] == "shards: int8")
    if mbit <= 1000 and ratio < 2:
        fail(f"int8 over shards is {ratio} times faster than float32, and is to be 2 times faster")


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="some methods, 12 steps")
    parser.add_argument("--steps", type=int, default=200, help="of each run")
    parser.add_argument("--bandwidth", type=int, metavar="MBIT", help="step times on a loopback of so many Mbit/s")
    parser.add_argument("--json", action="store_true", help="write one JSON object")
    options = parser.parse_args()
    stated, is_alone = conditions(), own_loopback()
    if options.bandwidth is not None and not is_alone:
        fail("a bandwidth is limited in a network namespace only, which is not to be had here")
    num_steps = 12 if options.quick else options.steps
    warmup = max(1, num_steps // 4)
    folder = Path(os.environ.get("TMPDIR", "/tmp"))
    path = folder / f"communication-{os.getpid()}.toml"

    def run(manifest: str, *, steps: int = num_steps, dim: int = DIM) -> dict[str, Any]:
        path.write_text(f"composer3d = 1\n{manifest.format(warmup=warmup)}")
        found = run_ranks(trained, RANKS, path.as_posix(), steps, warmup, dim, is_alone, timeout_s=1800.0)
        return found[0]

    try:
        if options.bandwidth is not None:
            _report_limited(options.bandwidth, lambda manifest: run(manifest, steps=5, dim=WIDE), stated, options.json)
            return
        rows = []
        for layout, methods in METHODS.items():
            chosen = {name: each for name, each in methods.items() if not options.quick or name in QUICK}
            rows += measured(layout, chosen, run)
        by_name = {row["name"]: row for row in rows}
        ours, torchs = by_name["shards: bf16"], by_name["shards: bf16 of torch"]
        if not ours["error"] < 0.5 * torchs["error"]:
            fail(f"bf16 on the wire has an error of {ours['error']}, and torch's bf16 of {torchs['error']}")
        if is_alone:
            plain, least = (by_name[f"shards: {each}"]["mib_on_wire"] for each in ("float32", "int4, int8 weights"))
            if not (ours["mib_on_wire"] < torchs["mib_on_wire"] and least < plain / 5):
                fail(f"bytes are not what they are to be: {[(row['name'], row['mib_on_wire']) for row in rows]}")
        if options.json:
            after = {"load_1min_after": round(os.getloadavg()[0], 2)}
            say(json.dumps({"steps": num_steps, "rows": rows, "conditions": {**stated, **after}}, indent=1))
        else:
            say_rows(rows, stated, as_json=False)
    finally:
        path.unlink(missing_ok=True)


if __name__ == "__main__":
    main()
