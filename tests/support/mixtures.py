"""Mixtures of experts as other people write them, and a composed step of one beside one device's.

Shapes: B sequences, S positions, T tokens, D features, N experts, K experts a token.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import composer3d
from composer3d import all_gather_json
from composer3d.models import moe
from composer3d.testing import count_collectives
from support.models import largest, mine, seeded, write_manifest

VOCAB = 11
DIM = 8
NUM_EXPERTS = 4


class Looped(nn.Module):
    """A loop that skips experts without tokens, and adds in place to its own sum."""

    def __init__(self, starved=False):
        super().__init__()
        self.gate = nn.Linear(DIM, NUM_EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 12), nn.GELU(), nn.Linear(12, DIM)) for _ in range(NUM_EXPERTS)
        )
        if starved:  # all tokens go to the first two, so that ranks of others get none
            self.gate.weight.data.zero_()
            self.gate.bias.data.copy_(torch.tensor([9.0, 8.0, 0.0, 0.0]))

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen_TK == number)
            if token.numel() == 0:
                continue
            out_TD.index_add_(0, token, expert(x_TD[token]) * weights_TK[token, slot, None])
        return x_BSD + out_TD.view_as(x_BSD)


class Masked(Looped):
    """Masks in place of indexes, entries read by number, and dropout, which draws for each of the two runs."""

    dropout = 0.0

    def forward(self, x_BSD):
        x_BSD = F.dropout(x_BSD, self.dropout)
        weights_BSN = self.gate(x_BSD).softmax(-1)
        best_BS = weights_BSN.argmax(-1)
        out_BSD = torch.zeros_like(x_BSD)
        for number in range(len(self.experts)):
            mask_BS = best_BS == number
            if mask_BS.any():
                out_BSD[mask_BS] = self.experts[number](x_BSD[mask_BS]) * weights_BSN[mask_BS][:, number, None]
        return x_BSD + out_BSD


class Named(Looped):
    """Experts in a dict, which holds what is done to the results of each, too."""

    def __init__(self):
        super().__init__()
        held = {f"expert_{number}": each for number, each in enumerate(self.experts)}
        self.experts = nn.ModuleDict({"act": nn.Softsign()} | held)

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        best = self.gate(x_TD).softmax(-1).max(-1)
        out_TD = torch.zeros_like(x_TD)
        for number, expert in enumerate([*self.experts.values()][1:]):
            token = (best.indices == number).nonzero().squeeze(-1)
            out_TD = out_TD.index_copy(0, token, self.experts["act"](expert(x_TD[token])) * best.values[token, None])
        return x_BSD + out_TD.view_as(x_BSD)


class Nested(Looped):
    """Experts of different widths in a list inside of a dict, called by their `forward`."""

    def __init__(self):
        super().__init__()
        widths = (
            nn.Sequential(nn.Linear(DIM, 4 + number), nn.GELU(), nn.Linear(4 + number, DIM)) for number in range(4)
        )
        self.parts = nn.ModuleDict({"norm": nn.LayerNorm(DIM), "experts": nn.ModuleList(widths)})
        del self.experts

    def forward(self, x_BSD):
        x_TD = self.parts["norm"](x_BSD).flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        out_TD = torch.zeros_like(x_TD)
        for number in chosen_TK.unique().tolist():
            token, slot = torch.where(chosen_TK == number)
            expert = self.parts["experts"][number]
            out_TD = out_TD.index_add(0, token, expert.forward(x_TD[token]) * weights_TK[token, slot, None])
        return x_BSD + out_TD.view_as(x_BSD)


class Slotwise(Looped):
    """A loop over choices around that over experts, which calls each of them twice."""

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        out_TD = torch.zeros_like(x_TD)
        for slot in range(2):
            for number, expert in enumerate(self.experts):
                mask_T = chosen_TK[:, slot] == number
                if mask_T.any():
                    out_TD[mask_T] += expert(x_TD[mask_T]) * weights_TK[mask_T, slot, None]
        return x_BSD + out_TD.view_as(x_BSD)


class TokenByToken(Looped):
    """A token at a time, without a dim of rows; experts of other forms, one of which has no parameters."""

    def __init__(self):
        super().__init__()
        self.experts[1], self.experts[3] = nn.Linear(DIM, DIM), nn.Identity()

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        best = self.gate(x_TD).softmax(-1).max(-1)
        numbers = best.indices.tolist()
        rows = [self.experts[number](x_D) for number, x_D in zip(numbers, x_TD, strict=True)]
        return x_BSD + (torch.stack(rows) * best.values[:, None]).view_as(x_BSD)


class Widened(Looped):
    """Results of another width than rows, summed before a projection."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 5), nn.Linear(5, 2 * DIM)) for _ in range(NUM_EXPERTS)
        )
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        out_TF = x_TD.new_zeros(x_TD.shape[0], 2 * DIM)
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen_TK == number)
            out_TF = out_TF.index_add(0, token, expert(x_TD[token]) * weights_TK[token, slot, None])
        return x_BSD + self.down(out_TF).view_as(x_BSD)


class InTwoLists(Looped):
    """Both matrices of an expert in lists of their own."""

    def __init__(self):
        super().__init__()
        del self.experts
        self.up = nn.ModuleList(nn.Linear(DIM, 12) for _ in range(NUM_EXPERTS))
        self.down = nn.ModuleList(nn.Linear(12, DIM) for _ in range(NUM_EXPERTS))

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(2, -1)
        out_TD = torch.zeros_like(x_TD)
        for number in range(NUM_EXPERTS):
            token, slot = torch.where(chosen_TK == number)
            if token.numel():
                out = self.down[number](torch.relu(self.up[number](x_TD[token])))
                out_TD = out_TD.index_add(0, token, out * weights_TK[token, slot, None])
        return x_BSD + out_TD.view_as(x_BSD)


class Stack(nn.Module):
    """Stacked weights with biases, in transformers' contract."""

    def __init__(self):
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up_NFD, self.up_NF = (nn.Parameter(torch.randn(NUM_EXPERTS, 12, *rest) / 4) for rest in ((DIM,), ()))
        self.down_NDF = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, 12) / 4)

    def forward(self, hidden_states, top_k_index, top_k_weights=None):
        out_TD = torch.zeros_like(hidden_states)
        for number in range(self.num_experts):
            token, slot = torch.where(top_k_index == number)
            up = torch.tanh(F.linear(hidden_states[token], self.up_NFD[number], self.up_NF[number]))
            out_TD.index_add_(0, token, F.linear(up, self.down_NDF[number]) * top_k_weights[token, slot, None])
        return out_TD


class NormedStack(Stack):
    """Results are normed, with weights that all experts share."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)

    def forward(self, hidden_states, top_k_index, top_k_weights=None):
        out_TD = torch.zeros_like(hidden_states)
        for number in range(self.num_experts):
            token, slot = torch.where(top_k_index == number)
            up = torch.tanh(F.linear(hidden_states[token], self.up_NFD[number], self.up_NF[number]))
            down = self.norm(F.linear(up, self.down_NDF[number]))
            out_TD.index_add_(0, token, down * top_k_weights[token, slot, None])
        return out_TD


class DenseStack(Stack):
    """All experts compute all tokens, weighted by zero where a token is not theirs."""

    def forward(self, hidden_states, top_k_index, top_k_weights=None):
        zeros_TN = hidden_states.new_zeros(len(hidden_states), self.num_experts)
        weights_TN = zeros_TN.scatter_add(1, top_k_index, top_k_weights)
        up_TNF = torch.tanh(torch.einsum("td,nfd->tnf", hidden_states, self.up_NFD) + self.up_NF)
        return (torch.einsum("tnf,ndf->tnd", up_TNF, self.down_NDF) * weights_TN[..., None]).sum(1)


class FlatStack(nn.Module):
    """Matrices of all experts one below the other, as DBRX's; called with sequences, and the choices of all tokens."""

    def __init__(self):
        super().__init__()
        self.num_experts, self.num_experts_per_tok = NUM_EXPERTS, 2
        self.up, self.down = (nn.Parameter(torch.randn(NUM_EXPERTS * 12, DIM) / 4) for _ in range(2))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        x_TD = hidden_states.reshape(-1, DIM)
        out_TD = torch.zeros_like(x_TD)
        for number in top_k_index.unique():
            token, slot = torch.where(top_k_index == number)
            up_FD, down_FD = (weight.view(-1, 12, DIM)[number] for weight in (self.up, self.down))
            out = torch.tanh(x_TD[token].matmul(up_FD.T)).matmul(down_FD)
            out_TD = out_TD.index_add(0, token, out * top_k_weights[token, slot, None])
        return out_TD.view_as(hidden_states)


class Stacked(nn.Module):
    def __init__(self, starved=False, top_k=2, stack=Stack):
        super().__init__()
        self.gate, self.experts, self.top_k = Looped(starved).gate, stack(), top_k

    def forward(self, x_BSD):
        x_TD = x_BSD.flatten(0, 1)
        weights_TK, chosen_TK = self.gate(x_TD).softmax(-1).topk(self.top_k, -1)
        return x_BSD + self.experts(x_TD, chosen_TK, top_k_weights=weights_TK).view_as(x_BSD)


class FlatStacked(Stacked):
    """A block whose experts are called with sequences."""

    def forward(self, x_BSD):
        weights_TK, chosen_TK = self.gate(x_BSD.flatten(0, 1)).softmax(-1).topk(self.top_k, -1)
        return x_BSD + self.experts(x_BSD, chosen_TK, weights_TK)


class MixtureNet(nn.Module):
    """Two layers of a mixture between an embedding and a head."""

    def __init__(self, layer, **options):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(layer(**options) for _ in range(2))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens_BS):
        x_BSD = self.tok(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.out(x_BSD)


class Tied(MixtureNet):
    """Both layers have the same experts, in one list or each in a list of its own."""

    def __init__(self, in_one):
        super().__init__(Looped)
        experts = self.layers[0].experts
        self.layers[1].experts = experts if in_one else nn.ModuleList(experts)


def shipped(**sizes):
    """Return the shipped model, small; without losses of its routers unless stated."""
    small = {"dim": DIM, "num_layers": 2, "num_heads": 2, "num_experts": NUM_EXPERTS, "vocab_size": VOCAB}
    return moe(**{**small, "expert_dim": 12, "balance_loss": 0.0, **sizes})


MIXTURES = {
    "looped": lambda: MixtureNet(Looped),
    "looped starved": lambda: MixtureNet(Looped, starved=True),
    "masked": lambda: MixtureNet(Masked),
    "named": lambda: MixtureNet(Named),
    "nested": lambda: MixtureNet(Nested),
    "slotwise": lambda: MixtureNet(Slotwise),
    "token by token": lambda: MixtureNet(TokenByToken),
    "widened": lambda: MixtureNet(Widened),
    "two lists": lambda: MixtureNet(InTwoLists),
    "stacked": lambda: MixtureNet(Stacked),
    "stacked starved": lambda: MixtureNet(Stacked, starved=True),
    "stacked of three": lambda: MixtureNet(Stacked, top_k=3),
    "dense": lambda: MixtureNet(Stacked, stack=DenseStack),
    "flat": lambda: MixtureNet(FlatStacked, stack=FlatStack),
    "normed": lambda: MixtureNet(Stacked, stack=NormedStack),
    "tied": lambda: Tied(in_one=True),
    "tied in two lists": lambda: Tied(in_one=False),
    "shipped": shipped,
    "shipped of four heads": lambda: shipped(num_heads=4),
}


def tokens_and_targets(num_sequences=8, seq_len=6):
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCAB, (num_sequences, seq_len + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[::3, :2] = -100
    return tokens[:, :-1].contiguous(), targets


def token_sum(output, targets):
    logits = getattr(output, "logits", output)
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=-100)
    auxiliary = getattr(output, "auxiliary", None)
    return composer3d.Loss(sum=total, count=(targets != -100).sum(), auxiliary=auxiliary)


def mixture_steps(cases):
    """Run on a rank: one composed step in float64 of each (name or factory, text), against one device.

    Returns for each (loss error, norm error, largest relative gradient error, (count, bytes) by (op, axis)).
    """
    torch.set_default_dtype(torch.float64)
    return [_step(name, text) for name, text in cases]


def _step(name, text):
    tokens, targets = tokens_and_targets()
    reference = seeded(MIXTURES.get(name, name))
    loss_1 = token_sum(reference(tokens), targets)
    (loss_1.sum / loss_1.count).backward()
    zeros = {fqn: torch.zeros_like(p) for fqn, p in reference.named_parameters()}
    wanted = zeros | {fqn: p.grad for fqn, p in reference.named_parameters() if p.grad is not None}
    norm_1 = torch.nn.utils.clip_grad_norm_(reference.parameters(), float("inf"))
    run = composer3d.compose(seeded(MIXTURES.get(name, name)), write_manifest(text), loss_fn=token_sum)
    tokens, targets = mine(run, tokens), mine(run, targets)
    with count_collectives(run.mesh) as collectives, run.step(0):
        loss = run.forward_backward(tokens, target=targets)
        norm = run.clip_grad_norm_(float("inf"))
    scale = largest(float(gradient.abs().max()) for gradient in wanted.values())
    # Of packed weights a rank of tp has its own heads' rows, which no DTensor knows.
    found = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters() if p.grad is not None}
    error = largest(float((found[fqn] - wanted[fqn]).abs().max()) / scale for fqn in found)
    everywhere = {fqn for names in all_gather_json(sorted(found)) for fqn in names}
    # What nothing was routed to has no gradient, or the optimizer's decay would change it.
    assert everywhere == {fqn for fqn, parameter in reference.named_parameters() if parameter.grad is not None}
    run.close()
    return (
        float((loss - loss_1.sum.detach() / loss_1.count).abs()),
        float((norm - norm_1).abs() / norm_1),
        error,
        collectives.summary(),
    )


def planned_loop():
    return MixtureNet(Looped)


def starved():
    return MixtureNet(Looped, starved=True)
