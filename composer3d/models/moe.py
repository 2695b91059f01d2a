"""Mixture of experts: Llama's blocks with routed and shared experts in place of the feed-forward; plain torch.

Shape suffixes: those of `llama`, and T tokens of a micro-batch (B x S), N experts, K experts a token, R = T x K rows:
pairs of a token and an expert.
Source: Shazeer et al., Outrageously Large Neural Networks, arXiv:1701.06538; Fedus et al., Switch Transformers,
arXiv:2101.03961; DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv:2412.19437.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.models.llama import Attention, Decoder, FeedForward, LlamaConfig, seen_inside_documents

__all__ = ["Experts", "Mixture", "MoE", "MoEConfig", "Output", "moe"]

_INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class MoEConfig(LlamaConfig):
    """The sizes of a mixture of experts; `moe` explains each.

    Raises:
        ValueError: The sizes do not fit each other.
    """

    num_experts: int = 8
    top_k: int = 2
    expert_dim: int | None = None
    num_shared_experts: int = 0
    num_dense_layers: int = 0
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    balance: Literal["microbatch", "sequence"] = "microbatch"
    balance_loss: float = 0.01
    z_loss: float = 0.0
    bias_rate: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_experts", "top_k", "num_groups", "top_groups", "expert_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} = {value}; it must be at least 1")
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k = {self.top_k} is more than num_experts = {self.num_experts}")
        if self.num_experts % self.num_groups:
            raise ValueError(f"num_experts = {self.num_experts} does not divide into num_groups = {self.num_groups}")
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups = {self.top_groups} is more than num_groups = {self.num_groups}")
        reachable = self.num_experts // self.num_groups * self.top_groups
        if self.top_k > reachable:
            raise ValueError(f"top_k = {self.top_k} is more than the {reachable} experts of top_groups groups")
        if not 0 <= self.num_dense_layers <= self.num_layers:
            raise ValueError(f"num_dense_layers = {self.num_dense_layers}; it must be 0 to {self.num_layers}")
        if self.num_shared_experts < 0:
            raise ValueError(f"num_shared_experts = {self.num_shared_experts}; it must be at least 0")
        if self.scores not in ("softmax", "sigmoid"):
            raise ValueError(f'scores = "{self.scores}"; it must be "softmax" or "sigmoid"')
        if self.balance not in ("microbatch", "sequence"):
            raise ValueError(f'balance = "{self.balance}"; it must be "microbatch" or "sequence"')
        for name in ("balance_loss", "z_loss", "bias_rate"):
            if not 0.0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} = {getattr(self, name)}; it must be at least 0")

    @property
    def routed_dim(self) -> int:
        """The width of an expert; default so that top_k of them are as wide as a dense feed-forward."""
        return self.expert_dim if self.expert_dim is not None else -(-self.hidden_dim // self.top_k)

    @property
    def has_auxiliary(self) -> bool:
        """Whether a loss of the routers joins the objective."""
        return self.balance_loss > 0 or self.z_loss > 0


def moe(*, vocab_size: int = 256, max_seq_len: int = 2048, **sizes: Any) -> MoE:
    """Build a mixture of experts; this is `use = "composer3d.models:moe"` of a manifest.

    Args:
        vocab_size: Tokens.
        max_seq_len: Positions at most.
        sizes: Others of `composer3d.models:llama`, of which ffn_dim and ffn_multiple_of are for dense layers, and

            num_experts: Routed experts of a layer.
            top_k: Experts a token.
            expert_dim: Width of an expert; default that of a dense feed-forward / top_k.
            num_shared_experts: Experts that every token has beside the routed ones, as one of so many times the width.
            num_dense_layers: First layers with a dense feed-forward.
            scores: Of a token and an expert: "softmax" over experts, or "sigmoid" of each by itself.
            normalise: Whether the weights of a token's experts are divided by their sum.
            scale: Factor of the weights.
            num_groups: Groups of consecutive experts.
            top_groups: Groups among whose experts a token may choose, those with the highest score (of two experts with
                "sigmoid").
            balance: Over what the load-balancing loss is taken: the tokens of a micro-batch, or of each sequence.
            balance_loss: Its weight; at 0 there is none. It is 1 a layer where routing is even.
            z_loss: Weight of the mean square of the logarithm of the routers' normaliser.
            bias_rate: By how much a step changes the bias that an expert's scores have in the choice, up where it had
                fewer tokens than the mean, else down: balance without a loss. A loop of one's own calls the model's
                `after_step()` after the optimizer's step; a composition does so itself.

    Raises:
        ValueError: The sizes do not fit each other; the message holds them.
        TypeError: A size has another name.

    >>> model = moe(dim=64, num_layers=2, num_heads=4, num_experts=4)
    >>> model(torch.zeros(1, 3, dtype=torch.int64)).logits.shape
    torch.Size([1, 3, 256])
    """
    return MoE(MoEConfig(vocab_size=vocab_size, max_seq_len=max_seq_len, **sizes))


class Output(NamedTuple):
    """Result of a mixture.

    Args:
        logits: logits_BSV of every next token.
        auxiliary: Scalar that joins the objective as its mean over micro-batches: the routers' losses.
    """

    logits: Tensor
    auxiliary: Tensor


class Experts(nn.Module):
    """Routed experts with stacked weights, each a SwiGLU.

    Called with tokens, the experts of each, and their weights: the contract of transformers' experts.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config, self.num_experts = config, config.num_experts
        gated, narrowed = (config.num_experts, config.dim, config.routed_dim), (config.routed_dim, config.dim)
        self.w1_NDF = nn.Parameter(torch.empty(gated))
        self.w3_NDF = nn.Parameter(torch.empty(gated))
        self.w2_NFD = nn.Parameter(torch.empty(config.num_experts, *narrowed))

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.w1_NDF, std=_INIT_STD)
        nn.init.normal_(self.w3_NDF, std=_INIT_STD)
        nn.init.normal_(self.w2_NFD, std=self.config.residual_std)

    def forward(self, hidden_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts.

        Args:
            hidden_TD: Tokens.
            index_TK: Experts of each, 0 to num_experts - 1.
            weights_TK: Of their results.
        """
        chosen_R, top_k = index_TK.reshape(-1), index_TK.shape[-1]
        order_R = chosen_R.argsort(stable=True)
        sorted_R = chosen_R[order_R]
        out_RD = self._run(hidden_TD[order_R // top_k], sorted_R)
        out_TKD = torch.zeros_like(out_RD).index_copy(0, order_R, out_RD).unflatten(0, (-1, top_k))
        return (out_TKD * weights_TK.unsqueeze(-1)).sum(1).to(hidden_TD.dtype)

    def _run(self, x_RD: Tensor, experts_R: Tensor) -> Tensor:
        """Run rows in ascending order of their experts."""
        if x_RD.is_meta or not _is_grouped(x_RD, self.w1_NDF):
            w1_RDF, w3_RDF, w2_RFD = (weight[experts_R] for weight in (self.w1_NDF, self.w3_NDF, self.w2_NFD))
            x_R1D = x_RD.unsqueeze(1)
            return torch.bmm(F.silu(torch.bmm(x_R1D, w1_RDF)) * torch.bmm(x_R1D, w3_RDF), w2_RFD).squeeze(1)
        counts_N = experts_R.new_zeros(self.w1_NDF.shape[0]).scatter_add_(0, experts_R, torch.ones_like(experts_R))
        ends_N = counts_N.cumsum(0).to(torch.int32)
        gate_RF, up_RF = (F.grouped_mm(x_RD, weight, offs=ends_N) for weight in (self.w1_NDF, self.w3_NDF))
        return F.grouped_mm(F.silu(gate_RF) * up_RF, self.w2_NFD, offs=ends_N)


def _is_grouped(x_RD: Tensor, weight_NDF: Tensor) -> bool:
    """Return whether torch's grouped product takes these: up to float32, in rows of whole 16 bytes.

    Else each row is multiplied with a copy of its expert's weights, R x D x F elements at once.
    """
    wide = x_RD.dtype.itemsize
    is_even = all(size * wide % 16 == 0 for size in weight_NDF.shape[1:])
    return hasattr(F, "grouped_mm") and wide <= 4 and is_even and x_RD.dtype == weight_NDF.dtype


class Router(nn.Module):
    """Choose each token's experts; in float32 at least, whatever the dtype around it.

    Attributes:
        bias_N: Added to scores where experts are chosen, and only there; with `bias_rate`.
        counts_N: Tokens that chose each expert in this step; with `bias_rate`.
        summed_buffers: Those that a composition sums over samples of other ranks before it calls `after_step`.
    """

    summed_buffers: tuple[str, ...] = ()
    bias_N: Tensor
    counts_N: Tensor

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.dim))
        if config.bias_rate:
            self.summed_buffers = ("counts_N",)
            self.register_buffer("bias_N", torch.zeros(config.num_experts))
            # Narrow floating-point counts would not tell neighbours apart.
            self.register_buffer("counts_N", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        nn.init.normal_(self.weight, std=_INIT_STD)
        for buffer in self.buffers():
            buffer.zero_()

    @torch.no_grad()
    def after_step(self) -> None:
        """Move biases towards balance by the step's counts, and forget these."""
        self.bias_N += self.config.bias_rate * (self.counts_N.sum() - self.config.num_experts * self.counts_N).sign()
        self.counts_N.zero_()

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return index_BSK, weights_BSK and the layer's loss, a scalar."""
        config, dtype = self.config, torch.promote_types(x_BSD.dtype, torch.float32)
        logits_BSN = F.linear(x_BSD.to(dtype), self.weight.to(dtype))
        scores_BSN = logits_BSN.softmax(-1) if config.scores == "softmax" else logits_BSN.sigmoid()
        index_BSK = self._choose(scores_BSN.detach())
        if config.bias_rate and self.training and torch.is_grad_enabled():
            self.counts_N += self._chosen(index_BSK).sum((0, 1))
        weights_BSK = scores_BSN.gather(-1, index_BSK)
        if config.normalise:
            weights_BSK = weights_BSK / weights_BSK.sum(-1, keepdim=True)
        weights_BSK = (weights_BSK * config.scale).to(x_BSD.dtype)
        return index_BSK, weights_BSK, self._loss(logits_BSN, scores_BSN, index_BSK)

    def _choose(self, scores_BSN: Tensor) -> Tensor:
        config = self.config
        if config.bias_rate:
            scores_BSN = scores_BSN + self.bias_N
        if config.top_groups < config.num_groups:
            grouped_BSGn = scores_BSN.unflatten(-1, (config.num_groups, -1))
            best = min(2, grouped_BSGn.shape[-1]) if config.scores == "sigmoid" else 1
            groups_BSg = grouped_BSGn.topk(best, -1).values.sum(-1).topk(config.top_groups, -1).indices
            numbers_G = torch.arange(config.num_groups, device=scores_BSN.device)
            is_open_BSG = (groups_BSg.unsqueeze(-1) == numbers_G).any(-2)
            scores_BSN = grouped_BSGn.masked_fill(~is_open_BSG.unsqueeze(-1), float("-inf")).flatten(-2)
        return scores_BSN.topk(config.top_k, -1).indices

    def _chosen(self, index_BSK: Tensor) -> Tensor:
        """Return chosen_BSN: 1 where a token has an expert, else 0."""
        numbers_N = torch.arange(self.config.num_experts, device=index_BSK.device)
        return (index_BSK.unsqueeze(-1) == numbers_N).sum(-2)

    def _loss(self, logits_BSN: Tensor, scores_BSN: Tensor, index_BSK: Tensor) -> Tensor:
        """Return N x the sum over experts of their share of rows x their mean score, and the z-loss."""
        config, loss = self.config, logits_BSN.new_zeros(())
        if config.balance_loss:
            shares_BSN = scores_BSN if config.scores == "softmax" else scores_BSN / scores_BSN.sum(-1, keepdim=True)
            rows_BSN = self._chosen(index_BSK).to(shares_BSN.dtype) / config.top_k
            if config.balance == "sequence":
                balance = (rows_BSN.mean(1) * shares_BSN.mean(1)).sum(-1).mean(0)
            else:
                balance = (rows_BSN.mean((0, 1)) * shares_BSN.mean((0, 1))).sum(-1)
            loss = loss + config.balance_loss * config.num_experts * balance
        if config.z_loss:
            loss = loss + config.z_loss * logits_BSN.logsumexp(-1).square().mean()
        return loss


class Mixture(nn.Module):
    """Routed experts, and shared ones that every token has."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.router, self.experts = Router(config), Experts(config)
        shared = {"ffn_dim": config.routed_dim * config.num_shared_experts}
        sizes = {name: getattr(config, name) for name in LlamaConfig.__dataclass_fields__}
        self.shared = FeedForward(LlamaConfig(**{**sizes, **shared})) if config.num_shared_experts else None

    def reset_parameters(self) -> None:
        """Draw new weights."""
        self.router.reset_parameters()
        self.experts.reset_parameters()
        if self.shared is not None:
            self.shared.reset_parameters()

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Return out_BSD and the layer's loss."""
        index_BSK, weights_BSK, loss = self.router(x_BSD)
        out_TD = self.experts(x_BSD.flatten(0, 1), index_BSK.flatten(0, 1), weights_BSK.flatten(0, 1))
        out_BSD = out_TD.unflatten(0, x_BSD.shape[:2])
        return (out_BSD if self.shared is None else out_BSD + self.shared(x_BSD)), loss


class Block(nn.Module):
    """Attention and a feed-forward, dense or a mixture, each normed before and added to the residual stream."""

    def __init__(self, config: MoEConfig, *, is_dense: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.attention_dropout = nn.Dropout(config.dropout)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward: nn.Module = FeedForward(config) if is_dense else Mixture(config)
        self.ffn_dropout = nn.Dropout(config.dropout)

    def reset_parameters(self) -> None:
        """Draw new weights."""
        for module in (self.attention_norm, self.attention, self.ffn_norm, self.feed_forward):
            module.reset_parameters()  # type: ignore[operator]

    def forward(
        self, x_BSD: Tensor, auxiliary: Tensor, positions: Tensor | None = None, mask_B1SS: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Add both branches to the stream, and the router's loss to the layers' before."""
        x_BSD = x_BSD + self.attention_dropout(self.attention(self.attention_norm(x_BSD), positions, mask_B1SS))
        out = self.feed_forward(self.ffn_norm(x_BSD))
        out_BSD, loss = out if isinstance(out, tuple) else (out, None)
        return x_BSD + self.ffn_dropout(out_BSD), auxiliary if loss is None else auxiliary + loss


class MoE(Decoder):
    """Blocks with routed experts, after those with one feed-forward."""

    config: MoEConfig

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config, lambda number: Block(config, is_dense=number < config.num_dense_layers))

    def forward(
        self, tokens_BS: Tensor, positions: Tensor | None = None, documents: Tensor | None = None
    ) -> Output | Tensor:
        """Return logits of every next token, with the routers' loss where there is one.

        Args:
            tokens_BS: Token numbers.
            positions: As of `Llama`.
            documents: As of `Llama`.
        """
        x_BSD = self.tok_embeddings(tokens_BS)
        mask_B1SS = None if documents is None else seen_inside_documents(documents)
        auxiliary = x_BSD.new_zeros((), dtype=torch.promote_types(x_BSD.dtype, torch.float32))
        for layer in self.layers:
            x_BSD, auxiliary = layer(x_BSD, auxiliary, positions, mask_B1SS)
        logits_BSV = self.output(self.norm(x_BSD))
        return Output(logits=logits_BSV, auxiliary=auxiliary) if self.config.has_auxiliary else logits_BSV

    def after_step(self) -> None:
        """Move the routers' biases by the step's counts; for a loop on one device, after its optimizer's step."""
        for module in self.modules():
            if isinstance(module, Router) and module.summed_buffers:
                module.after_step()
