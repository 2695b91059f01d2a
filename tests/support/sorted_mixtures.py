"""Mixtures whose experts are called with rows in order of experts, or from helpers around their loop.

Shapes as in `mixtures`; R rows, pairs of a token and an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.mixtures import DIM, NUM_EXPERTS, Looped, MixtureNet

__all__ = ["FORMS"]


class Counted(nn.Module):
    """One matrix of each expert, as ScatterMoE's: rows, and a list of how many each has."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.weight_NFD = nn.Parameter(torch.randn(NUM_EXPERTS, width_out, width_in) / 4)

    def forward(self, rows_RD, expert_size):
        pieces = zip(rows_RD.split(expert_size), self.weight_NFD, strict=True)
        return torch.cat([F.linear(piece, weight) for piece, weight in pieces])


class CountedTensor(nn.Module):
    """As torchtitan's: a tensor of counts, and rows of no expert after the last."""

    def __init__(self, width):
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up_NFD = nn.Parameter(torch.randn(NUM_EXPERTS, width, DIM) / 4)
        self.down_NDF = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, width) / 4)

    def forward(self, rows_RD, num_tokens_per_expert):
        sizes = num_tokens_per_expert.tolist()
        pieces = rows_RD[: sum(sizes)].split(sizes)
        triples = zip(pieces, self.up_NFD, self.down_NDF, strict=True)
        out_RD = torch.cat([torch.tanh(piece @ up.t()) @ down.t() for piece, up, down in triples])
        return torch.cat([out_RD, out_RD.new_zeros(rows_RD.shape[0] - out_RD.shape[0], out_RD.shape[1])])


class Ended(CountedTensor):
    """As grouped products: where each expert's rows end."""

    def forward(self, rows_RD, offs):
        return super().forward(rows_RD, offs.diff(prepend=offs.new_zeros(1)))


class Grouped(CountedTensor):
    """As Llama 4's: as many rows for each expert, one after another."""

    def forward(self, rows_RD):
        x_NRD = rows_RD.view(self.up_NFD.shape[0], -1, DIM)
        return torch.bmm(torch.tanh(torch.bmm(x_NRD, self.up_NFD.mT)), self.down_NDF.mT).view(-1, DIM)


class ByExpert(CountedTensor):
    """A dim of experts, and samples between it and tokens."""

    def forward(self, x_NBSD):
        up_NBSF = torch.einsum("nbsd,nfd->nbsf", x_NBSD, self.up_NFD).tanh()
        return torch.einsum("nbsf,ndf->nbsd", up_NBSF, self.down_NDF)


class Sorted(nn.Module):
    """Rows sorted by experts around a form of them."""

    def __init__(self, form, starved=False):
        super().__init__()
        self.gate, self.form = Looped(starved).gate, form
        if form == "counted":
            self.up, self.down = Counted(DIM, 12), Counted(12, DIM)
        else:
            self.experts = {"counts": CountedTensor, "ends": Ended}[form](12)

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        chosen_R, order_R = chosen_TK.flatten().sort(stable=True)
        rows_RD, counts_N = x_TD[order_R // 2], torch.bincount(chosen_R, minlength=NUM_EXPERTS)
        if self.form == "counted":
            sizes = counts_N.tolist()
            out_RD = self.down(torch.tanh(self.up(rows_RD, sizes)), sizes)
        elif self.form == "counts":
            out_RD = self.experts(F.pad(rows_RD, (0, 0, 0, 3)), counts_N)[: len(order_R)]
        else:
            out_RD = self.experts(rows_RD, counts_N.cumsum(0).to(torch.int32))
        out_TD = torch.zeros_like(x_TD).index_add(0, order_R // 2, out_RD * weights_TK.flatten()[order_R, None])
        return x_BSD + out_TD.view_as(x_BSD)


class OfAttention(nn.Module):
    """Projections of queries and outputs as experts, as JetMoE's: methods of a module without a forward call them.

    Every expert has as many rows, so that a rank receives as many as it sends.
    """

    def __init__(self):
        super().__init__()
        self.gate, self.up, self.down = Looped().gate, Counted(DIM, 12), Counted(12, DIM)

    def map(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        chosen_TK = torch.arange(2 * x_TD.shape[0]).view(-1, 2) % NUM_EXPERTS
        weights_R = self.gate(x_TD).softmax(-1).gather(1, chosen_TK).flatten()
        order_R = chosen_TK.flatten().sort(stable=True).indices
        topology = order_R, weights_R[order_R], torch.bincount(chosen_TK.flatten()).tolist()
        rows_RF = self.up(x_TD[order_R // 2], topology[-1])
        return torch.zeros_like(rows_RF).index_add(0, order_R, rows_RF).view(*x_BSD.shape[:2], 2, -1), topology

    def reduce(self, x_BSKF, topology):
        order_R, weights_R, sizes = topology
        out_RD = self.down(x_BSKF.flatten(0, 2)[order_R], sizes) * weights_R[:, None]
        out_TD = out_RD.new_zeros(len(order_R) // 2, DIM).index_add(0, order_R // 2, out_RD)
        return out_TD.view(*x_BSKF.shape[:2], DIM)


class Attended(nn.Module):
    """Attention whose queries and outputs experts compute."""

    def __init__(self):
        super().__init__()
        self.experts, self.kv = OfAttention(), nn.Linear(DIM, 24)

    def forward(self, x_BSD):
        q_BSKF, topology = self.experts.map(x_BSD)
        k, v = (x_BSF[:, None].expand(-1, 2, -1, -1) for x_BSF in self.kv(x_BSD).chunk(2, -1))
        attended = F.scaled_dot_product_attention(q_BSKF.transpose(1, 2), k, v, is_causal=True)
        return x_BSD + self.experts.reduce(attended.transpose(1, 2), topology)


class Weighted(nn.Module):
    """All tokens to all experts, times weights of which most are zero."""

    def __init__(self, experts):
        super().__init__()
        self.gate, self.experts = Looped().gate, experts(12)

    def forward(self, x_BSD):
        best_BSK = self.gate(x_BSD).topk(2, -1)
        scores = torch.full_like(self.gate(x_BSD), float("-inf")).scatter(-1, best_BSK.indices, best_BSK.values)
        x_NBSD = x_BSD * scores.sigmoid().movedim(-1, 0)[..., None]
        out = self.experts(x_NBSD.flatten(0, 2) if isinstance(self.experts, Grouped) else x_NBSD)
        return x_BSD + out.view_as(x_NBSD).sum(0)


class OwnForward(nn.ModuleDict):
    """A dict of experts with a forward of its own, as Switch Transformers have."""

    def __init__(self):
        super().__init__({f"expert_{number}": expert for number, expert in enumerate(Looped().experts)})
        self.num_experts = NUM_EXPERTS

    def forward(self, x_TD, chosen_TK, weights_TK):
        out_TD = torch.zeros_like(x_TD)
        mask_NKT = F.one_hot(chosen_TK, self.num_experts).permute(2, 1, 0)
        for number in torch.greater(mask_NKT.sum((-1, -2)), 0).nonzero():
            slot, token = torch.where(mask_NKT[number].squeeze(0))
            result = self[f"expert_{number[0]}"](x_TD[token]) * weights_TK[token, slot, None]
            out_TD.index_add_(0, token, result)
        return out_TD


class CallsDict(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = Looped().gate, OwnForward()

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        return x_BSD + self.experts(x_TD, chosen_TK, weights_TK).view_as(x_BSD)


class Generating(Looped):
    """A generator has the loop, and hands out experts with the tokens that are theirs."""

    def routed(self, chosen_TK):
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen_TK == number)
            yield expert, token, slot

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        out_TD = torch.zeros_like(x_TD)
        for expert, token, slot in self.routed(chosen_TK):
            out_TD = out_TD.index_add(0, token, expert(x_TD[token]) * weights_TK[token, slot, None])
        return x_BSD + out_TD.view_as(x_BSD)


def run_experts(x_TD, experts, chosen_TK, weights_TK):
    out_TD = torch.zeros_like(x_TD)
    for number, expert in enumerate(experts):
        token, slot = torch.where(chosen_TK == number)
        if token.numel():
            out_TD = out_TD.index_add(0, token, expert(x_TD[token]) * weights_TK[token, slot, None])
    return out_TD


class Helped(Looped):
    """A function outside of the class has the loop."""

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        return x_BSD + run_experts(x_TD, self.experts, chosen_TK, weights_TK).view_as(x_BSD)


FORMS = {
    "counted": lambda: MixtureNet(Sorted, form="counted"),
    "counted starved": lambda: MixtureNet(Sorted, form="counted", starved=True),
    "counted in attention": lambda: MixtureNet(Attended),
    "tensor of counts": lambda: MixtureNet(Sorted, form="counts"),
    "ends": lambda: MixtureNet(Sorted, form="ends", starved=True),
    "grouped": lambda: MixtureNet(Weighted, experts=Grouped),
    "dim of experts": lambda: MixtureNet(Weighted, experts=ByExpert),
    "dict with a forward": lambda: MixtureNet(CallsDict),
    "generator": lambda: MixtureNet(Generating),
    "function": lambda: MixtureNet(Helped),
}
