"""Batches whose sequence is sharded over cp: lengths that do not divide, and loops that call the model themselves."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from support.models import mine, write_manifest
from support.sequence_models import DIM, ByHand, Language
from support.sequence_steps import context, padded_batch, sequence_steps
from support.tensor_parallel import batch_of, built, class_loss, errors
from torch import nn

import composer3d
from composer3d import Batch, BatchError
from composer3d.testing import assert_parity, count_collectives, run_ranks

FSDP = "[sharding.fsdp2]\n"
PIPELINE = '[scheduling.pipeline]\nschedule = "1F1B"\n'
SP = "[sharding.tensor_parallel]\nsequence_parallel = true\n"


def cp(method="gather", *, degree=2, mesh="", more="", train=""):
    return f'[mesh]\ncp = {degree}\n{mesh}\n[train]\n{train}\n[sharding.context_parallel]\nmethod = "{method}"\n{more}'


def shortened(family, length, num_samples=4):
    """Return a batch of which the first tokens are left, those of the first sample without a valid target."""
    inputs, targets = batch_of(family, num_samples)
    inputs, targets = inputs[:, :length].contiguous(), targets[:, :length].contiguous()
    targets[0] = -100
    return inputs, targets


def expected(family, inputs, targets, options=None):
    model = built(family, options)
    loss, count = class_loss(model(inputs), targets)
    (loss / count).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return (loss / count).detach(), gradients, int(count)


def steps_of(cases):
    """Run a step of each (family, text, length) in float64; return the errors of loss and gradients, and the counts."""
    torch.set_default_dtype(torch.float64)
    found = []
    for family, text, length in cases:
        inputs, targets = shortened(family, length)
        loss_1, gradients, count = expected(family, inputs, targets)
        run = composer3d.compose(built(family), write_manifest(text), loss_fn=class_loss)
        inputs, targets = mine(run, inputs), mine(run, targets)
        evaluated = run.evaluate(inputs, target=targets)
        with run.step(0) as state:
            loss = run.forward_backward(inputs, target=targets)
            run.clip_grad_norm_(float("inf"))
            held = {name: gradients[name] for name, _ in run.named_parameters()}
            error = max(errors(run, held), float((loss - loss_1).abs()), float((evaluated.loss - loss_1).abs()))
            found.append((error, {state.count, evaluated.count} - {count}))
        run.close()
    return found


def assert_equal(world_size, cases):
    for ranks in zip(*run_ranks(steps_of, world_size, cases), strict=True):
        for error, other_counts in ranks:
            assert error <= 1e-12
            assert not other_counts


def test_lengths_that_do_not_divide_are_padded_exactly():
    # A rank has one token of 5 at a degree of 4, none of 3: chunks of one position, of which one is padding.
    assert_equal(2, [("llama", cp(more=FSDP), 7), ("llama", cp("ring"), 5)])
    assert_equal(4, [("llama", cp("ring", degree=4, more=FSDP), 5)])


@pytest.mark.slow
def test_lengths_of_other_methods_are_padded_exactly():
    assert_equal(2, [("llama", cp("ulysses"), 6)])
    assert_equal(4, [("llama", cp(degree=4, more=FSDP), 3)])


def test_padding_composes_with_pipelines_and_sequence_parallelism():
    microbatches = "microbatch = 1"
    assert_equal(
        4,
        [
            ("llama", cp(mesh="pp = 2", train=microbatches, more=FSDP + PIPELINE), 7),
            ("llama", cp(mesh="tp = 2", more=SP), 7),
        ],
    )


def test_logits_that_tp_shards_lose_padding_with_their_form():
    assert_equal(4, [("llama", cp(mesh="tp = 2", more=SP + "loss_parallel = true\n"), length) for length in (8, 5)])


def refused(family, length):
    run = composer3d.compose(built(family), write_manifest(cp()), loss_fn=class_loss)
    inputs, targets = shortened(family, length)
    try:
        with pytest.raises(BatchError) as caught, run.step(0):
            run.forward_backward(inputs, target=targets)
    finally:
        run.close()
    return str(caught.value)


def test_models_that_see_what_follows_name_the_nearest_lengths():
    (message, other) = run_ranks(refused, 2, "bert", 7)
    assert message == other
    assert message.startswith("a sequence of 7 tokens was padded to 8, since ranks of cp share it equally, and ")
    assert message.endswith("; use 4 or 8 tokens")


class Growing(Language):
    """Rotations whose base grows with the length."""

    def attend(self, q, k, v, tokens):
        length, width = q.shape[2], q.shape[3]
        angles = torch.arange(length)[:, None] * (1.0 + length) ** (-torch.arange(width) / width)
        return F.scaled_dot_product_attention(q * angles.cos(), k * angles.cos(), v, is_causal=True)


class Centred(ByHand):
    """Scores less their mean over all positions, before a mask hides any."""

    def attend(self, q, k, v, tokens):
        scores = q @ k.transpose(-1, -2)
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        return (scores - scores.mean(-1, keepdim=True)).masked_fill(~seen, float("-inf")).softmax(-1) @ v


class Open(ByHand):
    """Attention that is written out, in which all tokens see each other."""

    def attend(self, q, k, v, tokens):
        return (q @ k.transpose(-1, -2)).softmax(-1) @ v


class Summing(ByHand):
    """Sums of what came before, and a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(DIM, DIM, batch_first=True)

    def mixed(self, block, x, tokens):
        return super().mixed(block, self.recurrent(x)[0] + 0.1 * x.cumsum(1), tokens)


def test_attention_that_is_written_out_and_sums_are_padded_exactly():
    cases = [(model, context(), functools.partial(padded_batch, 14)) for model in (ByHand, Summing)]
    for ranks in zip(*run_ranks(sequence_steps, 2, cases), strict=True):
        assert max(max(found[:2]) for found in ranks) <= 1e-12


def unpadded(models):
    messages = []
    for model in models:
        with pytest.raises(BatchError) as caught:
            sequence_steps([(model, context(), functools.partial(padded_batch, 14))])
        messages.append(str(caught.value))
    return messages


def test_what_padding_would_change_is_refused():
    (growing, centred, seen), _ = run_ranks(unpadded, 2, [Growing, Centred, Open])
    start = (
        "a sequence of 14 tokens does not divide into 4 equal chunks, as context_parallel needs, and is not padded, "
    )
    nearest = "; use 12 or 16, or write balanced = false"
    assert growing == (start + "since the model's own code (__rpow__) computes with a number of the length" + nearest)
    assert centred == (
        start + "since the model's own code (mean) reads all positions, and not as a softmax does" + nearest
    )
    assert seen == (
        "a sequence of 14 tokens was padded to 16, since ranks of cp share it equally, and attention that is written "
        "out weighs the padding; use 12 or 16 tokens"
    )


def own_loops(cases):
    """Run steps whose forward is the loop's; return the errors of outputs, losses and gradients, and the counts."""
    torch.set_default_dtype(torch.float64)
    found = []
    for family, text, length, has_target in cases:
        inputs, targets = shortened(family, length)
        loss_1, gradients, _ = expected(family, inputs, targets)
        with torch.no_grad():
            output_1 = built(family)(inputs)
        run = composer3d.compose(built(family), write_manifest(text), loss_fn=class_loss)
        local, local_targets = mine(run, inputs), mine(run, targets)
        with torch.no_grad():
            before = run.model(local)
        with run.step(0, target=local_targets if has_target else None), count_collectives(run.mesh) as collectives:
            output = run.model(local)
            loss = run.backward(class_loss(output, local_targets))
            run.clip_grad_norm_(float("inf"))
            error = max(errors(run, gradients), float((loss - loss_1).abs()))
        wanted = mine(run, output_1)
        error = max(error, *(float((each - wanted).abs().max()) for each in (before, output.detach())))
        run.close()
        found.append((error, {op: n for (op, axis), (n, _) in collectives.summary().items() if axis == "cp"}))
    return found


def test_a_loop_that_calls_the_model_itself_has_whole_outputs():
    found = run_ranks(own_loops, 2, [("llama", cp(), 8, True), ("llama", cp("ring", more=FSDP), 7, False)])
    for ranks in zip(*found, strict=True):
        assert all(error <= 1e-12 for error, _ in ranks)
    (_, counts), layers = found[0][0], 2
    # Those of attention, and of the output.
    assert (counts["all_gather"], counts["reduce_scatter"]) == (2 * layers + 1, layers + 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        (2, [("gpt2", cp(), 8, True), ("bert", cp(more=FSDP), 8, False)]),
        (4, [("llama", cp(mesh="dp_shard = 2", more=FSDP), 8, True)]),
    ],
    ids=["families", "dp"],
)
def test_a_loop_of_other_models_and_layouts_has_whole_outputs(world_size, cases):
    for ranks in zip(*run_ranks(own_loops, world_size, cases), strict=True):
        assert all(error <= 1e-12 for error, _ in ranks)


def test_verify_proves_padded_lengths():
    inputs, targets = shortened("llama", 7)
    path = write_manifest(cp("ring", more=FSDP))
    assert_parity(functools.partial(built, "llama"), path, Batch(args=(inputs,), target=targets), loss_fn=class_loss)
