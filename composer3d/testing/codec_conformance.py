"""Conformance of codecs on the wire: what exchanges rely on, tried on rows of many lengths, magnitudes and dtypes.

Shapes: R rows of N elements; P bytes of a payload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from composer3d.communication import InPlaceCodec

if TYPE_CHECKING:
    from torch import Tensor

    from composer3d.communication import Codec

__all__ = ["assert_codec_conforms"]

LENGTHS = (0, 1, 2, 3, 7, 8, 63, 64, 65, 256, 257, 1000)
_ROWS = 3


def assert_codec_conforms(codec: Codec, *, lengths: Sequence[int] = LENGTHS) -> None:
    """Assert what exchanges and `verify` rely on; on one process, in about a second.

    Payloads are bytes, as many as stated, and depend on their own row alone, as what is decoded does; errors are
    within the bound, which is finite; the same elements have the same payload where the codec says so; elements are not
    changed; zeros stay zeros; what is not finite is not lost, so that overflows are seen, and spoils no other row;
    bfloat16, float16 and float64 are taken as float32 is; what an `InPlaceCodec` writes, or adds, is what it decodes,
    to the bit.

    Args:
        codec: A `composer3d.Codec`.
        lengths: Values of N; 0 where a rank's shard of every parameter is empty.

    Raises:
        AssertionError: With what does not hold, and for which elements.
    """
    for length in lengths:
        for name, x_RN in _numbers(length):
            _judge(codec, x_RN, f"{name} of {length} elements")
        if length:
            _judge_what_is_not_finite(codec, length)


def _numbers(length: int) -> Iterator[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(length)
    x_RN = torch.randn(_ROWS, length, generator=generator)
    magnitudes = torch.logspace(-6, 3, length)
    yield "normal numbers", x_RN
    yield "numbers of all magnitudes", x_RN * magnitudes
    yield "numbers of 1e-40", x_RN * 1e-40
    yield "zeros", torch.zeros(_ROWS, length)
    yield "equal numbers", torch.full((_ROWS, length), 0.1)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield f"{str(dtype).removeprefix('torch.')} numbers", x_RN.to(dtype)


def _judge(codec: Codec, x_RN: Tensor, what: str) -> None:
    rows, length = x_RN.shape
    before, stated = x_RN.clone(), codec.num_bytes(length)
    payload_RP = codec.encode(x_RN)
    assert payload_RP.dtype == torch.uint8, f"{what}: a payload is {payload_RP.dtype}, and has to be uint8"
    assert payload_RP.shape == (rows, stated), (
        f"{what}: a payload has the shape {tuple(payload_RP.shape)}, and {(rows, stated)} is stated"
    )
    assert torch.equal(x_RN, before), f"{what}: encoding changes the elements"
    decoded_RN = codec.decode(payload_RP, length)
    assert decoded_RN.dtype == torch.float32 and decoded_RN.shape == (rows, length), (
        f"{what}: decoding returns {decoded_RN.dtype} {tuple(decoded_RN.shape)}, and has to return float32 "
        f"{(rows, length)}"
    )
    if isinstance(codec, InPlaceCodec):
        _judge_in_place(codec, payload_RP, decoded_RN, what)
    bound_RN = codec.bound(x_RN)
    assert bound_RN.shape == x_RN.shape and bool((bound_RN.isfinite() & (bound_RN >= 0)).all()), (
        f"{what}: the bound is no finite number for each element"
    )
    apart = (decoded_RN.double() - x_RN.double()).abs() > bound_RN.double()
    assert not bool(apart.any()), f"{what}: {int(apart.sum())} errors are beyond the bound"
    assert bool(x_RN.any()) or not bool(decoded_RN.any()), f"{what}: zeros are decoded as something else"
    last = codec.decode(payload_RP[-1:].clone(), length)
    assert torch.equal(last, decoded_RN[-1:]), f"{what}: what a row is decoded as depends on other rows"
    if codec.is_repeatable:
        assert torch.equal(codec.encode(x_RN), payload_RP), f"{what}: the same elements have another payload"
        single = torch.cat([codec.encode(x_1N) for x_1N in x_RN.split(1)])
        assert torch.equal(single, payload_RP), f"{what}: a row's payload depends on other rows"


def _judge_in_place(codec: InPlaceCodec, payload_RP: Tensor, decoded_RN: Tensor, what: str) -> None:
    # In the middle of other memory, which stays as it is; the numbers that are there make sums round.
    around = torch.full((decoded_RN.numel() + 2,), 0.3)
    out_RN = around[1:-1].view(decoded_RN.shape)
    codec.decode_into(payload_RP, out_RN)
    assert torch.equal(out_RN, decoded_RN), f"{what}: what is written in place is not what is decoded"
    codec.decode_into(payload_RP, out_RN, add=True)
    codec.decode_into(payload_RP[:1].clone(), out_RN[:1], add=True)
    sum_RN = decoded_RN + decoded_RN
    sum_RN[:1] += decoded_RN[:1]
    assert torch.equal(out_RN, sum_RN), f"{what}: what is added in place is not the sum with what is decoded"
    assert float(around[0]) == float(around[-1]) == around.new_tensor(0.3), f"{what}: memory beside it is overwritten"


def _judge_what_is_not_finite(codec: Codec, length: int) -> None:
    generator = torch.Generator().manual_seed(length)
    for value in (float("nan"), float("inf"), float("-inf")):
        x_RN = torch.randn(_ROWS, length, generator=generator)
        x_RN[1, length // 2] = value
        payload_RP = codec.encode(x_RN)
        assert payload_RP.shape == (_ROWS, codec.num_bytes(length)), f"{value} changes the size of a payload"
        decoded_RN = codec.decode(payload_RP, length)
        assert not bool(decoded_RN[1].isfinite().all()), f"{value} among {length} elements is decoded as finite numbers"
        assert bool(decoded_RN[0].isfinite().all()) and bool(decoded_RN[2].isfinite().all()), (
            f"{value} in a row of {length} elements spoils other rows"
        )
