"""Functions of torch that draw random numbers inside: attention, recurrent layers, and what is called once a sample."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from composer3d.mesh.held_shards import Shards
from composer3d.step.random_numbers.counter_random import Rows, kept_weights, row_seed
from composer3d.step.random_numbers.draw_sites import Draw, argument
from composer3d.torch_compat.written_attention import attend_keeping, attends_by_math

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["attention", "each", "heads", "recurrent"]


def each(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """Call a function once a sample, with torch's own generators seeded for it, and put the results together."""
    import torch

    first = next(arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor))

    def by_sample(key: int, rows: Rows, shard: Shards | None) -> Any:
        found = []
        size = first.shape[0] // rows.count
        for place in range(rows.count):

            def piece(value: Any, at: int = place * size) -> Any:
                is_split = isinstance(value, torch.Tensor) and value.ndim and value.shape[0] == first.shape[0]
                return value.narrow(0, at, size) if is_split else value

            torch.manual_seed(row_seed(key, rows.first + place))
            found.append(func(*map(piece, args), **{name: piece(value) for name, value in kwargs.items()}))
        return torch.cat(found)

    return Draw(shape=tuple(first.shape), by_sample=by_sample, is_called=True)


def attention(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """Attention that drops weights: on torch's math path each weight has its number, whatever the shards.

    Kernels that do all in one, on CUDA, draw by blocks of their own: they are called once a sample.
    """
    import torch

    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    usual = (None, None, None, None, 0.0, False)
    q, k, v, mask, p, is_causal = (
        argument(args, kwargs, place, key, value) for place, (key, value) in enumerate(zip(names, usual, strict=True))
    )
    if not 0.0 < p < 1.0:
        return None
    if not attends_by_math(q, args, kwargs):
        return each(func, name, args, kwargs)
    options = {key: kwargs[key] for key in ("scale", "enable_gqa") if key in kwargs}
    lead = q.shape[:-2] if options.get("enable_gqa") else torch.broadcast_shapes(q.shape[:-2], k.shape[:-2])
    shape = (*lead, q.shape[-2], k.shape[-2])

    def by_sample(key: int, rows: Rows, shard: Shards | None) -> Tensor:
        held = shard or Shards(inner_first=())
        kept = kept_weights(held.places(shape, q.device), held.whole(shape), 1.0 - p, key=key, rows=rows)
        return attend_keeping(q, k, v, mask, kept, dropout_p=p, is_causal=is_causal, **options)

    return Draw(shape=shape, by_sample=by_sample if len(shape) > 2 else None)


def heads(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """Multi-head attention: written out; with keys of its own, called once a sample, which lie along dim 1."""
    import torch

    # Which imports torch.
    from composer3d.torch_compat.multihead_attention import attend_with_heads, call_of

    if not (argument(args, kwargs, 10, "dropout_p", 0.0) and argument(args, kwargs, 13, "training", True)):
        return None
    if (given := call_of(args, kwargs)) is not None:
        return Draw(shape=(), by_sample=None, written=functools.partial(attend_with_heads, given))
    query, num_heads = args[0], args[4]
    if query.ndim != 3:
        return Draw(shape=(), by_sample=None)

    def by_sample(key: int, rows: Rows, shard: Shards | None) -> Any:
        size = query.shape[1] // rows.count
        outputs, weights = [], []
        for place in range(rows.count):
            named = dict(kwargs)
            for option, wide in (("key_padding_mask", 1), ("attn_mask", num_heads)):
                value = named.get(option)
                if value is not None and (option != "attn_mask" or value.ndim == 3):
                    named[option] = value.narrow(0, place * size * wide, size * wide)
            torch.manual_seed(row_seed(key, rows.first + place))
            pieces = (tensor.narrow(1, place * size, size) for tensor in args[:3])
            output, weight = func(*pieces, *args[3:], **named)
            outputs.append(output)
            weights.append(weight)
        return torch.cat(outputs, 1), None if weights[0] is None else torch.cat(weights)

    return Draw(shape=tuple(query.shape), by_sample=by_sample, batch_dim=1, is_called=True)


def recurrent(func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Draw | None:
    """Layers that drop between each other, inside of one function; packed sequences are not taken apart."""
    import torch

    # The probability is the only number that is no integer; training follows it.
    at = next((place for place, arg in enumerate(args) if isinstance(arg, float)), None)
    if at is None or not args[at] or not args[at + 1]:
        return None
    if len(args) != 9:
        return Draw(shape=(), by_sample=None)
    x, batch_dim = args[0], 0 if args[8] else 1

    def by_sample(key: int, rows: Rows, shard: Shards | None) -> Any:
        size = x.shape[batch_dim] // rows.count
        found = []
        # cuDNN keeps the state of its dropout for itself, whatever the seeds.
        with torch.backends.cudnn.flags(enabled=False):
            for place in range(rows.count):
                states = [state.narrow(1, place * size, size) for state in ([args[1]], args[1])[name == "lstm"]]
                torch.manual_seed(row_seed(key, rows.first + place))
                piece = x.narrow(batch_dim, place * size, size)
                found.append(func(piece, states if name == "lstm" else states[0], *args[2:], **kwargs))
        outputs, *last = zip(*found, strict=True)
        return torch.cat(outputs, batch_dim), *(torch.cat(states, 1) for states in last)

    return Draw(shape=tuple(x.shape), by_sample=by_sample, batch_dim=batch_dim, is_called=True)
