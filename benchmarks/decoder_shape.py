"""Dimensions of a decoder that the cost formulas use."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ModelShape"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of equal blocks: attention and a feed-forward part, embedding and output projection.

    Args:
        num_layers: Blocks.
        hidden: Width between blocks.
        num_heads: Of queries.
        num_kv_heads: Of keys and values.
        head_dim: Of a head.
        ffn: Width inside the feed-forward part.
        vocab_size: Rows of the embedding and of the output projection.
        gated: Three matrices in the feed-forward part (SwiGLU) instead of two.
        tied: Whether embedding and output projection are one tensor.
        positions: Rows of a learned embedding of positions.
        biases: Parameters of one block beside its matrices and two norms' weights.
    """

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab_size: int
    gated: bool = True
    tied: bool = False
    positions: int = 0
    biases: int = 0

    @property
    def attention_parameters(self) -> int:
        """Of one block's projections."""
        return self.hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)

    @property
    def ffn_parameters(self) -> int:
        """Of one block's feed-forward part."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer_vectors(self) -> int:
        """Parameters of one block that tensor parallelism leaves whole: norms and biases."""
        return 2 * self.hidden + self.biases

    @property
    def layer_parameters(self) -> int:
        """Of one block, norms and biases included."""
        return self.attention_parameters + self.ffn_parameters + self.layer_vectors

    @property
    def embedding_parameters(self) -> int:
        """Of tokens and positions."""
        return (self.vocab_size + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the output projection, the same tensor as the embedding where they are tied."""
        return self.vocab_size * self.hidden

    @property
    def num_parameters(self) -> int:
        """Of the whole model; a tied tensor counts once."""
        head = 0 if self.tied else self.head_parameters
        return self.num_layers * self.layer_parameters + self.embedding_parameters + head + self.hidden

    @property
    def num_multiplying(self) -> int:
        """Of them those that multiply: without the embedding, with the output projection."""
        return self.num_layers * self.layer_parameters + self.head_parameters + self.hidden
