"""Context parallelism: what a model's own code has compiled by torch.compile runs as it was, and is one device's."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from support.late_hooks import VOCAB, D
from support.models import mine, write_manifest
from support.root_hooks import Body, Model, loss_of
from torch import Tensor, nn

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
FSDP = "mesh.cp = 2\n[sharding.context_parallel]\n[sharding.fsdp2]\n"


@torch.compile(backend="eager")
def added_up(x: Tensor) -> Tensor:
    """Return what relates positions."""
    return x + x.cumsum(1) / x.shape[1]


class Compiled(nn.Module):
    """Compiles a function of its file, a method, a function that it holds, or a block in place."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.body, self.head, self.kind = Body(), nn.Linear(D, VOCAB), kind
        if kind == "held":
            self.held = torch.compile(lambda x: torch.nn.functional.silu(x) * x, backend="eager")
        if kind == "method":
            self.held = torch.compile(self.without_mean, backend="eager")
        if kind == "in place":
            block: Any = self.body.blocks[0]
            block.compile(backend="eager")

    def without_mean(self, x: Tensor) -> Tensor:
        """Return what relates positions, too."""
        return x - x.mean(1, keepdim=True)

    def forward(self, idx: Tensor) -> Tensor:
        x = self.body(idx)
        if self.kind == "of a file":
            x = added_up(x)
        if self.kind in ("held", "method"):
            x = x + self.held(x)
        return self.head(x)


def errors(kinds: list[str], text: str) -> dict[str, tuple[float, list[str]]]:
    """Return how far gradients are from one device's, of the largest, and what is noted, by kind."""
    torch.set_default_dtype(torch.float64)
    generator, found = torch.Generator().manual_seed(1), {}
    x, y = (torch.randint(0, VOCAB, (4, 8), generator=generator) for _ in range(2))
    for kind in kinds:
        torch.manual_seed(0)
        reference, model = (Compiled(kind), Compiled(kind)) if kind else (Model(), Model())
        model.load_state_dict(reference.state_dict())
        with torch.compiler.set_stance("force_eager"):
            total, count = loss_of(reference(x), y)
            (total / count).backward()
        run = composer3d.compose(model, write_manifest(text), loss_fn=loss_of, example=((x,), {}))
        with run.step(0):
            run.forward_backward(mine(run, x), target=mine(run, y))
            own = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters()}
        notes = [note for note in run.context.stash(composer3d.Decisions).notes if "torch.compile" in note]
        run.close()
        wanted = {fqn: p.grad for fqn, p in reference.named_parameters() if p.grad is not None}
        top = max(float(each.abs().max()) for each in wanted.values())
        found[kind] = max(float((own[fqn] - wanted[fqn]).abs().max()) / top for fqn in own), notes
    return found


def test_compiled_functions_run_as_they_were():
    where = "context_parallel: what torch.compile has compiled in"
    notes = {
        "of a file": [f"{where} the model's own code runs as it was (added_up)"],
        "held": [f"{where} the model's own code runs as it was (<lambda>)"],
        "method": [f"{where} the model's own code runs as it was (without_mean)"],
        # Code is read, and not run: it names the function.
        "in place": [
            f"{where} the model's own code runs as it was (added_up)",
            f'{where} "body.blocks.0" runs as it was (Block)',
        ],
    }
    for found in run_ranks(partial(errors, list(notes)), 2, FSDP):
        assert {kind: noted for kind, (_, noted) in found.items()} == notes
        assert not {kind: error for kind, (error, _) in found.items() if not error < TIGHT}


def test_blocks_that_are_compiled_in_place_are_propagated_over_tp():
    text = "mesh.tp = 2\n[sharding.tensor_parallel]\n[sharding.fsdp2]\n"
    for found in run_ranks(partial(errors, ["in place"]), 2, text):
        assert found["in place"][0] < TIGHT


def test_models_without_any_have_no_note():
    for found in run_ranks(partial(errors, [""]), 2, FSDP):
        assert found[""][0] < TIGHT and not found[""][1]
