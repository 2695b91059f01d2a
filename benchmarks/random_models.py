"""Models put together at random, in layouts of two ranks, beside one device.

    python benchmarks/random_models.py --count 50 --seed 0 [--layouts fsdp2 tp pp]

What a model's author chooses is drawn: how tokens are mixed and positions known, how norms, residuals and both ends are
written, how blocks are kept and called, what is shared, what of the first block the last one reads, what is returned.
Each is trained for two steps of SGD in float64; losses and gradients of both are compared with the same model on one
device. A case is a function of its seed: `--count 1 --seed 9` repeats one. Exit code 1 if any differs, or raises what
is no ComposerError.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import note, say
from random_model_parts import DIM, EMBEDDINGS, HEADS, LENGTH, MIXERS, MLPS, NORMS, RESIDUALS, VOCAB
from torch import Tensor, nn

import composer3d
from composer3d.testing import run_ranks

__all__ = ["Model", "main"]

SAMPLES, STEPS, TOLERANCE = 4, 2, 1e-9
VERDICTS = ("equal", "refused", "DIFFERS", "RAISED")
LAYOUTS: Mapping[str, str] = {
    "fsdp2": "[sharding.fsdp2]",
    "recomputed": "[sharding.fsdp2]\n[scheduling.activation_checkpoint]",
    "ddp": "[sharding.ddp]",
    "tp": "mesh.tp = 2\n[sharding.tensor_parallel]",
    "sp": "mesh.tp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true",
    "cp": "mesh.cp = 2\n[sharding.context_parallel]",
    "pp": "mesh.pp = 2\ntrain.microbatch = 2\n[scheduling.pipeline]",
}
CONTAINERS = ("ModuleList", "Sequential", "ModuleDict", "attributes", "list of lists", "dict of parts")
SHARED = ("nothing", "nothing", "nothing", "block", "mlp", "norm", "turns")
SKIPS = ("none", "none", "none", "first into last", "U", "embedding into all")
OUTPUTS = ("logits", "logits", "tuple", "dict", "auxiliary loss")
CALLS = ("x", "x", "with positions", "by keyword", "tuple")
POSITIONS = ("learned", "sinusoidal", "parameter", "none")


class Block(nn.Module):
    """Mixes tokens, then computes on each.

    Args:
        draw: Chooses.
        choices: Of the model, by name.
        mlp: Shared by all blocks, or None.
        norm: Likewise.
    """

    def __init__(self, draw: random.Random, choices: Mapping[str, str], mlp: nn.Module | None, norm: Any) -> None:
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

    def forward(self, x_BSD: Tensor, positions_S: Tensor | None = None, *, scale: float = 1.0) -> Any:
        """Return x_BSD, or it and a number of the block."""
        x_BSD = self.residual(self, x_BSD, self.norm1, self.mixer)
        if positions_S is not None:
            x_BSD = x_BSD + 0.01 * positions_S.to(x_BSD.dtype).unsqueeze(-1)
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
    )
    found |= {name: draw.choice(values) for name, values in names}
    found["mixers"] = ", ".join(draw.sample(list(MIXERS), draw.choice([1, 1, 1, 2])))
    if found["container"] == "Sequential":
        found |= {"call": "x", "skip": "none"}
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
        self.tokens = EMBEDDINGS[chosen["embedding"]]()
        if chosen["positions"] == "learned":
            self.positions = nn.Embedding(16, DIM)
        elif chosen["positions"] == "parameter":
            self.pos_embed = nn.Parameter(torch.randn(1, 16, DIM) / 4)
        elif chosen["positions"] == "sinusoidal":
            angles = torch.arange(16).unsqueeze(1) * 10.0 ** -torch.arange(0, 4, 8 / DIM)
            self.register_buffer("waves", torch.cat((angles.sin(), angles.cos()), 1), persistent=False)
        mlp = MLPS[chosen["mlp"]]() if chosen["shared"] == "mlp" else None
        norm = NORMS[chosen["norm"]]() if chosen["shared"] == "norm" else None
        blocks = [Block(draw, chosen, mlp, norm) for _ in range(num)]
        if chosen["shared"] == "block":
            blocks = [blocks[0]] * num
        elif chosen["shared"] == "turns":
            blocks = [blocks[index % 2] for index in range(num)]
        self._keep(blocks)
        self.final = NORMS[chosen["norm"]]()
        self.head = nn.Linear(DIM, VOCAB, bias=chosen["head"] == "adapted")
        if chosen["head"] == "tied attribute":
            self.head.weight = self.tokens.weight
        elif chosen["head"] == "with temperature":
            self.temperature = nn.Parameter(torch.tensor(0.2))
        elif chosen["head"] == "adapted":
            self.adapter = nn.Linear(DIM, DIM)
        elif chosen["head"] in ("F.linear of the embedding", "x @ embedding.T"):
            del self.head

    def _keep(self, blocks: list[Block]) -> None:
        container, names = self.choices["container"], [f"h{index}" for index in range(len(blocks))]
        if container == "Sequential":
            self.layers: Any = nn.Sequential(*blocks)
        elif container == "ModuleDict":
            self.layers = nn.ModuleDict(zip(names, blocks, strict=True))
        elif container == "attributes":
            for name, block in zip(names, blocks, strict=True):
                setattr(self, name, block)
        elif container == "list of lists":
            self.stages = nn.ModuleList([nn.ModuleList(blocks[:2]), nn.ModuleList(blocks[2:])])
        elif container == "dict of parts":
            self.transformer = nn.ModuleDict({"h": nn.ModuleList(blocks), "ln_f": NORMS[self.choices["norm"]]()})
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
        x_BSD, auxiliary = self._embedded(tokens_BS), []
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
                x_BSD = self._called(block, x_BSD, auxiliary)
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

    def _called(self, block: Any, x_BSD: Tensor, auxiliary: list[Tensor]) -> Tensor:
        call = self.choices["call"]
        if call == "with positions":
            return block(x_BSD, torch.arange(x_BSD.shape[1], device=x_BSD.device))
        if call == "by keyword":
            return block(x_BSD, scale=0.5)
        if call == "tuple":
            x_BSD, each_B = block(x_BSD)
            auxiliary.append(each_B)
            return x_BSD
        return block(x_BSD)


def loss_fn(output: Any, targets_BS: Tensor) -> Tensor:
    """Return the mean cross-entropy, and what the model adds to it."""
    logits = output["logits"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    loss = F.cross_entropy(logits.flatten(0, 1), targets_BS.flatten())
    return loss + 0.1 * output[1].mean() if isinstance(output, tuple) and output[1].dim() == 1 else loss


def batches_of(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and targets, BS, of every step."""
    generator = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randint(0, VOCAB, (SAMPLES, LENGTH), generator=generator) for _ in range(2))  # type: ignore[misc]
        for _ in range(STEPS)
    ]


def made(seed: int) -> Model:
    """Return a seed's model, its weights drawn from the seed."""
    torch.manual_seed(seed)
    return Model(seed)


def compared(manifest: Path, seed: int) -> tuple[str, str]:
    """Return verdict and detail of a case, on one of two ranks."""
    torch.set_default_dtype(torch.float64)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    alone, batches = made(seed), batches_of(seed)
    try:
        run = composer3d.compose(made(seed), manifest, loss_fn=loss_fn, example=((batches[0][0],), {}))
        plain = torch.optim.SGD(alone.parameters(), lr=0.1)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        size = SAMPLES // run.context.data_parallel_degree
        mine = slice(run.context.data_parallel_rank * size, (run.context.data_parallel_rank + 1) * size)
        worst, where = 0.0, ""
        for number, (tokens, targets) in enumerate(batches):
            expected = loss_fn(alone(tokens), targets)
            expected.backward()
            with run.step(number):
                value = run.forward_backward(tokens[mine], target=targets[mine])
                norm = run.clip_grad_norm_(1e9)  # sums the gradients of weights that stages share
                gradients = [p.grad for p in alone.parameters() if p.grad is not None]
                for distance, name in (
                    (_distance(value, expected.detach()), "the loss"),
                    (_distance(norm, nn.utils.get_total_norm(gradients)), "the norm"),
                    *_distances_of_gradients(run, alone),
                ):
                    if not distance <= worst:
                        worst, where = distance, f"{name} in step {number}"
                optimizer.step()
                optimizer.zero_grad()
            plain.step()
            plain.zero_grad()
        run.close()
    except composer3d.ComposerError as error:
        return "refused", str(error)
    except Exception as error:
        return "RAISED", f"{type(error).__name__}: {error}"
    return ("equal" if worst < TOLERANCE else "DIFFERS"), f"{worst:.2g} ({where})"


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max()) / (1e-3 + float(other.abs().max()))


def _distances_of_gradients(run: Any, alone: nn.Module) -> list[tuple[float, str]]:
    whole = dict(alone.named_parameters(remove_duplicate=False))
    return [
        (
            _distance(
                run.full_tensor(fqn, torch.zeros_like(p) if p.grad is None else p.grad),
                torch.zeros_like(whole[fqn]) if whole[fqn].grad is None else whole[fqn].grad,  # type: ignore[arg-type]
            ),
            fqn,
        )
        for fqn, p in run.named_parameters()
    ]


def main() -> int:
    """Compare, and print the counts and what is not equal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--refusals", action="store_true", help="print them")
    arguments = parser.parse_args()
    verdicts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.layouts:
            Path(folder, f"{name}.toml").write_text(f"composer3d = 1\n{LAYOUTS[name]}\n", encoding="utf-8")
        for seed in range(arguments.seed, arguments.seed + arguments.count):
            for name in arguments.layouts:
                verdict, detail = _case(Path(folder, f"{name}.toml"), seed)
                verdicts[verdict] += 1
                if verdict in ("DIFFERS", "RAISED") or (verdict == "refused" and arguments.refusals):
                    note(f"{seed} {name} {verdict}: {detail}\n    {choices_of(seed)}")
    say("  ".join(f"{verdict} {verdicts[verdict]}" for verdict in VERDICTS))
    return int(verdicts["DIFFERS"] + verdicts["RAISED"] > 0)


def _case(manifest: Path, seed: int) -> tuple[str, str]:
    """Return the worst verdict of two ranks."""
    try:
        return max(run_ranks(compared, 2, manifest, seed, timeout_s=120), key=lambda found: VERDICTS.index(found[0]))
    except composer3d.RankError as error:
        return "RAISED", str(error)


if __name__ == "__main__":
    sys.exit(main())
