"""Groups of ranks that train a small model, and end themselves at stated places."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import composer3d
from composer3d.processes.child import Child
from composer3d.processes.forking import limit_ranks
from composer3d.replicas import ATTEMPT, GROUP, Exchange, ReplicaPolicy
from composer3d.runner.launching.group_launcher import launch_groups
from composer3d.runner.launching.launcher import launch_local
from support.process_trees import send_to_tree

STEPS, SAMPLES = 6, 8


class Block(nn.Module):
    """Projections that tensor parallelism knows, and dropout."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(8, 12), nn.Linear(12, 8), nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(x))))


class Model(nn.Module):
    """Blocks, and running statistics."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(SAMPLES, 8, generator=generator, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)


def end(how, folder):
    """End or stop this rank, or a whole machine of several (`support.group_nodes`): `node-1 kill`.

    Or wait until a file is there: `until node-0-again`.
    """
    if how.startswith("until "):
        Path(folder, "waits").touch()
        while not Path(folder, how.removeprefix("until ")).exists():
            time.sleep(0.01)
        return None
    if how.startswith("node-"):
        rank, _, how = how.removeprefix("node-").partition(" ")
        pid = int(Path(folder, f"node-{rank}.pid").read_text())
        if how == "term":
            return os.kill(pid, signal.SIGTERM)
        if how == "shoot":  # another machine, while this one goes on
            return os.kill(pid, signal.SIGKILL)
        if how in ("freeze", "slay"):
            return send_to_tree(pid, signal.SIGSTOP if how == "freeze" else signal.SIGKILL)
        if how == "kill":  # the kernel ends its groups with it
            os.kill(pid, signal.SIGKILL)
            signal.pause()
        for each in (pid, os.getppid()):
            os.kill(each, signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)


def ends_in_recovery():
    """End this process at the third tensor that it is given."""
    receive, left = Exchange.receive, [3]

    def wrapped(self, *arguments):
        left[0] -= 1
        if not left[0]:
            end("kill", "")
        receive(self, *arguments)

    Exchange.receive = wrapped


def err(head, faults):
    """Have backwards err: the first one of a step ("once"), or every one from a step on ("always").

    Returns a list whose item is the step that runs.
    """
    now = [-1]

    def hook(module, gradients, _):
        if now[0] == faults.get("once"):
            del faults["once"]
        elif now[0] < faults.get("always", STEPS):
            return None
        return tuple(gradient * (1 + 1e-9) for gradient in gradients)

    head.register_full_backward_hook(hook)
    return now


def trained(manifest, folder, ends):
    """Train as one rank; write a line per step, end or err at those in `ends`.

    Each is `[group, attempt, rank, step, place, how]`. Places: before or after a step, in `recovery`, `own` for a
    backward of the loop's own, `wrong` for `err`.
    """
    torch.set_default_dtype(torch.float64)
    group, attempt = int(os.environ.get(GROUP, 0)), int(os.environ.get(ATTEMPT, 0))
    rank = int(os.environ["RANK"])
    here = [(step, place, how) for *who, step, place, how in ends if who == [group, attempt, rank]]
    if any(place == "recovery" for _, place, _ in here):
        ends_in_recovery()
    with composer3d.compose(Model, manifest, loss_fn=mse_loss) as run:
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        replicas = run.replicas
        wrong = {how: step for step, place, how in here if place == "wrong"}
        now = err(run.model.head, wrong) if wrong else [-1]
        start = 0 if replicas is None else replicas.begin(0)
        size = SAMPLES // run.context.data_parallel_degree
        mine = slice(run.context.data_parallel_rank * size, (run.context.data_parallel_rank + 1) * size)
        for step in range(start, STEPS):
            x, y = batch(step)
            now[0] = step
            with run.step(step):
                for at, place, how in here:
                    if (at, place) == (step, "before"):
                        end(how, folder)
                if any((at, place) == (step, "own") for at, place, _ in here):
                    run.backward(mse_loss(run.model(x[mine]), y[mine]))
                loss = float(run.forward_backward(x[mine], target=y[mine]))
                norm = float(run.clip_grad_norm_(0.1))
                for at, place, how in here:
                    if (at, place) == (step, "after"):
                        end(how, folder)
                optimizer.step()
                optimizer.zero_grad()
            digest = hashlib.sha256()
            for fqn, parameter in run.named_parameters():
                digest.update(run.full_tensor(fqn, parameter.detach()).contiguous().numpy().tobytes())
            row = {"step": step, "loss": loss, "norm": norm, "digest": digest.hexdigest(), "attempt": attempt}
            row["repeated"] = 0 if replicas is None else replicas.num_repeated
            row["members"] = [] if replicas is None else list(replicas.members)
            with Path(folder, f"group-{group}-rank-{rank}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
        if replicas is not None:
            replicas.finish(STEPS, lambda: None)


def rows(folder, group, rank=0):
    path = Path(folder, f"group-{group}-rank-{rank}.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def run_groups(folder, text, *, groups=2, ranks=1, ends=(), table="", max_restarts=0, **policy):
    """Run groups to their end; return how they ended, and what each noted."""
    folder.mkdir()
    manifest = folder / "run.toml"
    manifest.write_text(f"composer3d = 1\n[mesh]\nreplica = {groups}\n{text}\n[communication.replicas]\n{table}")
    work = (str(manifest), str(folder), [list(each) for each in ends])

    def launch():
        options = {"policy": ReplicaPolicy(**policy), "num_groups": groups, "num_ranks": ranks, "device": "cpu"}
        result = launch_groups(trained, work, output=folder / "run", max_restarts=max_restarts, **options)
        failed = None if result.report is None else result.report.render()
        return {"outcome": result.outcome, "failed": failed, "restarts": result.num_restarts}

    with limit_ranks(groups * ranks):
        result = Child(launch).result()
    return result, [rows(folder, group) for group in range(groups)]


def run_alone(folder):
    """Run the same on one rank, without groups."""
    folder.mkdir()
    manifest = folder / "run.toml"
    manifest.write_text("composer3d = 1\n[train]\nmicrobatch = 1\n")

    def launch():
        result = launch_local(trained, (str(manifest), str(folder), []), num_ranks=1, device="cpu", output=folder)
        return {"failed": None if result.report is None else result.report.render()}

    with limit_ranks(1):
        assert Child(launch).result() == {"failed": None}
    return rows(folder, 0)


def difference(found, reference):
    """Return the largest relative difference of loss and norm, over the steps that were made."""
    expected = {row["step"]: row for row in reference}
    return max(
        abs(row[name] - expected[row["step"]][name]) / abs(expected[row["step"]][name])
        for row in found
        for name in ("loss", "norm")
    )
