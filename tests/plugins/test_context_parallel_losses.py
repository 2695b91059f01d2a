"""Context parallelism: losses of each position alone stay local, those that relate positions are one device's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from composer3d_plugins.sharding.context_parallel.loss_positions import Losses, OutputForm
from composer3d_plugins.sharding.context_parallel.sequence_positions import zigzag
from support.models import write_manifest
from support.tensor_parallel import batch_of, built, class_loss
from support.training import start, write
from torch import Tensor

from composer3d import Batch, Loss
from composer3d.propagation import SEQUENCE, Placed, mark, spec_of
from composer3d.runner.reporting.metrics import read_metrics
from composer3d.testing import assert_parity

VOCAB = 13
WEIGHTS = torch.linspace(0.1, 2.0, VOCAB)


def each(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o.mT, t, reduction="none")


def mean(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), t.flatten())


def without_ignored(o: Tensor, t: Tensor) -> Tensor:
    t = t.clone()
    t[t == 0] = -100
    return F.cross_entropy(o.reshape(-1, o.size(-1)), t.view(-1))


def of_picked(o: Tensor, t: Tensor) -> Tensor:
    kept = t != 0
    return F.cross_entropy(o[kept], t[kept])


def counted(o: Tensor, t: Tensor) -> tuple[Tensor, float]:
    return each(o, t).sum(), (t != -100).sum().item()


LOCAL: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "mean": mean,
    "sum": lambda o, t: F.cross_entropy(o.view(-1, VOCAB), t.view(-1), reduction="sum", label_smoothing=0.1),
    "transposed": lambda o, t: F.cross_entropy(o.mT, t, weight=WEIGHTS),
    "probabilities": lambda o, t: F.mse_loss(o.softmax(-1), F.one_hot(t, VOCAB).to(o.dtype)),
    "chosen": lambda o, t: -o.log_softmax(-1).gather(-1, t[..., None]).squeeze(-1).mean(),
    "masked": lambda o, t: (each(o, t) * (t != 0)).sum() / (t != 0).sum().clamp(min=1),
    "total penalty": lambda o, t: mean(o, t) + 1e-2 * o.logsumexp(-1).square().mean(),
    "all numbers": lambda o, t: each(o, t).sum() / t.numel(),
    "counted": counted,
    "stated": lambda o, t: Loss(sum=each(o, t).sum(), count=(t != -100).sum()),
    "without ignored": without_ignored,
    "picked": of_picked,
}
RELATING: dict[str, tuple[str, Callable[[Tensor, Tensor], Any]]] = {
    "shifted": ("__getitem__", lambda o, t: mean(o[:, :-1], t[:, 1:])),
    "padded and shifted": ("pad|getitem", lambda o, t: mean(o, F.pad(t, (0, 1), value=-100)[:, 1:])),
    "last": ("__getitem__", lambda o, t: F.cross_entropy(o[:, -1], t[:, -1])),
    "log-probability": ("log_sigmoid", lambda o, t: -F.logsigmoid(-each(o, t).sum(1)).mean()),
    "sums of samples": ("mean", lambda o, t: each(o, t).sum(1).mean()),
    "means of samples": ("mean", lambda o, t: each(o, t).mean(1).mean()),
    "sum over samples": ("divided", lambda o, t: each(o, t).sum() / len(o)),
    "count of samples": ("divided", lambda o, t: (each(o, t).sum(), len(o))),
    "greatest": ("max", lambda o, t: each(o, t).max(1).values.mean()),
    "greatest of all": ("max", lambda o, t: each(o, t).max()),
    "pooled": ("mean", lambda o, t: F.cross_entropy(o.mean(1), t[:, 0])),
    "weights": ("mul", lambda o, t: (each(o, t) * torch.linspace(1, 2, t.size(1))).mean()),
    "smooth": ("__getitem__", lambda o, t: mean(o, t) + (o[:, 1:] - o[:, :-1]).square().mean()),
    "normalised inside": ("sum|div", lambda o, t: (each(o, t) / (t != 0).sum()).sum()),
    "length inside": ("divided", lambda o, t: (each(o, t) / t.size(1)).sum()),
    "perplexity": ("exp", lambda o, t: mean(o, t).exp()),
    "root": ("sqrt", lambda o, t: each(o, t).square().mean().sqrt()),
    "hardest": ("topk", lambda o, t: each(o, t).flatten().topk(4).values.mean()),
    "positions as classes": (
        "cross_entropy",
        lambda o, t: F.cross_entropy(o[..., 0], torch.zeros(len(o), dtype=torch.int64)),
    ),
    "branch": ("any", lambda o, t: mean(o, t) if (t != -100).any() else o.sum() * 0),
    "values": ("tolist", lambda o, t: mean(o, t) * float(t.tolist()[0][0])),
}


def decisions() -> Losses:
    output = torch.empty(2, 4, VOCAB, device="meta")
    mark(output, placed=Placed(dim=1, parts=(8,)), degree=2, sources=frozenset({SEQUENCE}), axis="cp")
    form = OutputForm(output, (spec_of(output, "cp"),), num_samples=2, lengths=(8,))
    return Losses(form=form, dim=1, degree=2, positions=partial(zigzag, degree=2))


def relation(loss: Callable[..., Any], length: int = 13) -> str:
    losses = decisions()
    target = torch.zeros(3, length, dtype=torch.int64)
    return losses.relation(loss, target, num_samples=3, lengths=(length,))


@pytest.mark.parametrize("name", LOCAL)
def test_losses_of_each_position_stay_local(name: str) -> None:
    assert relation(LOCAL[name]) == ""


@pytest.mark.parametrize("name", RELATING)
def test_losses_that_relate_positions_are_seen(name: str) -> None:
    said, loss = RELATING[name]
    found = relation(loss)
    assert any(each in found for each in said.split("|")), found
    assert "divided" in found or "no total" in found or "test_context_parallel_losses.py:" in found


def test_a_loss_is_decided_once_whatever_kind_of_callable_it_is():
    calls: list[int] = []

    def noted(o: Tensor, t: Tensor, *, where: list[list[int]]) -> Tensor:
        calls.append(1)
        return mean(o, t)

    losses, loss = decisions(), partial(noted, where=[calls])
    target = torch.zeros(3, 13, dtype=torch.int64)
    for _ in range(2):
        assert losses.relation(loss, target, num_samples=3, lengths=(13,)) == ""
    assert len(calls) == 2  # two lengths, once


class LaterShifted:
    """Relates positions from a later step on."""

    step = 0

    def __call__(self, o: Tensor, t: Tensor) -> Tensor:
        return mean(o[:, :-1], t[:, 1:]) if self.step else mean(o, t)


def test_a_loss_that_changes_what_it_does_is_decided_again():
    losses, loss, target = decisions(), LaterShifted(), torch.zeros(3, 13, dtype=torch.int64)
    assert losses.relation(loss, target, num_samples=3, lengths=(13,)) == ""
    loss.step = 1
    assert "__getitem__" in losses.relation(loss, target, num_samples=3, lengths=(13,))


SETTINGS = {"is_shifted": False}


class Trainer:
    """What a loss may know of the loop around it."""

    epoch = 0


def of_a_closure(trainer: Trainer) -> Callable[..., Tensor]:
    return lambda o, t: mean(o[:, :-1], t[:, 1:]) if trainer.epoch else mean(o, t)


def of_a_list(epochs: list[int]) -> Callable[..., Tensor]:
    return lambda o, t: mean(o[:, :-1], t[:, 1:]) if epochs else mean(o, t)


def of_globals(o: Tensor, t: Tensor) -> Tensor:
    return mean(o[:, :-1], t[:, 1:]) if SETTINGS["is_shifted"] else mean(o, t)


@pytest.mark.parametrize("kind", ["attribute", "list", "global"])
def test_a_loss_is_decided_again_where_what_its_closure_reads_changes(kind: str, monkeypatch):
    trainer, epochs = Trainer(), []
    losses, target = decisions(), torch.zeros(3, 13, dtype=torch.int64)
    loss = {"attribute": of_a_closure(trainer), "list": of_a_list(epochs), "global": of_globals}[kind]
    assert losses.relation(loss, target, num_samples=3, lengths=(13,)) == ""
    trainer.epoch = 1
    epochs.append(1)
    monkeypatch.setitem(SETTINGS, "is_shifted", True)
    assert "__getitem__" in losses.relation(loss, target, num_samples=3, lengths=(13,))


LAST = """
def last(output, target):
    return output[:, -1].double().square().sum(), len(target)
"""
EVALUATED = """
composer3d = 1
model.args = { dim = 16, num_layers = 1, num_heads = 2, dropout = 0.0 }
data = { use = "synthetic", seq_len = 8, vocab_size = 8 }
train = { steps = 1, global_batch = 2, microbatch = 1 }
evaluation = { every = 1, batches = 1, metrics = { last = "last_metric:last" } }
lr_schedule.use = "constant"
run.device = "cpu"
[sharding.context_parallel]
[sharding.fsdp2]
"""


def test_a_metric_that_relates_positions_is_one_devices_beside_a_loss_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "last_metric.py").write_text(LAST)
    path, found = write(tmp_path, EVALUATED), []
    for degree in (2, 1):
        start(path, degree, f"mesh.cp={degree}", output=tmp_path / f"{degree}")
        found.append(next(read_metrics(tmp_path / f"{degree}" / "metrics.jsonl"))["evaluation_last"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def shifted_loss(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    total, count = class_loss(output[:, :-1].contiguous(), target[:, 1:].contiguous())
    return total, count


def test_a_loss_that_shifts_padded_targets_is_one_devices():
    path = write_manifest("[mesh]\ncp = 2\n[sharding.context_parallel]\n[sharding.fsdp2]\n")
    inputs, targets = (each[:, :7].contiguous() for each in batch_of("llama", 4))
    batch = Batch(args=(inputs,), target=targets)
    assert_parity(partial(built, "llama"), path, batch, loss_fn=shifted_loss, steps=1)
