"""Sequence parallelism: what blocks leave in attributes, lists and hooks for a loss is one device's, or refused.

Shapes: B samples, S positions, D features.
"""

from __future__ import annotations

import pytest
import torch
from support.kept_losses import VOCAB, D, entropy, errors_of, given, seeded, stated, whole
from support.models import write_manifest
from torch import Tensor, nn

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
TP = "mesh.tp = 2\n[sharding.tensor_parallel]\n"
SEQUENCE = f"{TP}sequence_parallel = true\n"
PLAN = (
    'plan = { "layers.*.up" = "colwise", "layers.*.down" = "rowwise", "layers.0" = "split", "layers.1" = "gather", '
    'tok = "replicate", head = "replicate" }\n'
)
HOOKED: list[Tensor] = []


class Block(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.up, self.down, self.keeps = nn.Linear(D, 2 * D), nn.Linear(2 * D, D), keeps
        self.last: Tensor | None = None

    def forward(self, x: Tensor, collected: list[Tensor]) -> Tensor:
        h = torch.tanh(self.up(x))
        y = x + self.down(h)
        if self.keeps == "list":
            collected.append(y)
        self.last = {"input": x, "features": h}.get(self.keeps)
        return y


class Model(nn.Module):
    def __init__(self, keeps: str) -> None:
        super().__init__()
        self.tok, self.layers = nn.Embedding(VOCAB, D), nn.ModuleList(Block(keeps) for _ in range(2))
        self.head, self.collected = nn.Linear(D, VOCAB), list[Tensor]()

    def forward(self, tokens: Tensor) -> Tensor:
        self.collected.clear()
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x, self.collected)
        return self.head(x)


def built(keeps: str) -> Model:
    torch.manual_seed(0)
    HOOKED.clear()
    model = Model(keeps)
    if keeps == "hook":
        hook_into(model)
    return model


def hook_into(model: Model) -> None:
    for layer in model.layers:
        layer.up.register_forward_pre_hook(lambda module, args: HOOKED.append(args[0]))


def neighbours(x: Tensor) -> Tensor:
    return (x[:, 1:] - x[:, :-1]).square().mean()


def loss_of(model: Model, o: Tensor, t: Tensor) -> Tensor:
    kept = [layer.last for layer in model.layers if layer.last is not None] + model.collected + HOOKED
    total = entropy(o, t) + sum(map(neighbours, kept))
    HOOKED.clear()
    return total


def error_of(keeps: str, text: str) -> float:
    """Return how far the loss and gradients of the engine's step are from one device's."""
    torch.set_default_dtype(torch.float64)
    x, y = given(padded=False)
    reference = built(keeps)
    wanted = loss_of(reference, reference(x), y)
    wanted.backward()
    model = built(keeps)
    run = composer3d.compose(
        model,
        write_manifest(text),
        loss_fn=lambda o, t: loss_of(model, o, t),
        loss_reduction="mean",
        example=((x,), {}),
    )
    try:
        with run.step(0):
            value = run.forward_backward(x, target=y)
            own = {name: run.full_tensor(name, p.grad) for name, p in run.named_parameters()}
    finally:
        run.close()
    grads = {name: p.grad for name, p in reference.named_parameters()}
    top = max(float(each.abs().max()) for each in grads.values())
    return max(abs(float(value - wanted.detach())), *(float((own[n] - grads[n]).abs().max()) / top for n in own))


def of_blocks(names: tuple[str, ...]) -> list[float]:
    return [error_of(name, SEQUENCE) for name in names]


def of_mixtures(names: tuple[str, ...], text: str) -> list[list[float]]:
    return [errors_of(name, text, form=form) for name in names for form in (stated, whole)]


def test_positions_that_blocks_leave_are_all_there_for_a_loss_in_a_loop_and_in_the_engine():
    for found in run_ranks(of_mixtures, 2, ("probabilities", "logits", "activations"), SEQUENCE):
        assert max(map(max, found)) < TIGHT


def test_they_are_in_lists_that_a_block_is_given_as_its_input_and_in_hooks():
    for found in run_ranks(of_blocks, 2, ("list", "input", "hook")):
        assert max(found) < TIGHT


def whole_blocks(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    found = {}
    for name in names:
        run = composer3d.compose(seeded(name), write_manifest(SEQUENCE), loss_fn=stated)
        rows = {row.name: row.fqns for row in run.plan}
        found[name] = rows.get("tensor_parallel.whole sequence", ())
        run.close()
    return found


def test_blocks_that_leave_complete_losses_or_nothing_still_shard_the_sequence():
    for found in run_ranks(whole_blocks, 2, ("", "attribute", "file", "activations", "logits")):
        assert not found[""] and not found["attribute"] and not found["file"]
        assert found["activations"] == found["logits"] == ("",)  # all


def refused(keeps: str, text: str) -> str:
    try:
        error_of(keeps, text)
    except composer3d.ComposerError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("keeps", "what"), [("input", 'Block keeps as "last"'), ("list", "Block keeps in what it is given")]
)
def test_a_stated_plan_that_shards_them_is_refused(keeps: str, what: str):
    for text in run_ranks(refused, 2, keeps, SEQUENCE + PLAN):
        assert text.endswith(
            f"[sharding.tensor_parallel] the plan does not fit the model's code: a loss can read what {what}, which is "
            'sharded along the sequence; write plan = "auto", which leaves the sequence of such a block whole, or '
            "sequence_parallel = false"
        )


def test_a_loss_function_that_reads_a_ranks_features_is_refused():
    for text in run_ranks(refused, 2, "features", TP):
        assert text.startswith("ranks of tensor parallelism computed other losses of the same batch: they differ by")
