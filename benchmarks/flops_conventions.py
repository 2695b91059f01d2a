"""Model FLOPs by the conventions in which figures are published: the same run has another MFU under each.

Sources: palm: Aakanksha Chowdhery et al., arXiv:2204.02311, appendix B; causal: Megatron-Bridge's tables since 25.09;
korthikanti: Vijay Korthikanti et al., arXiv:2205.05198, appendix A; megatron96: Deepak Narayanan et al.,
arXiv:2104.04473, equation 3, which counts a full recomputation and therefore is no MFU.
"""

from __future__ import annotations

from collections.abc import Mapping

from decoder_shape import ModelShape

__all__ = ["CONVENTIONS", "flops_per_token"]

CONVENTIONS: Mapping[str, str] = {
    "palm": "6 N + 12 L h s, N without the embedding unless it is the output too, whole attention",
    "mosaic": "6 N + 12 L h s, N with embeddings, whole attention",
    "causal": "6 N + 6 L h s, N without the embedding, attention as a causal kernel executes it",
    "korthikanti": "72 L h^2 s (1 + s / 6h + V / 12 L h) a sequence, whole attention, GPT's block",
    "megatron96": "96 L h^2 s (1 + s / 6h + V / 16 L h) a sequence, with a full recomputation: hardware FLOPs",
}


def flops_per_token(shape: ModelShape, seq_len: int, convention: str) -> float:
    """Return the floating-point operations of forward and backward that a convention counts for one token.

    Args:
        shape: Of the model.
        seq_len: Tokens that attend to each other.
        convention: One of `CONVENTIONS`.
    """
    hidden, layers = shape.hidden, shape.num_layers
    if convention in ("korthikanti", "megatron96"):
        factor, vocabulary = (72, 12) if convention == "korthikanti" else (96, 16)
        square = factor * layers * hidden**2
        return square * (1 + seq_len / (6 * hidden) + shape.vocab_size / (vocabulary * layers * hidden))
    attention = 12.0 * layers * shape.num_heads * shape.head_dim * seq_len
    if convention == "causal":
        attention /= 2
    parameters = shape.num_parameters if convention == "mosaic" else shape.num_multiplying
    return 6 * parameters + attention
