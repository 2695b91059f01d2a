"""Queues of samples that a forward writes into, as MoCo's: one device's where ranks gather, named where they do not."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from support.models import composed, mine
from torch import nn
from torch.nn.functional import cross_entropy, normalize

from composer3d.testing import full, run_ranks


class Contrast(nn.Module):
    """Scores of queries beside their keys and those of a queue, into which the keys go."""

    def __init__(self, gather):
        super().__init__()
        self.query, self.key, self.gather = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False), gather
        self.register_buffer("queue", normalize(torch.randn(4, 16), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def forward(self, one, two):
        query = normalize(self.query(one), dim=1)
        with torch.no_grad():
            key = normalize(self.key(two), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone()], 1) / 0.07
        with torch.no_grad():
            keys = self.gather(key)
            place = int(self.place)
            self.queue[:, place : place + len(keys)] = keys.T
            self.place[0] = (place + len(keys)) % self.queue.shape[1]
        return scores


def of_all_ranks(key):
    found = [torch.empty_like(key) for _ in range(dist.get_world_size())]
    dist.all_gather(found, key.contiguous())
    return torch.cat(found)


def seeded(gather):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Contrast(gather)


def train(text, gather, folder):
    """Return how far parameters are from one device's after four steps, and what was logged until a save."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("composer3d").addHandler(handler)
    reference, run = seeded(lambda key: key), composed(text, seeded(gather), loss_fn=None)
    optimizers = [torch.optim.SGD(reference.query.parameters(), lr=0.1), run.optimizer(torch.optim.SGD, lr=0.1)]
    for seed in range(4):
        pair = torch.randn(2, 8, 6, generator=torch.Generator().manual_seed(seed))
        scores = reference(*pair)
        cross_entropy(scores, torch.zeros(8, dtype=torch.long)).backward()
        scores = run.model(*(mine(run, each) for each in pair))
        run.backward(cross_entropy(scores, torch.zeros(len(scores), dtype=torch.long)))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    run.save(folder)
    wanted = dict(reference.named_parameters())
    errors = [float((full(p) - wanted[fqn]).detach().abs().max()) for fqn, p in run.named_parameters()]
    run.close()
    return max(errors), messages


@pytest.mark.parametrize("text", ["[sharding.ddp]\n", "[sharding.fsdp2]\n"])
def test_a_queue_of_all_ranks_keys_is_one_devices(text, tmp_path):
    for error, messages in run_ranks(train, 2, text, of_all_ranks, tmp_path / "saved"):
        assert error < 1e-12 and messages == []


def test_a_queue_of_a_ranks_own_keys_is_named_with_what_to_write(tmp_path):
    (_, (queue, counter)), (_, others) = run_ranks(train, 2, "[sharding.ddp]\n", lambda key: key, tmp_path / "saved")
    assert counter.startswith('"place" (+4): a forward of 4 samples adds to what the model keeps') and others == []
    assert (
        "differ between data-parallel ranks: queue; a forward that uses them computes on every rank with its own"
        in queue
    )
    assert queue.endswith("into a queue of samples, as MoCo's, write those of all ranks, which dist.all_gather brings")
