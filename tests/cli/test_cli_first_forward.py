"""What a first step would die of: one real forward of two samples, in `check` and before a run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support import plain_models

MODELS = '''
import torch
from torch import nn


class Tokens(nn.Module):
    def __init__(self, vocab_size=64, positions=64, returns="logits", dim=8, num_layers=1):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab_size, dim), nn.Embedding(positions, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(num_layers))
        self.head, self.returns = nn.Linear(dim, vocab_size), returns

    def forward(self, tokens):
        x = self.tok(tokens) + self.pos(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x)
        if self.returns == "detached":
            return logits.detach()
        if self.returns == "exit":
            raise SystemExit(0)
        return logits if self.returns == "logits" else Answer(logits) if self.returns == "object" else None


class Answer:
    def __init__(self, logits):
        self.content = logits


class Small(Tokens):
    """Takes whatever rows it is given, however many tokens there are."""

    def __init__(self, rows=64):
        super().__init__(vocab_size=rows, positions=512)


class Lazy(Tokens):
    def __init__(self):
        super().__init__()
        self.head = nn.LazyLinear(64)


class Cyclic(Tokens):
    def __init__(self):
        super().__init__()
        self.layers[0].parent = self


existing = Tokens()


class Ranked(Tokens):
    def __init__(self, vocab_size):
        super().__init__(vocab_size)

    def forward(self, tokens):
        return super().forward(tokens) * (1 + torch.distributed.get_rank())


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        return {"features": torch.zeros(3), "unknown": 1.0, "targets": torch.zeros(2)}


class Known(Rows):
    def __getitem__(self, index):
        return torch.zeros(3), torch.zeros(2)


class Padded(Rows):
    def __getitem__(self, index):
        return torch.ones(3), torch.tensor([-1 + 2 * (index % 2), 1])


class Uneven(Rows):
    def __getitem__(self, index):
        return torch.zeros(3 + index), torch.zeros(2)


class Empty(Known):
    def __len__(self):
        return 0


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.zeros(3), torch.zeros(2)


class Pixels(Rows):
    def __getitem__(self, index):
        return torch.zeros(3, 2, 2), torch.full((2, 2), 3)


class Classes(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 3, 1)


class Features(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def forward(self, features):
        return super().forward(features)


def two_means(output, target):
    return output[target >= 0].abs().mean() + 0.1 * output.square().mean()
'''
BASE = """\
composer3d = 1
run.device = "cpu"
mesh.dp_shard = 2
train.steps = 2
train.global_batch = 4
sharding.fsdp2 = {}
"""


@pytest.fixture
def check(folder, command):
    (folder / "first_models.py").write_text(MODELS)
    shutil.copy(Path(plain_models.__file__), folder / "plain_models.py")

    def checked(text, verb="check"):
        (folder / "run.toml").write_text(BASE + text)
        code, out, err = command(verb, "run.toml")
        return code, (err + out).splitlines()[0]

    return checked


TOKENS = 'model.use = "first_models:Tokens"\ndata.use = "python_docs"\nmodel.args = { vocab_size = 256, %s }\n'
CASES = {
    "positions": (
        TOKENS % "positions = 64",
        "run.toml:7:7: [model] its forward fails on the first samples: IndexError: index out of range in self, at "
        "first_models.py:14; it was called with input 0 int64 [2, 256] up to 255; data.seq_len = 256 (the default)",
    ),
    "rows": (
        'model.use = "first_models:Small"\ndata.seq_len = 16\n',
        "run.toml:7:7: [model] its forward fails on the first samples: IndexError: index out of range in self, at "
        "first_models.py:14; it was called with input 0 int64 [2, 16] up to 255; data.seq_len = 16, data.use = "
        '"python_docs" (the default)',
    ),
    "no tensor": (
        TOKENS % 'positions = 256, returns = "nothing"',
        "run.toml:7:7: [model] its forward returns NoneType, in which torch finds no tensor; return tensors, alone or "
        "in a tuple, list, dict or dataclass",
    ),
    "object": (
        TOKENS % 'positions = 256, returns = "object"',
        "run.toml:7:7: [model] its forward returns Answer, in which torch finds no tensor; return tensors, alone or in "
        "a tuple, list, dict or dataclass",
    ),
    "detached": (
        TOKENS % 'positions = 256, returns = "detached"',
        "run.toml:7:7: [model] no parameter would be trained: what its forward returns has no gradient; look for "
        ".detach(), torch.no_grad() or torch.inference_mode() in it",
    ),
    "exit": (
        TOKENS % 'positions = 256, returns = "exit"',
        "run.toml:7:7: [model] its forward fails on the first samples: SystemExit: 0, at first_models.py:21",
    ),
    "lazy": (
        'model.use = "first_models:Lazy"\n',
        'run.toml:7:7: [model] "head.weight" of a LazyLinear has no shape before the first forward; write a module '
        "with its sizes, such as nn.Linear(in_features, out_features)",
    ),
    "cyclic": (
        'model.use = "first_models:Cyclic"\n',
        'run.toml:7:7: [model] the model contains itself: "layers.0.parent" is a module that it is inside of; keep a '
        "reference that is no submodule",
    ),
    "existing": (
        'model.use = "first_models:existing"\n',
        "run.toml:7:7: [model] first_models:existing is a Tokens that exists, not a callable that returns one; name "
        "its class, or a function that builds it",
    ),
    "large": (
        TOKENS % 'positions = 256, dim = 1024, num_layers = 40, returns = "nothing"',
        "run.toml:7:7: [model] its forward returns NoneType, in which torch finds no tensor; return tensors, alone or "
        "in a tuple, list, dict or dataclass",
    ),
    "argument": (
        'model.use = "first_models:Features"\ndata.use = "first_models:Rows"\ntrain.loss = "mse"\n',
        "run.toml:7:7: [model] its forward fails on the first samples: TypeError: Features.forward() got an unexpected "
        'keyword argument "unknown"',
    ),
    "loss": (
        'model.use = "plain_models:autoencoder"\ndata.use = "plain_models:images"\ntrain.loss = "mse"\n',
        "run.toml:7:7: [model] its forward fails on the first samples: RuntimeError: mat1 and mat2 shapes cannot be "
        "multiplied",
    ),
    "held out": (
        'model.use = "first_models:Features"\ndata.use = "first_models:Known"\ntrain.loss = "mse"\n'
        "evaluation.every = 1\n",
        "run.toml:8:1: [data] 2 samples held out do not fill a batch of 4, and torch.float32 targets cannot be marked "
        "as without loss; hold out more (evaluation_fraction), or lower global_batch",
    ),
    "uneven": (
        'model.use = "first_models:Features"\ndata.use = "first_models:Uneven"\ntrain.loss = "mse"\n',
        "run.toml:8:6: [data] samples 0 and 1 meet in one batch and their input have the shapes (3,) and (4,); set ",
    ),
    "empty": (
        'model.use = "first_models:Features"\ndata.use = "first_models:Empty"\ntrain.loss = "mse"\n',
        'run.toml:8:6: [data] use = "first_models:Empty" is empty: its length is 0',
    ),
    "a stream without a state": (
        'model.use = "first_models:Features"\ndata.use = "first_models:Endless"\ndata.order = "stream"\n'
        'train.loss = "mse"\n',
        'run.toml:8:6: [data] use = "first_models:Endless" gives an iterable of type Endless without state_dict() and '
        "load_state_dict()",
    ),
    "no place for targets": (
        'model.use = "first_models:Features"\ndata.use = "first_models:Known"\ntrain.loss = "model"\n',
        'run.toml:9:7: [train] with [train] loss = "model" the model is given the targets, and its forward has no ',
    ),
    "classes second": (
        'model.use = "first_models:Classes"\ndata.use = "first_models:Pixels"\n',
        "run.toml:4:1: [train] logits of shape [2, 3, 2, 2] (classes last) do not fit torch.int64 targets of shape "
        "[2, 2, 2]; cross_entropy takes one integer for each row of logits; where dim 1 holds the classes, write "
        'train.loss = { use = "cross_entropy", class_dim = 1 }',
    ),
    "classes from 1": (
        'model.use = "first_models:Classes"\ndata.use = "first_models:Pixels"\ntrain.loss.class_dim = 1\n',
        "run.toml:9:7: [train] the model returns 3 classes, 0 to 2, and targets are 3 to 3; count classes from 0, "
        "give the model more of them, or mark targets without loss as -100",
    ),
    "shapes": (
        'model.use = "plain_models:classifier"\ndata.use = "plain_models:images"\ntrain.loss = "mse"\n',
        'run.toml:9:7: [train] loss = "mse" compares element by element: the model returns [2, 5], and the targets are '
        "[2]; give both one shape",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_first_step_that_would_fail_is_a_problem(name, check):
    text, message = CASES[name]
    code, told = check(text)
    assert code == 2 and told.replace("'unknown'", '"unknown"').startswith(message), told


def test_a_loss_that_is_no_sum_is_said(check):
    text = 'model.use = "plain_models:pairs"\ndata.use = "plain_models:captions"\n'
    code, told = check(text + 'train.loss = "plain_models:contrastive"\n')
    assert code == 0 and told.startswith(
        'run.toml:9:7: warning: [train] loss = "plain_models:contrastive" of two samples together is 0.693147, and of '
        "each alone 0 and 0: it is no sum or mean over samples"
    )


def test_means_over_other_numbers_of_targets_are_refused_with_what_to_write(check):
    code, told = check(
        'model.use = "first_models:Features"\ndata.use = "first_models:Padded"\ntrain.loss = "first_models:two_means"\n'
    )
    assert code == 2 and told.startswith(
        'run.toml:9:7: [train] loss = "first_models:two_means" adds up means over other numbers (4 and 3 in two '
        "samples), of which micro-batches and ranks have different ones (1 and 2 in each), and a run weighs a loss by "
        "one number; average every term over the targets that are counted"
    ), told


def test_a_run_is_refused_before_its_ranks_are_started(check):
    code, told = check(CASES["positions"][0], verb="run")
    assert code == 2 and told.startswith(CASES["positions"][1])


def test_what_is_right_stays_right(check):
    assert check(TOKENS % "positions = 256")[0] == 0


def test_a_forward_that_asks_for_its_rank_is_not_refused(check):
    assert check('model.use = "first_models:Ranked"\ndata.seq_len = 16\n')[0] == 0


PREPARED = """
import torch


class Unprepared(torch.utils.data.Dataset):
    def prepare(self, cache):
        raise AssertionError("check prepares nothing")

    def __len__(self):
        return 40

    def __getitem__(self, index):
        raise AssertionError("not prepared")


class Exemplary(Unprepared):
    def example(self):
        return torch.zeros(17, dtype=torch.int64)


class Long(Unprepared):
    def example(self):
        return torch.zeros(90, dtype=torch.int64)
"""


def test_data_that_prepare_are_tried_by_their_example_or_said_not_to_be(folder, check, command):
    (folder / "prepared_rows.py").write_text(PREPARED)
    text = 'model.use = "first_models:Tokens"\ndata.use = "prepared_rows:%s"\ndata.vocab_size = 64\n'
    check(text % "Unprepared")
    code, out, err = command("check", "run.toml")
    assert (code, err) == (0, "") and out.endswith(
        'the first forward was not tried in full: [data] use = "prepared_rows:Unprepared" gives no samples before it '
        "is prepared; a method example() would\n"
    )
    check(text % "Exemplary")
    code, out, err = command("check", "run.toml")
    assert (code, err) == (0, "") and "the first forward" not in out
    code, told = check(text % "Long")
    assert code == 2 and "its forward fails on the first samples: IndexError" in told
