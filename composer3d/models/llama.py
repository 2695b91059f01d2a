"""Llama: a decoder of pre-norm blocks with rotary positions, grouped-query attention and SwiGLU; plain torch.

Shape suffixes: B batch, S sequence, D model dim, H heads, K key/value heads, E head dim, P = E / 2 rotary pairs,
F feed-forward dim, V vocabulary. H, K, F and V may be local to a rank: head counts come from the projections' results.
Source: Hugo Touvron et al., LLaMA: Open and Efficient Foundation Language Models, arXiv:2302.13971, 2023.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

__all__ = ["AttentionKernel", "Decoder", "Llama", "LlamaConfig", "llama", "seen_inside_documents"]

AttentionKernel = Literal["auto", "flash", "efficient", "math", "cudnn"]

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """The sizes of a Llama; `llama` explains each.

    Raises:
        ValueError: The sizes do not fit each other.
    """

    dim: int = 256
    num_layers: int = 8
    num_heads: int = 8
    num_kv_heads: int | None = None
    vocab_size: int = 256
    ffn_dim: int | None = None
    ffn_multiple_of: int = 64
    max_seq_len: int = 2048
    rope_theta: float = 500000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = False
    attention: AttentionKernel = "auto"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dim", "num_layers", "num_heads", "num_kv_heads", "vocab_size", "ffn_dim", "max_seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}; it must be at least 1")
        if self.dim % self.num_heads:
            raise ValueError(f"dim = {self.dim} does not divide into num_heads = {self.num_heads}")
        if self.head_dim % 2:
            raise ValueError(f"dim / num_heads = {self.head_dim} is odd; rotary positions turn pairs")
        if self.num_heads % self.kv_heads:
            raise ValueError(f"num_heads = {self.num_heads} does not divide into num_kv_heads = {self.kv_heads}")
        if self.attention not in ("auto", *_BACKENDS):
            raise ValueError(f'attention = "{self.attention}"; it must be one of: auto, {", ".join(_BACKENDS)}')
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout = {self.dropout}; it must be at least 0 and below 1")

    @property
    def head_dim(self) -> int:
        """The width of a head."""
        return self.dim // self.num_heads

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads; as many as heads by default."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def hidden_dim(self) -> int:
        """The width of the feed-forward: by default 8/3 of dim, which makes SwiGLU as large as a plain one of 4 dim."""
        if self.ffn_dim is not None:
            return self.ffn_dim
        return math.ceil(8 * self.dim / 3 / self.ffn_multiple_of) * self.ffn_multiple_of

    @property
    def residual_std(self) -> float:
        """The initial spread of projections into the residual stream, which sums two of them a layer."""
        return _INIT_STD / math.sqrt(2 * self.num_layers)


def llama(
    *,
    dim: int = 256,
    num_layers: int = 8,
    num_heads: int = 8,
    num_kv_heads: int | None = None,
    vocab_size: int = 256,
    ffn_dim: int | None = None,
    ffn_multiple_of: int = 64,
    max_seq_len: int = 2048,
    rope_theta: float = 500000.0,
    norm_eps: float = 1e-5,
    tie_embeddings: bool = False,
    attention: AttentionKernel = "auto",
    dropout: float = 0.0,
) -> Llama:
    """Build a Llama; this is `use = "composer3d.models:llama"` of a manifest.

    Args:
        dim: Width of the residual stream.
        num_layers: Blocks.
        num_heads: Query heads; must divide dim.
        num_kv_heads: Key/value heads; must divide num_heads, and default to it.
        vocab_size: Tokens.
        ffn_dim: Width of the feed-forward; default 8/3 of dim.
        ffn_multiple_of: The default is rounded up to a multiple of this.
        max_seq_len: Longer sequences are refused. Positions are computed, so it costs no memory.
        rope_theta: Base of the rotary wavelengths.
        norm_eps: Added to the mean square in norms.
        tie_embeddings: The output projection is the embedding.
        attention: Kernel of scaled_dot_product_attention; `auto` lets torch choose, any other is used or fails.
        dropout: Probability of dropping an element of what a block adds to the residual stream.

    Raises:
        ValueError: The sizes do not fit each other; the message holds them.

    >>> sum(parameter.numel() for parameter in llama(dim=64, num_layers=2, num_heads=4).parameters())
    139584
    """
    return Llama(
        LlamaConfig(
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            vocab_size=vocab_size,
            ffn_dim=ffn_dim,
            ffn_multiple_of=ffn_multiple_of,
            max_seq_len=max_seq_len,
            rope_theta=rope_theta,
            norm_eps=norm_eps,
            tie_embeddings=tie_embeddings,
            attention=attention,
            dropout=dropout,
        )
    )


def rotate(x_BSHE: Tensor, *, positions: Tensor, theta: float) -> Tensor:
    """Turn each pair of neighbouring elements by an angle that grows with the position.

    The angles are computed here, in float32 at least, and not kept in a buffer: casting the model, or mixed precision
    casting a block's arguments, would round them.
    Source: Jianlin Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding, arXiv:2104.09864, 2021.

    Args:
        x_BSHE: Queries or keys.
        positions: Of shape S or B x S.
        theta: Base of the wavelengths.
    """
    dtype = torch.promote_types(x_BSHE.dtype, torch.float32)
    pairs_P = torch.arange(0, x_BSHE.shape[-1], 2, device=x_BSHE.device, dtype=dtype)
    angles = positions[..., None].to(dtype) * theta ** (-pairs_P / x_BSHE.shape[-1])
    cos, sin = angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)
    even_BSHP, odd_BSHP = x_BSHE.to(dtype).unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([even_BSHP * cos - odd_BSHP * sin, even_BSHP * sin + odd_BSHP * cos], dim=-1)
    return turned.flatten(-2).type_as(x_BSHE)


def seen_inside_documents(documents_BS: Tensor) -> Tensor:
    """Return mask_B1SS: whether the query of a row sees the key of a column, of its own document and not after it."""
    seq_len = documents_BS.shape[1]
    is_before_SS = torch.ones(seq_len, seq_len, dtype=torch.bool, device=documents_BS.device).tril()
    return ((documents_BS[:, :, None] == documents_BS[:, None, :]) & is_before_SS)[:, None]


class ScaledDotProductAttention(nn.Module):
    """Causal attention itself, without weights; a module, so that it can be exchanged or watched by its FQN."""

    def __init__(self, kernel: AttentionKernel) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, mask_B1SS: Tensor | None = None) -> Tensor:
        """Return out_BHSE; several query heads share a key/value head where K < H.

        A mask, true where a query sees a key, is causal itself.
        """
        is_grouped = False
        # A branch, and no `bool`: torch.compile decides it where the numbers of heads are symbols, and keeps the other.
        if q_BHSE.shape[1] != k_BKSE.shape[1]:
            is_grouped = True
        if is_grouped and self.kernel == "efficient":
            # Of the kernels, only this one cannot read a key/value head for several heads.
            repeats = q_BHSE.shape[1] // k_BKSE.shape[1]
            k_BKSE, v_BKSE = (x.repeat_interleave(repeats, dim=1) for x in (k_BKSE, v_BKSE))
            is_grouped = False
        chosen = contextlib.nullcontext() if self.kernel == "auto" else sdpa_kernel(_BACKENDS[self.kernel])
        with chosen:
            return F.scaled_dot_product_attention(
                q_BHSE, k_BKSE, v_BKSE, attn_mask=mask_B1SS, is_causal=mask_B1SS is None, enable_gqa=is_grouped
            )


class Attention(nn.Module):
    """Grouped-query attention with rotary positions.

    Source: Joshua Ainslie et al., GQA: Training Generalized Multi-Query Transformer Models from Multi-Head Checkpoints,
    arXiv:2305.13245, 2023.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.wq = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)
        self.sdpa = ScaledDotProductAttention(config.attention)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        for projection in (self.wq, self.wk, self.wv):
            nn.init.normal_(projection.weight, std=_INIT_STD)
        nn.init.normal_(self.wo.weight, std=self.config.residual_std)

    def forward(self, x_BSD: Tensor, positions: Tensor | None = None, mask_B1SS: Tensor | None = None) -> Tensor:
        """Attend over the sequence as the projections return it, which may be longer than what came in."""
        q_BSHE, k_BSKE, v_BSKE = (
            projected.view(projected.shape[0], projected.shape[1], -1, self.config.head_dim)
            for projected in (self.wq(x_BSD), self.wk(x_BSD), self.wv(x_BSD))
        )
        seq_len = q_BSHE.shape[1]
        if seq_len > self.config.max_seq_len:
            raise ValueError(f"a sequence of {seq_len} is longer than max_seq_len = {self.config.max_seq_len}")
        if positions is None:
            positions = torch.arange(seq_len, device=q_BSHE.device)
        q_BSHE = rotate(q_BSHE, positions=positions, theta=self.config.rope_theta)
        k_BSKE = rotate(k_BSKE, positions=positions, theta=self.config.rope_theta)
        out_BHSE = self.sdpa(q_BSHE.transpose(1, 2), k_BSKE.transpose(1, 2), v_BSKE.transpose(1, 2), mask_B1SS)
        return self.wo(out_BHSE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: one projection gates another.

    Source: Noam Shazeer, GLU Variants Improve Transformer, arXiv:2002.05202, 2020.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.w1.weight, std=_INIT_STD)
        nn.init.normal_(self.w2.weight, std=self.config.residual_std)
        nn.init.normal_(self.w3.weight, std=_INIT_STD)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """Widen, gate, narrow."""
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))


class Block(nn.Module):
    """Attention and feed-forward, each normed before and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.ffn_dropout = nn.Dropout(config.dropout)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        for module in (self.attention_norm, self.attention, self.ffn_norm, self.feed_forward):
            module.reset_parameters()

    def forward(self, x_BSD: Tensor, positions: Tensor | None = None, mask_B1SS: Tensor | None = None) -> Tensor:
        """Add both branches."""
        x_BSD = x_BSD + self.attention_dropout(self.attention(self.attention_norm(x_BSD), positions, mask_B1SS))
        return x_BSD + self.ffn_dropout(self.feed_forward(self.ffn_norm(x_BSD)))


class Decoder(nn.Module):
    """Embedding, blocks, norm and output projection.

    Args:
        config: Sizes.
        block: Makes the block of a number.
    """

    def __init__(self, config: LlamaConfig, block: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(block(number) for number in range(config.num_layers))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw new weights: normal with standard deviation 0.02, less where they feed the residual stream."""
        nn.init.normal_(self.tok_embeddings.weight, std=_INIT_STD)
        layers: Iterable[Any] = self.layers
        for layer in layers:
            layer.reset_parameters()
        self.norm.reset_parameters()
        if not self.config.tie_embeddings:
            nn.init.normal_(self.output.weight, std=_INIT_STD)


class Llama(Decoder):
    """Blocks of attention and feed-forward."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config, lambda number: Block(config))

    def forward(self, tokens_BS: Tensor, positions: Tensor | None = None, documents: Tensor | None = None) -> Tensor:
        """Return logits_BSV of every next token.

        Args:
            tokens_BS: Token numbers.
            positions: Of shape S or B x S, for sequences that do not count from 0; attention stays causal in the order
                in which the tokens come.
            documents: The number of each token's document, B x S, where a row holds several; tokens see those of
                their own.
        """
        x_BSD = self.tok_embeddings(tokens_BS)
        mask_B1SS = None if documents is None else seen_inside_documents(documents)
        for layer in self.layers:
            x_BSD = layer(x_BSD, positions, mask_B1SS)
        return self.output(self.norm(x_BSD))
