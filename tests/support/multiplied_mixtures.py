"""Mixtures whose block multiplies weights of experts itself, gives experts what others return, or has lists of lists.

Shapes as in `mixtures`; F width of experts, C rows of each expert, R pairs of a token and an expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.further_mixtures import expert
from support.mixtures import DIM, NUM_EXPERTS, Looped, MixtureNet

__all__ = ["CHAINED", "MULTIPLIED", "NESTED", "ChoosingStacks", "Lists", "planned_lists", "planned_rows"]

WIDTH = 12


def matrices(*shape):
    return nn.ParameterList(nn.Parameter(torch.randn(*shape) / 3) for _ in range(NUM_EXPERTS))


class Routed(nn.Module):
    """A router, and the choices of every token."""

    def __init__(self):
        super().__init__()
        self.gate, self.num_experts = nn.Linear(DIM, NUM_EXPERTS, bias=False), NUM_EXPERTS

    def routed(self, x_BSD):
        x_TD = x_BSD.reshape(-1, DIM)
        return x_TD, *self.gate(x_TD).softmax(-1).topk(2, -1)


class Lists(Routed):
    """A parameter an expert, and biases, in three lists; experts without tokens are left out."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.bias = matrices(DIM, WIDTH), matrices(WIDTH, DIM), matrices(WIDTH)

    def forward(self, x_BSD):
        x_TD, weights_TK, chosen_TK = self.routed(x_BSD)
        out_TD = torch.zeros_like(x_TD)
        for number in range(self.num_experts):
            token, slot = torch.where(chosen_TK == number)
            if token.numel():
                up = F.silu(x_TD[token] @ self.up[number] + self.bias[number])
                out_TD.index_add_(0, token, (up @ self.down[number]) * weights_TK[token, slot, None])
        return x_BSD + out_TD.view_as(x_BSD)


class Unsaid(Lists):
    """The same, and nothing says how many they are, or that they are experts; the bias is added by the product."""

    def __init__(self):
        super().__init__()
        del self.num_experts

    def forward(self, x_BSD):
        x_TD, weights_TK, chosen_TK = self.routed(x_BSD)
        out_TD = torch.zeros_like(x_TD)
        for number in range(len(self.up)):
            token, slot = torch.where(chosen_TK == number)
            up = torch.addmm(self.bias[number], x_TD[token], self.up[number]).relu()
            out_TD = out_TD.index_add(0, token, up.mm(self.down[number]) * weights_TK[token, slot, None])
        return x_BSD + out_TD.view_as(x_BSD)


class GatedDict(Routed):
    """Gated experts by name, of several widths, in dicts of parameters that linear layers take."""

    def __init__(self):
        super().__init__()
        self.kinds = ("gate", "up", "down")
        for kind in self.kinds:
            sizes = [(DIM, 8 + n) if kind == "down" else (8 + n, DIM) for n in range(NUM_EXPERTS)]
            held = {f"e{n}": nn.Parameter(torch.randn(*size) / 3) for n, size in enumerate(sizes)}
            setattr(self, f"experts_{kind}", nn.ParameterDict(held))

    def forward(self, x_BSD):
        x_TD, weights_TK, chosen_TK = self.routed(x_BSD)
        out_TD = torch.zeros_like(x_TD)
        for number, name in enumerate(self.experts_up.keys()):
            mask_T = (chosen_TK == number).any(-1)
            if not mask_T.any():
                continue
            x, (gate, up, down) = x_TD[mask_T], (getattr(self, f"experts_{kind}")[name] for kind in self.kinds)
            made = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
            out_TD[mask_T] += made * (weights_TK * (chosen_TK == number))[mask_T].sum(-1, keepdim=True)
        return x_BSD + out_TD.view_as(x_BSD)


class Beside(Routed):
    """Stacks beside the router: gate and up in one, of which half is read at a time, its bias, and down."""

    def __init__(self):
        super().__init__()
        self.up_NDF = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, 2 * WIDTH) / 3)
        self.up_NF = nn.Parameter(torch.randn(NUM_EXPERTS, 2 * WIDTH) / 3)
        self.down_NFD = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, DIM) / 3)

    def forward(self, x_BSD):
        x_TD, weights_TK, chosen_TK = self.routed(x_BSD)
        out_TD = torch.zeros_like(x_TD)
        for number in range(self.num_experts):
            token, slot = torch.where(chosen_TK == number)
            gate_DF, up_DF = self.up_NDF[number].chunk(2, -1)
            up = (x_TD[token] @ up_DF) * F.silu(x_TD[token].matmul(gate_DF) + self.up_NF[number, :WIDTH])
            out_TD.index_add_(0, token, torch.mm(up, self.down_NFD[number]) * weights_TK[token, slot, None])
        return x_BSD + out_TD.view_as(x_BSD)


class RowByRow(Routed):
    """A matrix for each row, chosen from stacks and multiplied one by one."""

    def __init__(self):
        super().__init__()
        self.up_NDF = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, WIDTH) / 3)
        self.down_NFD = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, DIM) / 3)

    def forward(self, x_BSD):
        x_TD, weights_TK, chosen_TK = self.routed(x_BSD)
        x_R1D, chosen_R = x_TD.repeat_interleave(2, 0)[:, None], chosen_TK.flatten()
        out_R1D = torch.bmm(torch.bmm(x_R1D, self.up_NDF[chosen_R]).relu(), self.down_NFD[chosen_R])
        return x_BSD + (out_R1D.view(-1, 2, DIM) * weights_TK[..., None]).sum(1).view_as(x_BSD)


class Gathered(Routed):
    """A matrix for each choice of each position, which einsums multiply."""

    def __init__(self):
        super().__init__()
        self.up_NFD = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, DIM) / 3)
        self.down_NDF = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, WIDTH) / 3)

    def forward(self, x_BSD):
        weights_BSK, chosen_BSK = self.gate(x_BSD).softmax(-1).topk(2, -1)
        up_BSKF = torch.einsum("bskfd,bsd->bskf", self.up_NFD[chosen_BSK], x_BSD).relu()
        return x_BSD + torch.einsum("bskdf,bskf,bsk->bsd", self.down_NDF[chosen_BSK], up_BSKF, weights_BSK)


class ChoosingStacks(Routed):
    """Experts choose positions of a sequence, and compute them by einsums with stacks."""

    def __init__(self):
        super().__init__()
        self.up_NDF = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, WIDTH) / 3)
        self.down_NFD = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, DIM) / 3)

    def forward(self, x_BSD):
        best_BNC = self.gate(x_BSD).softmax(-1).transpose(1, 2).topk(2, -1)
        chosen_BNCS = F.one_hot(best_BNC.indices, x_BSD.shape[1]).to(x_BSD.dtype)
        rows_BNCD = torch.einsum("bncs,bsd->bncd", chosen_BNCS, x_BSD)
        up_BNCF = F.gelu(torch.einsum("bncd,ndf->bncf", rows_BNCD, self.up_NDF))
        out_BNCD = torch.einsum("...ncf,nfd->...ncd", up_BNCF, self.down_NFD)
        return x_BSD + torch.einsum("bncs,bnc,bncd->bsd", chosen_BNCS, best_BNC.values, out_BNCD)


class Broadcast(Routed):
    """Every expert computes every position, in products that broadcast over sequences and experts."""

    def __init__(self):
        super().__init__()
        self.up_NDF = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, WIDTH) / 3)
        self.down_NFD = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, DIM) / 3)

    def forward(self, x_BSD):
        out_BNSD = (x_BSD[:, None] @ self.up_NDF).relu() @ self.down_NFD
        weights_BNS = self.gate(x_BSD).softmax(-1).transpose(1, 2)
        return x_BSD + (out_BNSD * weights_BNS[..., None]).sum(1)


class StackedLists(Routed):
    """Lists are stacked in the forward, where every expert computes every token."""

    def __init__(self):
        super().__init__()
        self.up, self.down = matrices(WIDTH, DIM), matrices(DIM, WIDTH)

    def forward(self, x_BSD):
        weights_BSN = self.gate(x_BSD).softmax(-1)
        best_BSK = weights_BSN.topk(2, -1)
        weights_BSN = torch.zeros_like(weights_BSN).scatter(-1, best_BSK.indices, best_BSK.values)
        up_BSNF = torch.einsum("bsd,nfd->bsnf", x_BSD, torch.stack(list(self.up))).relu()
        turned_NFD = torch.stack([down_DF.t() for down_DF in self.down])
        return x_BSD + torch.einsum("bsnf,nfd,bsn->bsd", up_BSNF, turned_NFD, weights_BSN)


class Groups(nn.Module):
    """Groups of experts, lists in a list; all are chosen at once."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, 6)
        self.experts = nn.ModuleList(nn.ModuleList(expert(6) for _ in range(3)) for _ in range(2))

    def forward(self, x_BSD):
        x_TD = x_BSD.reshape(-1, DIM)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        out_TD = torch.zeros_like(x_TD)
        for number in chosen_TK.unique().tolist():
            token, slot = torch.where(chosen_TK == number)
            made = self.experts[number // 3][number % 3](x_TD[token])
            out_TD = out_TD.index_add(0, token, made * weights_TK[token, slot, None])
        return x_BSD + out_TD.view_as(x_BSD)


class Deeper(nn.Module):
    """Experts in a module that nobody calls, inside of one whose own forward is not used."""

    def __init__(self):
        super().__init__()
        looped, self.ffn = Looped(), Hashless()
        self.gate, self.ffn.bank = looped.gate, nn.Module()
        self.ffn.bank.experts = looped.experts

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        out_TD = torch.zeros_like(x_TD)
        for number in range(NUM_EXPERTS):
            token, slot = torch.where(chosen_TK == number)
            if token.numel():
                out_TD.index_add_(0, token, self.ffn.bank.experts[number](x_TD[token]) * weights_TK[token, slot, None])
        return x_BSD + out_TD.view_as(x_BSD)


class Hashless(nn.Module):
    def forward(self, x_BSD):
        return x_BSD


class InPlaceRows(Looped):
    """One expert a token, whose rows are read from the memory that results are written to."""

    def forward(self, x_BSD):
        best_BS, out_BSD = self.gate(x_BSD).argmax(-1), x_BSD * self.gate(x_BSD).softmax(-1).amax(-1, keepdim=True)
        for number, each in enumerate(self.experts):
            mask_BS = best_BS == number
            out_BSD[mask_BS] = each(out_BSD[mask_BS])
        return x_BSD + out_BSD


class Twice(Looped):
    """Tokens are routed again with what came out, to the same experts."""

    def forward(self, x_BSD):
        return super().forward(super().forward(x_BSD))


class ByGroup(Looped):
    """A router of the chosen group, one of a list, says which of its experts computes a token."""

    def __init__(self):
        super().__init__()
        self.gate, self.routers = nn.Linear(DIM, 2), nn.ModuleList(nn.Linear(DIM, 2) for _ in range(2))
        self.experts = nn.ModuleList(nn.ModuleList(expert() for _ in range(2)) for _ in range(2))

    def forward(self, x_BSD):
        x_TD = x_BSD.reshape(-1, DIM)
        groups_TG, out_TD = self.gate(x_TD).softmax(-1), torch.zeros_like(x_TD)
        for group, experts in enumerate(self.experts):
            inside = (groups_TG.argmax(-1) == group).nonzero()[:, 0]
            if len(inside) == 0:
                continue
            best = self.routers[group](x_TD[inside]).softmax(-1).max(-1)
            for number, each in enumerate(experts):
                rows = (best.indices == number).nonzero()[:, 0]
                if len(rows):
                    made = each(x_TD[inside[rows]]) * best.values[rows, None] * groups_TG[inside[rows], group, None]
                    out_TD[inside[rows]] = made
        return x_BSD + out_TD.view_as(x_BSD)


class Chained(Looped):
    """An expert is given what those before it have added to."""

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        for number, each in enumerate(self.experts):
            token, slot = torch.where(chosen_TK == number)
            x_TD = x_TD.index_add(0, token, each(x_TD[token]) * weights_TK[token, slot, None])
        return x_TD.view_as(x_BSD)


def nets(*layers):
    return {layer.__name__: lambda layer=layer: MixtureNet(layer) for layer in layers}


# Exchanges of a layer: 2, 1, and as many as results are waited for.
MULTIPLIED = nets(Lists, Unsaid, GatedDict, Beside, RowByRow, Gathered, ChoosingStacks, Broadcast, StackedLists)
NESTED = nets(Groups, Deeper, InPlaceRows)
CHAINED = nets(Twice, ByGroup, Chained)


def planned_lists():
    return MixtureNet(Lists)


def planned_rows():
    return MixtureNet(InPlaceRows)
