"""The batch on which proofs are tested."""

from __future__ import annotations

import torch

from composer3d import Batch
from support.faults import VOCAB


def batch():
    """Return 12 sequences, each with another number of valid targets."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (12, 5), generator=generator)
    targets = torch.randint(0, VOCAB, (12, 4), generator=generator)
    for row, length in enumerate(torch.randint(0, 3, (12,), generator=generator)):
        targets[row, :length] = -100
    return Batch(args=(tokens[:, :4].contiguous(),), target=targets)
