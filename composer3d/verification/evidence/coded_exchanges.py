"""Codecs on the wire, tried on real ranks: every exchange beside the same codec on one device, element by element.

Shapes: W ranks of a group; N elements of a row; P bytes of its payload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from composer3d.torch_compat import without_torch_functions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d import Codec, CodedCollectives, CodedExchange

__all__ = ["wrong_codecs"]

_ROUNDS = 3
_LOST = 1e-5  # relative, of roundings of float32
_WHAT = {"gradients": "gradients in shards", "weights": "weights in shards", "replicas": "gradients over replicas"}
_BLOCK = 64  # elements of one magnitude, so that blocks of a codec differ in theirs


def wrong_codecs(coded: CodedCollectives, *, device: torch.device) -> tuple[str, ...]:
    """Return what is wrong with a run's exchanges, a line each; all ranks of their groups call it.

    Every exchange is run on numbers of its own sizes: of magnitudes from 1e-6 to 1e3, with zeros, another sign and
    magnitude in every block. What it returns is compared with the ranks' numbers, encoded, decoded and added in the
    order of ranks on this rank alone: bit for bit where the codec is repeatable. Errors may not exceed the codec's
    bound, and payloads have the bytes that it states. Means of replicas are the same bits on all of them; with error
    feedback, means of several exchanges and what is left over at last add up to the true means.

    Collectives: of every length that was exchanged the exchange itself; of means several, and an all-gather of each.
    """
    found: list[str] = []
    with without_torch_functions():  # here float32 is float32, in float64's verification too
        for exchange in coded.exchanges.values():
            for length in sorted(exchange.lengths):
                found += _wrong_mean(exchange, length, device) if exchange.what == "replicas" else []
                found += _wrong(exchange, length, device) if exchange.codec is not None else []
    return tuple(found)


def _wrong(exchange: CodedExchange, length: int, device: torch.device) -> list[str]:
    import torch
    import torch.distributed as dist

    codec = exchange.codec
    assert codec is not None
    rank, num_ranks = dist.get_rank(exchange.group), exchange.group.size()
    rows = num_ranks if exchange.what == "gradients" else 1
    numbers = [_numbers(sender, rows, length, device) for sender in range(num_ranks)]
    mine_RN = numbers[rank]
    returned = exchange.run(mine_RN if exchange.what == "gradients" else mine_RN.view(-1))
    if exchange.what == "replicas":
        expected, bound, true, sent = _mean(codec, numbers)
    else:
        # Row `rank` of every sender is added here; of weights every sender's only row is gathered.
        given = [sender[rank : rank + 1] if exchange.what == "gradients" else sender for sender in numbers]
        decoded = [_decoded(codec, x_1N).view(-1) for x_1N in given]
        bounds = [codec.bound(x_1N).view(-1) for x_1N in given]
        exact = [x_1N.view(-1) for x_1N in given]
        put = _sum if exchange.what == "gradients" else torch.stack
        expected, bound, true, sent = put(decoded), put(bounds), put(exact), mine_RN
        bound += true.abs() * 1e-5 if exchange.what == "gradients" else 0.0
    label = f"the exchange of {_WHAT[exchange.what]} of {length} elements"
    payload, stated = codec.encode(sent), codec.num_bytes(sent.shape[1])
    if payload.nbytes != len(sent) * stated:
        return [f"{label} sends {payload.nbytes // len(sent)} bytes a row, and its codec states {stated}"]
    if returned.shape != expected.shape:
        return [f"{label} returns the shape {tuple(returned.shape)}, and {tuple(expected.shape)} was expected"]
    if codec.is_repeatable and not torch.equal(returned, expected):
        apart = int((returned != expected).sum())
        return [f"{label} differs in {apart} of {expected.numel()} elements from the same codec on one device"]
    beyond = (returned - true).abs() > bound
    if bool(beyond.any()):
        return [f"{label} is off by more than its codec's bound in {int(beyond.sum())} of {true.numel()} elements"]
    return []


def _mean(codec: Codec, numbers: list[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return, as one device computes them, replicas' mean, its largest error and its true value, and rows to encode."""
    import torch

    num_ranks, length = len(numbers), numbers[0].numel()
    chunk = -(-length // num_ranks)
    padded = [torch.nn.functional.pad(x_1N, (0, num_ranks * chunk - length)).view(num_ranks, chunk) for x_1N in numbers]
    mean = _sum([_decoded(codec, x_WL) for x_WL in padded]) / num_ranks
    bound = _sum([codec.bound(x_WL) for x_WL in padded]) / num_ranks + codec.bound(mean)
    true = _sum(padded) / num_ranks
    found = (_decoded(codec, mean), bound + true.abs() * 1e-5, true)
    expected, bound, true = (each.reshape(-1)[:length] for each in found)
    return expected, bound, true, padded[0]


def _wrong_mean(exchange: CodedExchange, length: int, device: torch.device) -> list[str]:
    """Compare replicas with each other, and with error feedback all that they were given with all that it became."""
    import torch
    import torch.distributed as dist

    rank, num_ranks = dist.get_rank(exchange.group), exchange.group.size()
    label = f"the exchange of {_WHAT[exchange.what]} of {length} elements"
    run = exchange.run if exchange.rounds is None else exchange.rounds()
    means, true, left = [], [], None
    for number in range(1 if exchange.rounds is None else _ROUNDS):
        numbers = [_numbers(number * num_ranks + sender, 1, length, device).view(-1) for sender in range(num_ranks)]
        returned = run(numbers[rank])
        mean, left = returned if isinstance(returned, tuple) else (returned, None)
        means.append(mean)
        true.append(_sum(numbers) / num_ranks)
    everybodys = [torch.empty_like(means[-1]) for _ in range(num_ranks)]
    dist.all_gather(everybodys, means[-1].contiguous(), group=exchange.group)
    if not all(torch.equal(other, everybodys[0]) for other in everybodys):
        return [f"{label} returns other numbers on some replicas than on others"]
    if left is None:
        return []
    owed = left / num_ranks
    dist.all_reduce(owed, group=exchange.group)
    apart = (_sum(means) + owed - _sum(true)).abs().max() / _sum([each.abs() for each in true]).abs().max()
    if not float(apart) < _LOST:
        return [f"{label} loses, or sends twice, {float(apart):.2g} of the largest element in {_ROUNDS} steps"]
    return []


def _numbers(sender: int, rows: int, length: int, device: torch.device) -> Tensor:
    """Return a rank's rows, the same on every rank that asks."""
    import torch

    generator = torch.Generator().manual_seed(sender + 1)
    x_RN = torch.randn(rows, length, generator=generator, dtype=torch.float32)
    place_N = torch.arange(length)
    magnitude_N = 10.0 ** (place_N.div(_BLOCK, rounding_mode="floor") % 10 - 6).float()
    return (x_RN * magnitude_N * (place_N % 7 != 3)).to(device)


def _decoded(codec: Codec, x_RN: Tensor) -> Tensor:
    return codec.decode(codec.encode(x_RN), x_RN.shape[1])


def _sum(rows: list[Tensor]) -> Tensor:
    """Add in order, beginning with zeros, as a receiver does."""
    import torch

    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total
