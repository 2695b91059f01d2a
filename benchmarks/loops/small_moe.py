"""The small Llama with a mixture of experts in place of every feed-forward, in plain torch. No parallel code.

Shape suffixes: those of `small_llama`, and R rows: pairs of a token and an expert, N experts, F their width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from small_llama import Config, SmallLlama
from torch import Tensor, nn

__all__ = ["Experts", "Mixture", "build"]

NUM_EXPERTS = 8
TOP_K = 2


class Experts(nn.Module):
    """Stacked experts, called with tokens, the experts of each and their weights."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        width = config.hidden_dim // TOP_K
        self.num_experts = NUM_EXPERTS
        self.w1_NDF, self.w3_NDF = (nn.Parameter(torch.empty(NUM_EXPERTS, config.dim, width)) for _ in range(2))
        self.w2_NFD = nn.Parameter(torch.empty(NUM_EXPERTS, width, config.dim))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, x_TD: Tensor, index_TK: Tensor, weights_TK: Tensor) -> Tensor:
        chosen_R, top_k = index_TK.reshape(-1), index_TK.shape[-1]
        order_R = chosen_R.argsort(stable=True)
        out_RD = self.run(x_TD[order_R // top_k], chosen_R.bincount(minlength=self.num_experts))
        out_TKD = torch.empty_like(out_RD).index_copy(0, order_R, out_RD).unflatten(0, (-1, top_k))
        return (out_TKD * weights_TK[..., None]).sum(1)

    def run(self, x_RD: Tensor, counts_N: Tensor) -> Tensor:
        """Run rows in the order of their experts."""
        ends_N = counts_N.cumsum(0).to(torch.int32)
        gate_RF, up_RF = (F.grouped_mm(x_RD, weight, offs=ends_N) for weight in (self.w1_NDF, self.w3_NDF))
        return F.grouped_mm(F.silu(gate_RF) * up_RF, self.w2_NFD, offs=ends_N)


class Mixture(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(config.dim, NUM_EXPERTS, bias=False), Experts(config)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_TD = x_BTD.flatten(0, 1)
        weights_TK, index_TK = self.gate(x_TD).softmax(-1).topk(TOP_K, -1)
        return self.experts(x_TD, index_TK, weights_TK).view_as(x_BTD)


def build(config: Config) -> SmallLlama:
    torch.manual_seed(config.seed)
    model = SmallLlama(config)
    for layer in model.layers:
        layer.mlp = Mixture(config)
    return model
