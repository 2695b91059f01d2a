"""Folders as Megatron-LM core 0.17 writes them, and its attention with queries, keys and values in one tensor."""

from __future__ import annotations

import argparse
import warnings

import torch
import torch.nn.functional as F
from torch.distributed import checkpoint as dcp

from composer3d.checkpoint import contents, read_tensors

HEADS, GROUPS, WIDTH, DIM, VOCAB = 4, 2, 6, 24, 32
ROWS = (HEADS + 2 * GROUPS) * WIDTH


def arguments(**changed):
    held = {"num_attention_heads": HEADS, "num_query_groups": GROUPS, "rotary_interleaved": False}
    return argparse.Namespace(**{**held, **changed})


def write_folder(folder, state, args):
    """Write tensors, and the plain rest in `common.pt`: 8 iterations, the optimizer's 7 steps."""
    folder.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder)
    groups = {"param_groups": [{"lr": 0.1, "step": 7}]}
    torch.save({"args": args, "iteration": 8, "optimizer": {"optimizer": groups}}, folder / "common.pt")


def tensors_in(path):
    return dict(read_tensors(path, list(contents(path))))


def rotated(x, *, neighbours):
    """Turn the pairs of heads, batch x sequence x heads x width, as Megatron-LM does."""
    exponents = -torch.arange(0, WIDTH, 2, dtype=x.dtype) / WIDTH
    angles = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * 10000.0**exponents
    if neighbours:
        angles = angles.repeat_interleave(2, dim=-1)[:, None]
        half = torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    else:
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        half = torch.cat([-x[..., WIDTH // 2 :], x[..., : WIDTH // 2]], dim=-1)
    return x * angles.cos() + half * angles.sin()


def attended(x, fused, out, *, neighbours=False):
    """Return causal attention of x (batch x sequence x width), of rows by groups: queries, a key, a value."""
    grouped = (x @ fused.T).unflatten(-1, (GROUPS, HEADS // GROUPS + 2, WIDTH))
    q, k, v = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    q, k = (rotated(each, neighbours=neighbours).transpose(1, 2) for each in (q, k))
    mixed = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).flatten(2) @ out.T
