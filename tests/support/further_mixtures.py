"""Further ways to write a mixture with a list of experts: sorted and split rows, experts that choose, mixtures of rows.

Shapes as in `mixtures`; R rows, pairs of a token and an expert, P slots of an expert, C rows of each expert.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.mixtures import DIM, NUM_EXPERTS, Looped, MixtureNet

__all__ = ["FURTHER"]


def expert(width=12):
    return nn.Sequential(nn.Linear(DIM, width), nn.GELU(), nn.Linear(width, DIM))


class SortedRows(Looped):
    """Rows sorted by expert, and a slice of them for each that has any, as DeepSeek's inference code."""

    def forward(self, x_BSD):
        x_TD = x_BSD.view(-1, DIM)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        counts_TN = chosen_TK.new_zeros((chosen_TK.shape[0], len(self.experts))).scatter_(1, chosen_TK, 1)
        order_R = chosen_TK.view(-1).argsort(stable=True)
        rows_RD, parts, first = x_TD[order_R // 2], [], 0
        for number, count in enumerate(counts_TN.sum(0).tolist()):
            if count:
                parts.append(self.experts[number](rows_RD[first : first + count]))
            first += count
        out_RD = torch.empty_like(rows_RD)
        out_RD[order_R] = torch.cat(parts)
        return x_BSD + (out_RD.view(*chosen_TK.shape, -1) * weights_TK.unsqueeze(-1)).sum(1).view_as(x_BSD)


class Choosing(Looped):
    """Experts choose tokens of each sequence, read by `gather` and summed by `scatter_add`."""

    def forward(self, x_BSD):
        best_BNC = self.gate(x_BSD).softmax(-1).transpose(1, 2).topk(2, -1)
        out_BSD = torch.zeros_like(x_BSD)
        for number, each in enumerate(self.experts):
            at_BCD = best_BNC.indices[:, number, :, None].expand(-1, -1, DIM)
            rows_BCD = each(x_BSD.gather(1, at_BCD)) * best_BNC.values[:, number, :, None]
            out_BSD = out_BSD.scatter_add(1, at_BCD, rows_BCD)
        return x_BSD + out_BSD


class Soft(Looped):
    """Slots of experts are means of a sequence's positions; no token is routed."""

    def __init__(self):
        super().__init__()
        self.slots_DNP = nn.Parameter(torch.randn(DIM, NUM_EXPERTS, 2) / 3)

    def forward(self, x_BSD):
        scores_BSNP = torch.einsum("bsd,dnp->bsnp", x_BSD, self.slots_DNP)
        combined_BSNP = scores_BSNP.flatten(2).softmax(-1).view_as(scores_BSNP)
        rows_NBPD = torch.einsum("bsnp,bsd->nbpd", scores_BSNP.softmax(1), x_BSD)
        out_NBPD = torch.stack([each(rows_NBPD[number]) for number, each in enumerate(self.experts)])
        return x_BSD + torch.einsum("bsnp,nbpd->bsd", combined_BSNP, out_NBPD)


class Beside(Looped):
    """Shared experts in a list, beside routed ones."""

    def __init__(self):
        super().__init__()
        self.shared, self.shared_gate = nn.ModuleList([expert(6), expert(6)]), nn.Linear(DIM, 1)

    def forward(self, x_BSD):
        return super().forward(x_BSD) + self.shared_gate(x_BSD).sigmoid() * sum(each(x_BSD) for each in self.shared)


class Hashed(nn.Module):
    """No router: a hash of a token says its expert."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(expert() for _ in range(NUM_EXPERTS))

    def forward(self, x_BSD):
        x_TD = x_BSD.reshape(-1, DIM)
        key_T = (x_TD.detach()[:, 0] * 1e4).long().abs() % NUM_EXPERTS
        out_TD = torch.zeros_like(x_TD)
        for number, each in enumerate(self.experts):
            mask_T = key_T == number
            out_TD[mask_T] = each(x_TD[mask_T])
        return x_BSD + out_TD.view_as(x_BSD)


class Jittered(Looped):
    """One expert a token by a mask of ones, as Switch Transformers; noise of no width is drawn in both runs."""

    def forward(self, x_BSD):
        x_TD = x_BSD.reshape(-1, DIM)
        noisy_TD = x_TD * torch.empty_like(x_TD).uniform_(1.0, 1.0) if self.training else x_TD
        best_T = self.gate(noisy_TD).softmax(-1).max(-1)
        mask_TN, out_TD = F.one_hot(best_T.indices, NUM_EXPERTS).bool(), torch.zeros_like(x_TD)
        for number, each in enumerate(self.experts):
            out_TD[mask_TN[:, number]] = each(x_TD[mask_TN[:, number]])
        return x_BSD + (out_TD * best_T.values[:, None]).view_as(x_BSD)


class Buffered(Looped):
    """A buffer for each expert with room for all rows, written by `index_put`."""

    def forward(self, x_BSD):
        x_TD = x_BSD.reshape(-1, DIM)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        chosen_R = chosen_TK.t().reshape(-1)
        place_R = F.one_hot(chosen_R, NUM_EXPERTS).cumsum(0)[torch.arange(len(chosen_R)), chosen_R] - 1
        rows_NCD = x_TD.new_zeros(NUM_EXPERTS, len(chosen_R), DIM)
        rows_NCD = rows_NCD.index_put((chosen_R, place_R), x_TD.repeat(2, 1))
        out_NCD = torch.stack([each(rows) for each, rows in zip(self.experts, rows_NCD.unbind(0), strict=True)])
        out_RD = out_NCD[chosen_R, place_R] * weights_TK.t().reshape(-1, 1)
        return x_BSD + out_RD.view(2, -1, DIM).sum(0).view_as(x_BSD)


class Grouped(Looped):
    """A group of experts is chosen, then one of the group."""

    def __init__(self):
        super().__init__()
        self.of_groups = nn.Linear(DIM, 2)

    def forward(self, x_BSD):
        x_TD = x_BSD.reshape(-1, DIM)
        group_T = self.of_groups(x_TD).softmax(-1).max(-1)
        best_T = self.gate(x_TD).view(-1, 2, 2)[torch.arange(len(x_TD)), group_T.indices].softmax(-1).max(-1)
        chosen_T, out_TD = group_T.indices * 2 + best_T.indices, torch.zeros_like(x_TD)
        for number in range(NUM_EXPERTS):
            token = (chosen_T == number).nonzero(as_tuple=True)[0]
            if len(token):
                out_TD[token] = self.experts[number](x_TD[token])
        return x_BSD + (out_TD * (best_T.values * group_T.values)[:, None]).view_as(x_BSD)


class Sized(nn.Module):
    """As many experts, and choices of a token, as are stated, with weights that add up to one."""

    def __init__(self, num_experts=NUM_EXPERTS, top_k=2):
        super().__init__()
        self.top_k, self.gate = top_k, nn.Linear(DIM, num_experts)
        self.experts = nn.ModuleList(expert() for _ in range(num_experts))

    def forward(self, x_BSD):
        x_TD = x_BSD.reshape(-1, DIM)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(self.top_k, -1)
        weights_TK, out_TD = weights_TK / weights_TK.sum(-1, keepdim=True), torch.zeros_like(x_TD)
        for number, each in enumerate(self.experts):
            token, slot = torch.where(chosen_TK == number)
            out_TD.scatter_add_(0, token[:, None].expand(-1, DIM), weights_TK[token, slot, None] * each(x_TD[token]))
        return x_BSD + out_TD.view_as(x_BSD)


def unlike(**options):
    """Return a model whose second layer has other numbers."""
    net = MixtureNet(Sized)
    net.layers[1] = Sized(**options)
    return net


FURTHER = {
    **{
        each.__name__: lambda each=each: MixtureNet(each)
        for each in (SortedRows, Choosing, Soft, Beside, Hashed, Jittered, Buffered, Grouped)
    },
    "other choices": lambda: unlike(top_k=3),
    "other experts": lambda: unlike(num_experts=8),
}
