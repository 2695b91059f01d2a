"""A small model with uneven dims, padded batches, and the composed step beside one device's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import composer3d
from composer3d.testing import count_collectives, full, run_ranks
from support.temporary_folders import session_folder

VOCAB = 11


class Block(nn.Module):
    def __init__(self, dim, dropout=0.0):
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim + 1)
        self.down = nn.Linear(2 * dim + 1, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(x))))


class Net(nn.Module):
    """Token model; 7 and 15 divide by neither 2 nor 4, so the last shards are uneven, and some are empty."""

    def __init__(self, dim=7, num_layers=3, *, tied=False, dropout=0.0):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, dim)
        self.layers = nn.ModuleList(Block(dim, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, VOCAB, bias=not tied)
        if tied:
            self.out.weight = self.tok.weight

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        # FSDP2 warns about outputs that are views.
        return self.out(self.norm(x)) + 0.0


class Even(Net):
    """A model whose blocks can be sharded over tp."""

    def __init__(self, dim=7, num_layers=4):
        super().__init__(dim=dim, num_layers=num_layers)
        for block in self.layers:
            block.up, block.down = nn.Linear(dim, 16), nn.Linear(16, dim)


def seeded(factory=Net, **options):
    """Return the model with the same weights on every rank."""
    torch.manual_seed(0)
    return factory(**options)


def padded(num_sequences=12, seq_len=5, seed=3):
    """Return tokens and targets; every sequence has another number of valid targets."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (num_sequences, seq_len + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for sequence, length in enumerate(torch.randint(0, seq_len - 1, (num_sequences,), generator=generator)):
        targets[sequence, :length] = -100
    return tokens[:, :-1].contiguous(), targets


def unpadded(num_sequences=12, seq_len=5, seed=3):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (num_sequences, seq_len + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def sum_loss(logits, targets):
    return (
        F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100),
        (targets != -100).sum(),
    )


def mean_loss(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def write_manifest(text, name="run.toml"):
    path = session_folder() / name
    path.write_text("composer3d = 1\n" + text)
    return path


def composed(text, model=None, *, loss_fn=sum_loss, **options):
    """Compose a model from a manifest's text, on this rank."""
    return composer3d.compose(seeded() if model is None else model, write_manifest(text), loss_fn=loss_fn, **options)


def mine(run, tensor):
    """Slice the samples of this data-parallel rank."""
    degree = run.context.data_parallel_degree
    size = tensor.shape[0] // degree
    return tensor.narrow(0, run.context.data_parallel_rank * size, size)


def reference_gradients(model, tokens, targets):
    """One device, one batch: the loss and every gradient under every name."""
    loss, count = sum_loss(model(tokens), targets)
    (loss / count).backward()
    return (loss / count).detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def one_step(text, *, microbatch=None, options=None, calls=1, batch=padded):
    """Run on a rank: one composed step in float64, and its distance from one device.

    Returns (loss error, norm error, largest relative gradient error, collectives of the step by (op, axis)).
    """
    torch.set_default_dtype(torch.float64)
    tokens, targets = batch()
    reference = seeded(**(options or {}))
    loss_1, gradients = reference_gradients(reference, tokens, targets)
    norm_1 = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
    run = composed(text + (f"\n[train]\nmicrobatch = {microbatch}\n" if microbatch else ""), seeded(**(options or {})))
    optimizer = run.optimizer(torch.optim.SGD, lr=1e-3)  # Adam's many operators on DTensors take a rank 0.15 s
    tokens, targets = mine(run, tokens), mine(run, targets)
    with count_collectives(run.mesh) as collectives, run.step(0):
        for part in range(calls):
            size = tokens.shape[0] // calls
            cut = slice(part * size, (part + 1) * size)
            loss = run.forward_backward(tokens[cut], target=targets[cut])
        norm = run.clip_grad_norm_(0.01)
        counted = collectives.summary()
        error = gradient_error(run, {name: g for name, g in gradients.items()})
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    loss_error = float((loss - loss_1).abs()) if calls == 1 else 0.0
    return loss_error, float((norm - norm_1).abs() / norm_1), error, {key: count for key, (count, _) in counted.items()}


def assert_unchanged(world_size, layout, more, *, microbatch=3):
    """A plugin that looks on leaves gradients as those of one device, and issues no collective of its own."""

    def both():
        return one_step(layout + more, microbatch=microbatch), one_step(layout, microbatch=microbatch)

    for (*errors, counted), (*_, expected) in run_ranks(both, world_size):
        assert max(errors) < 1e-12
        assert counted == expected


def largest(values):
    """Return the largest of some numbers, infinity if one of them is none: `max` may pass over those."""
    return max((float("inf") if value != value else value for value in values), default=0.0)


def gradient_error(run, gradients):
    """Return max|d| / max|ref| over all gradients; every reference gradient must be there."""
    found = {name: full(p.grad) for name, p in run.named_parameters() if p.grad is not None}
    assert found.keys() == gradients.keys(), found.keys() ^ gradients.keys()
    return largest(float((found[name] - g).abs().max() / g.abs().max()) for name, g in gradients.items())
