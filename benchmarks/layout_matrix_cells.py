"""Cells of the matrix of layouts: which there are, which may be refused and why, and one beside one device.

Everything about a cell is computed from its four options. `PERMITTED` is the one list of refusals that are right; a
cell that refuses for another reason has failed, and so has one that is on the list and does not refuse.
"""

from __future__ import annotations

import contextlib
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import composer3d
from composer3d import torch_compat
from composer3d.errors import ComposerError, RankError
from composer3d.manifest import load_manifest
from composer3d.models import llama
from composer3d.testing import fake_world, full, pairwise, run_ranks

__all__ = ["OPTIONS", "PERMITTED", "Cell", "Refusal", "Verdict", "cells", "covering", "judge", "one_device", "warm"]

DEGREE = 2
NUM_SEQUENCES, SEQ_LEN, VOCAB_SIZE = 32, 8, 24
NUM_LAYERS = 4  # the longest pipelines here have four stages
NUM_STEPS = 2
TOLERANCE = 1e-12
TIMEOUT_S = 120.0  # of a cell
MAX_RANKS = 8  # of a cell with a sharded sequence

DATA = {
    "ddp": "[sharding.ddp]\n",
    "ddp-bucketed": '[sharding.ddp]\nreducer = "bucketed"\n',
    "zero1": "[sharding.fsdp2]\nzero = 1\n",
    "zero2": "[sharding.fsdp2]\nzero = 2\n",
    "zero3": "[sharding.fsdp2]\nzero = 3\n",
    "hsdp": "[sharding.fsdp2]\n",
}
TENSOR = {
    "tp1": "",
    "tp2": "[sharding.tensor_parallel]\n",
    "tp2-sp": "[sharding.tensor_parallel]\nsequence_parallel = true\n",
}
SCHEDULES = (
    "no-pp",
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
)
CONTEXT = ("cp1", *(f"cp{degree}-{method}" for degree in (2, 4) for method in ("gather", "ring", "ulysses")))
ONE_STAGE = ("no-pp", "GPipe", "1F1B")  # a rank; the other schedules have two
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "data": tuple(DATA),
    "tensor": tuple(TENSOR),
    "schedule": SCHEDULES,
    "microbatches": ("P", "4P"),
    "context": CONTEXT,
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One layout.

    Args:
        data: Of `DATA`, over two ranks, or four for hsdp; where the sequence is sharded, over as many less as keep to
            eight ranks, so that parameters are sharded or averaged over cp alone.
        tensor: Of `TENSOR`.
        schedule: Of `SCHEDULES`.
        microbatches: As many as there are ranks along pp, or four times as many.
        context: Of `CONTEXT`: ranks that share a sequence, and how attention reads the keys of the others.
    """

    data: str
    tensor: str
    schedule: str
    microbatches: str
    context: str = "cp1"

    def __str__(self) -> str:
        name = f"{self.data}/{self.tensor}/{self.schedule}/{self.microbatches}"
        return name if self.context == "cp1" else f"{name}/{self.context}"

    @property
    def permitted(self) -> Sequence[Refusal]:
        """Refusals that are right."""
        return PERMITTED

    def make(self) -> nn.Module:
        """Make the model."""
        return factory()

    @property
    def is_there(self) -> bool:
        """Whether it is a cell: with a sharded sequence, of few ranks, and with one of the kinds of other options."""
        few = self.data != "ddp-bucketed" and self.microbatches == "4P" and self.world_size <= MAX_RANKS
        return self.context == "cp1" or few

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees above 1."""
        axes = [
            ("pp", self.schedule != "no-pp"),
            ("dp_replicate", self.data.startswith("ddp") or self.data == "hsdp"),
            ("dp_shard", not self.data.startswith("ddp")),
            ("tp", self.tensor != "tp1"),
        ]
        found = {name: DEGREE for name, there in axes if there}
        if self.context != "cp1":
            found["cp"] = int(self.context[2])
            for name in ("dp_shard", "dp_replicate"):
                if math.prod(found.values()) > MAX_RANKS:
                    found.pop(name, None)
        return found

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def num_stages(self) -> int:
        """Of the whole pipeline."""
        return self.degrees.get("pp", 1) * (1 if self.schedule in ONE_STAGE else 2)

    @property
    def num_microbatches(self) -> int:
        """Of a data-parallel rank in a step."""
        return self.degrees.get("pp", 1) * (4 if self.microbatches == "4P" else 1)

    @property
    def manifest(self) -> str:
        """The text of its manifest."""
        data_ranks = self.world_size // math.prod(self.degrees.get(name, 1) for name in ("pp", "cp", "tp"))
        mesh = "".join(f"{name} = {degree}\n" for name, degree in self.degrees.items())
        train = f"global_batch = {NUM_SEQUENCES}\nmicrobatch = {NUM_SEQUENCES // data_ranks // self.num_microbatches}\n"
        pipeline = "" if self.schedule == "no-pp" else f'[scheduling.pipeline]\nschedule = "{self.schedule}"\n'
        method = self.context.partition("-")[2]
        context = f'[sharding.context_parallel]\nmethod = "{method}"\n' if method else ""
        tables = f"{DATA[self.data]}{TENSOR[self.tensor]}{context}{pipeline}"
        return f"composer3d = 1\n[mesh]\n{mesh}[train]\n{train}{tables}"


def cells() -> Iterator[Cell]:
    """Yield all of them."""
    for context in CONTEXT:
        for values in product(*(OPTIONS[name] for name in OPTIONS if name != "context")):
            cell = Cell(**dict(zip(OPTIONS, values, strict=False)), context=context)
            if cell.is_there:
                yield cell


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A refusal that is right.

    Args:
        reason: In a few words.
        message: A regular expression that the message of the refusal matches.
        applies: Whether a cell must be refused for it.
    """

    reason: str
    message: str
    applies: Callable[[Cell], bool]


PERMITTED = (
    Refusal(
        reason='reducer = "bucketed" with pp or tp above 1',
        message=r'reducer = "bucketed" does not work with (pp|tp) = \d+: ',
        applies=lambda cell: cell.data == "ddp-bucketed" and bool({"pp", "tp"} & cell.degrees.keys()),
    ),
    Refusal(
        reason="too few micro-batches or blocks for the schedule",
        message=(
            r"makes \d+ micro-batches of \d+, and \w+ needs at least as many micro-batches as stages, \d+"
            r"|makes \d+ stages, and the model (has \d+ blocks|calls blocks \d+ times)"
        ),
        # DualPipeV's two stages a rank are those of one model run from both ends: with fewer micro-batches it has no
        # order of actions. A stage without a block would have nothing to do.
        applies=lambda cell: (
            (cell.schedule == "DualPipeV" and cell.num_microbatches < cell.num_stages) or cell.num_stages > NUM_LAYERS
        ),
    ),
    Refusal(
        reason="fewer heads than ranks that exchange them",
        message=r'method = "ulysses" gives each of 4 ranks the same number of heads, and there are 2',
        applies=lambda cell: cell.context == "cp4-ulysses" and cell.tensor != "tp1",
    ),
)


def covering() -> list[Cell]:
    """Return a few cells of at most eight ranks in which every two options stand together that can."""

    def excluded(row: Mapping[str, str]) -> bool:
        # What is not there yet is taken as what excludes nothing.
        cell = Cell(**{"data": "zero3", "tensor": "tp1", "schedule": "no-pp", "microbatches": "4P", **row})
        return not cell.is_there or cell.world_size > 8 or any(refusal.applies(cell) for refusal in PERMITTED)

    return [Cell(**row) for row in pairwise(OPTIONS, excluded=excluded)]


# ---- cells beside one device -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a cell.

    Args:
        cell: Which one.
        outcome: `proven`, `refused` (as it must be), or `failed`.
        detail: The reason, for what is not proven.
        largest: The largest relative difference by what was compared, over all ranks and steps.
    """

    cell: Cell
    outcome: str
    detail: str
    largest: Mapping[str, float]


def factory() -> nn.Module:
    """Make the model: grouped heads, one block a stage where there are most stages."""
    return llama(
        dim=16,
        num_layers=NUM_LAYERS,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=VOCAB_SIZE,
        ffn_multiple_of=4,
        max_seq_len=SEQ_LEN,
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a step; every sequence has another number of valid targets."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB_SIZE, (NUM_SEQUENCES, SEQ_LEN + 1), generator=generator)
    lengths = torch.randint(0, SEQ_LEN - 1, (NUM_SEQUENCES, 1), generator=generator)
    targets = tokens[:, 1:].masked_fill(torch.arange(SEQ_LEN) < lengths, -100)
    return tokens[:, :-1].contiguous(), targets


def loss_fn(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum over valid tokens and their number."""
    total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")
    return total, (targets != -100).sum()


def train(text: str, make: Callable[[], nn.Module] = factory) -> dict[str, Any]:
    """Run the steps on this rank in float64; return by what is compared and by name every full tensor it has."""
    torch.set_default_dtype(torch.float64)
    torch_compat.silence_redistribution()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cell.toml"
        path.write_text(text)
        manifest = load_manifest(path)
    found: dict[str, Any] = {}
    with composer3d.compose(make, manifest, loss_fn=loss_fn, device="cpu") as run:
        # Linear in the gradients: Adam would divide the smallest ones' rounding by their size.
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        rank, degree = run.context.data_parallel_rank, run.context.data_parallel_degree
        for step in range(NUM_STEPS):
            tokens, targets = (tensor.chunk(degree)[rank] for tensor in batch(step))
            with run.step(step):
                found[f"loss {step}"] = run.forward_backward(tokens, target=targets).detach().clone()
                found[f"grad_norm {step}"] = torch.as_tensor(float(run.clip_grad_norm_(0.5)))
                found |= named(run, f"gradients {step}", lambda parameter: parameter.grad)
                optimizer.step()
                optimizer.zero_grad()
        found |= named(run, "parameters", lambda parameter: parameter)
    return found


def named(run: Any, what: str, part: Callable[[nn.Parameter], Tensor | None]) -> dict[str, Tensor]:
    """Return what the run's parameters have, in full and in the model's order."""
    tensors = {fqn: part(parameter) for fqn, parameter in run.named_parameters()}
    return {
        f"{what} {fqn}": run.context.in_model_order(fqn, full(tensor)).clone()
        for fqn, tensor in tensors.items()
        if tensor is not None
    }


def one_device(make: Callable[[], nn.Module] = factory) -> dict[str, Tensor]:
    """Return what one device computes, whatever the cell: the whole batch in one forward."""
    (reference,) = run_ranks(train, 1, "composer3d = 1\n", make)
    return reference


def warm(cell: Cell) -> None:
    """Compose a cell in a fake world, on meta, so that ranks that are forked afterwards need not import its code.

    A first composition takes 1.4 s of CPU where a second one takes 0.7 s, and every rank pays it.
    """
    torch.set_default_dtype(torch.float64)
    with fake_world(cell.world_size), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cell.toml"
        path.write_text(cell.manifest)
        with contextlib.suppress(ComposerError):
            composer3d.compose(cell.make, load_manifest(path), loss_fn=loss_fn, device="cpu", purpose="plan").close()


def judge(some: Sequence[Cell], reference: Mapping[str, Tensor]) -> list[Verdict]:
    """Run cells of one world size, and compare all that their ranks have with one device.

    They share one world, which saves most of a cell's time; where it fails, each is run again in a world of its own.
    """
    (world_size,) = {cell.world_size for cell in some}

    def measured() -> list[dict[str, float] | str]:
        return [_distances(cell, reference) for cell in some]

    try:
        ranks = run_ranks(measured, world_size, timeout_s=TIMEOUT_S * len(some), max_ranks=max(8, world_size))
    except RankError as error:
        if len(some) == 1:
            return [Verdict(cell=some[0], outcome="failed", detail=str(error), largest={})]
        return [verdict for cell in some for verdict in judge([cell], reference)]
    return [_verdict(cell, [rank[index] for rank in ranks], reference) for index, cell in enumerate(some)]


def _distances(cell: Cell, reference: Mapping[str, Tensor]) -> dict[str, float] | str:
    """Return how far this rank is from one device, by name, or why it refused."""
    try:
        found = train(cell.manifest, cell.make)
    except ComposerError as error:
        return str(error)
    return {name: distance(tensor, reference[name]) for name, tensor in found.items()}


def _verdict(cell: Cell, ranks: Sequence[dict[str, float] | str], reference: Mapping[str, Tensor]) -> Verdict:
    """Put together what the ranks found."""
    must = next((refusal for refusal in cell.permitted if refusal.applies(cell)), None)
    refused = [rank for rank in ranks if isinstance(rank, str)]
    outcome, detail, largest = "proven", "", {}
    if refused:
        if must is not None and len(refused) == len(ranks) and all(re.search(must.message, text) for text in refused):
            outcome, detail = "refused", must.reason
        else:
            outcome, detail = "failed", f"refused on {len(refused)} of {len(ranks)} ranks: {refused[0]}"
        return Verdict(cell=cell, outcome=outcome, detail=detail, largest={})
    together: dict[str, float] = {}
    for name, value in (item for rank in ranks if not isinstance(rank, str) for item in rank.items()):
        kind = name.partition(" ")[0]
        together[name], largest[kind] = max(together.get(name, 0.0), value), max(largest.get(kind, 0.0), value)
    worst = max(together, key=lambda name: together[name])
    if must is not None:
        outcome, detail = "failed", f"not refused, although: {must.reason}"
    elif missing := sorted(reference.keys() - together.keys()):
        outcome, detail = "failed", f"no rank has {missing[0]}"
    elif together[worst] > TOLERANCE:
        outcome, detail = "failed", f"{worst} differs by {together[worst]:.3g} of its largest value"
    return Verdict(cell=cell, outcome=outcome, detail=detail, largest=largest)


def distance(actual: Tensor, reference: Tensor) -> float:
    """Return the largest difference relative to the largest value; infinite where a value is not finite."""
    if actual.shape != reference.shape:
        return float("inf")
    difference = float((actual - reference).abs().max())
    return difference / float(reference.abs().max()) if difference == difference else float("inf")
