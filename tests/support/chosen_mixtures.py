"""Mixtures of experts whose code does what the values of its choice say: it skips, counts, sorts and looks up."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from support.mixtures import Looped, MixtureNet

__all__ = ["CHOSEN", "chosen_mixture"]


class _Sum(Looped):
    """Calls `combined` with tokens, and the weights and experts of each."""

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        return x_BSD + self.combined(x_TD, weights_TK, chosen_TK).view_as(x_BSD)

    def combined(self, x_TD, weights_TK, chosen_TK):
        raise NotImplementedError

    def by_rows(self, x_TD, weights_TK, chosen_TK, counts):
        """Sort rows by experts, of which each is given so many, and skip those without any."""
        order_R = chosen_TK.reshape(-1).argsort(stable=True)
        rows_RD, results, start = x_TD[order_R // 2], [], 0
        for expert, count in zip(self.experts, counts, strict=True):
            if count == 0:
                continue
            results.append(expert(rows_RD[start : start + count]))
            start += count
        out_RD = torch.cat(results)
        placed_RD = torch.empty_like(out_RD).index_copy(0, order_R, out_RD)
        return (placed_RD.unflatten(0, (-1, 2)) * weights_TK[..., None]).sum(1)


class Skipping(_Sum):
    def combined(self, x_TD, weights_TK, chosen_TK):
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            mask_T = (chosen_TK == number).any(-1)
            if not mask_T.any():
                continue
            weight_T = (weights_TK * (chosen_TK == number)).sum(-1)[mask_T]
            out_TD[mask_T] += expert(x_TD[mask_T]) * weight_T[:, None]
        return out_TD


class Distinct(_Sum):
    def combined(self, x_TD, weights_TK, chosen_TK):
        out_TD = torch.zeros_like(x_TD)
        for number in chosen_TK.cpu().unique().tolist():
            token_R, slot_R = torch.where(chosen_TK == number)
            out_TD.index_add_(0, token_R, self.experts[number](x_TD[token_R]) * weights_TK[token_R, slot_R, None])
        return out_TD


class Counted(_Sum):
    def combined(self, x_TD, weights_TK, chosen_TK):
        counts = torch.bincount(chosen_TK.reshape(-1), minlength=len(self.experts)).tolist()
        return self.by_rows(x_TD, weights_TK, chosen_TK, counts)


class Scattered(_Sum):
    def combined(self, x_TD, weights_TK, chosen_TK):
        counts_TN = chosen_TK.new_zeros((chosen_TK.shape[0], len(self.experts)))
        counts_TN.scatter_(1, chosen_TK, 1)
        return self.by_rows(x_TD, weights_TK, chosen_TK, counts_TN.sum(0).tolist())


class Added(_Sum):
    def combined(self, x_TD, weights_TK, chosen_TK):
        chosen_R = chosen_TK.reshape(-1)
        counts_N = torch.zeros(len(self.experts), dtype=torch.int64)
        counts_N.index_add_(0, chosen_R, torch.ones_like(chosen_R))
        return self.by_rows(x_TD, weights_TK, chosen_TK, counts_N.tolist())


class OneHot(_Sum):
    def combined(self, x_TD, weights_TK, chosen_TK):
        out_TD = torch.zeros_like(x_TD)
        mask_NKT = F.one_hot(chosen_TK, num_classes=len(self.experts)).permute(2, 1, 0)
        for number in mask_NKT.sum((-1, -2)).greater(0).nonzero():
            slot_R, token_R = torch.where(mask_NKT[number].squeeze(0))
            out_TD.index_add_(0, token_R, self.experts[number](x_TD[token_R]) * weights_TK[token_R, slot_R, None])
        return out_TD


class TokenAtATime(_Sum):
    def combined(self, x_TD, weights_TK, chosen_TK):
        chosen = chosen_TK.tolist()
        return torch.stack(
            [
                sum(weights_TK[token, slot] * self.experts[chosen[token][slot]](x_D) for slot in range(2))
                for token, x_D in enumerate(x_TD)
            ]
        )


CHOSEN = {each.__name__: each for each in (Skipping, Distinct, Counted, Scattered, Added, OneHot, TokenAtATime)}


def chosen_mixture(form):
    return MixtureNet(CHOSEN[form])
