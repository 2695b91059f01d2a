"""Models put together at random, in layouts of two and four ranks, beside one device.

    python benchmarks/random_models.py --count 50 --seed 0 [--layouts fsdp2 tp pp]

What a model's author chooses is drawn: how tokens are mixed and positions known, how norms, residuals and both ends are
written, how blocks are kept and called, what is shared and frozen, what of other blocks one reads, what is returned.
Each is trained for two steps of SGD in float64; losses and gradients of both are compared with the same model on one
device. A case is a function of its seed: `--count 1 --seed 9` repeats one. Exit code 1 if any differs, or raises what
is no ComposerError.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from harness import note, say
from random_model import Model, choices_of
from random_model_parts import LENGTH, VOCAB
from torch import Tensor, nn

import composer3d
from composer3d.testing import run_ranks

__all__ = ["main"]

SAMPLES, STEPS, TOLERANCE = 4, 2, 1e-9
VERDICTS = ("equal", "refused", "DIFFERS", "RAISED")
TENSOR, SEQUENCE = "[sharding.tensor_parallel]", "[sharding.tensor_parallel]\nsequence_parallel = true"
LAYOUTS: Mapping[str, str] = {
    "fsdp2": "[sharding.fsdp2]",
    "recomputed": "[sharding.fsdp2]\n[scheduling.activation_checkpoint]",
    "ddp": "[sharding.ddp]",
    "tp": f"mesh.tp = 2\n{TENSOR}",
    "sp": f"mesh.tp = 2\n{SEQUENCE}",
    "cp": "mesh.cp = 2\n[sharding.context_parallel]",
    "pp": "mesh.pp = 2\ntrain.microbatch = 2\n[scheduling.pipeline]",
    "fsdp2 x sp": f"mesh = {{ dp_shard = 2, tp = 2 }}\n[sharding.fsdp2]\n{SEQUENCE}",
    "pp x tp": f"mesh = {{ pp = 2, tp = 2 }}\ntrain.microbatch = 2\n[scheduling.pipeline]\n{TENSOR}",
    "pp x ddp": "mesh = { pp = 2, dp_replicate = 2 }\ntrain.microbatch = 1\n[scheduling.pipeline]\n[sharding.ddp]",
    "cp x tp": f"mesh = {{ cp = 2, tp = 2 }}\n[sharding.context_parallel]\n{TENSOR}",
}


def loss_fn(output: Any, targets_BS: Tensor) -> Tensor:
    """Return the mean cross-entropy, and what the model adds to it."""
    logits = output["logits"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    if logits.dim() == 2:  # of a sample
        targets_BS = targets_BS[:, 0]
    loss = F.cross_entropy(logits.flatten(0, -2), targets_BS.flatten())
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
                if alone.choices["loop"] == "own" and run.context.degrees["pp"] == 1:
                    value = run.backward(loss_fn(run.model(tokens[mine]), targets[mine]))
                    assert value is not None, "the step's last backward"
                else:
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
    """Return the worst verdict of all ranks."""
    num_ranks = 4 if " x " in manifest.stem else 2
    try:
        found: list[tuple[str, str]] = run_ranks(compared, num_ranks, manifest, seed, timeout_s=120)
    except composer3d.RankError as error:
        return "RAISED", str(error)
    return max(found, key=lambda each: VERDICTS.index(each[0]))


if __name__ == "__main__":
    sys.exit(main())
