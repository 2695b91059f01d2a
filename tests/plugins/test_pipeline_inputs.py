"""What models of a pipeline may be given, and what they may keep: inputs of all kinds, buffers, statistics."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.models import VOCAB, Block, composed, mine, padded, seeded
from support.pipeline_models import DIM, assert_equal_to_one_device, pipelined_step, token_sum
from torch import nn

from composer3d import RankError
from composer3d.testing import run_ranks

ONE = "[mesh]\npp = 2\n[scheduling.pipeline]\n"
V = ONE + 'schedule = "ZBVZeroBubble"\n'

# ---- inputs ----------------------------------------------------------------------------------------------------------


class Inputs(nn.Module):
    """Positions, a mask and a mapping; a bias that blocks are given, made from two of them on every stage."""

    def __init__(self):
        super().__init__()
        self.tok, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(8, DIM)
        self.layers = nn.ModuleList(Biased() for _ in range(4))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, positions, *, extra):
        x = self.tok(tokens) + self.positions(positions)
        bias = (extra["mask"] * positions).unsqueeze(-1).to(x.dtype)
        for layer in self.layers:
            x = layer(x, bias=bias)
        return self.out(x) * extra["scale"]


class Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Block(DIM)

    def forward(self, x, bias):
        return self.inner(x + bias)


def inputs_of(num_sequences, seq_len):
    tokens, targets = padded(num_sequences, seq_len)
    positions = torch.arange(seq_len).expand(num_sequences, -1).contiguous()
    mask = torch.ones(num_sequences, seq_len)
    mask[:, seq_len // 2 :] = 0.0
    return tokens, positions, mask, targets


def with_inputs(text):
    """Two steps with sequences of different lengths; return the largest distance from one device."""
    torch.set_default_dtype(torch.float64)
    example = (
        (torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)),
        {"extra": {"mask": torch.ones(2, 4), "scale": 0.5}},
    )
    model = seeded(Inputs)
    run = composed(text + "[train]\nmicrobatch = 2\n", seeded(Inputs), loss_fn=token_sum, example=example)
    errors = []
    for number, seq_len in enumerate((5, 7, 5)):
        tokens, positions, mask, targets = inputs_of(8, seq_len)
        total, count = token_sum(model(tokens, positions, extra={"mask": mask, "scale": 0.5}), targets)
        (total / count).backward()
        extra = {"mask": mine(run, mask), "scale": 0.5}
        with run.step(number):
            loss = run.forward_backward(mine(run, tokens), mine(run, positions), target=mine(run, targets), extra=extra)
            for name, parameter in run.named_parameters():
                expected = model.get_parameter(name).grad
                errors.append(float((parameter.grad - expected).abs().max() / expected.abs().max()))
                parameter.grad = None
        model.zero_grad()
        errors.append(float((loss - total.detach() / count).abs()))
        evaluation = run.evaluate(mine(run, tokens), mine(run, positions), target=mine(run, targets), extra=extra)
        errors.append(float((evaluation.loss - total.detach() / count).abs()))
    run.close()
    return max(errors)


@pytest.mark.parametrize("text", [ONE, V])
def test_positions_masks_and_mappings_of_changing_lengths(text):
    assert max(run_ranks(with_inputs, 2, text)) < 1e-12


# ---- shapes that follow from values, and from plain arguments --------------------------------------------------------


class Chosen(nn.Module):
    """Blocks all but the first of which are given the rows of a half of the token numbers."""

    def __init__(self, num_layers=4):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(DIM) for _ in range(num_layers))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens, is_short=False):
        tokens = tokens[:, : tokens.shape[1] // 2] if is_short else tokens
        x, rows = self.layers[0](self.tok(tokens).flatten(0, 1)), (tokens.flatten() < VOCAB // 2).nonzero().squeeze(1)
        y = x.index_select(0, rows)
        for layer in self.layers[1:]:
            y = layer(y)
        return self.out(x.index_add(0, rows, y)).view(*tokens.shape, VOCAB)


def chosen(text):
    """Evaluate micro-batches with different numbers of such rows, then train on them."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    rows = [int((part < VOCAB // 2).sum()) for part in tokens.split(3)]
    assert len(set(rows)) > 1
    total, count = token_sum(seeded(Chosen)(tokens), targets)
    run = composed(text + "[train]\nmicrobatch = 3\n", seeded(Chosen), loss_fn=token_sum)
    assert float((run.evaluate(tokens, target=targets).loss - total.detach() / count).abs()) < 1e-12
    with run.step(0):
        run.forward_backward(tokens, target=targets)


@pytest.mark.parametrize("schedule", ["GPipe", "1F1B", "Interleaved1F1B", "DualPipeV"])
def test_rows_that_values_choose_are_evaluated_and_refused_in_training_where_they_would_be_sent(schedule):
    with pytest.raises(RankError) as caught:
        run_ranks(chosen, 2, f'{ONE}schedule = "{schedule}"\n')
    first, *_ = re.findall(r'composer3d\.errors\.StepError: ("layers.*)', str(caught.value))
    assert f"failed after it: composer3d.errors.StepError: {first}" in str(caught.value)
    layer, now, before, stage, following, beginning = re.match(
        r'"layers\.(\d)" returns float64 \[(\d+), 7\] in micro-batch \d of this step, and returned float64 '
        r'\[(\d+), 7\] when stages (\d) and (\d) \(from "layers\.(\d)"\) agreed on what travels between them\. ',
        first,
    ).groups()
    assert (int(beginning), int(following)) == (int(layer) + 1, int(stage) + 1)
    assert now != before


def test_rows_that_are_chosen_and_put_back_in_one_stage_are_one_devices():
    text = ONE + 'split = { tracer = ["layers.1"] }\n'
    assert_equal_to_one_device(run_ranks(pipelined_step, 2, text, Chosen))


def shortened():
    """Train on halves of sequences where an argument says so."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    run = composed(
        ONE + 'split = { tracer = ["layers.1"] }\n[train]\nmicrobatch = 3\n', seeded(Chosen), loss_fn=token_sum
    )
    half, errors = targets[:, : tokens.shape[1] // 2].contiguous(), []
    for number, (is_short, target) in enumerate([(False, targets), (True, half), (False, targets)]):
        total, count = token_sum(seeded(Chosen)(tokens, is_short=is_short), target)
        with run.step(number):
            loss = run.forward_backward(tokens, target=target, is_short=is_short)
        errors.append(float((loss - total.detach() / count).abs()))
    run.close()
    return max(errors)


def test_shapes_that_a_flag_decides_are_agreed_on_anew():
    assert max(run_ranks(shortened, 2)) < 1e-12


class Skipping(nn.Module):
    """A frozen embedding, and a block whose gradient the batch decides on."""

    def __init__(self):
        super().__init__()
        self.tok, self.out = nn.Embedding(VOCAB, DIM).requires_grad_(False), nn.Linear(DIM, VOCAB)
        self.first, self.second = Gated(), Gated()

    def forward(self, tokens):
        x = self.tok(tokens)
        for block in (self.first, self.second):
            x = block(x, tokens[0, 0] == 0)
        return self.out(x)


class Gated(Block):
    def __init__(self):
        super().__init__(DIM)

    def forward(self, x, is_left_out):
        return x * 1 if is_left_out else super().forward(x)


def gated():
    tokens, targets = padded()
    tokens[:3], tokens[3:] = 0, 1
    run = composed(
        ONE + 'schedule = "GPipe"\nsplit = { tracer = ["second"] }\n[train]\nmicrobatch = 3\n', seeded(Skipping)
    )
    with run.step(0):
        run.forward_backward(tokens, target=targets)


def test_a_gradient_that_would_not_come_back_is_refused():
    with pytest.raises(RankError) as caught:
        run_ranks(gated, 2)
    assert (
        'failed after it: composer3d.errors.StepError: "first" returns a tensor that needs a gradient in micro-batch 1 '
        "of this step, and returned one that needs none, so that no gradient would come back when stages 0 and 1 (from "
        '"second") agreed on what travels between them. '
    ) in str(caught.value)


# ---- buffers ---------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Batch statistics before, in and behind the blocks, and a table that all blocks read."""

    def __init__(self, num_layers=2, norm=nn.BatchNorm1d):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.stem = norm(DIM)
        self.layers = nn.ModuleList(NormedBlock(norm) for _ in range(num_layers))
        self.last = norm(DIM)
        self.out = nn.Linear(DIM, VOCAB)
        self.register_buffer("table", torch.linspace(0, 1, 16).unsqueeze(-1))
        self.register_buffer("shift", torch.full((DIM,), 0.25))

    def forward(self, tokens):
        x = self.stem((self.tok(tokens) + self.shift).transpose(1, 2)).transpose(1, 2)
        rows = self.table[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, rows)
        return self.out(self.last(x.transpose(1, 2)).transpose(1, 2))


class NormedBlock(Block):
    def __init__(self, norm):
        super().__init__(DIM)
        self.statistics = norm(DIM)

    def forward(self, x, rows):
        return super().forward(self.statistics(x.transpose(1, 2)).transpose(1, 2) + rows)


def expected_of(tokens):
    model = seeded(Normed)
    for start in range(0, 12, 3):
        model(tokens[start : start + 3])
    return model


def statistics(text):
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    expected = dict(expected_of(tokens).named_buffers())
    run = composed(text + "[train]\nmicrobatch = 3\n", seeded(Normed))
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    found = {name: buffer for part in run.parts for name, buffer in part.module.named_buffers()}
    run.close()
    return max(float((found[name] - expected[name]).abs().max()) for name in found), set(found)


def names_of(*modules):
    return {f"{name}.{kind}" for name in modules for kind in ("running_mean", "running_var", "num_batches_tracked")}


def test_statistics_are_one_devices_and_on_one_stage():
    # The forward that learns shapes leaves buffers alone, and stages hold none of what others count.
    (error, first), (other, second) = run_ranks(statistics, 2, ONE)
    assert max(error, other) < 1e-12
    assert first == {"table", "shift"} | names_of("stem", "layers.0.statistics")
    assert second == {"table"} | names_of("last", "layers.1.statistics")


class Applied(nn.BatchNorm1d):
    """Applies its statistics and never counts: what one device computes of a whole batch, it does of its parts."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, training=False)


@pytest.mark.parametrize(("text", "num_layers"), [(ONE, 2), (V, 4)])
def test_gradients_with_buffers_equal_one_device(text, num_layers):
    options = {"num_layers": num_layers, "norm": Applied}
    assert_equal_to_one_device(run_ranks(partial(pipelined_step, microbatch=3), 2, text, Normed, options))


def saved(folder, text):
    run = composed(text + "[train]\nmicrobatch = 3\n", seeded(Normed))
    tokens, targets = padded()
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    run.save(f"{folder}/checkpoint")
    run.close()


def loaded(folder):
    run = composed("", seeded(Normed))
    run.load(f"{folder}/checkpoint")
    found = {name: buffer.clone() for name, buffer in run.parts[0].module.named_buffers()}
    run.close()
    return found


def test_statistics_are_saved_by_the_stage_that_counts_them(tmp_path):
    run_ranks(saved, 2, tmp_path, ONE)
    (found,) = run_ranks(loaded, 1, tmp_path)
    expected = dict(expected_of(padded()[0]).named_buffers())
    for name in names_of("stem", "layers.0.statistics", "layers.1.statistics", "last"):
        torch.testing.assert_close(found[name], expected[name])
