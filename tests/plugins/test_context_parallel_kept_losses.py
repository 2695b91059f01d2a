"""Context parallelism: losses that a model leaves in attributes, lists and objects are one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.kept_losses import (
    COLLECTED,
    EXTRA,
    MANAGER,
    VOCAB,
    balance,
    entropy,
    errors_of,
    given,
    seeded,
    stated,
    whole,
)
from support.models import mine, write_manifest
from torch import Tensor

import composer3d
from composer3d.testing import run_ranks

TIGHT = 1e-12
CP = "mesh.cp = 2\n[sharding.context_parallel]\n"
FSDP = f"{CP}[sharding.fsdp2]\n"
EVEN = {"padded": False, "parts": 2}


def several(cases: list[tuple[str, str, dict[str, Any]]]) -> list[list[float]]:
    return [errors_of(keeps, text, **options) for keeps, text, options in cases]


def assert_one_devices(world_size: int, cases: list[tuple[str, str, dict[str, Any]]]) -> None:
    for ranks in zip(*run_ranks(several, world_size, cases), strict=True):
        assert max(max(errors) for errors in ranks) < TIGHT


def test_losses_that_a_model_keeps_are_one_devices_wherever_it_keeps_them():
    assert_one_devices(2, [(keeps, FSDP, {}) for keeps in EXTRA])


def test_they_are_where_nobody_else_averages_and_where_they_are_stated_as_auxiliary():
    assert_one_devices(2, [("attribute", CP, {}), ("probabilities", CP, {}), ("object", FSDP, {"form": stated})])


@pytest.mark.parametrize(
    "tables",
    [
        pytest.param(FSDP, id="micro-batches"),
        pytest.param(f"{FSDP}[scheduling.activation_checkpoint]\nmode = 'full'\n", id="recomputed"),
        pytest.param(f"mesh.ep = 2\n{FSDP}[sharding.expert_parallel]\n", id="experts"),
    ],
)
def test_they_are_over_micro_batches_beside_other_plugins(tables: str):
    names = ("attribute", "list", "file", "object", "probabilities", "logits")
    assert_one_devices(2, [(keeps, tables, EVEN) for keeps in names])


@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_functions_that_blocks_have_torch_recompute_are_propagated_again(reentrant: bool):
    """A recomputation of a rank's positions alone had attention of their own, and means of their own."""
    cases = [(keeps, FSDP, {"reentrant": reentrant}) for keeps in ("attribute", "statistic")]
    assert_one_devices(2, cases)


@pytest.mark.slow
def test_they_are_beside_tensor_parallelism_with_a_sharded_sequence():
    tables = f"mesh.tp = 2\n{FSDP}[sharding.tensor_parallel]\nsequence_parallel = true\n"
    assert_one_devices(4, [(keeps, tables, {}) for keeps in EXTRA])


LOSSES = {
    "square": lambda ce, o: ce**2,
    "exponential": lambda ce, o: ce.exp(),
    "product of means": lambda ce, o: ce * o.square().mean(),
    "ratio of means": lambda ce, o: ce / o.square().mean(),
    "ratio of sums": lambda ce, o: o.square().sum() / o.abs().sum(),
    "logsumexp": lambda ce, o: ce + o.flatten().logsumexp(0),
    "variance": lambda ce, o: ce + o.var(),
    "entropy of a mean": lambda ce, o: ce + (p := o.softmax(-1).mean((0, 1))).mul(p.log()).sum(),
    "greatest": lambda ce, o: ce + o.max(),
    "weighed by another": lambda ce, o: ce * torch.exp(-o.square().mean()) + o.square().mean(),
}


def loss_of(name: str, o: Tensor, t: Tensor) -> Tensor:
    return LOSSES[name](F.cross_entropy(o.reshape(-1, VOCAB), t.reshape(-1)), o)


def functions_of_means(reduction: str | None) -> list[float]:
    """Return how far losses and gradients of a loop, and of the engine where it is stated, are from one device's."""
    torch.set_default_dtype(torch.float64)
    found = []
    for name in LOSSES:
        x, y = given(padded=True)
        reference, model = seeded(""), seeded("")
        wanted = loss_of(name, reference(x), y)
        wanted.backward()
        options = {} if reduction is None else {"loss_reduction": reduction}
        run = composer3d.compose(
            model, write_manifest(FSDP), loss_fn=lambda o, t, name=name: loss_of(name, o, t), **options
        )
        with run.step(0):
            value = run.backward(loss_of(name, run.model(x), y)) if reduction is None else None
            value = run.forward_backward(x, target=y) if reduction else value
            grads = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters()}
        run.close()
        top = max(float(p.grad.abs().max()) for p in reference.parameters())
        off = [float((grads[fqn] - p.grad).abs().max()) / top for fqn, p in reference.named_parameters()]
        found.append(max(*off, abs(float(value - wanted.detach()))))
    return found


@pytest.mark.parametrize("reduction", [None, "mean"], ids=["loop", "engine"])
def test_functions_of_several_means_are_one_devices(reduction: str | None):
    for errors in run_ranks(functions_of_means, 2, reduction):
        assert max(errors) < TIGHT


def summed() -> tuple[float, float]:
    torch.set_default_dtype(torch.float64)
    x, y = given(padded=True)
    reference = seeded("")
    wanted = F.cross_entropy(reference(x).reshape(-1, VOCAB), y.reshape(-1), reduction="sum")
    wanted.backward()
    run = composer3d.compose(seeded(""), write_manifest(FSDP), loss_fn=stated)
    with run.step(0):
        value = run.backward(F.cross_entropy(run.model(x).reshape(-1, VOCAB), y.reshape(-1), reduction="sum"))
        own = run.full_tensor("tok.weight", dict(run.named_parameters())["tok.weight"].grad)
    run.close()
    return float(value - wanted.detach()), float((own - reference.tok.weight.grad).abs().max())


def test_a_sum_of_a_loop_is_counted_once_however_many_ranks_share_its_sequence():
    for loss, gradient in run_ranks(summed, 2):
        assert abs(loss) < 1e-11
        assert gradient < TIGHT


def composed_and_left(keeps: str) -> tuple[int, int]:
    torch.set_default_dtype(torch.float64)
    model = seeded(keeps)
    composer3d.compose(model, write_manifest(FSDP), loss_fn=stated).close()
    return len(COLLECTED), len(MANAGER.losses)


@pytest.mark.parametrize("keeps", ["file", "object"])
def test_composing_leaves_nothing_in_lists_of_the_models_file(keeps: str):
    assert run_ranks(composed_and_left, 2, keeps) == [(0, 0)] * 2


class Hidden:
    """A loss whose tensors no search of its attributes, closures and globals finds."""

    def __call__(self, o: Tensor, t: Tensor) -> Tensor:
        import support.kept_losses as file

        extra = sum(each.square().mean() for each in vars(file)["COLLECTED"])
        return F.cross_entropy(o.reshape(-1, VOCAB), t.reshape(-1)) + 0.1 * extra


def hidden() -> str:
    torch.set_default_dtype(torch.float64)
    run = composer3d.compose(seeded("logits"), write_manifest(FSDP), loss_fn=Hidden(), loss_reduction="mean")
    x, y = given(padded=False)
    try:
        with run.step(0):
            run.forward_backward(mine(run, x), target=mine(run, y))
    except composer3d.LossError as error:
        return str(error)
    finally:
        run.close()
    return ""


def test_shards_that_a_loss_reads_unforeseen_are_refused():
    for text in run_ranks(hidden, 2):
        assert text.startswith("square of an activation that the model keeps (test_context_parallel_kept_losses.py:")
        assert "losses of ranks' own positions do not add up to it; let the loss function read it by a name" in text


def padded_lengths() -> float:
    """Return how far a loop's loss over what the model keeps of a padded sequence is from one device's."""
    torch.set_default_dtype(torch.float64)
    x, y = (each[:, :7] for each in given(padded=False))
    reference, model = seeded("activations"), seeded("activations")
    wanted = whole(reference, reference(x), y, keeps="activations")
    run = composer3d.compose(model, write_manifest(FSDP), loss_fn=stated)
    with run.step(0):
        value = run.backward(whole(model, run.model(x), y, keeps="activations"))
    run.close()
    return abs(float(value - wanted.detach()))


def test_loops_read_no_padding():
    assert max(run_ranks(padded_lengths, 2)) < TIGHT


def over_shards() -> str:
    torch.set_default_dtype(torch.float64)
    tables = "mesh.tp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true\n"
    x, y = given(padded=False)
    model, kept = seeded(""), list[Tensor]()
    run = composer3d.compose(model, write_manifest(tables), loss_fn=stated)
    for layer in model.layers:  # where the composition does not know of it
        layer.experts.gate.register_forward_hook(lambda module, args, output: kept.append(output))
    try:
        with run.step(0):
            with pytest.warns(UserWarning, match="has hooks, which are given the positions of their rank"):
                o = run.model(x)
            run.backward(entropy(o, y) + 0.1 * sum(balance(each.softmax(-1), each.argmax(-1)) for each in kept))
    except composer3d.LossError as error:
        return str(error)
    finally:
        run.close()
    return ""


def test_shards_of_a_sequence_inside_of_a_block_are_found_by_what_roundings_allow():
    """Losses of ranks along tp differ by 0.1 % here, which in float64 no rounding explains."""
    for text in run_ranks(over_shards, 2):
        assert text.startswith("ranks of tensor parallelism computed other losses of the same batch")
