"""Context parallelism: what hooks keep of a forward or a backward is whole where a loop reads it, at any time after.

A loop logs norms of activations, trains a probe on them, or asks `torch.autograd.grad` for their gradients.

Shapes: B samples, S positions, D features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.late_hooks import VOCAB, D, Model
from support.models import write_manifest
from torch import Tensor, nn

import composer3d
from composer3d.composition.loop.module_hooks import ModuleHooks
from composer3d.testing import run_ranks

TIGHT = 1e-12
CP = "mesh.cp = 2\n[sharding.context_parallel]\n"
FSDP = f"{CP}[sharding.fsdp2]\n"
KEPT: list[Tensor] = []


def keep(module: nn.Module, given: Any, output: Tensor) -> None:
    KEPT.append(output.detach())


def keep_with_graph(module: nn.Module, given: Any, output: Tensor) -> None:
    if output.requires_grad:
        output.retain_grad()
    KEPT.append(output)


def keep_norms(module: nn.Module, given: Any, output: Tensor) -> None:
    KEPT.append(output.detach().norm(dim=-1).clone())


def keep_gradients(module: nn.Module, into: Any, outof: Any) -> None:
    KEPT.append(outof[0])


def logged(kept: Tensor) -> list[Tensor]:
    lasts = [kept[:, -1]] if kept.ndim > 2 else []
    return [kept.abs().mean(), kept.norm(dim=-1), torch.tensor(float(kept.shape[1])), *lasts]


def times_gradient(kept: Tensor) -> list[Tensor]:
    assert kept.grad is not None
    return [(kept.grad * kept).sum(-1).detach()]


def of_output(kept: Tensor) -> list[Tensor]:
    return [kept.detach().logsumexp(-1), torch.tensor(float(kept.shape[1]))]


Registered = Callable[[nn.Module], Any]
# What a loop reads after a backward, of what which hook keeps.
READ: dict[str, tuple[Registered, Callable[[Tensor], list[Tensor]]]] = {
    "detached": (lambda m: m.get_submodule("blocks.0").register_forward_hook(keep), logged),
    "with its gradient": (lambda m: m.get_submodule("blocks.0").register_forward_hook(keep_with_graph), times_gradient),
    "numbers": (lambda m: m.get_submodule("blocks.1.out").register_forward_hook(keep_norms), logged),
    "of the last module": (lambda m: m.get_submodule("head").register_forward_hook(keep_with_graph), times_gradient),
    "of the model": (lambda m: m.register_forward_hook(keep_with_graph), of_output),
    "of a backward": (lambda m: m.get_submodule("blocks.0.out").register_full_backward_hook(keep_gradients), logged),
}


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), targets.flatten())


def batch_of(length: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randint(0, VOCAB, (4, length), generator=generator) for _ in range(2))
    return x, torch.randn(4, 1, D, generator=generator), y


def seeded(register: Registered) -> Model:
    torch.manual_seed(0)
    model = Model()
    register(model)
    KEPT.clear()
    return model


def largest(found: list[Tensor], wanted: list[Tensor]) -> float:
    assert [each.shape for each in found] == [each.shape for each in wanted]
    return max(float((one - other).abs().max() / other.abs().max()) for one, other in zip(found, wanted, strict=True))


def read_later(text: str, length: int) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    (x, noise, y), errors = batch_of(length), {}
    for name, (register, read) in READ.items():
        reference = seeded(register)
        loss_of(reference(x, noise), y).backward()
        wanted = read(KEPT[-1])
        run = composer3d.compose(seeded(register), write_manifest(text), loss_fn=loss_of, example=((x, noise), {}))
        for step in range(6):  # past those forwards that are looked at closely
            KEPT.clear()
            run.model.zero_grad()
            with run.step(step):
                if step % 2:
                    run.backward(loss_of(run.model(x, noise), y))
                else:
                    run.forward_backward(x, noise, target=y)
                errors[f"{name} {step}"] = largest(read(KEPT[-1]), wanted)
        errors[f"{name} outside of a step"] = largest(read(KEPT[-1]), wanted)
        kept = KEPT[-1].detach() + 0.0
        run.close()
        assert torch.isfinite(kept).all()  # what was read is whole
        if length % 2 and name == "of a backward":  # hooks are given all tokens of a sequence that is padded
            assert largest(read(KEPT[-1]), wanted) < TIGHT
        else:
            with pytest.raises(composer3d.StepError, match="of an activation .* that was kept of a run that is closed"):
                read(KEPT[-1])
    assert not torch.overrides._get_current_function_mode_stack()
    return errors


@pytest.mark.parametrize(
    ("text", "length"),
    [
        pytest.param(FSDP, 8, id="fsdp2"),
        pytest.param(CP, 7, id="padded"),
        pytest.param(f"{FSDP}[scheduling.activation_checkpoint]\nmode = 'full'\n", 8, id="recomputed"),
    ],
)
def test_a_loop_reads_all_positions_of_what_hooks_keep(text: str, length: int):
    for found in run_ranks(read_later, 2, text, length):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def of_probe(probe: nn.Linear, loss: Tensor, y: Tensor) -> Iterator[Tensor]:
    own = F.cross_entropy(probe(KEPT[-1].detach()).flatten(0, 1), y.flatten())
    own.backward()
    yield own.detach()
    yield from (parameter.grad for parameter in probe.parameters())  # type: ignore[misc]


def of_grad(probe: nn.Linear, loss: Tensor, y: Tensor) -> Iterator[Tensor]:
    first, second = torch.autograd.grad(loss, [KEPT[-2], KEPT[-1]], retain_graph=True)
    yield from (first, second, F.normalize(first, dim=-1) + KEPT[-2].detach())
    yield torch.autograd.grad(KEPT[-1][:, 0].sum(), KEPT[-2], retain_graph=True)[0]


def before_the_backward(text: str, length: int) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    (x, noise, y), errors = batch_of(length), {}

    def register(model: nn.Module) -> None:
        for name in ("blocks.0", "blocks.1"):
            model.get_submodule(name).register_forward_hook(keep_with_graph)

    for name, ask in {"a probe": of_probe, "gradients": of_grad}.items():
        reference, probe = seeded(register), nn.Linear(D, VOCAB)
        loss = loss_of(reference(x, noise), y)
        wanted = list(ask(probe, loss, y))
        loss.backward()
        wanted += [parameter.grad for parameter in reference.parameters()]
        run = composer3d.compose(seeded(register), write_manifest(text), example=((x, noise), {}))
        for step in range(4):
            KEPT.clear()
            run.model.zero_grad()
            probe.zero_grad()
            with run.step(step):
                loss = loss_of(run.model(x, noise), y)
                found = list(ask(probe, loss, y))
                run.backward(loss)
            found += [run.full_tensor(fqn, parameter.grad) for fqn, parameter in run.named_parameters()]
            errors[f"{name} {step}"] = largest(found, wanted)
        run.close()
    return errors


@pytest.mark.parametrize(("text", "length"), [pytest.param(FSDP, 8, id="fsdp2"), pytest.param(FSDP, 7, id="padded")])
def test_a_probe_and_torchs_gradients_of_kept_activations_are_one_devices(text: str, length: int):
    for found in run_ranks(before_the_backward, 2, text, length):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


def modes_of_steps() -> list[int]:
    """Return the numbers of modes that are entered after backwards: without hooks, with one, and when it is removed."""
    x, noise, y = batch_of(8)
    run = composer3d.compose(Model(), write_manifest(FSDP), loss_fn=loss_of, example=((x, noise.float()), {}))

    def entered() -> int:
        with run.step(entered.steps):
            run.forward_backward(x, noise.float(), target=y)
        entered.steps += 1
        return len(torch.overrides._get_current_function_mode_stack())

    entered.steps = 0
    found = [entered() for _ in range(4)]
    handle = run.model.blocks[0].register_forward_hook(keep)
    found.append(entered())
    handle.remove()
    found.append(entered())
    run.close()
    return found


def test_nothing_is_followed_after_a_backward_where_no_hook_keeps_anything():
    for found in run_ranks(modes_of_steps, 2):
        assert found == [0, 0, 0, 0, 1, 1]  # what the hook has kept may be read when it is gone, too


def closed_in_turn() -> list[str]:
    """Return what reading an activation says after each of two runs, whose shards are alike, is closed."""
    x, noise, y = batch_of(8)
    register = READ["detached"][0]
    runs = []
    for _ in range(2):
        runs.append(
            composer3d.compose(seeded(register), write_manifest(FSDP), loss_fn=loss_of, example=((x, noise), {}))
        )
    with runs[0].step(0):
        runs[0].forward_backward(x, noise, target=y)
    found = []
    runs[1].close()
    assert KEPT[-1].shape[1] == 8
    for read in (lambda: KEPT[-1].device, lambda: KEPT[-1].mean(), lambda: KEPT[-1].shape):
        runs[0].close()
        try:
            found.append(str(read()))
        except composer3d.StepError as error:
            found.append(str(error).partition(" (")[0])
    return found


def test_what_is_kept_may_be_read_until_the_last_run_is_closed():
    for found in run_ranks(closed_in_turn, 2):
        assert found == ["cpu", "mean of an activation", "shape of an activation"]


def read_without_hooks(text: str) -> list[float]:
    """Return how far what hooks have kept is, where they are gone before the backward, and read in the next step."""
    torch.set_default_dtype(torch.float64)
    x, noise, y = batch_of(8)
    found = []
    reference = seeded(lambda m: m.get_submodule("blocks.0").register_forward_hook(keep))
    reference(x, noise)
    wanted = logged(KEPT[-1])
    run = composer3d.compose(seeded(lambda m: None), write_manifest(text), loss_fn=loss_of, example=((x, noise), {}))
    for step in range(2):
        with run.step(step):
            if not step:
                handle = run.model.get_submodule("blocks.0").register_forward_hook(keep)
            output = run.model(x, noise)
            handle.remove()
            run.backward(loss_of(output, y))
            found.append(largest(logged(KEPT[-1]), wanted))
            run.model.zero_grad()
    run.close()
    return found


def test_a_loop_reads_all_positions_when_hooks_are_gone_too():
    for found in run_ranks(read_without_hooks, 2, FSDP):
        assert max(found) < TIGHT


def test_a_hook_that_comes_where_another_goes_is_seen():
    module = nn.Linear(2, 2)
    hooks = ModuleHooks([module])
    library = module.register_forward_hook(F.relu)
    assert not hooks()
    library.remove()
    own = module.register_forward_hook(keep)
    assert hooks()
    own.remove()
    assert hooks()  # of what it has kept
