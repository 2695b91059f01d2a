"""A manifest run with a fault in it: what the faults do, on which rank and when. Lies in the run's own folder."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time

import torch
import torch.distributed as dist
from torch import nn

STEP = 3  # in which the fault shows


POISON = 15  # a token


class Rows:
    """Samples; with a fault, one that rank 1 never gets, or one that is poisoned."""

    def __init__(self, fault=None):
        self.fault, self.read = fault, 0

    def __len__(self):
        return 12

    def __getitem__(self, number):
        self.read += 1
        if self.fault == "hangs" and os.environ["RANK"] == "1" and self.read > STEP:
            wait_for_a_lock()
        row = torch.arange(number, number + 9) % POISON
        return torch.full_like(row, POISON) if self.fault == "poison" and number == 5 else row


def wait_for_a_lock():
    threading.Event().wait()


class Layer(nn.Linear):
    """A layer; poisoned, it divides by nothing."""

    poison = False

    def forward(self, x):
        x = x + super().forward(x).relu()
        return x / 0.0 if self.poison else x


class Model(nn.Module):
    def __init__(self, vocab_size=16, dim=8, fault=None):
        super().__init__()
        self.embedding, self.fault, self.num_forwards = nn.Embedding(vocab_size, dim), fault, 0
        self.layers = nn.ModuleList(Layer(dim, dim) for _ in range(3))
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens):
        self.num_forwards += 1
        fault = FAULTS.get(self.fault)
        x = self.embedding(tokens)
        if fault is not None:
            x = fault(x, dist.get_rank(), self.num_forwards - 1)
        self.layers[1].poison = bool((tokens == POISON).any())
        for layer in self.layers:
            x = layer(x)
        return self.head(x) + 0.0


def killed(x, rank, step):
    if (rank, step) == (1, STEP):
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def calls_another_collective(x, rank, step):
    if (rank, step) == (1, STEP):
        dist.all_reduce(torch.ones(3))
    return x


def waits_for_something_else(x, rank, step):
    if (rank, step) == (1, STEP):
        wait_for_a_lock()
    return x


def sends_another_shape(x, rank, step):
    if step == STEP:
        dist.all_reduce(torch.ones(5000 if rank == 1 else 5))
    return x


def needs_too_much(x, rank, step):
    if (rank, step) == (1, STEP):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))
        return x + torch.zeros(2**28).sum()
    return x


class Delay:
    """Three times what the longest step so far took without it, first steps aside: on a slow machine it is longer."""

    def __init__(self):
        self.last_s = None
        self.longest_s = 0.02

    def __call__(self, x, rank, step):
        if rank == 1:
            if step > 2:
                self.longest_s = max(self.longest_s, min(time.perf_counter() - self.last_s, 1.0))
            time.sleep(3 * self.longest_s)
            self.last_s = time.perf_counter()
        return x


FAULTS = {
    "killed": killed,
    "extra": calls_another_collective,
    "stuck": waits_for_something_else,
    "shapes": sends_another_shape,
    "memory": needs_too_much,
    "slow": Delay(),
}
