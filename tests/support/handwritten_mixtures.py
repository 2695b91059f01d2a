"""Mixtures whose experts are known by their name: loops that choose no rows, and stacks that do not say their number.

Shapes as in `mixtures`; C rows of each expert, M experts with and without weights.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.mixtures import DIM, NUM_EXPERTS, Looped, MixtureNet, Stack

__all__ = ["HANDWRITTEN"]


class Dense(Looped):
    """All experts compute all tokens; those of others weigh nothing."""

    def forward(self, x_BSD):
        weights_BSN = self.gate(x_BSD).softmax(-1)
        best = weights_BSN.topk(2, -1)
        weights_BSN = torch.zeros_like(weights_BSN).scatter(-1, best.indices, best.values)
        out_BSDN = torch.stack([expert(x_BSD) for expert in self.experts], -1)
        return x_BSD + (out_BSDN * weights_BSN[..., None, :]).sum(-1)


class UncountedStack(nn.Module):
    """Stacked weights, called with rows of every expert; no attribute says how many there are."""

    def __init__(self):
        super().__init__()
        self.up_NDF = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, 12) / 4)
        self.down_NFD = nn.Parameter(torch.randn(NUM_EXPERTS, 12, DIM) / 4)

    def forward(self, x_NCD):
        up_NCF = torch.einsum("ncd,ndf->ncf", x_NCD, self.up_NDF)
        return torch.einsum("ncf,nfd->ncd", up_NCF.tanh(), self.down_NFD)


class Dispatched(nn.Module):
    """One-hot masks of a place among an expert's rows of a sequence, as GShard's; some tokens find no room."""

    def __init__(self):
        super().__init__()
        self.gate, self.experts = Looped().gate, UncountedStack()

    def forward(self, x_BSD):
        best, capacity = self.gate(x_BSD).softmax(-1).max(-1), x_BSD.shape[1] // 2
        mask_BSN = F.one_hot(best.indices, NUM_EXPERTS)
        place_BS = ((mask_BSN.cumsum(1) - 1) * mask_BSN).sum(-1)
        place_BSC = F.one_hot(place_BS.clamp(max=capacity), capacity + 1)[..., :capacity]
        dispatch_BSNC = (mask_BSN[..., None] * place_BSC[..., None, :]).to(x_BSD.dtype)
        rows_NBCD = torch.einsum("bsnc,bsd->nbcd", dispatch_BSNC, x_BSD)
        out_NBCD = self.experts(rows_NBCD.flatten(1, 2)).view_as(rows_NBCD)
        return x_BSD + torch.einsum("bsnc,bs,nbcd->bsd", dispatch_BSNC, best.values, out_NBCD)


class WeightsFirst(Stack):
    """Called with weights before choices; its number has a name of one letter."""

    def __init__(self):
        super().__init__()
        self.N = self.num_experts
        del self.num_experts

    def forward(self, hidden, weights_TK, chosen_TK):
        out_TD = torch.zeros_like(hidden)
        for number in range(self.N):
            token, slot = torch.where(chosen_TK == number)
            up = torch.tanh(F.linear(hidden[token], self.up_NFD[number], self.up_NF[number]))
            out_TD.index_add_(0, token, F.linear(up, self.down_NDF[number]) * weights_TK[token, slot, None])
        return out_TD


class CallsWeightsFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = Looped().gate, WeightsFirst()

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        return x_BSD + self.experts(x_TD, weights_TK, chosen_TK).view_as(x_BSD)


class Weightless(nn.Module):
    """Six experts, the last two of which have no weights and return their tokens; one stack has rows of all, unused.

    A dim of one choice is taken for none, as LongCat-Flash's code does.
    """

    def __init__(self):
        super().__init__()
        self.num_routed_experts, self.total_experts = NUM_EXPERTS, NUM_EXPERTS + 2
        self.up_MFD = nn.Parameter(torch.randn(self.total_experts, 12, DIM) / 4)
        self.down_NDF = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, 12) / 4)

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out_TD = torch.zeros_like(hidden_states)
        mask_MKT = F.one_hot(top_k_index, self.total_experts).permute(2, 1, 0)
        for number in mask_MKT.sum((-1, -2)).nonzero().flatten().tolist():
            slot, token = torch.where(mask_MKT[number].squeeze(0))
            rows = hidden_states[token]
            if number < self.num_routed_experts:
                rows = F.linear(torch.tanh(F.linear(rows, self.up_MFD[number])), self.down_NDF[number])
            out_TD.index_add_(0, token, rows * top_k_weights[token, slot, None])
        return out_TD


class CallsWeightless(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(DIM, NUM_EXPERTS + 2), Weightless()

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        return x_BSD + self.experts(x_TD, chosen_TK, weights_TK).view_as(x_BSD)


HANDWRITTEN = {
    "dense": lambda: MixtureNet(Dense),
    "uncounted": lambda: MixtureNet(Dispatched),
    "weights first": lambda: MixtureNet(CallsWeightsFirst),
    "without weights": lambda: MixtureNet(CallsWeightless),
}
