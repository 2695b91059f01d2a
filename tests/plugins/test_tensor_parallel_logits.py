"""The loss of logits that stay cut along the vocabulary."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from support.models import write_manifest
from support.tensor_parallel import AUTO
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import composer3d
from composer3d import TransformError
from composer3d.testing import count_collectives, full, run_ranks

VOCAB, SIZE, SEQ = 24, 4, 6


class Tokens(nn.Module):
    def __init__(self, vocab=VOCAB):
        super().__init__()
        self.emb = nn.Embedding(vocab, SIZE)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(SIZE, 8), nn.Linear(8, SIZE)) for _ in range(2))
        self.head = nn.Linear(SIZE, vocab)

    def forward(self, tokens):
        x = self.emb(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def batch(vocab=VOCAB):
    tokens = torch.randint(0, vocab, (3, SEQ), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    targets[0, :4], targets[1, -1] = -100, -100
    return tokens, targets


def counted(loss):
    return lambda logits, targets: (loss(logits, targets), (targets != -100).sum())


def flat(logits, targets, **options):
    options = {"reduction": "sum", **options}
    return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), **options)


def weights(dtype):
    return torch.linspace(0.5, 2, VOCAB, dtype=dtype)


LOSSES = {
    "flat": flat,
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduction="sum"),
    "module": lambda x, y: nn.CrossEntropyLoss(reduction="sum")(x.flatten(0, 1), y.flatten()),
    "smoothed": lambda x, y: flat(x, y, label_smoothing=0.1),
    "weighted": lambda x, y: flat(x, y, weight=weights(x.dtype)),
    "a token": lambda x, y: (flat(x, y, reduction="none") * torch.arange(float(y.numel()), dtype=x.dtype)).sum(),
    "mean": lambda x, y: flat(x, y, reduction="mean") * (y != -100).sum(),
    "another padding": lambda x, y: flat(x, y.masked_fill(y == -100, 7), ignore_index=7),
    "shifted, capped, biased": lambda x, y: flat(
        torch.tanh(x.double()[:, :-1].contiguous() / 3) * 3 + torch.arange(1.0 * VOCAB, dtype=x.dtype),
        y[:, 1:].contiguous(),
    ),
    "of two parts": lambda x, y: sum(flat(a, b) for a, b in zip(x.split(1, 0), y.split(1, 0), strict=True)),
}


def compared(names, more):
    """Return the loss's and the largest gradient's difference from one device, and the all-reduces along tp."""
    torch.set_default_dtype(torch.float64)
    found = {}
    for name in names:
        loss_fn = counted(LOSSES[name])
        torch.manual_seed(0)
        alone = Tokens()
        torch.manual_seed(0)
        manifest = write_manifest(f"[mesh]\ntp = 2\n{more}\n{AUTO}loss_parallel = true\n")
        run = composer3d.compose(Tokens(), manifest, loss_fn=loss_fn)
        tokens, targets = batch()
        total, count = loss_fn(alone(tokens), targets)
        (total / count).backward()
        with run.step(0), count_collectives(run.mesh) as collectives:
            loss = run.forward_backward(tokens, target=targets)
        gradients = dict(alone.named_parameters())
        error = max(float((full(p.grad) - gradients[fqn].grad).abs().max()) for fqn, p in run.named_parameters())
        without = float((run.evaluate(tokens, target=targets).loss - loss).abs())
        found[name] = max(float((loss - total / count).detach().abs()), error, without), collectives.count("all_gather")
        run.close()
    return found


def test_losses_and_gradients_equal_one_device():
    for found in run_ranks(compared, 2, list(LOSSES), ""):
        assert {name: error for name, (error, _) in found.items() if error > 1e-14} == {}
        assert {gathers for _, gathers in found.values()} == {0}


class Largest(TorchDispatchMode):
    """Remembers the largest tensor that any operator gives."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        leaves = result if isinstance(result, list | tuple) else [result]
        # DTensor works out shapes on tensors that hold nothing, of a class of their own.
        held = (leaf for leaf in leaves if type(leaf) is torch.Tensor and not leaf.is_meta)
        self.numel = max([self.numel, *(leaf.numel() for leaf in held)])
        return result


def largest(settings):
    vocab = 16384  # so that logits are what is largest
    run = composer3d.compose(
        Tokens(vocab), write_manifest(f"[mesh]\ntp = 2\n{AUTO}{settings}\n"), loss_fn=counted(flat)
    )
    tokens, targets = batch(vocab)
    with run.step(0), Largest() as seen:
        run.forward_backward(tokens, target=targets)
    run.close()
    return seen.numel / (tokens.numel() * vocab)


def test_no_rank_ever_holds_all_logits():
    assert run_ranks(largest, 2, "loss_parallel = true") == [0.5, 0.5]
    assert run_ranks(largest, 2, "") == [1.0, 1.0]


ONLY = "; of the losses only cross_entropy works on sharded logits; leave out loss_parallel"
REFUSED = {
    "log_softmax": (
        lambda x, y: -F.log_softmax(x, -1).gather(-1, y.clamp(min=0).unsqueeze(-1)).sum(),
        f'"loss_parallel": log_softmax on sharded features: it goes along the sharded dim{ONLY}',
    ),
    "logsumexp": (
        lambda x, y: x.logsumexp(-1).sum(),
        f'"loss_parallel": logsumexp on sharded features: it mixes the features of all ranks{ONLY}',
    ),
    "probabilities": (
        lambda x, y: F.cross_entropy(x.transpose(1, 2), torch.zeros(x.transpose(1, 2).shape)),
        f"cross_entropy with probabilities as targets needs whole logits{ONLY}",
    ),
    "both": (
        lambda x, y: flat(x, y, weight=weights(x.dtype), label_smoothing=0.1),
        f"cross_entropy with class weights and label smoothing together needs whole logits{ONLY}",
    ),
    "classes": (
        lambda x, y: F.cross_entropy(x, y[:, :1].expand(-1, VOCAB)),
        f"cross_entropy takes classes along dim 1, and the vocabulary is dim 2{ONLY}",
    ),
    "in place": (
        lambda x, y: flat(x.mul_(0.5), y),
        f'"loss_parallel": mul_ changes sharded logits in place{ONLY}',
    ),
    "old": (
        lambda x, y: F.cross_entropy(x.transpose(1, 2), y, reduce=False).sum(),
        f"cross_entropy knows size_average and reduce no more; use reduction{ONLY}",
    ),
}


def said(names):
    found = {}
    for name in names:
        manifest = write_manifest(f"[mesh]\ntp = 2\n{AUTO}loss_parallel = true\n")
        run = composer3d.compose(Tokens(), manifest, loss_fn=counted(REFUSED[name][0]))
        tokens, targets = batch()
        with pytest.raises(TransformError) as caught, run.step(0):
            run.forward_backward(tokens, target=targets)
        found[name] = str(caught.value)
        run.close()
    return found


def test_other_losses_are_refused():
    told = run_ranks(said, 2, list(REFUSED))[0]
    bare = {name: re.sub(r" \(test_tensor_parallel_logits.py:\d+\)", "", text) for name, text in told.items()}
    assert bare == {name: message for name, (_, message) in REFUSED.items()}
    assert bare["logsumexp"] != told["logsumexp"]  # which has its line
