"""Ranks of a sharded sequence as threads of one process, whose exchanges are seen by one backward."""

from __future__ import annotations

import copy
import threading
from collections import Counter

import torch
import torch.nn.functional as F

from composer3d.propagation import PropagatedSequence

DEGREE = 2


def positions(length):
    """Return the positions of both ranks: a chunk from both ends for the first, the middle for the second."""
    first, second, third, fourth = torch.arange(length).tensor_split(4)
    return torch.cat([first, fourth]), torch.cat([second, third])


class Exchange:
    def __init__(self):
        self.barrier, self.given = threading.Barrier(DEGREE), [None] * DEGREE

    def all(self, rank, x):
        self.given[rank] = x
        self.barrier.wait(timeout=1200)
        found = list(self.given)
        self.barrier.wait(timeout=1200)
        return found


class ThreadRules:
    """Rules whose exchanges are differentiated by autograd itself, so that every adjoint is right."""

    def __init__(self, exchange, rank):
        self.exchange, self.rank, self.notes = exchange, rank, Counter()

    def index(self, length, device):
        return positions(length)[self.rank]

    def local_length(self, length):
        return len(self.index(length, None))

    def divides(self, *, coarse, fine):
        times = fine // coarse
        rows = (positions(coarse)[rank][:, None] * times + torch.arange(times) for rank in range(DEGREE))
        return all(torch.equal(row.flatten(), other) for row, other in zip(rows, positions(fine), strict=True))

    def gather(self, x, *, dim, length):
        order = torch.cat(positions(length))
        return torch.cat(self.exchange.all(self.rank, x), dim).index_select(dim, order.argsort())

    def window_sizes(self, reach):
        return [end - start for start, end in self.runs(reach)]

    def runs(self, reach):
        """Return the windows of this rank, each around a single position."""
        starts = [sum(reach.written[:at]) for at in range(len(reach.written))]
        own = torch.cat([start + self.index(length, None) for start, length in zip(starts, reach.written, strict=True)])
        return [(at - reach.before, at + 1 + reach.after) for at in own.tolist()]

    def windows(self, x, *, dim, reach):
        shards = x.split([self.local_length(length) for length in reach.read], dim)
        pairs = zip(shards, reach.read, strict=True)
        whole = torch.cat([self.gather(shard, dim=dim, length=length) for shard, length in pairs], dim)
        length = whole.shape[dim]
        at = torch.cat([torch.arange(*run) for run in self.runs(reach)])
        inside = (at >= 0) & (at < length)
        found = whole.index_select(dim, at.clamp(0, length - 1))
        return found * inside.view(-1, *[1] * (x.ndim - 1 - dim))

    def attend(self, call):
        q, k, v, mask = call.q_BHSE, call.k_BKTE, call.v_BKTF, call.mask
        if call.k_length is not None:
            k, v = (self.gather(x, dim=x.ndim - 2, length=call.k_length) for x in (k, v))
        rows = torch.arange(q.shape[-2]) if call.q_length is None else positions(call.q_length)[self.rank]
        if mask is not None and mask.shape[-2] == call.q_length and not call.has_own_rows:
            mask = mask.index_select(mask.ndim - 2, rows)
        if call.is_causal:
            mask = rows[:, None] >= torch.arange(k.shape[-2])
        groups = q.shape[-3] != k.shape[-3] if q.ndim > 3 else False
        return F.scaled_dot_product_attention(q, k, v, mask, scale=call.scale, enable_gqa=groups)

    def weigh(self, weights, *, row, column, rows, columns):
        """Look at nothing: lengths are not padded."""

    def note(self, what, name):
        self.notes[what, name] += 1


def run_sharded(model, tokens, loss, rowwise=()):
    """Return the sum of both ranks' losses of a model whose sequence is sharded, and what the first noted.

    Args:
        model: Its parameters are both ranks'.
        tokens: Of shape B x S.
        loss: Takes an output and this rank's positions.
        rowwise: As of `PropagatedSequence`.
    """
    exchange, found, failed = Exchange(), [None] * DEGREE, []
    rules = [ThreadRules(exchange, rank) for rank in range(DEGREE)]
    memo = {id(parameter): parameter for parameter in model.parameters()}
    models = [copy.deepcopy(model, dict(memo)) for _ in range(DEGREE)]

    def run(rank):
        try:
            index = positions(tokens.shape[1])[rank]
            found[rank] = loss(models[rank](tokens[:, index]), index)
        except BaseException as error:
            failed.append(error)
            exchange.barrier.abort()

    for each, rule in zip(models, rules, strict=True):
        options = {"rules": rule, "rowwise": rowwise, "inputs": lambda args, kwargs: {0: 1}}
        PropagatedSequence(degree=DEGREE, blocks={}, **options).install(each)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(DEGREE)]
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)  # of all threads
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_default_dtype(dtype)
    if failed:
        raise failed[0]
    return sum(found), rules[0].notes
