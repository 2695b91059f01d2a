"""The operators whose time is measured on a CPU: those of which training steps of decoders and encoders consist.

Each is called as the framework calls it, on tensors that other calls have driven out of the nearest caches, and writes
its result into fresh memory. Bytes are counted as the tracer counts them: every input and every result once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch

from composer3d.planning.hardware.cluster import BROADCAST, SHORT_ROW
from composer3d.planning.hardware.timed_calls import least_seconds, seconds_of

__all__ = ["REFERENCES", "Reference", "bytes_of", "calls_of", "time_references"]

WIDTH, CLASSES, HEADS = 256, 2048, 8
ELEMENTS = (2**14, 2**17, 2**19, 2**21)  # from what stays in the first cache to what none holds
_APART = 2**26  # bytes after which the same tensors are used again: more than caches hold
_MOST_SETS = 64
_KEPT = 0.9  # of what a dropout keeps

Make = Callable[[int, torch.dtype], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An operator that is timed.

    Args:
        name: As it is traced, or where the form of its arguments decides, with that behind.
        make: Its arguments, of about so many elements and of a dtype.
        call: It, on what `make` made.
        writes: Which of the arguments it writes to, for one that works in place.
    """

    name: str
    make: Make
    call: Callable[..., Any]
    writes: tuple[int, ...] = ()


_ATEN = torch.ops.aten


def _rows(number: int, width: int = WIDTH) -> Make:
    """Return what makes tensors of rows that together have the elements asked for."""

    def make(elements: int, dtype: torch.dtype) -> tuple[Any, ...]:
        return tuple(torch.randn(max(1, elements // width), width).to(dtype) for _ in range(number))

    return make


def _broadcast(elements: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return one of each pair of a head's features, and what turns it: one for all heads of a position."""
    length = max(1, elements // (HEADS * SHORT_ROW))
    pairs = torch.randn(length, HEADS, SHORT_ROW, 2).to(dtype)
    return pairs[..., 0], torch.randn(length, 1, SHORT_ROW).to(dtype)


def _probabilities(elements: int, dtype: torch.dtype) -> tuple[Any, ...]:
    gradient, values = _rows(2, CLASSES)(elements, dtype)
    return gradient, values.float().log_softmax(-1).to(dtype)


def _losses(elements: int, dtype: torch.dtype) -> tuple[Any, ...]:
    values = _probabilities(elements, dtype)[1]
    return torch.ones((), dtype=dtype), values, torch.randint(CLASSES, values.shape[:1])


def _weights(elements: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Return as many embeddings as tokens, half of the elements each."""
    number = max(1, elements // WIDTH // 2)
    return torch.randn(number, WIDTH).to(dtype), torch.randint(number, (1, number))


def _norm(elements: int, dtype: torch.dtype) -> tuple[Any, ...]:
    (values,) = _rows(1)(elements, dtype)
    return values, torch.ones(WIDTH, dtype=dtype), torch.zeros(WIDTH, dtype=dtype)


def _norm_backward(elements: int, dtype: torch.dtype) -> tuple[Any, ...]:
    values, weight, bias = _norm(elements, dtype)
    _, mean, scale = torch.native_layer_norm(values, [WIDTH], weight, bias, 1e-5)
    return torch.randn(values.shape).to(dtype), values, mean, scale, weight, bias


def _heads(elements: int, dtype: torch.dtype) -> tuple[Any, ...]:
    (values,) = _rows(1)(elements, dtype)
    return (values.view(1, -1, HEADS, WIDTH // HEADS).transpose(1, 2),)


def _states(elements: int, dtype: torch.dtype) -> tuple[Any, ...]:
    lists = tuple([values] for values in _rows(4)(elements, dtype))
    lists[3][0].square_()
    return (*lists, [torch.ones(())])


def _adamw(parameters: Any, gradients: Any, means: Any, squares: Any, steps: Any) -> None:
    _ATEN._fused_adamw_(
        parameters, gradients, means, squares, [], steps,
        lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
    )  # fmt: skip


def _other(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16 if values.dtype == torch.float32 else torch.float32)


REFERENCES: Sequence[Reference] = (
    Reference(name="aten.mul", make=_rows(2), call=torch.mul),
    Reference(name=BROADCAST, make=_broadcast, call=torch.mul),
    Reference(name="aten.copy_", make=_rows(2), call=torch.Tensor.copy_, writes=(0,)),
    Reference(name="aten.clone", make=_heads, call=torch.Tensor.contiguous),
    Reference(name="aten._to_copy", make=_rows(1), call=_other),
    Reference(name="aten.stack", make=_rows(2), call=lambda a, b: torch.stack((a, b), -1)),
    Reference(name="aten.cat", make=_rows(2), call=lambda a, b: torch.cat((a, b), -1)),
    Reference(name="aten.sum", make=_rows(1), call=lambda a: a.sum(-1)),
    Reference(name="aten.mean", make=_rows(1), call=lambda a: a.mean(-1, keepdim=True)),
    Reference(name="aten.pow", make=_rows(1), call=lambda a: a.pow(2)),
    Reference(name="aten.tanh", make=_rows(1), call=torch.tanh),
    Reference(name="aten.sigmoid", make=_rows(1), call=torch.sigmoid),
    Reference(name="aten.silu", make=_rows(1), call=_ATEN.silu),
    Reference(name="aten.silu_backward", make=_rows(2), call=_ATEN.silu_backward),
    Reference(name="aten.gelu", make=_rows(1), call=_ATEN.gelu),
    Reference(name="aten.gelu_backward", make=_rows(2), call=_ATEN.gelu_backward),
    Reference(name="aten.bernoulli_", make=_rows(1), call=lambda a: a.bernoulli_(_KEPT), writes=(0,)),
    Reference(name="aten._softmax", make=_rows(1, CLASSES), call=lambda a: a.softmax(-1)),
    Reference(
        name="aten._softmax_backward_data",
        make=_rows(2, CLASSES),
        call=lambda a, b: _ATEN._softmax_backward_data(a, b, -1, b.dtype),
    ),
    Reference(name="aten._log_softmax", make=_rows(1, CLASSES), call=lambda a: a.log_softmax(-1)),
    Reference(
        name="aten._log_softmax_backward_data",
        make=_probabilities,
        call=lambda a, b: _ATEN._log_softmax_backward_data(a, b, -1, b.dtype),
    ),
    Reference(
        name="aten.nll_loss_forward",
        make=lambda elements, dtype: _losses(elements, dtype)[1:],
        call=lambda values, classes: _ATEN.nll_loss_forward(values, classes, None, 2, -100),
    ),
    Reference(
        name="aten.nll_loss_backward",
        make=lambda elements, dtype: (*_losses(elements, dtype), torch.ones((), dtype=dtype)),
        call=lambda grad, values, classes, total: _ATEN.nll_loss_backward(grad, values, classes, None, 2, -100, total),
    ),
    Reference(name="aten.embedding", make=_weights, call=_ATEN.embedding),
    Reference(
        name="aten.embedding_dense_backward",
        make=lambda elements, dtype: (_weights(elements, dtype)[0][None], _weights(elements, dtype)[1]),
        call=lambda grad, tokens: _ATEN.embedding_dense_backward(grad, tokens, tokens.numel(), -1, False),
    ),
    Reference(
        name="aten.native_layer_norm",
        make=_norm,
        call=lambda a, weight, bias: torch.native_layer_norm(a, [WIDTH], weight, bias, 1e-5),
    ),
    Reference(
        name="aten.native_layer_norm_backward",
        make=_norm_backward,
        call=lambda grad, a, mean, scale, weight, bias: _ATEN.native_layer_norm_backward(
            grad, a, [WIDTH], mean, scale, weight, bias, [True, True, True]
        ),
    ),
    Reference(name="aten._foreach_norm", make=lambda n, dtype: (list(_rows(1)(n, dtype)),), call=_ATEN._foreach_norm),
    Reference(name="aten._fused_adamw_", make=_states, call=_adamw, writes=(0, 1, 2, 3)),
)


def bytes_of(values: Any) -> int:
    """Return the bytes of all tensors in nested lists and tuples."""
    if isinstance(values, torch.Tensor):
        return values.numel() * values.element_size()
    return sum(map(bytes_of, values)) if isinstance(values, list | tuple) else 0


def _copied(values: Any) -> Any:
    if isinstance(values, torch.Tensor):
        return torch.empty_strided(values.shape, values.stride(), dtype=values.dtype).copy_(values)
    return type(values)(map(_copied, values)) if isinstance(values, list | tuple) else values


def calls_of(reference: Reference, elements: int, dtype: torch.dtype) -> tuple[Callable[[], Any], int]:
    """Return a call that takes other tensors every time, and the bytes that one of them moves.

    Args:
        reference: What to call.
        elements: About so many.
        dtype: Of the tensors.
    """
    first = reference.make(elements, dtype)
    result = reference.call(*first)
    moved = bytes_of(first) + bytes_of([first[index] for index in reference.writes] if reference.writes else result)
    number = max(1, min(_MOST_SETS, _APART // moved))
    sets = cycle([first, *(_copied(first) for _ in range(number - 1))])
    return lambda: reference.call(*next(sets)), moved


def time_references(dtypes: Sequence[torch.dtype], budget: float) -> Iterator[tuple[str, str, int, float]]:
    """Yield name, dtype, bytes moved and seconds of work of every reference at every size, on this CPU.

    The work is what a call takes longer than one on a single element: what comes with every call is `launch_s`.

    Args:
        dtypes: Each of them.
        budget: Seconds for all of it, about.
    """
    device = torch.device("cpu")
    each = budget / (len(dtypes) * len(REFERENCES) * len(ELEMENTS))
    least = least_seconds(device, each)
    for dtype in dtypes:
        for reference in REFERENCES:
            for elements in ELEMENTS:
                call, moved = calls_of(reference, elements, dtype)
                work = seconds_of(device, call, each / 2) - least
                yield reference.name, str(dtype).removeprefix("torch."), moved, max(work, 1e-8)
