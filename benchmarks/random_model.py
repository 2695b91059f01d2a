"""Models that are put together at random for `random_models.py`: what a seed chooses, and the model of its choices."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from random_model_parts import DIM, MIXERS, MLPS, VOCAB, CrossAttention
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["Model", "choices_of"]


class HandNorm(nn.Module):
    """RMSNorm by hand, the weight counted from 0 as in Gemma."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(DIM))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return x_BSD * torch.rsqrt(x_BSD.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.weight)


class ChannelNorm(nn.Module):
    """GroupNorm of every position's features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, DIM)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.norm(x_BSD.flatten(0, 1)).view_as(x_BSD)


class Affine(nn.Module):
    """A scale and a shift, as in ResMLP."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(1, 1, DIM)), nn.Parameter(torch.zeros(1, 1, DIM))

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.alpha * x_BSD + self.beta


NORMS: Mapping[str, Callable[[], nn.Module]] = {
    "LayerNorm": lambda: nn.LayerNorm(DIM),
    "RMSNorm": lambda: nn.RMSNorm(DIM),
    "RMSNorm by hand": HandNorm,
    "LayerNorm without weight": lambda: nn.LayerNorm(DIM, elementwise_affine=False),
    "GroupNorm": ChannelNorm,
    "affine": Affine,
    "no norm": nn.Identity,
}

# Given the block, x and one of its two parts, with the part's norm.
Branch = Callable[[Tensor], Tensor]
RESIDUALS: Mapping[str, Callable[[Any, Tensor, Branch, Branch], Tensor]] = {
    "pre-norm": lambda block, x, norm, part: x + part(norm(x)),
    "post-norm": lambda block, x, norm, part: norm(x + part(x)),
    "sandwich": lambda block, x, norm, part: x + norm(part(norm(x))),
    "ReZero": lambda block, x, norm, part: x + block.resweight * part(norm(x)),
    "layer scale": lambda block, x, norm, part: x + block.gamma * part(norm(x)),
    "highway": lambda block, x, norm, part: torch.lerp(x, part(norm(x)), block.carry(x).sigmoid()),
    "halved": lambda block, x, norm, part: (x + part(norm(x))) / math.sqrt(2),
    "in place": lambda block, x, norm, part: part(norm(x)).add_(x),
}


class Table(nn.Module):
    """An embedding that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, DIM))

    def forward(self, tokens_BS: Tensor) -> Tensor:
        return self.weight[tokens_BS]


EMBEDDINGS: Mapping[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(VOCAB, DIM),
    "padded embedding": lambda: nn.Embedding(VOCAB, DIM, padding_idx=0),
    "table": Table,
}
HEADS: Mapping[str, Callable[[Any, Tensor], Tensor]] = {
    "head": lambda model, x: model.head(x),
    "tied attribute": lambda model, x: model.head(x),
    "F.linear of the embedding": lambda model, x: F.linear(x, model.tokens.weight),
    "x @ embedding.T": lambda model, x: x @ model.tokens.weight.T,
    "soft-capped": lambda model, x: 5 * torch.tanh(model.head(x) / 5),
    "with temperature": lambda model, x: model.head(x) * model.temperature.exp(),
    "adapted": lambda model, x: model.head(F.gelu(model.adapter(x))),
    "pooled": lambda model, x: model.head(x.mean(1)),
    "last position": lambda model, x: model.head(x[:, -1]),
}

CONTAINERS = ("ModuleList", "Sequential", "ModuleDict", "attributes", "list of lists", "dict of parts")
SHARED = ("nothing", "nothing", "nothing", "block", "mlp", "norm", "turns")
SKIPS = ("none", "none", "none", "first into last", "U", "embedding into all")
OUTPUTS = ("logits", "logits", "tuple", "dict", "auxiliary loss")
CALLS = ("x", "x", "with positions", "with a mask", "by keyword", "tuple", "checkpointed")
CROSSED = ("no", "no", "no", "second half")
FROZEN = ("nothing", "nothing", "nothing", "embedding", "first block", "norms")
LOOPS = ("forward_backward", "own")
POSITIONS = ("learned", "sinusoidal", "parameter", "none")


class Block(nn.Module):
    """Mixes tokens, then computes on each.

    Args:
        draw: Chooses.
        choices: Of the model, by name.
        mlp: Shared by all blocks, or None.
        norm: Likewise.
        is_crossed: Whether it attends to a memory too.
    """

    def __init__(
        self,
        draw: random.Random,
        choices: Mapping[str, str],
        mlp: nn.Module | None,
        norm: Any,
        *,
        is_crossed: bool = False,
    ) -> None:
        super().__init__()
        self.mixer = MIXERS[draw.choice(choices["mixers"].split(", "))]()
        self.mlp = MLPS[choices["mlp"]]() if mlp is None else mlp
        self.norm1, self.norm2 = (NORMS[choices["norm"]]() if norm is None else norm for _ in range(2))
        self.residual, self.call = RESIDUALS[choices["residual"]], choices["call"]
        if choices["residual"] == "ReZero":
            self.resweight = nn.Parameter(torch.tensor(0.5))
        if choices["residual"] == "layer scale":
            self.gamma = nn.Parameter(torch.full((DIM,), 0.3))
        if choices["residual"] == "highway":
            self.carry = nn.Linear(DIM, DIM)
        if is_crossed:
            self.cross = CrossAttention()

    def forward(
        self,
        x_BSD: Tensor,
        positions_S: Tensor | None = None,
        *,
        mask_BS: Tensor | None = None,
        memory_BTD: Tensor | None = None,
        scale: float = 1.0,
    ) -> Any:
        """Return x_BSD, or it and a number for every sample."""
        x_BSD = self.residual(self, x_BSD, self.norm1, self.mixer)
        if positions_S is not None:
            x_BSD = x_BSD + 0.01 * positions_S.to(x_BSD.dtype).unsqueeze(-1)
        if mask_BS is not None:
            x_BSD = x_BSD.masked_fill(~mask_BS.unsqueeze(-1), 0.0)
        if memory_BTD is not None:
            x_BSD = x_BSD + self.cross(x_BSD, memory_BTD)
        x_BSD = self.residual(self, x_BSD, self.norm2, lambda x: scale * self.mlp(x))
        return (x_BSD, x_BSD.square().mean((1, 2))) if self.call == "tuple" else x_BSD


def choices_of(seed: int) -> dict[str, str]:
    """Return what a seed chooses, by name."""
    draw = random.Random(seed)
    tables = {"mlp": MLPS, "norm": NORMS, "residual": RESIDUALS, "embedding": EMBEDDINGS, "head": HEADS}
    found = {name: draw.choice(list(table)) for name, table in tables.items()}
    names: Sequence[tuple[str, Sequence[str]]] = (
        ("container", CONTAINERS),
        ("shared", SHARED),
        ("skip", SKIPS),
        ("output", OUTPUTS),
        ("call", CALLS),
        ("positions", POSITIONS),
        ("blocks", ("2", "3", "4")),
        ("crossed", CROSSED),
        ("frozen", FROZEN),
        ("loop", LOOPS),
    )
    found |= {name: draw.choice(values) for name, values in names}
    found["mixers"] = ", ".join(draw.sample(list(MIXERS), draw.choice([1, 1, 1, 2])))
    if found["container"] == "Sequential":
        found |= {"call": "x", "skip": "none", "crossed": "no"}
    if found["crossed"] != "no" and found["shared"] in ("block", "turns"):
        found["crossed"] = "no"
    if found["call"] != "tuple" and found["output"] == "auxiliary loss":
        found["output"] = "logits"
    return found


class Model(nn.Module):
    """A token model of a seed's choices.

    Args:
        seed: Of the case.
    """

    waves: Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        chosen, draw = choices_of(seed), random.Random(~seed)
        self.choices, num = chosen, int(chosen["blocks"])
        self.tokens: Any = EMBEDDINGS[chosen["embedding"]]()
        if chosen["positions"] == "learned":
            self.positions = nn.Embedding(16, DIM)
        elif chosen["positions"] == "parameter":
            self.pos_embed = nn.Parameter(torch.randn(1, 16, DIM) / 4)
        elif chosen["positions"] == "sinusoidal":
            angles = torch.arange(16).unsqueeze(1) * 10.0 ** -torch.arange(0, 4, 8 / DIM)
            self.register_buffer("waves", torch.cat((angles.sin(), angles.cos()), 1), persistent=False)
        mlp = MLPS[chosen["mlp"]]() if chosen["shared"] == "mlp" else None
        norm = NORMS[chosen["norm"]]() if chosen["shared"] == "norm" else None
        crossed = [chosen["crossed"] != "no" and index >= num // 2 for index in range(num)]
        blocks = [Block(draw, chosen, mlp, norm, is_crossed=is_crossed) for is_crossed in crossed]
        if chosen["shared"] == "block":
            blocks = [blocks[0]] * num
        elif chosen["shared"] == "turns":
            blocks = [blocks[index % 2] for index in range(num)]
        self._keep(blocks)
        self.final = NORMS[chosen["norm"]]()
        self.head: Any = nn.Linear(DIM, VOCAB, bias=chosen["head"] == "adapted")
        if chosen["head"] == "tied attribute":
            self.head.weight = self.get_parameter("tokens.weight")
        elif chosen["head"] == "with temperature":
            self.temperature = nn.Parameter(torch.tensor(0.2))
        elif chosen["head"] == "adapted":
            self.adapter = nn.Linear(DIM, DIM)
        elif chosen["head"] in ("F.linear of the embedding", "x @ embedding.T"):
            del self.head
        self._freeze(blocks[0])

    def _freeze(self, first: Block) -> None:
        modules = {
            "nothing": [],
            "embedding": [self.tokens],
            "first block": [first],
            "norms": [module for module in self.modules() if "norm" in type(module).__name__.lower()],
        }[self.choices["frozen"]]
        for module in modules:
            module.requires_grad_(False)

    def _keep(self, blocks: list[Block]) -> None:
        container, names = self.choices["container"], [f"h{index}" for index in range(len(blocks))]
        if container == "Sequential":
            self.layers: Any = nn.Sequential(*blocks)
        elif container == "ModuleDict":
            self.layers = nn.ModuleDict(dict(zip(names, blocks, strict=True)))
        elif container == "attributes":
            for name, block in zip(names, blocks, strict=True):
                setattr(self, name, block)
        elif container == "list of lists":
            self.stages: Any = nn.ModuleList([nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])])
        elif container == "dict of parts":
            self.transformer: Any = nn.ModuleDict({"h": nn.ModuleList(blocks), "ln_f": NORMS[self.choices["norm"]]()})
        else:
            self.layers = nn.ModuleList(blocks)

    def _blocks(self) -> list[Any]:
        container = self.choices["container"]
        if container == "attributes":
            return [getattr(self, f"h{index}") for index in range(int(self.choices["blocks"]))]
        if container == "ModuleDict":
            return [self.layers[name] for name in self.layers]
        if container == "list of lists":
            return [block for stage in self.stages for block in stage]
        return list(self.transformer.h if container == "dict of parts" else self.layers)

    def _embedded(self, tokens_BS: Tensor) -> Tensor:
        x_BSD, S = self.tokens(tokens_BS), tokens_BS.shape[1]
        if self.choices["positions"] == "learned":
            return x_BSD + self.positions(torch.arange(S, device=tokens_BS.device))
        if self.choices["positions"] == "parameter":
            return x_BSD + self.pos_embed[:, :S]
        if self.choices["positions"] == "sinusoidal":
            return x_BSD * DIM**0.5 + self.waves[:S]
        return x_BSD

    def forward(self, tokens_BS: Tensor) -> Any:
        """Return logits_BSV, or what the model's output holds them in."""
        x_BSD, auxiliary = self._embedded(tokens_BS), list[Tensor]()
        if self.choices["container"] == "Sequential":
            x_BSD = self.layers(x_BSD)
        else:
            kept, blocks, skip = [x_BSD], self._blocks(), self.choices["skip"]
            for index, block in enumerate(blocks):
                if skip == "embedding into all" and index:
                    x_BSD = x_BSD + 0.1 * kept[0]
                elif skip == "U" and index >= (len(blocks) + 1) // 2:
                    x_BSD = x_BSD + kept[len(blocks) - index]
                elif skip == "first into last" and index == len(blocks) - 1:
                    x_BSD = x_BSD + kept[1]
                memory = kept[len(blocks) // 2] if hasattr(block, "cross") else None
                x_BSD = self._called(block, x_BSD, auxiliary, mask_BS=tokens_BS != 0, memory_BTD=memory)
                kept.append(x_BSD)
        if self.choices["container"] == "dict of parts":
            x_BSD = self.transformer.ln_f(x_BSD)
        logits_BSV = HEADS[self.choices["head"]](self, self.final(x_BSD))
        return {
            "logits": lambda: logits_BSV,
            "tuple": lambda: (logits_BSV, x_BSD),
            "dict": lambda: {"logits": logits_BSV, "hidden": x_BSD},
            "auxiliary loss": lambda: (logits_BSV, torch.stack(auxiliary).sum(0)),
        }[self.choices["output"]]()

    def _called(
        self, block: Any, x_BSD: Tensor, auxiliary: list[Tensor], *, mask_BS: Tensor, memory_BTD: Tensor | None
    ) -> Tensor:
        call = self.choices["call"]
        options: dict[str, Any] = {} if memory_BTD is None else {"memory_BTD": memory_BTD}
        if call == "with positions":
            return block(x_BSD, torch.arange(x_BSD.shape[1], device=x_BSD.device), **options)
        if call == "with a mask":
            return block(x_BSD, mask_BS=mask_BS, **options)
        if call == "by keyword":
            return block(x_BSD, scale=0.5, **options)
        if call == "checkpointed":
            return checkpoint(block, x_BSD, use_reentrant=False, **options)
        if call == "tuple":
            x_BSD, each_B = block(x_BSD, **options)
            auxiliary.append(each_B)
            return x_BSD
        return block(x_BSD, **options)
