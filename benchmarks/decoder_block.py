"""Closed formulas for the operators and saved bytes of one decoder block, embedding and head.

Sources: Vijay Korthikanti et al., Reducing Activation Recomputation, arXiv:2205.05198, section 4 (bytes of GPT's
block); those of Llama's eager block were counted with torch: 52.5 bytes a token and width, 56 with float32 norms.
"""

from __future__ import annotations

from dataclasses import dataclass

from decoder_shape import ModelShape

from composer3d.planning.formulas.layout_numbers import Setup
from composer3d.planning.tracing.traced import Operators

__all__ = ["Work", "block", "embedding", "head"]

_BACKWARD_POINTWISE = 2.0  # a pointwise operator's backward reads the gradient and what was saved, and writes one
_TOKEN_ID = 8  # bytes
# Bytes of a logit that the loss keeps, and those of its backward at their most. Eager: the logits, a float32 copy and
# its log-softmax; both gradients. A fused loss computes in the float32 copy, one compiled from the logits needs none.
_LOGITS = {"eager": (10.0, 6.0), "fused": (6.0, 4.0), "compiled": (8.0, 6.0), "compiled loss": (2.0, 2.0)}
_FLASH_BACKWARD = 2.5  # five products where the forward has two


@dataclass(frozen=True, kw_only=True)
class Work:
    """Operators of a module's forward and backward, and the bytes of activations in between.

    Args:
        forward: Of one micro-batch.
        backward: Without recomputation.
        saved_bytes: That the backward needs, of one micro-batch.
        selective_bytes: The same where cheap operators and half of the products are recomputed.
        working_bytes: Temporaries of the backward at their most, besides what was saved.
    """

    forward: tuple[Operators, ...]
    backward: tuple[Operators, ...]
    saved_bytes: float = 0.0
    selective_bytes: float = 0.0
    working_bytes: float = 0.0


def block(shape: ModelShape, setup: Setup) -> Work:
    """Return the work of one block on one rank of tp."""
    n, h, t = setup.tokens, shape.hidden, setup.tp
    queries = shape.num_heads * shape.head_dim // t
    keys = max(shape.num_kv_heads * shape.head_dim // t, shape.head_dim)
    ffn = shape.ffn // t
    products = [(n, h, queries + 2 * keys), (n, queries, h), (n, h, ffn), (n, ffn, h)]
    if shape.gated:
        products = [(n, h, queries), (n, h, keys), (n, h, keys), (n, queries, h), (n, h, ffn), (n, h, ffn), (n, ffn, h)]
    forward = [_product(setup, *dims) for dims in products]
    backward = [call for dims in products for call in _product_backward(setup, *dims)]
    forward += _attention(shape, setup)
    backward += _attention(shape, setup, backward=True)
    traffic = _pointwise_bytes(shape, setup)
    launches = {"eager": 30, "fused": 10, "compiled": 5}[setup.kernels]
    forward.append(_pointwise(setup, traffic, launches))
    backward.append(_pointwise(setup, traffic * _BACKWARD_POINTWISE, launches * 2))
    saved, cheap = _saved_bytes(shape, setup)
    return Work(
        forward=tuple(forward),
        backward=tuple(backward),
        saved_bytes=saved,
        selective_bytes=cheap,
        working_bytes=float(setup.precision.compute_bytes * n * (2 * h + 4 * ffn)),
    )


def _product(setup: Setup, m: int, k: int, n: int) -> Operators:
    return _gemm(setup, (m, k), (k, n))


def _product_backward(setup: Setup, m: int, k: int, n: int) -> list[Operators]:
    """Return the gradients of the inputs and of the weights."""
    return [_gemm(setup, (m, n), (n, k)), _gemm(setup, (k, m), (m, n))]


def _gemm(setup: Setup, left: tuple[int, int], right: tuple[int, int]) -> Operators:
    (m, k), n = left, right[1]
    size = setup.precision.compute_bytes
    return Operators(
        name="aten.mm",
        dtype=setup.precision.dtype,
        shapes=(left, right),
        count=1,
        flops=2 * m * k * n,
        bytes_moved=int(size * (m * k + k * n + m * n)),
    )


def _attention(shape: ModelShape, setup: Setup, *, backward: bool = False) -> list[Operators]:
    """Return scores and their products with the values; fused, or with the scores in memory."""
    batch, heads = setup.microbatch, max(shape.num_heads // setup.tp, 1)
    queries, keys, dim = setup.seq_len // setup.cp, setup.seq_len, shape.head_dim
    flops = 4 * batch * heads * queries * keys * dim
    size = setup.precision.compute_bytes
    if setup.attention == "flash":
        name = "aten._scaled_dot_product_flash_attention" + ("_backward" if backward else "")
        factor = _FLASH_BACKWARD if backward else 1
        return [
            Operators(
                name=name,
                dtype=_compute_dtype(setup),
                shapes=((batch, heads, queries, dim), (batch, heads, keys, dim), (batch, heads, keys, dim)),
                count=1,
                flops=int(flops * factor),
                bytes_moved=int(size * 4 * batch * heads * keys * dim * factor),
            )
        ]
    scores = batch * heads * queries * keys
    both = [
        Operators(
            name="aten.bmm",
            dtype=_compute_dtype(setup),
            shapes=shapes,
            count=2 if backward else 1,
            flops=flops // 2,
            bytes_moved=int(size * scores),
        )
        for shapes in (
            ((batch * heads, queries, dim), (batch * heads, dim, keys)),
            ((batch * heads, queries, keys), (batch * heads, keys, dim)),
        )
    ]
    # Scale, mask and softmax in one kernel, dropout in another: each reads and writes the scores.
    return [*both, _pointwise(setup, scores * size * 5 * (1.2 if backward else 1), 3)]


def _compute_dtype(setup: Setup) -> str:
    """Return the dtype of what is not a linear layer: float8 is for those only."""
    return "bfloat16" if setup.precision.dtype.startswith("float8") else setup.precision.dtype


def _pointwise(setup: Setup, traffic: float, launches: int) -> Operators:
    """Return several pointwise calls as equal ones."""
    return Operators(
        name="aten.pointwise",
        dtype=_compute_dtype(setup),
        shapes=((setup.tokens,),),
        count=launches,
        flops=0,
        bytes_moved=int(traffic / launches),
    )


def _pointwise_bytes(shape: ModelShape, setup: Setup) -> float:
    """Return the traffic of a block's forward besides products and attention: norms, residuals, rotary, activation."""
    n, h, t = setup.tokens, shape.hidden, setup.tp
    cut = t if setup.sequence_parallel else 1
    ffn, heads = shape.ffn / t, (shape.num_heads + shape.num_kv_heads) * shape.head_dim / t
    size = setup.precision.compute_bytes
    norm = {"eager": 20.0, "fused": 2.0, "compiled": 2.0}[setup.kernels] * size * (1 if shape.gated else 0.4)
    norm = max(norm, 2.0 * size)
    residual = {"eager": 3.0, "fused": 3.0, "compiled": 1.5}[setup.kernels] * size
    activation = (5.0 if setup.kernels != "compiled" else 3.0) if shape.gated else 2.0
    rotary = {"eager": 10.0, "fused": 2.0, "compiled": 2.0}[setup.kernels] if shape.gated else 1.0
    casts = 0.0
    if setup.precision.dtype.startswith("float8"):  # read twice (largest value, cast), write one byte
        casts = (3 * h + ffn) * 2.5 * size
    return n * (2 * (norm + residual) * h / cut + size * (activation * ffn + rotary * heads) + casts)


def _saved_bytes(shape: ModelShape, setup: Setup) -> tuple[float, float]:
    """Return the activations that a block keeps, all of them and those that selective recomputation leaves."""
    n, h, t = setup.tokens, shape.hidden, setup.tp
    size = setup.precision.compute_bytes
    cut = t if setup.sequence_parallel else 1
    heads = shape.num_heads * shape.head_dim / t
    keys = shape.num_kv_heads * shape.head_dim / t
    ffn = shape.ffn / t
    stream = 4 * h / cut  # inputs of the two norms, and their results
    norms = {"eager": 4.0 * h / cut if shape.gated else 0.0, "fused": 0.0, "compiled": 0.0}[setup.kernels]
    attention = 2 * heads + 2 * keys + 2 * shape.num_heads / t  # queries, result, keys, values, log-sum-exp
    if setup.attention == "math":
        attention += 2.5 * setup.seq_len / setup.cp * shape.num_heads / t
    rotary = (heads + keys) * (2.0 if setup.kernels == "eager" and shape.gated else 0.0)
    inner = ffn * ((4 if setup.kernels == "eager" else 3) if shape.gated else 2)
    dropout = 0.0 if shape.gated else h / cut
    everything = size * n * (stream + norms + attention + rotary + inner + dropout)
    # The block's input, the attention's result, and every other product.
    projected = heads + keys if shape.gated else heads + 2 * keys
    cheap = size * n * (h / cut + heads + projected + ffn + (h / cut if shape.gated else 0.0))
    return everything, cheap


def embedding(shape: ModelShape, setup: Setup) -> Work:
    """Return the work of looking tokens up; its backward needs their ids, and the first block keeps the result."""
    size = setup.tokens * shape.hidden * setup.precision.compute_bytes
    return Work(
        forward=(_pointwise(setup, 3 * size, 2),),
        backward=(_pointwise(setup, 4 * size, 3),),
        saved_bytes=_TOKEN_ID * setup.tokens,
    )


def head(shape: ModelShape, setup: Setup) -> Work:
    """Return the work of final norm, logits and cross entropy."""
    n, h, vocab = setup.tokens, shape.hidden, -(-shape.vocab_size // setup.tp)
    logits = n * vocab
    traffic = {"eager": 18.0, "fused": 14.0, "compiled": 8.0}[setup.kernels] * logits
    saved, working = _LOGITS[setup.loss or setup.kernels]
    return Work(
        forward=(_product(setup, n, h, vocab), _pointwise(setup, traffic, 5)),
        backward=(*_product_backward(setup, n, h, vocab), _pointwise(setup, traffic, 4)),
        saved_bytes=setup.precision.compute_bytes * n * h + saved * logits,
        working_bytes=working * logits,
    )
