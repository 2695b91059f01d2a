"""Gradients that replicas exchange in a run, recorded, and the same algorithms on one device in float64."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from composer3d_plugins.communication.compression.replica_means import ReplicaMeans

from composer3d import seed_of


@dataclass
class Recorded:
    """Calls of one rank: (ranks of the group, gradients by name before, and after)."""

    calls: list = field(default_factory=list)

    def attach(self, monkey):
        """Record calls of compressed means; `monkey` sets an attribute for the rank's life."""
        exchange = ReplicaMeans.__call__

        def recorded(means, buffer, gradients, group):
            before = by_name(means, gradients)
            exchange(means, buffer, gradients, group)
            after = by_name(means, gradients)
            self.calls.append((tuple(dist.get_process_group_ranks(group)), before, after))

        monkey(ReplicaMeans, "__call__", recorded)


def by_name(means, gradients):
    """Return gradients as they are sent, one after the other."""
    return {means.name_of(held): g.detach().double().numpy().copy() for held, g in gradients}


def power_sgd(ranks, *, rank, seed=0, feedback=True):
    """Return the largest distance of recorded means from PowerSGD on one device, relative to the largest mean.

    Args:
        ranks: `calls` of every rank of the world.
        rank: Of the products.
        seed: Of the run.
        feedback: Whether what is lost is sent later.
    """
    worst, compressed = 0.0, 0
    owed, factors = {}, {}
    for members in sorted({call[0] for calls in ranks for call in calls}):
        assert len({len(ranks[member]) for member in members}) == 1
        for number in range(len(ranks[members[0]])):
            for name in ranks[members[0]][number][1]:
                given = [ranks[member][number][1][name] for member in members]
                sent = [x + owed.get((members, name, r), 0.0) for r, x in enumerate(given)]
                mean = sum(sent) / len(sent)
                matrix = mean.reshape(len(mean), -1) if mean.ndim > 1 and mean.size else mean.reshape(-1, 1)
                rows, columns = matrix.shape
                size = min(rank, rows, columns)
                expected = mean
                if mean.ndim > 1 and size and size * (rows + columns) < rows * columns:
                    key = (members, name)
                    if key not in factors:
                        generator = torch.Generator().manual_seed(seed_of(seed, "power_sgd", name))
                        drawn = torch.randn(columns, size, generator=generator, dtype=torch.float32)
                        factors[key] = drawn.double().numpy()
                    left, _ = np.linalg.qr(matrix @ factors[key])
                    factors[key] = matrix.T @ left
                    expected = (left @ factors[key].T).reshape(mean.shape)
                    compressed += 1
                for r, x in enumerate(sent):
                    owed[members, name, r] = x - expected if feedback else 0.0
                found = [ranks[member][number][2][name] for member in members]
                assert all(np.array_equal(found[0], other) for other in found)
                if expected.size:
                    largest = max(np.abs(mean).max(), 1e-300)
                    worst = max(worst, float(np.abs(found[0] - expected).max() / largest))
    assert compressed, "nothing was compressed"
    return worst


def rows_of_codec(ranks, *, codec, feedback=True):
    """Return the largest distance of recorded means from a codec of rows on one device, as `power_sgd` does."""
    worst, owed = 0.0, {}
    for members in sorted({call[0] for calls in ranks for call in calls}):
        for number in range(len(ranks[members[0]])):
            size, names = len(members), tuple(ranks[members[0]][number][1])
            given = [flat(ranks[member][number][1]) for member in members]
            length = -(-given[0].numel() // size)
            senders, owners = owed.setdefault((members, names), ([0.0] * size, [0.0] * size))
            sent = [padded(x + e, length * size).view(size, length) for x, e in zip(given, senders, strict=True)]
            decoded = [codec.decode(codec.encode(x.float()), length) for x in sent]
            total = sum(x.double() for x in decoded) / size
            mean = torch.stack([row + e for row, e in zip(total, owners, strict=True)])
            again = codec.decode(codec.encode(mean.float()), length).double()
            if feedback:
                numel = given[0].numel()
                left = [(x - d.double()).reshape(-1)[:numel] for x, d in zip(sent, decoded, strict=True)]
                lost = padded((mean - again).reshape(-1)[:numel], length * size).view(size, length)
                owed[members, names] = (left, list(lost))
            expected = again.reshape(-1)[: given[0].numel()]
            found = [flat(ranks[member][number][2]) for member in members]
            assert all(torch.equal(found[0], other) for other in found)
            worst = max(worst, float((found[0] - expected).abs().max() / expected.abs().max()))
    return worst


def flat(tensors):
    return torch.cat([torch.from_numpy(tensor).reshape(-1) for tensor in tensors.values()])


def padded(x, numel):
    return torch.nn.functional.pad(x, (0, numel - x.numel()))
