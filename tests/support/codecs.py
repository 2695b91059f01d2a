"""Codecs of a third party: one that is right, and some that are not."""

from __future__ import annotations

import torch


class Half:
    """float16 on the wire."""

    is_repeatable = True

    def __init__(self, *, block):
        del block

    def num_bytes(self, length):
        return 2 * length

    def encode(self, x_RN):
        return x_RN.to(torch.float16).view(torch.uint8)

    def decode(self, payload_RP, length):
        return payload_RP.contiguous().view(torch.float16).float()

    def bound(self, x_RN):
        return x_RN.abs() * 2.0**-11 + 2.0**-24


class Shrinking(Half):
    """Decodes a thousandth too little, which its bound does not admit."""

    def decode(self, payload_RP, length):
        return super().decode(payload_RP, length) * 0.999


class Wide(Half):
    """Sends float32, and states the bytes of float16."""

    def encode(self, x_RN):
        return x_RN.float().contiguous().view(torch.uint8)

    def decode(self, payload_RP, length):
        return payload_RP.contiguous().view(torch.float32)


class Restless(Half):
    """Claims to be repeatable, and is not."""

    def encode(self, x_RN):
        return super().encode(x_RN * (1 + 2.0**-10 * torch.rand_like(x_RN)))

    def bound(self, x_RN):
        return x_RN.abs() * 0.01 + 1e-3


class Parted(Half):
    """Decodes other numbers on every rank, which its wide bound admits."""

    is_repeatable = False

    def decode(self, payload_RP, length):
        return super().decode(payload_RP, length) * (1 + 2.0**-9 * torch.distributed.get_rank())

    def bound(self, x_RN):
        return x_RN.abs() * 0.01 + 1e-3
