"""Context parallelism: hooks that a loop registers see no padding, and an error in a forward leaves no mode behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.late_hooks import VOCAB, Block
from support.models import mine, write_manifest
from support.root_hooks import Model, last, loss_of, of_words, shifted
from torch import Tensor, nn
from torch.nn.modules import module as modules

import composer3d
from composer3d.errors import BatchError
from composer3d.testing import run_ranks

TIGHT = 1e-12
LENGTH = 7
CP = "mesh.cp = 2\n[sharding.context_parallel]\n"
FSDP = f"{CP}[sharding.fsdp2]\n"
LENGTHS: list[int] = []


def without_mean(module: nn.Module, given: Any) -> Any:
    return (given[0] - given[0].mean(1, keepdim=True),)


def counted(module: nn.Module, given: Any, output: Tensor) -> None:
    LENGTHS.append(output.shape[1])


def on_blocks(module: nn.Module, given: Any, output: Any) -> Any:
    return last(module, given, output) if isinstance(module, Block) else None


def block(model: Any, at: int = 0) -> Any:
    return model.get_submodule(f"body.blocks.{at}")


HOOKS: dict[str, Callable[[Any], Any]] = {
    "output": lambda m: m.register_forward_hook(last),
    "output by name": lambda m: m.register_forward_hook(of_words, with_kwargs=True),
    "input": lambda m: m.register_forward_pre_hook(shifted, prepend=True),
    "block": lambda m: block(m).register_forward_hook(last),
    "before a block": lambda m: block(m, 1).register_forward_pre_hook(without_mean),
    "of features": lambda m: block(m).register_forward_hook(lambda _, given, o: o.tanh()),
    "numbers": lambda m: block(m).register_forward_hook(lambda _, given, o: o * torch.arange(o.shape[1])[:, None]),
    "all modules": lambda m: modules.register_module_forward_hook(on_blocks),
    "kept": lambda m: block(m).register_forward_hook(counted),
}


def errors(text: str, loop: bool) -> dict[str, float]:
    """Return how far gradients of a second step are from one device's, of the largest, by hook; one run for all."""
    torch.set_default_dtype(torch.float64)
    generator, found = torch.Generator().manual_seed(1), {}
    x, y = (torch.randint(0, VOCAB, (4, LENGTH), generator=generator) for _ in range(2))
    torch.manual_seed(0)
    reference, model = Model(), Model()
    model.load_state_dict(reference.state_dict())
    run = composer3d.compose(model, write_manifest(text), loss_fn=None if loop else loss_of, example=((x,), {}))
    for number, (name, register) in enumerate(HOOKS.items()):
        reference.zero_grad()
        handle = register(reference)
        total, count = loss_of(reference(x), y)
        (total / count).backward()
        handle.remove()
        handle = register(run.model)
        LENGTHS.clear()
        with run.step(number):
            if loop:
                total, count = loss_of(run.model(mine(run, x)), mine(run, y))
                run.backward(total / count)
            else:
                run.forward_backward(mine(run, x), target=mine(run, y))
            own = {fqn: run.full_tensor(fqn, p.grad) for fqn, p in run.named_parameters() if p.grad is not None}
        handle.remove()
        assert set(LENGTHS) <= {LENGTH}
        for _, parameter in run.named_parameters():
            parameter.grad = None
        wanted = {fqn: p.grad for fqn, p in reference.named_parameters() if p.grad is not None}
        top = max(float(each.abs().max()) for each in wanted.values())
        found[name] = max(float((own[fqn] - wanted[fqn]).abs().max()) / top for fqn in own)
    run.close()
    return found


def assert_one_devices(world_size: int, text: str, loop: bool) -> None:
    for found in run_ranks(errors, world_size, text, loop):
        assert not {name: error for name, error in found.items() if not error < TIGHT}


@pytest.mark.parametrize("loop", [False, True])
def test_hooks_of_a_loop_see_tokens_alone(loop: bool):
    assert_one_devices(2, FSDP, loop)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "text"),
    [
        pytest.param(4, f"mesh.tp = 2\n{FSDP}[sharding.tensor_parallel]\n", id="tp"),
        pytest.param(2, f"{FSDP}[scheduling.activation_checkpoint]\n", id="recomputed"),
        pytest.param(2, FSDP.replace("_parallel]", "_parallel]\nmethod = 'ring'\nbalanced = false"), id="ring"),
    ],
)
def test_they_do_beside_other_plugins(world_size: int, text: str):
    assert_one_devices(world_size, text, loop=False)


def writing(module: nn.Module, given: Any, output: Tensor) -> None:
    output[:, 0] = 0


def raising(module: nn.Module, given: Any, output: Tensor) -> None:
    if not output.is_meta:
        raise KeyError("of a hook")


def refused() -> tuple[list[str], int]:
    """Return what runs with such hooks raise, and the modes that stay behind them."""
    torch.set_default_dtype(torch.float64)
    tokens, said = torch.zeros(2, LENGTH + 1, dtype=torch.int64), []
    for hook in (writing, raising, None):
        run = composer3d.compose(Model(), write_manifest(FSDP), loss_fn=loss_of, example=((tokens,), {}))
        x = tokens[:, : LENGTH + (hook is not writing)]
        if hook is not None:
            block(run.model).register_forward_hook(hook)
        try:
            with run.step(0):
                loss, _ = loss_of(run.model(x), x)
                raise ValueError(f"of a loop, {loss.item():.0f}" if hook is None else "missed")
        except (BatchError, KeyError, ValueError) as error:
            said.append(str(error))
        finally:
            run.close()
    return said, len(torch.overrides._get_current_function_mode_stack())


def test_a_hook_that_writes_is_refused_and_errors_leave_no_mode_behind():
    for said, num_modes in run_ranks(refused, 2):
        assert said[0].startswith("a sequence of 7 tokens was padded to 8, since ranks of cp share it equally, and")
        assert "the hook writing (test_context_parallel_padded_hooks.py:" in said[0]
        assert "): __setitem__ writes into an activation of a sequence that is padded (" in said[0]
        assert said[0].endswith("return another tensor, or use lengths that need no padding); use 4 tokens")
        assert said[1] == "'of a hook'"
        assert said[2].startswith("of a loop, ")
        assert num_modes == 0
