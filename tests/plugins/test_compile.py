from __future__ import annotations

import tempfile

import pytest
import torch
from support.models import Net, composed, gradient_error, mine, padded, reference_gradients, seeded

from composer3d import ManifestError
from composer3d.models import llama
from composer3d.testing import assert_gradients_equal, gather_full, run_ranks

# Dynamo looks at the .grad of everything that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
TIGHT = 1e-12
EAGER = '[scheduling.compile]\nbackend = "aot_eager"\n'
FSDP = "[sharding.fsdp2]\n"
AC = "[scheduling.activation_checkpoint]\n"
BUCKETS = '[sharding.ddp]\nreducer = "bucketed"\n[precision.mixed]\nparam_dtype = "float32"\n'


def step(text):
    """One step in float64 beside one device; dynamo refuses to work under the mode that counts collectives."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    loss, gradients = reference_gradients(seeded(), tokens, targets)
    run = composed(text + "[train]\nmicrobatch = 3\n")
    # torch 2.11 warns once a process that events of earlier cycles are gone, unless they are to be kept.
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True)
    with profiler as profile, run.step(0):
        composed_loss = run.forward_backward(mine(run, tokens), target=mine(run, targets))
        run.clip_grad_norm_(float("inf"))
    counts = {event.key: event.count for event in profile.key_averages() if event.key.startswith("c10d::")}
    error = gradient_error(run, gradients)
    run.close()
    return float((composed_loss - loss).abs()), error, counts


@pytest.mark.parametrize(("world_size", "text"), [(1, EAGER), (2, EAGER + FSDP), (2, EAGER + FSDP + AC)])
def test_gradients_equal_one_device(world_size, text):
    for loss, gradients, _ in run_ranks(step, world_size, text):
        assert loss < TIGHT
        assert gradients < TIGHT


def test_norms_that_are_units_of_their_own_lie_in_compiled_blocks():
    units = '[precision.mixed]\nparam_dtype = "float32"\nnorms = "float32_units"\n'
    plain, compiled = (run_ranks(trained_norms, 1, FSDP + units + AC + end)[0] for end in ("", EAGER))
    assert_gradients_equal(compiled, plain, tolerance=TIGHT)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")  # by what inductor imports of torch
def test_inductor():
    text = "[scheduling.compile]\n" + FSDP
    for loss, gradients, _ in run_ranks(step, 2, text, timeout_s=300):
        assert loss < TIGHT
        assert gradients < TIGHT


def compiled_blocks():
    run = composed(EAGER)
    names = [name for name, _ in run.parts[0].module.named_parameters()]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    tokens, targets = padded()
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    frames = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    run.close()
    return names, frames


def test_state_and_that_blocks_are_compiled():
    names, graphs = run_ranks(compiled_blocks, 1)[0]
    assert names == [name for name, _ in Net().named_parameters()]
    assert graphs == 1  # equal blocks share one graph


def test_collectives_stay_as_they_are():
    plain = run_ranks(step, 2, FSDP)[0][2]
    assert sum(plain.values()) > 3
    assert run_ranks(step, 2, FSDP + EAGER)[0][2] == plain


def trained_norms(text):
    model = llama(dim=8, num_layers=2, num_heads=2, num_kv_heads=2, ffn_dim=16, vocab_size=11)
    tokens, targets = padded()
    run = composed(text, model)
    with run.step(0):
        run.forward_backward(tokens, target=targets)
    gradients = gather_full({fqn: parameter.grad for fqn, parameter in run.parts[0].module.named_parameters()})
    run.close()
    return gradients


class Remembering(torch.nn.Linear):
    """Keeps what it was given, and counts."""

    calls = 0

    def forward(self, input):
        self.calls += 1
        self.seen = input * 2.0
        return super().forward(input)


def written_inside(text):
    torch.set_default_dtype(torch.float64)
    net = seeded()
    for block in net.layers:
        block.up.__class__ = Remembering
    tokens, targets = padded()
    run = composed(text + "[train]\nmicrobatch = 3\n", net)
    with run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
    gradients = gather_full({fqn: parameter.grad for fqn, parameter in run.parts[0].module.named_parameters()})
    run.close()
    return gradients, [(block.up.calls, tuple(block.up.seen.shape)) for block in net.layers]


@pytest.mark.parametrize("layout", ["", BUCKETS])
def test_what_is_recomputed_may_write_to_objects(layout):
    gradients, written = run_ranks(written_inside, 1, layout + AC + EAGER)[0]
    assert_gradients_equal(gradients, run_ranks(written_inside, 1, layout)[0][0], tolerance=TIGHT)
    assert written == [(4, (3, 5, 7))] * 3  # once for each of four micro-batches


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


def test_refuses_an_unknown_backend():
    message = run_ranks(refusal, 1, '[scheduling.compile]\nbackend = "inductr"')[0]
    assert message.startswith(':2:13: [scheduling.compile] "inductr" is not a torch.compile backend; one of: ')


def test_refuses_inductor_without_a_compiler(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert run_ranks(refusal, 1, "[scheduling.compile]")[0] == (
        ':2:13: [scheduling.compile] backend = "inductor" needs a C++ compiler on CPU, and "no-such-compiler" is not '
        'found; install g++, or write backend = "aot_eager"'
    )


def test_refuses_a_cache_that_others_may_write_to(monkeypatch, tmp_path):
    monkeypatch.setenv("USER", "somebody")
    for name in ("LOGNAME", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    cache = tmp_path / "torchinductor_somebody"
    cache.mkdir()
    cache.chmod(0o777)
    assert run_ranks(refusal, 1, "[scheduling.compile]")[0] == (
        f":2:13: [scheduling.compile] {cache} is writable for all users, and the compiler runs code that lies in it; "
        "remove it, or set TORCHINDUCTOR_CACHE_DIR to a folder of your own"
    )
