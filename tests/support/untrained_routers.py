"""Routers that nothing trains, as people write them by mistake: choices are right, and scores pass no gradient.

Shapes as in `mixtures`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from support.mixtures import DIM, NUM_EXPERTS, VOCAB, Looped, Stacked

__all__ = ["UNTRAINED", "InList", "InStack", "Routed", "trained"]


def detached(gate, x_TD):
    return gate(x_TD).detach().softmax(-1).topk(2, -1)


def without_gradients(gate, x_TD):
    with torch.no_grad():
        return gate(x_TD).softmax(-1).topk(2, -1)


def chosen_alone(gate, x_TD):
    chosen_TK = gate(x_TD).argmax(-1, keepdim=True)
    return torch.ones(chosen_TK.shape, dtype=x_TD.dtype), chosen_TK


def weights_detached(gate, x_TD):
    weights_TK, chosen_TK = gate(x_TD).softmax(-1).topk(2, -1)
    return weights_TK.detach(), chosen_TK


def divided_by_itself(gate, x_TD):
    weights_TK, chosen_TK = gate(x_TD).softmax(-1).topk(1, -1)
    return weights_TK / weights_TK.sum(-1, keepdim=True), chosen_TK


def of_chosen_alone(gate, x_TD):
    logits_TK, chosen_TK = gate(x_TD).topk(1, -1)
    return logits_TK.softmax(-1), chosen_TK


def as_numbers(gate, x_TD):
    weights_TK, chosen_TK = gate(x_TD).softmax(-1).topk(2, -1)
    return torch.tensor(weights_TK.tolist()), chosen_TK


def one_hot(gate, x_TD):
    scores_TN = gate(x_TD).softmax(-1)
    hard_TN = F.one_hot(scores_TN.argmax(-1), NUM_EXPERTS).to(x_TD.dtype)
    return hard_TN.topk(1, -1)


def straight_through_nothing(gate, x_TD):
    scores_TN = gate(x_TD).softmax(-1)
    hard_TN = F.one_hot(scores_TN.argmax(-1), NUM_EXPERTS) - scores_TN.detach() + scores_TN.detach()
    return hard_TN.topk(1, -1)


def trained(gate, x_TD):
    return gate(x_TD).softmax(-1).topk(2, -1)


UNTRAINED = (
    detached,
    without_gradients,
    chosen_alone,
    weights_detached,
    divided_by_itself,
    of_chosen_alone,
    as_numbers,
    one_hot,
    straight_through_nothing,
)


class InList(Looped):
    def __init__(self, route):
        super().__init__()
        self.route = route

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.route(self.gate, x_TD)
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen_TK == number)
            out_TD = out_TD.index_add(0, token, expert(x_TD[token]) * weights_TK[token, slot, None])
        return x_BSD + out_TD.view_as(x_BSD)


class InStack(Stacked):
    def __init__(self, route):
        super().__init__()
        self.route = route

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.route(self.gate, x_TD)
        return x_BSD + self.experts(x_TD, chosen_TK, weights_TK).view_as(x_BSD)


class Routed(nn.Module):
    """A layer with each route.

    Args:
        layer: `InList` or `InStack`.
        routes: Of the layers.
    """

    def __init__(self, layer, routes):
        super().__init__()
        self.tok, self.out = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.layers = nn.ModuleList(layer(route) for route in routes)

    def forward(self, tokens_BS):
        x_BSD = self.tok(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.out(x_BSD)
