"""Codecs on the wire, tried on real ranks: every exchange beside the same codec on one device, element by element.

Shapes: W ranks of a group; N elements of a row; P bytes of its payload.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from composer3d.torch_compat import without_torch_functions

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from composer3d import CodedCollectives, CodedExchange

__all__ = ["wrong_codecs"]

_BLOCK = 64  # elements of one magnitude, so that blocks of a codec differ in theirs


def wrong_codecs(coded: CodedCollectives, *, device: torch.device) -> tuple[str, ...]:
    """Return what is wrong with a run's exchanges, a line each; all ranks of their groups call it.

    Every exchange is run on numbers of its own sizes: of magnitudes from 1e-6 to 1e3, with zeros, another sign and
    magnitude in every block. What it returns is compared with the ranks' numbers, encoded, decoded and added in the
    order of ranks on this rank alone: bit for bit where the codec is repeatable. Errors may not exceed the codec's
    bound, and payloads have the bytes that it states.

    Collectives: of every length that was exchanged the exchange itself, and an all-gather of its numbers.
    """
    found: list[str] = []
    with without_torch_functions():  # here float32 is float32, in float64's verification too
        for exchange in coded.exchanges.values():
            for length in sorted(exchange.lengths):
                found += _wrong(exchange, length, device)
    return tuple(found)


def _wrong(exchange: CodedExchange, length: int, device: torch.device) -> list[str]:
    import torch
    import torch.distributed as dist

    rank, num_ranks = dist.get_rank(exchange.group), exchange.group.size()
    rows = num_ranks if exchange.what == "gradients" else 1
    numbers = [_numbers(sender, rows, length, device) for sender in range(num_ranks)]
    mine_RN = numbers[rank]
    returned = exchange.run(mine_RN if exchange.what == "gradients" else mine_RN.view(-1))
    # Row `rank` of every sender is added here; of weights every sender's only row is gathered.
    given = [sender[rank : rank + 1] if exchange.what == "gradients" else sender for sender in numbers]
    decoded = [_decoded(exchange.codec, x_1N) for x_1N in given]
    bounds = [exchange.codec.bound(x_1N).view(-1) for x_1N in given]
    exact = [x_1N.view(-1) for x_1N in given]
    if exchange.what == "gradients":
        expected, bound, true = _sum(decoded), _sum(bounds) + _sum(exact).abs() * 1e-5, _sum(exact)
    else:
        expected, bound, true = torch.stack(decoded), torch.stack(bounds), torch.stack(exact)
    label = f"the exchange of {exchange.what} in shards of {length} elements"
    payload = exchange.codec.encode(mine_RN)
    if payload.nbytes != rows * exchange.codec.num_bytes(length):
        stated = exchange.codec.num_bytes(length)
        return [f"{label} sends {payload.nbytes // rows} bytes a row, and its codec states {stated}"]
    if returned.shape != expected.shape:
        return [f"{label} returns the shape {tuple(returned.shape)}, and {tuple(expected.shape)} was expected"]
    if exchange.codec.is_repeatable and not torch.equal(returned, expected):
        apart = int((returned != expected).sum())
        return [f"{label} differs in {apart} of {expected.numel()} elements from the same codec on one device"]
    beyond = (returned - true).abs() > bound
    if bool(beyond.any()):
        return [f"{label} is off by more than its codec's bound in {int(beyond.sum())} of {true.numel()} elements"]
    return []


def _numbers(sender: int, rows: int, length: int, device: torch.device) -> Tensor:
    """Return a rank's rows, the same on every rank that asks."""
    import torch

    generator = torch.Generator().manual_seed(sender + 1)
    x_RN = torch.randn(rows, length, generator=generator, dtype=torch.float32)
    place_N = torch.arange(length)
    magnitude_N = 10.0 ** (place_N.div(_BLOCK, rounding_mode="floor") % 10 - 6).float()
    return (x_RN * magnitude_N * (place_N % 7 != 3)).to(device)


def _decoded(codec: Any, x_1N: Tensor) -> Tensor:
    decoded: Tensor = codec.decode(codec.encode(x_1N), x_1N.shape[1])
    return decoded.view(-1)


def _sum(rows: list[Tensor]) -> Tensor:
    """Add in order, beginning with zeros, as a receiver does."""
    import torch

    total = torch.zeros_like(rows[0])
    for row in rows:
        total += row
    return total
