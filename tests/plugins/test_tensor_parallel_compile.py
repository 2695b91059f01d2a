"""Compiled blocks under tp: what is propagated runs as captured graphs, and what no compiler can follow as it is."""

from __future__ import annotations

import pytest
import torch
from support.family_models import batch_of, class_loss
from support.models import largest, mine, write_manifest
from support.tensor_parallel import AUTO, built, errors, reference, steps_of

import composer3d
from composer3d.models import llama
from composer3d.propagation import Propagation
from composer3d.testing import fake_world, full, run_ranks

# Dynamo looks at the .grad of everything that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
TIGHT = 1e-12
SP = "sequence_parallel = true\n"
COMPILE = '[scheduling.compile]\nbackend = "aot_eager"\n'
AC = "[scheduling.activation_checkpoint]\n"


def text(settings="", more=""):
    return f"[mesh]\ntp = 2\n{AUTO}{settings}\n{more}"


# Attention of gpt2 is propagated, that of llama is not, and that of Alibi lies in the block itself.
CASES = [("gpt2", text("", COMPILE)), ("gpt2", text(SP, COMPILE)), ("llama", text(SP, COMPILE))]
CASES += [("Alibi", text("", COMPILE)), ("Alibi", text("", COMPILE + AC)), ("llama", text("", COMPILE + AC))]

GRAPHS = [("gpt2", "", ""), ("gpt2", SP, ""), ("gpt2", "", AC), ("Alibi", "", ""), ("Alibi", SP, ""), ("Alibi", "", AC)]


@pytest.mark.slow
def test_gradients_equal_one_device():
    for results in run_ranks(steps_of, 2, CASES, timeout_s=600):
        assert max(max(result[:3]) for result in results) < TIGHT


def propagated_in_later_steps(cases):
    """Return the calls of torch that were propagated in the second step of each case, and the largest error there."""
    torch.set_default_dtype(torch.float64)
    found, calls = [], []
    run_one = Propagation.run

    def counted(self, func, args, options):
        calls.append(func)
        return run_one(self, func, args, options)

    Propagation.run = counted
    for family, manifest in cases:
        torch._dynamo.reset()
        _, wanted, _ = reference(family, None, 4)
        run = composer3d.compose(built(family), write_manifest(manifest), loss_fn=class_loss)
        inputs, targets = (mine(run, tensor) for tensor in batch_of(family, 4))
        for step in range(2):
            calls.clear()
            with run.step(step):
                run.forward_backward(inputs, target=targets)
                error = errors(run, wanted)
                for _, parameter in run.named_parameters():
                    parameter.grad = None
        found.append((len(calls), error))
        run.close()
    return found


@pytest.mark.slow
def test_what_is_propagated_runs_as_a_graph():
    cases = [(family, text(settings, COMPILE + more)) for family, settings, more in GRAPHS]
    for results in run_ranks(propagated_in_later_steps, 2, cases, timeout_s=600):
        assert all(calls == 0 and error < TIGHT for calls, error in results), results


def drawn(cases):
    """Return gradients of a step with dropout, whose numbers are those of ranks, as what is compiled has them."""
    torch.set_default_dtype(torch.float64)
    found = []
    for family, manifest in cases:
        torch._dynamo.reset()
        run = composer3d.compose(built(family, {"dropout": 0.3}), write_manifest(manifest + RANKS), loss_fn=class_loss)
        inputs, targets = (mine(run, tensor) for tensor in batch_of(family))
        with run.step(0):
            run.forward_backward(inputs, target=targets)
            found.append({name: full(p.grad) for name, p in run.named_parameters()})
        run.close()
    return found


RANKS = '[train]\nrandom_numbers = "ranks"\n'
DRAWING = [("gpt2", ""), ("gpt2", SP), ("llama", SP)]


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", AC], ids=["saved", "recomputed"])
def test_compiled_blocks_draw_what_others_do(more):
    cases = [(family, text(settings, end + more)) for family, settings in DRAWING for end in ("", COMPILE)]
    for gradients in run_ranks(drawn, 2, cases, timeout_s=600):
        for plain, compiled in zip(gradients[::2], gradients[1::2], strict=True):
            assert plain.keys() == compiled.keys()
            scale = max(float(g.abs().max()) for g in plain.values())
            assert largest(float((plain[name] - compiled[name]).abs().max()) / scale for name in plain) < TIGHT


@pytest.mark.slow
def test_numbers_that_hooks_hold_are_no_symbols():
    """With `dynamic`, the compiler makes a symbol of every number that a function holds, and of products of sizes."""
    with fake_world(2):
        model = llama(dim=32, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=64, vocab_size=32)
        manifest = write_manifest("[mesh]\ntp = 2\n[sharding.tensor_parallel]\n" + SP + COMPILE + "dynamic = true\n")
        block = composer3d.compose(model, manifest, loss_fn=class_loss).parts[0].module.layers[0]
        for length in (16, 24):
            output = block(torch.randn(3, length, 32, requires_grad=True))
            assert output.shape == (3, length // 2, 32)
            output.sum().backward()


def test_a_batch_of_one_has_any_stride():
    """A compiled block hands on the stride of a dim of one element as it likes; blocks then differ in it alone."""
    with fake_world(2):
        model = llama(dim=32, num_layers=2, num_heads=4, num_kv_heads=4, ffn_dim=64, vocab_size=32)
        manifest = write_manifest("[mesh]\ntp = 2\n[sharding.tensor_parallel]\n" + SP + COMPILE)
        block = composer3d.compose(model, manifest, loss_fn=class_loss).parts[0].module.layers[0]
        x = torch.randn(1, 16, 32)
        for stride in (512, 7, 3):
            # A rank is given the whole sequence here, and hands its half on.
            assert block(x.as_strided(x.shape, (stride, 32, 1))).shape == (1, 8, 32)
