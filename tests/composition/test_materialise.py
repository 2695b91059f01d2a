from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.models import Block, Net, composed, gradient_error, mine, padded, reference_gradients
from torch import nn

from composer3d import InitialisationError, ManifestError
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
LOCKSTEP = '[sharding.lockstep]\nuse = "support.plugins:Lockstep"\n'
TENSOR = f"""
[mesh]
tp = 2
{LOCKSTEP}[sharding.parallelized]
use = "support.plugins:Parallelized"
columns = ["layers.0.up", "out"]
rows = ["tok"]
"""
LAYOUTS = {
    "mixed alone": (1, "[precision.mixed]"),
    "zero1": (2, "[sharding.fsdp2]\nzero = 1"),
    "zero2": (2, "[sharding.fsdp2]\nzero = 2"),
    "zero3": (2, "[sharding.fsdp2]"),
    "4 ranks": (4, "[sharding.fsdp2]"),
    "ignored": (2, '[sharding.fsdp2]\nignored = ["layers.1.*.bias"]'),
    "hsdp": (4, "[mesh]\ndp_replicate = 2\n[sharding.fsdp2]"),
    "ddp": (2, "[sharding.ddp]"),
    "ddp bucketed": (2, '[sharding.ddp]\nreducer = "bucketed"'),
    "tp": (2, TENSOR),
    "tp and fsdp2": (4, TENSOR + "[sharding.fsdp2]"),
}


class Scale(nn.Module):
    """Initialised by reset_parameters, which its __init__ calls."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.register_buffer("mask", torch.tril(torch.ones(3, 3, dtype=torch.bool)), persistent=False)
        self.register_buffer("scale", torch.arange(dim, dtype=torch.float32) / dim)
        self.reset_parameters()

    def reset_parameters(self):
        with torch.no_grad():
            self.weight.uniform_(0.5, 1.5).mul_(self.scale + 1)

    def forward(self, x):
        return x * self.weight


class InInit(Net):
    """Weights drawn in __init__, one from another."""

    def __init__(self):
        super().__init__()
        self.norm = Scale(7)
        self.out.weight = nn.Parameter(torch.randn(11, 7) * 0.02)
        nn.init.orthogonal_(self.layers[1].up.weight)
        with torch.no_grad():
            self.out.bias.copy_(self.out.weight.sum(1))


class Applied(Net):
    """Everything drawn anew by apply, with an initialiser that looks at its tensor."""

    def __init__(self):
        super().__init__()
        self.apply(self.draw)

    def draw(self, module):
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, Block):
            module.up.weight.data.mul_(0.5)


def tied():
    return Net(tied=True)


def reset():
    model = Net()
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


FACTORIES = {"init": InInit, "apply": Applied, "ties": tied, "reset": reset}


def starting_values(text):
    """Compose every factory; return the full values of all parameters and buffers, by factory and FQN."""
    found = {}
    for name, factory in FACTORIES.items():
        torch.manual_seed(dist.get_rank())  # which must not matter
        run = composed(text, factory)
        (part,) = run.parts
        tensors = [*part.module.named_parameters(remove_duplicate=False), *part.module.named_buffers()]
        found[name] = {fqn: full(tensor) for fqn, tensor in tensors}
        run.close()
    return found


@pytest.fixture(scope="module")
def alone():
    return run_ranks(starting_values, 1, "")[0]


@pytest.mark.parametrize(("world_size", "text"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_every_layout_starts_from_the_same_model(alone, world_size, text):
    for rank in run_ranks(starting_values, world_size, text):
        for name, factory in FACTORIES.items():
            model = factory()
            names = [name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())]
            assert list(rank[name]) == names
            for fqn, value in rank[name].items():
                assert torch.equal(value, alone[name][fqn]), (name, fqn)


def test_the_weights_are_those_the_factory_asked_for(alone):
    assert 0.5 < alone["init"]["norm.weight"].min() and alone["init"]["norm.weight"].max() < 3.0
    assert alone["init"]["norm.mask"].tolist() == torch.tril(torch.ones(3, 3, dtype=torch.bool)).tolist()
    assert torch.equal(alone["init"]["out.bias"], alone["init"]["out.weight"].sum(1))
    up = alone["init"]["layers.1.up.weight"]
    assert torch.allclose(up.T @ up, torch.eye(7), atol=1e-5)
    assert 0.015 < alone["apply"]["out.weight"].std() < 0.025
    assert alone["apply"]["layers.0.up.weight"].std() < 0.012
    assert not alone["apply"]["layers.0.up.bias"].any()
    assert torch.equal(alone["ties"]["out.weight"], alone["ties"]["tok.weight"])


def test_the_seed_of_the_manifest_decides(alone):
    other = run_ranks(starting_values, 1, "[train]\nseed = 1\n")[0]
    assert not torch.equal(other["init"]["out.weight"], alone["init"]["out.weight"])
    assert torch.equal(other["init"]["norm.scale"], alone["init"]["norm.scale"])


TIED = {name: LAYOUTS[name] for name in ("zero3", "hsdp", "ddp", "ddp bucketed", "tp", "tp and fsdp2")} | {
    "checkpoint": (2, "[scheduling.activation_checkpoint]\n[sharding.fsdp2]")
}


def tie(text):
    """Return whether the tie is one object, how many parameters the optimizer has, and the error of the gradient."""
    torch.set_default_dtype(torch.float64)
    run = composed(text, tied)
    model, reference = run.parts[0].module, tied()
    with torch.no_grad():
        for fqn, parameter in reference.named_parameters():
            parameter.copy_(full(model.get_parameter(fqn)))
    tokens, targets = padded()
    _, gradients = reference_gradients(reference, tokens, targets)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    with run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        run.clip_grad_norm_(float("inf"))
        error = gradient_error(run, gradients)
        optimizer.step()
    return model.out.weight is model.tok.weight, sum(len(g["params"]) for g in optimizer.param_groups), error


@pytest.mark.parametrize(("world_size", "text"), TIED.values(), ids=TIED.keys())
def test_a_tie_is_one_parameter_in_every_layout(world_size, text):
    for is_one, num_parameters, gradients in run_ranks(tie, world_size, text):
        assert is_one
        assert num_parameters == len(list(tied().parameters()))
        assert gradients < TIGHT


class Odd(Net):
    """Tensors of every kind that a broadcast may stumble over."""

    def __init__(self):
        super().__init__()
        self.norm.weight = nn.Parameter(self.norm.weight.bfloat16())
        self.layers[0].up.weight = nn.Parameter(torch.randn(7, 15).t())
        self.register_buffer("flags", torch.rand(5) > 0.5)
        self.register_buffer("count", torch.randint(0, 100, ()))
        self.register_buffer("phase", torch.randn(2, dtype=torch.complex64), persistent=False)


def by_rank(seeds, **options):
    """Compose a module whose weights follow the rank's seed; return what every rank then has, or is told."""
    torch.manual_seed(seeds[dist.get_rank()])
    model = Odd()
    if "fqn" in options:
        torch.manual_seed(0)
        fixed, fqn = Odd(), options.pop("fqn")
        fixed.state_dict()[fqn].copy_(model.state_dict()[fqn])
        model = fixed
    try:
        run = composed(f"[mesh]\ntp = {dist.get_world_size()}\n{LOCKSTEP}", model, **options)
    except InitialisationError as error:
        return str(error)
    return {name: full(t) for name, t in (*run.model.named_parameters(), *run.model.named_buffers())}


@pytest.mark.parametrize(
    ("seeds", "options", "fqn", "ranks"),
    [
        ([0, 0, 1], {}, "tok.weight", "rank 2"),
        ([0, 1, 2], {}, "tok.weight", "rank 1 and rank 2"),
        ([0, 0, 1], {"fqn": "layers.1.down.bias"}, "layers.1.down.bias", "rank 2"),
        ([0, 0, 1], {"fqn": "count"}, "count", "rank 2"),
    ],
)
def test_ranks_that_start_from_different_weights_are_refused(seeds, options, fqn, ranks):
    message = (
        f'ranks start from different weights: "{fqn}" on {ranks} is not what rank 0 has; '
        'seed all ranks alike, hand compose a factory, or pass weights="rank0"'
    )
    assert run_ranks(lambda: by_rank(seeds, **options), 3) == [message] * 3


def test_rank0_gives_its_weights_to_all():
    torch.manual_seed(7)
    model = Odd()
    for values in run_ranks(lambda: by_rank([7, 8], weights="rank0"), 2):
        for name, expected in (*model.named_parameters(), *model.named_buffers()):
            assert torch.equal(values[name], expected), name


def text_of(factory, kind=InitialisationError):
    with pytest.raises(kind) as caught:
        composed("[sharding.fsdp2]", factory())
    return str(caught.value)


def on_meta():
    with torch.device("meta"):
        return Net()


def test_a_model_on_meta_is_refused():
    assert run_ranks(text_of, 1, on_meta) == [
        '"tok.weight" is on meta and has no values; hand compose the factory, not its result'
    ]


def test_a_factory_that_depends_on_the_rank_is_refused():
    def by_rank():
        return lambda: Net(dim=7 + dist.get_rank() // 2)

    assert (
        run_ranks(text_of, 3, by_rank)
        == ["the factory makes another model on rank 2 than on rank 0; it must not depend on the rank"] * 3
    )


def test_a_factory_that_fails_is_refused_at_its_line():
    def fails():
        return lambda: {}["dim"]

    (text,) = run_ranks(text_of, 1, fails, ManifestError)
    line = fails.__code__.co_firstlineno + 1
    assert text.endswith(f"{__file__}:{line}: the factory raised KeyError: 'dim'")


def narrowed():
    with pytest.raises(InitialisationError) as caught:
        composed('[precision.narrowing]\nuse = "support.plugins:Narrowing"\n', model=Net)
    return str(caught.value)


def test_a_loaded_parameter_of_another_dtype_is_refused():
    assert run_ranks(narrowed, 1) == [
        'composer3d_load_parameter returned "norm.weight" as torch.bfloat16, and the parameter is torch.float32: '
        "rounding it on the way would be nobody's choice; return torch.float32, or make the parameter another one in a "
        "transform of phase CONVERT"
    ]
