"""Models that mix positions otherwise than by attention, or beside it, as other people write them.

Shapes: B batch, S positions, D model dim, N state dim, H heads, E head dim.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import nn

from support.sequence_models import DIM, HEADS, VOCAB, Language

__all__ = ["MIXERS", "Staged"]

STATE = 4


class Causal(Language):
    """Blocks of which subclasses state the mixer; attention is causal where they have one."""

    def attend(self, q, k, v, tokens):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Mamba(Causal):
    """A causal convolution padded at both ends, and a selective scan in a loop."""

    def block(self):
        block = super().block()
        block["in"], block["x"] = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 1 + 2 * STATE, bias=False)
        block["conv"], block["dt"] = nn.Conv1d(DIM, DIM, 4, groups=DIM, padding=3), nn.Linear(1, DIM)
        block["A"] = nn.Linear(STATE, DIM, bias=False)
        return block

    def mixed(self, block, x, tokens):
        S = x.shape[1]
        u, z = block["in"](x).chunk(2, dim=-1)
        u = F.silu(block["conv"](u.transpose(1, 2))[..., :S]).transpose(1, 2)
        dt, B, C = block["x"](u).split([1, STATE, STATE], dim=-1)
        dt = F.softplus(block["dt"](dt))
        A = torch.exp(dt.unsqueeze(-1) * -torch.exp(block["A"].weight))
        inputs = dt.unsqueeze(-1) * B.unsqueeze(2) * u.unsqueeze(-1)
        state, found = x.new_zeros(x.shape[0], DIM, STATE), []
        for t in range(S):
            state = A[:, t] * state + inputs[:, t]
            found.append((state * C[:, t, None]).sum(-1))
        return block["o"](torch.stack(found, dim=1) * F.silu(z) + u)


class Alone(Mamba):
    """The same with `unbind`, results written one by one, and nothing that meets a shard before the projection."""

    def mixed(self, block, x, tokens):
        u = block["conv"](F.pad(x, (0, 0, 1, -1)).transpose(1, 2))[:, :, : x.shape[1]].transpose(1, 2)
        state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
        for t, each in enumerate(torch.sigmoid(u).unbind(1)):
            state = 0.7 * state + each
            out[:, t] = state
        return block["o"](out)


class Rwkv(Causal):
    """Tokens shifted by one, a sum over the past with decay, and a gate."""

    def block(self):
        block = super().block()
        block["r"], block["k"], block["v"] = (nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        block["mix"], block["shift"] = nn.Linear(1, DIM, bias=False), nn.ZeroPad2d((0, 0, 1, -1))
        return block

    def mixed(self, block, x, tokens):
        mu, before = torch.sigmoid(block["mix"].weight[:, 0]), block["shift"](x)
        rolled = torch.roll(x, 1, dims=1)
        rolled[:, 0] = 0
        k = torch.exp(block["k"](x * mu + before * (1 - mu)))
        v = block["v"](torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], dim=1) * mu)
        past = (k * v).cumsum(1) / k.cumsum(dim=1)
        return block["o"](torch.sigmoid(block["r"](rolled)) * past)


class Recurrent(Causal):
    """A recurrent layer, and attention over what it returns."""

    kind = nn.GRU

    def __init__(self):
        super().__init__()
        self.recurrent = self.kind(DIM, DIM, batch_first=True)

    def forward(self, tokens):
        x, _ = self.recurrent(self.embedding(tokens))
        for block in self.layers:
            x = x + self.mixed(block, block["norm"](x), tokens)
        return self.head(x)


class Lstm(Recurrent):
    """In both directions, over x_SBD."""

    kind = staticmethod(lambda width, _, batch_first: nn.LSTM(width, width // 2, bidirectional=True))


class Conformer(Causal):
    """A gated depthwise convolution over neighbours of both sides before attention."""

    def block(self):
        block = super().block()
        block["gate"], block["conv"] = nn.Conv1d(DIM, 2 * DIM, 1), nn.Conv1d(DIM, DIM, 5, padding="same", groups=DIM)
        block["dilated"] = nn.Conv1d(DIM, DIM, 3, padding=2, dilation=2)
        return block

    def mixed(self, block, x, tokens):
        y = F.glu(block["gate"](x.transpose(1, 2)), dim=1)
        y = block["dilated"](F.silu(block["conv"](y))).transpose(1, 2)
        return Language.mixed(self, block, x + y, tokens)


class Subsampled(Causal):
    """Convolutions with strides before the blocks, and the mean of positions after them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(DIM, DIM, 3, padding=1), nn.Conv1d(DIM, DIM, 3, stride=2, padding=1)

    def forward(self, tokens):
        x = self.second(F.gelu(self.first(self.embedding(tokens).transpose(1, 2)))).transpose(1, 2)
        for block in self.layers:
            x = x + self.mixed(block, block["norm"](x), tokens)
        x = x.repeat_interleave(2, dim=1)
        return self.head(x + x.mean(1, keepdim=True))


class Hyena(Causal):
    """A long convolution by Fourier transforms, gated."""

    def block(self):
        block = super().block()
        block["filter"] = nn.Linear(1, DIM)
        return block

    def mixed(self, block, x, tokens):
        S = x.shape[1]
        at = torch.linspace(0, 1, S, device=x.device, dtype=x.dtype)[:, None]
        h = block["filter"](at) * torch.exp(-at)
        u, v = block["kv"](x).chunk(2, dim=-1)
        y = torch.fft.irfft(torch.fft.rfft(u, n=2 * S, dim=1) * torch.fft.rfft(h, n=2 * S, dim=0), n=2 * S, dim=1)
        return block["o"](y[:, :S] * v)


class CountedPositions(Causal):
    """Positions from a running count of tokens, as padded batches have them."""

    def forward(self, tokens):
        mask = (tokens != 0).long()
        x = self.embedding(tokens) + self.position((mask.cumsum(-1) - 1).clamp(min=0))
        for block in self.layers:
            x = x + self.mixed(block, block["norm"](x), tokens)
        valid = mask.unsqueeze(-1).to(x.dtype)
        return self.head(x + (x * valid).sum(1, keepdim=True) / valid.sum(1, keepdim=True))


class InPlace(Causal):
    """Writes into some positions, and into views of them."""

    def mixed(self, block, x, tokens):
        x = block["up"](x)
        x[:, 1:] = x[:, 1:] + 0.5 * x[:, :-1].clone()
        first = x[:, 0]
        first.mul_(2.0)
        x[:, 3:5] *= 0.5
        return Language.mixed(self, block, x, tokens)


class ConvOverImage(Causal):
    """A convolution of two dims, of which one is the sequence, and an average of neighbours."""

    def block(self):
        block = super().block()
        block["conv"] = nn.Conv2d(1, 2, (3, 4), padding=(1, 0), stride=(1, 4))
        return block

    def mixed(self, block, x, tokens):
        y = block["conv"](x.unsqueeze(1)).permute(0, 2, 1, 3).flatten(2)
        pooled = F.avg_pool1d(x.transpose(1, 2), 3, stride=1, padding=1).transpose(1, 2)
        return Language.mixed(self, block, x + pooled + F.pad(y, (0, DIM - y.shape[-1])), tokens)


class RelativeShift(Causal):
    """Scores by distance, shifted into place by padding and a view."""

    def attend(self, q, k, v, tokens):
        B, H, S, E = q.shape
        at = torch.arange(S - 1, -1, -1.0, device=q.device, dtype=q.dtype)
        r = torch.outer(at, 100.0 ** -torch.linspace(0, 1, E, dtype=q.dtype)).sin()
        by_distance = F.pad(torch.einsum("bhid,jd->bhij", q, r), (1, 0)).view(B, H, S + 1, S)[:, :, 1:].view(B, H, S, S)
        scores = torch.einsum("bhid,bhjd->bhij", q, k) + by_distance
        after = torch.ones(S, S, dtype=torch.bool, device=q.device).triu(1)
        return torch.einsum("bhij,bhjd->bhid", scores.masked_fill(after, float("-inf")).softmax(-1), v)


class LinearAttention(Causal):
    """Keys and values summed over all positions, and over the past."""

    def attend(self, q, k, v, tokens):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        sums, all_keys = torch.einsum("bhnd,bhne->bhde", k, v), k.sum(2)
        whole = torch.einsum("bhnd,bhde->bhne", q, sums) / torch.einsum("bhnd,bhd->bhn", q, all_keys).unsqueeze(-1)
        past = (k.unsqueeze(-1) * v.unsqueeze(-2)).cumsum(2)
        return whole + torch.einsum("bhnd,bhnde->bhne", q, past) / (q * k.cumsum(2)).sum(-1, keepdim=True)


class ShiftedWindows(Causal):
    """Attention within windows that lie in the batch, of positions that are rolled before and after."""

    def mixed(self, block, x, tokens):
        B, S, D = x.shape
        windows = torch.roll(x, shifts=-2, dims=1).view(B * S // 4, 4, D)
        return torch.roll(Language.mixed(self, block, windows, None).view(B, S, D), shifts=2, dims=1)


class LookingBack(Causal):
    """Attention to the own chunk and the one before, whose keys are shifted by a chunk."""

    def attend(self, q, k, v, tokens):
        q, k, v = (x.unflatten(2, (-1, 4)) for x in (q, k, v))
        k, v = (torch.cat([F.pad(x, (0, 0, 0, 0, 1, -1)), x], dim=3) for x in (k, v))
        at = torch.arange(q.shape[2] * 4, device=q.device).view(-1, 4)
        seen = torch.cat([F.pad(at, (0, 0, 1, -1), value=-1), at], -1)
        hidden = (at[..., :, None] < seen[..., None, :]) | (seen[..., None, :] < 0)
        scores = torch.einsum("bhwie,bhwje->bhwij", q, k).masked_fill(hidden, -1e30)
        return torch.einsum("bhwij,bhwje->bhwie", scores.softmax(-1), v).flatten(2, 3)


class TalkingHeads(Causal):
    """Weights of heads mixed by a convolution over scores, whose rows are positions."""

    def block(self):
        block = super().block()
        block["heads"] = nn.Conv2d(HEADS, HEADS, 1, bias=False)
        return block

    def mixed(self, block, x, tokens):
        q, k, v = block["q"](x), *block["kv"](x).chunk(2, -1)
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in (q, k, v))
        weights = block["heads"](q @ k.mT).softmax(-1)
        return block["o"]((weights @ v).transpose(1, 2).flatten(2))


class Grid(Causal):
    """Attention along one dim of a grid of positions, of queries with two batch dims."""

    def attend(self, q, k, v, tokens):
        grid = [x.transpose(1, 2).unflatten(1, (4, -1)).permute(0, 2, 3, 1, 4) for x in (q, k, v)]
        columns = F.scaled_dot_product_attention(*grid).permute(0, 3, 1, 2, 4).flatten(1, 2).transpose(1, 2)
        many = [x.unsqueeze(1).expand(-1, 3, -1, -1, -1) for x in (q, k, v)]
        return columns + F.scaled_dot_product_attention(*many, is_causal=True).mean(1)


class Pooled(Causal):
    """Takes last, largest and normalised positions, and mixes them by weights of the length."""

    def block(self):
        block = super().block()
        block["space"], block["norms"] = nn.Linear(16, 16), nn.InstanceNorm1d(DIM, affine=True)
        return block

    def mixed(self, block, x, tokens):
        x = block["norms"](x.transpose(1, 2)).transpose(1, 2)
        last = (tokens != 0).long().cumsum(1).argmax(1)
        taken = x[torch.arange(x.shape[0], device=x.device), last]
        again = x.gather(1, last[:, None, None].expand(-1, 1, x.shape[-1]))
        x = x + taken[:, None] + again + x[:, -1:] + x.amax(1, keepdim=True)
        return block["o"](x * block["space"](x.transpose(1, 2)).transpose(1, 2))


class SelfAttending(nn.Module):
    """A block with a forward of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.heads = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x):
        y = self.norm(x)
        x = x + self.heads(y, y, y, need_weights=False)[0]
        return x + F.gelu(self.up(x))


class Registers(nn.Module):
    """Trained tokens before those of the batch, which the head does not see: a length that the model makes."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.registers = nn.Parameter(torch.randn(1, 3, DIM))
        self.layers = nn.ModuleList(SelfAttending() for _ in range(2))

    def forward(self, tokens):
        x = torch.cat([self.registers.expand(tokens.shape[0], -1, -1), self.embedding(tokens)], dim=1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[:, 3:]


MIXERS = {
    cls.__name__: cls
    for cls in (
        Mamba, Alone, Rwkv, Recurrent, Lstm, Conformer, Subsampled, Hyena, CountedPositions, InPlace, ConvOverImage,
        RelativeShift, LinearAttention, ShiftedWindows, LookingBack, TalkingHeads, Grid, Pooled, Registers,
    )
}  # fmt: skip


class StagedBlock(nn.Module):
    """A block with a forward of its own, as schedules and recomputation need it."""

    def __init__(self, language):
        super().__init__()
        self.parts, self.mix = language.block(), None

    def forward(self, x):
        x = x + self.mix(self.parts, self.parts["norm"](x), None)
        return x + F.silu(self.parts["up"](x))


class Staged(nn.Module):
    """The blocks of another model.

    Args:
        kind: Its class.
    """

    def __init__(self, kind):
        super().__init__()
        language = kind()
        self.embedding, self.head = language.embedding, language.head
        self.layers = nn.ModuleList(StagedBlock(language) for _ in range(2))
        for layer in self.layers:
            layer.mix = functools.partial(kind.mixed, _Without(kind))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class _Without:
    """The methods of a model without its modules."""

    def __init__(self, kind):
        self.kind, self.kv_heads = kind, HEADS

    def attend(self, q, k, v, tokens):
        return self.kind.attend(None, q, k, v, tokens)
