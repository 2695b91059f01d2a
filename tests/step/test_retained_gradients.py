"""Retained gradients of earlier backwards, as a forward, a backward hook and the loop read them, are one device's.

Shapes: B samples, S positions, D features.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.late_hooks import VOCAB, Block, D
from support.models import write_manifest
from torch import Tensor, nn

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
SIZE, STEPS = 4, 3
FSDP = "[sharding.fsdp2]\n"
CP = "mesh.cp = 2\n[sharding.context_parallel]\n"


class Model(nn.Module):
    """Moves its embeddings along the sign of their last gradient, and looks at earlier ones in a backward hook."""

    def __init__(self, *, moves: bool = True) -> None:
        super().__init__()
        self.moves = moves
        self.tokens, self.positions = nn.Embedding(VOCAB, D), nn.Embedding(16, D)
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(D, VOCAB)
        self.kept: list[Tensor] = []
        self.seen: list[Tensor] = []
        self.blocks[1].register_full_backward_hook(self._look)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1]))
        if self.moves and self.kept and self.kept[-1].grad is not None:
            x = x + 0.1 * self.kept[-1].grad.sign()
        if self.moves and x.requires_grad:
            x.retain_grad()
            self.kept.append(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def _look(self, module: nn.Module, into: Any, outof: Any) -> None:
        before = [each.grad for each in self.kept[:-1] if each.grad is not None]
        self.seen.append(torch.stack([each.square().sum() for each in before]).sum() if before else torch.zeros(()))


def loss_of(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o.flatten(0, 1), t.flatten())


def trained(text: str, microbatch: int, length: int, own: bool) -> dict[str, float]:
    """Return how far weights, and all gradients that were retained, are from one device's after some steps."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(0, VOCAB, (SIZE, length), generator=generator) for _ in "xy") for _ in range(STEPS)]
    reference, model = _seeded(), _seeded()
    run = composer3d.compose(model, write_manifest(text), loss_fn=loss_of, example=((batches[0][0],), {}))
    ranks, rank = run.context.data_parallel_degree, run.context.data_parallel_rank
    per_rank = SIZE // ranks
    mine = slice(rank * per_rank, (rank + 1) * per_rank)
    # A micro-batch of one device has those of all ranks.
    pieces = torch.arange(SIZE).view(ranks, -1, microbatch).transpose(0, 1).flatten(1)
    plain, optimizer = torch.optim.SGD(reference.parameters(), lr=0.3), run.optimizer(torch.optim.SGD, lr=0.3)
    for step, (x, y) in enumerate(batches):
        for piece in pieces:
            (loss_of(reference(x[piece]), y[piece]) / len(pieces)).backward()
        plain.step()
        plain.zero_grad()
        with run.step(step):
            if own:
                run.backward(loss_of(run.model(x[mine]), y[mine]))
            else:
                run.forward_backward(x[mine], target=y[mine])
            optimizer.step()
            optimizer.zero_grad()
    pairs = {
        fqn: (run.full_tensor(fqn, p.detach()), reference.get_parameter(fqn).detach())
        for fqn, p in run.named_parameters()
    }
    assert len(model.kept) == len(reference.kept) == STEPS * len(pieces)
    held = slice(rank * microbatch, (rank + 1) * microbatch)
    for index, (one, other) in enumerate(zip(model.kept, reference.kept, strict=True)):
        pairs[f"gradient {index}"] = one.grad, other.grad[held]
    if ranks == 1:
        pairs["in hooks"] = torch.stack(model.seen), torch.stack(reference.seen)
    run.close()
    return {name: float((one - other).abs().max() / other.abs().max()) for name, (one, other) in pairs.items()}


def _seeded(*, moves: bool = True) -> Model:
    torch.manual_seed(0)
    return Model(moves=moves)


@pytest.mark.parametrize("own", [False, True], ids=["engine", "loop"])
@pytest.mark.parametrize("text", [f"mesh.dp_shard = 2\n{FSDP}", CP + FSDP], ids=["fsdp2", "cp"])
def test_a_forward_reads_the_gradient_that_the_last_step_retained(text: str, own: bool):
    microbatch = SIZE if text.startswith(CP) else SIZE // 2
    for found in run_ranks(trained, 2, text, microbatch, 8, own):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


@pytest.mark.parametrize(
    "text",
    [
        f"train.microbatch = 1\nmesh.dp_shard = 2\n{FSDP}",
        f"train.microbatch = 1\n{CP}{FSDP}",
    ],
    ids=["fsdp2", "cp"],
)
def test_a_forward_reads_that_of_the_last_micro_batch(text: str):
    for found in run_ranks(trained, 2, text, 1, 8, False):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def in_two_backwards(asks: bool) -> list[float]:
    """Return how far a gradient is that two backwards add to, with torch asked for another one between them."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, VOCAB, (SIZE, 8), generator=generator) for _ in "xy")
    reference, model = _seeded(), _seeded()
    run = composer3d.compose(model, write_manifest(CP + FSDP), example=((x,), {}))
    found = []
    for each, backward in ((reference, lambda loss, **last: loss.backward(**last)), (run.model, run.backward)):
        with run.step(0) if each is run.model else contextlib.nullcontext():
            output = each(x)
            first, second = loss_of(output, y), (output * output.detach()).mean()
            backward(first, retain_graph=True, **({"last": False} if each is run.model else {}))
            if asks:
                (asked,) = torch.autograd.grad(second, each.kept[-1], retain_graph=True)
            backward(second)
        found.append([each.kept[-1].grad, *([asked] if asks else [])])
    run.close()
    return [float((one - other).abs().max() / other.abs().max()) for other, one in zip(*found, strict=True)]


@pytest.mark.parametrize("asks", [False, True], ids=["added", "and asked for"])
def test_several_backwards_add_to_one_gradient(asks: bool):
    for found in run_ranks(in_two_backwards, 2, asks):
        assert len(found) == 1 + asks
        assert max(found) < TIGHT


def of_many_microbatches(text: str) -> list[float]:
    """Return how far gradients are that a block's forwards retain, all of which come before the first backward."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, VOCAB, (20, 8), generator=generator) for _ in "xy")
    reference, kept = _seeded(moves=False), []
    reference.blocks[0].register_forward_hook(lambda _, __, output: wanted.append(output) or output.retain_grad())
    wanted: list[Tensor] = []
    loss_of(reference(x), y).backward()
    run = composer3d.compose(_seeded(moves=False), write_manifest(text), loss_fn=loss_of, example=((x[:1],), {}))
    part = run.context.parts[0]
    if part.index == 0:
        block = next(each for each in part.module.modules() if isinstance(each, Block))
        block.register_forward_hook(lambda _, __, o: kept.append(o) or o.retain_grad() if o.requires_grad else None)
    size = len(x) // run.context.data_parallel_degree
    mine = slice(run.context.data_parallel_rank * size, (run.context.data_parallel_rank + 1) * size)
    with run.step(0):
        run.forward_backward(x[mine], target=y[mine])
    run.close()
    if part.index:
        return []
    pairs = zip(kept[-size:], wanted[0].grad[mine], strict=True)
    return [float((one.grad - other[None]).abs().max() / other.abs().max()) for one, other in pairs]


@pytest.mark.slow
def test_any_number_of_forwards_of_a_pipeline_retain_before_the_first_backward():
    text = f"mesh = {{ pp = 2, dp_shard = 2 }}\ntrain.microbatch = 1\n{FSDP}[scheduling.pipeline]\nschedule = 'GPipe'\n"
    found = run_ranks(of_many_microbatches, 4, text)
    assert [len(each) for each in found] == [10, 10, 0, 0]
    assert all(error < TIGHT for each in found for error in each)


def read_in_flight(schedule: str) -> list[str]:
    """Return what is said where a forward of a pipeline reads the gradient of the micro-batch before it."""
    torch.set_default_dtype(torch.float64)
    x, y = (torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(1)) for _ in "xy")
    text = f"mesh.pp = 2\ntrain.microbatch = 1\n[scheduling.pipeline]\nschedule = '{schedule}'\n"
    run = composer3d.compose(_seeded(moves=False), write_manifest(text), loss_fn=loss_of, example=((x[:1],), {}))
    part, kept, said = run.context.parts[0], [], []
    block = next(each for each in part.module.modules() if isinstance(each, Block))

    def look(module: nn.Module, given: Any, output: Tensor) -> None:
        if not output.requires_grad:
            return
        output.retain_grad()
        assert output.grad is None  # its own, as on one device
        kept.append(output)
        try:
            said.append("none" if len(kept) > 1 and kept[-2].grad is None else "there")
        except composer3d.StepError as error:
            said.append(str(error).partition(" (")[0])

    block.register_forward_hook(look)
    with run.step(0):
        run.forward_backward(x, target=y)
    run.close()
    del kept[:-4]  # a forward before those of the micro-batches
    assert [type(each) for each in kept] == [Tensor] * 4
    assert all(each.grad is not None for each in kept)
    return said if part.index == 0 else []


@pytest.mark.parametrize("schedule", ["1F1B", pytest.param("GPipe", marks=pytest.mark.slow)])
def test_a_forward_that_reads_the_gradient_of_a_micro_batch_in_flight_is_refused(schedule: str):
    said = run_ranks(read_in_flight, 2, schedule)[0]
    assert said[-3:] == ["a forward reads .grad of an activation of an earlier micro-batch"] * 3
