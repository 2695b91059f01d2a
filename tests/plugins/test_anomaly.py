from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from support.models import Block, Net, assert_unchanged, composed, mine, padded, seeded

from composer3d import ManifestError
from composer3d.testing import run_ranks

FSDP = "[sharding.fsdp2]\n"
HYBRID = "[mesh]\ndp_replicate = 2\n" + FSDP
PIPELINE = "[mesh]\npp = 2\n[scheduling.pipeline]\n"
PLAN = '[sharding.tensor_parallel.plan]\n"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'
TENSOR = "[mesh]\ntp = 2\n" + PLAN
RECOMPUTED = "[scheduling.activation_checkpoint]\n"


def table(folder, more=""):
    return f'[profiling.anomaly]\nfolder = "{folder}"\n{more}\n'


class Infinite(torch.autograd.Function):
    """The identity, whose gradient is infinite."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + float("inf")


class Fault(torch.nn.Module):
    """The identity, but for one micro-batch."""

    def __init__(self, case):
        super().__init__()
        self.case, self.run = case, None

    def is_due(self):
        state = self.run._engine.state if self.run is not None else None
        return state is not None and (state.step, state.index) == (2, 1)

    def forward(self, x):
        if not self.is_due():
            return x
        return x / 0.0 if self.case == "output" else Infinite.apply(x) if self.case == "gradient" else x


class Dividing(Block):
    """A block with a fault between its modules."""

    def forward(self, x):
        return super().forward(x / 0.0 if self.dropout.case == "between" and self.dropout.is_due() else x)


class Evenly(Net):
    """A model whose blocks can be cut over tp, with a fault in the second."""

    def __init__(self, case=None):
        super().__init__(dim=8, num_layers=4)
        for index, block in enumerate(self.layers):
            block.dropout, block.__class__ = Fault(case if index == 1 else None), Dividing
            block.up, block.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        if case == "weight":
            with torch.no_grad():
                self.layers[2].up.weight[0, 0] = float("nan")
        self.between = torch.nn.Identity()

    def forward(self, tokens):
        # A module that every stage calls, on what the first alone has looked up.
        x = self.between(self.tok(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x)) + 0.0


def train(text, folder, case=None, steps=4, more=""):
    """Train on a rank, in three micro-batches a step; return what the rank has written down."""
    degree = 4 if text == HYBRID else 2 if text == FSDP else 1
    model = partial(seeded, partial(Evenly, case))
    model = model if case != "weight" else model()
    run = composed(f"{text}\n[train]\nmicrobatch = {4 // degree}\n{table(folder, more)}", model)
    for part in run.parts:
        for module in part.module.modules():
            if isinstance(module, Fault):
                module.run = run
    optimizer = run.optimizer(torch.optim.SGD, lr=1e-3)
    tokens, targets = padded()
    for number in range(steps):
        with run.step(number):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            run.clip_grad_norm_(1.0)
            if number < 2:
                optimizer.step()
            optimizer.zero_grad()
    path = folder / f"rank-{run.context.rank}.jsonl"
    run.close()
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_gradients_equal_one_device_and_collectives_stay(tmp_path):
    assert_unchanged(2, FSDP + RECOMPUTED, table(tmp_path))
    assert list(tmp_path.iterdir()) == []


OUTPUT = ("output", "layers.1.dropout", "Fault")
GRADIENT = ("gradient", "layers.1.down", "Linear")
BETWEEN = ("input", "layers.1.up", "Linear")


@pytest.mark.parametrize(
    ("text", "world_size", "case", "expected"),
    [
        (RECOMPUTED, 1, "output", OUTPUT),
        (RECOMPUTED, 1, "gradient", GRADIENT),
        (RECOMPUTED, 1, "between", BETWEEN),
        (FSDP, 2, "gradient", GRADIENT),
        (FSDP, 2, "between", BETWEEN),
        (HYBRID, 4, "output", OUTPUT),
        (PIPELINE, 2, "output", OUTPUT),
        (PIPELINE, 2, "gradient", GRADIENT),
        (TENSOR, 2, "gradient", GRADIENT),
        (TENSOR, 2, "between", BETWEEN),
    ],
)
def test_the_first_that_is_not_finite(tmp_path, text, world_size, case, expected):
    results = run_ranks(train, world_size, text, tmp_path, case)
    rows = [row for found in results for row in found]
    assert {(row["step"], row["microbatch"]) for row in rows if row["what"] != "weight gradient"} == {(2, 1)}
    first = [(row["what"], row["fqn"], row["class"]) for row in rows if row["fqn"].startswith("layers.1.")]
    # Ranks behind the fault only see what follows from it: the second stage what it is sent.
    assert first and set(first) == {expected}
    assert all(row["weights_not_finite"] == [] for row in rows)


def test_weights_that_are_not_finite_are_told(tmp_path):
    (rows,) = run_ranks(partial(train, more="limit = 2"), 1, "", tmp_path, "weight")
    assert rows == [
        {
            "step": step,
            "rank": 0,
            "what": "output",
            "fqn": fqn,
            "class": kind,
            "microbatch": 0,
            "stage": 0,
            "weights_not_finite": ["weight"],
        }
        # The optimizer's step makes all weights what one was.
        for step, fqn, kind in ((0, "layers.2.up", "Linear"), (1, "tok", "Embedding"))
    ]


def test_steps_and_gradients_that_are_not_asked_for(tmp_path):
    assert run_ranks(partial(train, more="every = 3"), 1, "", tmp_path / "every", "output") == [[]]
    assert run_ranks(partial(train, more="gradients = false"), 1, "", tmp_path / "forward", "gradient") == [[]]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_behind_a_compiled_block_its_output_is_found(tmp_path):
    text = '[scheduling.compile]\nbackend = "eager"\nfullgraph = true\n'
    (rows,) = run_ranks(partial(train, steps=1), 1, text, tmp_path, "weight")
    assert [(row["what"], row["fqn"]) for row in rows] == [("input", "norm")]


def test_what_a_step_left_that_broke_off_is_told(tmp_path):
    def broken():
        model = seeded(partial(Evenly, "weight"))
        run = composed(table(tmp_path), model)
        model.out.forward = lambda x: 1 / 0
        with pytest.raises(ZeroDivisionError) as caught, run.step(0):
            run.forward_backward(*padded()[:1], target=padded()[1])
        run.close(caught.value)
        return (tmp_path / "rank-0.jsonl").read_text()

    assert '"fqn": "layers.2.up"' in run_ranks(broken, 1)[0]


def test_nothing_is_watched_outside_a_run(tmp_path):
    def checked():
        run = composed(table(tmp_path), seeded(partial(Evenly, "weight")), purpose="verify")
        with run.step(0):
            run.forward_backward(*padded()[:1], target=padded()[1])
            run.clip_grad_norm_(1.0)
        run.close()

    run_ranks(checked, 1)
    assert list(tmp_path.iterdir()) == []


def test_refuses_steps_that_there_are_not():
    with pytest.raises(ManifestError) as caught:
        composed("[profiling.anomaly]\nevery = 0\n")
    said = "profiling.anomaly.every must be at least 1, not 0"
    assert str(caught.value).partition("run.toml")[2] == f":3:1: [profiling.anomaly] {said}"
