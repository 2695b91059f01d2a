"""Models of other kinds than language models, each from a manifest alone: the run against a loop of one device.

The loop is written here, in float64, with the same batches; losses of later steps depend on every gradient before.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from support import plain_models
from support.training import start
from torch.utils.data import default_collate

from composer3d.composition.loop.sampling import indices
from composer3d.runner.reporting.metrics import read_metrics
from composer3d.testing import run_ranks

STEPS, BATCH = 4, 4
MANIFEST = """
composer3d = 1
model.use = "plain_models:MODEL"
data = { use = "plain_models:DATA", evaluation_fraction = 0.25 }
train = { steps = 4, global_batch = 4, microbatch = 1, grad_clip = inf, loss = LOSS }
optimizer = { use = "sgd", lr = 0.05, momentum = 0.0, weight_decay = 0.0 }
lr_schedule.use = "constant"
evaluation = { every = 4, batches = 2, metrics = METRICS }
run.device = "cpu"
"""
FSDP = "[sharding.fsdp2]\n"
PIPELINE = "[mesh]\npp = 2\n[scheduling.pipeline]\n"


@dataclass(frozen=True)
class Case:
    """A model, its data, what the manifest says of its loss, and the loss in plain torch."""

    model: str
    data: str
    loss: str
    plain: object
    layouts: tuple[str, ...] = (FSDP,)
    metrics: str = "{}"


def smoothed(output, target):
    return F.cross_entropy(output, target, label_smoothing=0.1)


def translated(output, target):
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=0)


def regressed(output, target):
    price, age = output["price"] - target["price"], output["age"] - target["age"]
    return (price**2).mean() + 0.5 * age.abs().mean()


CASES = {
    "classifier": Case(
        "classifier",
        "images",
        '{ use = "cross_entropy", label_smoothing = 0.1 }',
        smoothed,
        (FSDP, PIPELINE),
        '{ accuracy = "accuracy", top_two = "plain_models:accuracy_of_two" }',
    ),
    "segmenter": Case(
        "segmenter",
        "masks",
        '{ use = "cross_entropy", class_dim = 1, ignore_index = 255 }',
        lambda output, target: F.cross_entropy(output, target, ignore_index=255),
    ),
    "autoencoder": Case("autoencoder", "vectors", '"mse"', F.mse_loss, (FSDP, PIPELINE)),
    "imported": Case("autoencoder", "vectors", '"torch.nn:L1Loss"', F.l1_loss),
    "huber": Case(
        "autoencoder",
        "vectors",
        '{ use = "huber", args = { delta = 0.3 } }',
        lambda o, t: F.huber_loss(o, t, delta=0.3),
    ),
    "denoiser": Case("denoiser", "noisy", '"mse"', F.mse_loss, (FSDP, PIPELINE)),
    "translator": Case("translator", "sentences", '{ use = "cross_entropy", ignore_index = 0 }', translated, (FSDP,)),
    "regressor": Case("regressor", "houses", '{ use = "plain_models:two_losses", args = { weight = 0.5 } }', regressed),
    "karpathy": Case("karpathy", "rows", '{ use = "model", ignore_index = -1 }', None),
}


@pytest.fixture
def folder(tmp_path):
    shutil.copy(Path(plain_models.__file__), tmp_path / "plain_models.py")
    return tmp_path


def written(folder, case, layout, **changes):
    text = MANIFEST.replace("MODEL", case.model).replace("DATA", case.data).replace("LOSS", case.loss)
    path = folder / "run.toml"
    path.write_text(text.replace("METRICS", case.metrics) + layout)
    return path


def call(model, batch):
    """Return a model's output and the targets of a collated batch."""
    if isinstance(batch, dict):
        batch = dict(batch)
        targets = batch.pop("targets", None)
        return model(**batch), targets
    *inputs, targets = batch
    return model(*inputs), targets


def samples(data, numbers):
    items = [data[int(number)] for number in numbers]
    if isinstance(items[0], torch.Tensor):
        items = [(row[:-1], row[1:]) for row in items]
    return default_collate(items)


def loop(case):
    """Train on one device, without composer3d but for the order of samples; return its losses, and what is held out."""
    model, data = getattr(plain_models, case.model)(), getattr(plain_models, case.data)()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses, size = [], plain_models.NUM * 3 // 4

    def loss_of(batch):
        if case.plain is None:
            return model(*batch)[1]
        output, targets = call(model, batch)
        return case.plain(output, targets)

    for step in range(STEPS):
        loss = loss_of(samples(data, indices(step * BATCH, BATCH, size=size, seed=0, shuffle=True)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        batch = samples(data, range(size, size + 2 * BATCH))
        return losses, float(loss_of(batch)), call(model, batch)


@pytest.mark.parametrize(
    ("name", "layout"), [(name, layout) for name, case in CASES.items() for layout in case.layouts]
)
def test_a_run_is_one_device(name, layout, folder):
    case = CASES[name]
    start(written(folder, case, layout), 2)
    rows = list(read_metrics(folder / "out" / "metrics.jsonl"))
    ((losses, held_out, (output, targets)),) = run_ranks(loop, 1, case)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-12, abs=0)
    assert rows[-1]["evaluation_loss"] == pytest.approx(held_out, rel=1e-12, abs=0)
    if case.metrics != "{}":
        assert rows[-1]["evaluation_accuracy"] == float((output.argmax(-1) == targets).double().mean())
        two = (output.topk(2).indices == targets[:, None]).any(-1).double().mean()
        assert rows[-1]["evaluation_top_two"] == float(two)


@pytest.mark.parametrize(("name", "layout"), [("karpathy", FSDP), ("denoiser", PIPELINE)])
def test_plans_and_proofs_take_them(name, layout, folder):
    path = written(folder, CASES[name], layout)
    for verb, said in (
        (("plan", "--world-size", "2"), "all_reduce"),
        (("verify",), "proven: the composition computes"),
    ):
        command = [sys.executable, "-m", "composer3d", verb[0], path.name, *verb[1:]]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200, check=False)
        assert done.returncode == 0 and said in done.stdout, done.stdout + done.stderr


def test_a_loss_that_is_no_sum_is_not_proven(folder):
    case = Case("pairs", "captions", '"plain_models:contrastive"', None)
    command = [sys.executable, "-m", "composer3d", "verify", written(folder, case, FSDP).name]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 1 and "the loss is no sum over samples" in done.stdout, done.stdout + done.stderr
