"""Models that compose refuses because something was done to them before."""

from __future__ import annotations

import copy

import pytest
import torch
from support.models import composed, seeded, unpadded, write_manifest
from torch import nn

import composer3d
from composer3d import ComposerError, TransformError
from composer3d.testing import fake_world, run_ranks

FSDP = "[sharding.fsdp2]\n"
PLANS = {
    "fsdp2": FSDP,
    "ddp": "[sharding.ddp]\n",
    "bucketed": '[sharding.ddp]\nreducer = "bucketed"\n',
    "recomputed": "[scheduling.activation_checkpoint]\n",
    "tensor_parallel": '[mesh]\ntp = 2\n[sharding.tensor_parallel]\nplan = { "layers.*.0" = "colwise", '
    '"layers.*.2" = "rowwise" }\n',
}
STILL = ', and its parameters are still the shards of then ("{}" is a DTensor)'
AGAIN = (
    "compose was called with this module before{}; close does not take back what was done to its modules. Hand compose "
    "a function that builds the model, or a module that is built anew, and for the weights trained so far call "
    "run.save(...) before close and run.load(...) after compose"
)


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def again(text, weights, then):
    model = seeded(Layers)
    composed(text, model).close()
    with pytest.raises(TransformError) as caught:
        composed(text, then(model), weights=weights)
    return str(caught.value)


@pytest.mark.parametrize("weights", ["check", "rank0"])
@pytest.mark.parametrize("name", PLANS)
def test_a_module_that_was_composed_before_is_refused_whatever_was_done_to_it(name, weights):
    world = 1 if name == "recomputed" else 2
    expected = AGAIN.format("" if name in ("recomputed", "bucketed") else STILL.format("layers.0.0.weight"))
    assert run_ranks(again, world, PLANS[name], weights, lambda model: model) == [expected] * world


@pytest.mark.parametrize("name", ["recomputed", "fsdp2"])
def test_so_is_a_copy_of_it(name):
    expected = AGAIN.format("" if name == "recomputed" else STILL.format("layers.0.0.weight"))
    assert run_ranks(again, 1, PLANS[name], "check", copy.deepcopy) == [expected]


def untouched(text):
    """Compose the same module twice where nothing is done to it; return both losses."""
    model, (tokens, targets) = seeded(), unpadded()
    found = []
    for _ in range(2):
        run = composed(text, model)
        with run.step(0):
            found.append(float(run.forward_backward(tokens, target=targets)))
        run.close()
        model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("text", "world"), [("", 1), ("[mesh]\npp = 2\n[train]\nmicrobatch = 2\n[scheduling.pipeline]\n", 2)]
)
def test_a_module_that_stayed_as_it_was_is_composed_again(text, world):
    for first, second in run_ranks(untouched, world, text):
        assert first == second


def wrapped(how):
    from torch.distributed.fsdp import fully_shard

    model = seeded()
    if how == "sharded":
        fully_shard(model)
    elif how == "whole":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        model.layers[1] = nn.DataParallel(model.layers[1])
    with pytest.raises(TransformError) as caught:
        composed(FSDP, model)
    return str(caught.value)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            "sharded",
            '"tok.weight" is a DTensor before compose, so something else sharded the model; hand compose the model as '
            "it was, and write the sharding into the manifest",
        ),
        (
            "whole",
            "DistributedDataParallel wraps the model before compose; hand compose what it wraps, its .module, and "
            "write [sharding.ddp] into the manifest",
        ),
        (
            "a block",
            'DataParallel wraps "layers.1" before compose; hand compose what it wraps, its .module, and write '
            "[sharding.ddp] into the manifest",
        ),
    ],
)
def test_what_another_library_did_before_is_refused(how, message):
    assert run_ranks(wrapped, 2, how) == [message] * 2


def around(inner, name):
    """Return a module of which a module inside has it as a submodule."""
    inner.__setattr__(name, outer := nn.Sequential(nn.Linear(8, 8), inner))
    return outer


def unreadable(make, as_factory):
    with pytest.raises(ComposerError) as caught:
        composed(FSDP, make if as_factory else make())
    return str(caught.value).rpartition("[model] ")[2]


@pytest.mark.parametrize("as_factory", [False, True])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.LazyLinear(8))),
            '"1.0.weight" of a LazyLinear has no shape before the first forward; write a module with its sizes, such '
            "as nn.Linear(in_features, out_features)",
        ),
        (
            lambda: nn.Sequential(nn.Linear(8, 8), nn.LazyBatchNorm1d()),
            '"1.weight" of a LazyBatchNorm1d has no shape before the first forward; write a module with its sizes, '
            "such as nn.Linear(in_features, out_features)",
        ),
        (
            lambda: around(nn.Tanh(), "owner"),
            'the model contains itself: "1.owner" is a module that it is inside of; keep a reference that is no '
            "submodule, in a tuple or a weakref for example",
        ),
    ],
)
def test_models_without_shapes_or_an_end_are_refused_with_the_module(make, message, as_factory):
    assert unreadable(make, as_factory) == message


@pytest.mark.parametrize(
    ("example", "said"),
    [
        ((torch.zeros(2, 4),), "tuple of Tensor was given"),
        (torch.zeros(2, 4), "Tensor was given"),
        (lambda: (torch.zeros(2, 4), {}), "tuple of Tensor, dict was given"),
    ],
    ids=["one argument", "a tensor", "made"],
)
def test_an_example_that_is_no_pair_is_refused(example, said):
    with fake_world(2), pytest.raises(ComposerError) as caught:
        composer3d.compose(
            Layers, write_manifest("[mesh]\npp = 2\n[scheduling.pipeline]\n"), loss_fn=lambda out, target: out.sum(),
            example=example,
        )  # fmt: skip
    assert f"{said}; write example=((tokens,), {{}}), or ((), {{...}})" in str(caught.value)


def container(made, text):
    with pytest.raises(TransformError) as caught:
        composed(text, made({"one": nn.Linear(2, 2)}) if made is nn.ModuleDict else made([nn.Linear(2, 2)]))
    return str(caught.value)


@pytest.mark.parametrize("made", [nn.ModuleDict, nn.ModuleList])
@pytest.mark.parametrize("name", ["fsdp2", "ddp", "tensor_parallel"])
def test_a_container_without_a_forward_is_refused_with_what_to_pass(made, name):
    expected = (
        f"the model is a {made.__name__} without a forward, through which units gather their weights and outputs are "
        "followed; compose each of its modules by itself, or hand compose a module with a forward that calls them"
    )
    assert run_ranks(container, 2, made, PLANS[name]) == [expected] * 2


class Scripted(nn.Module):
    def __init__(self, compile_):
        super().__init__()
        self.inner, self.out = compile_(nn.Linear(4, 4)), nn.Linear(4, 4)

    def forward(self, x):
        return self.out(self.inner(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("compile_", [torch.jit.script, lambda module: torch.jit.trace(module, torch.ones(1, 4))])
@pytest.mark.parametrize(("model", "what"), [(Scripted, '"inner"'), (lambda of: of(nn.Linear(4, 4)), "the model")])
def test_modules_that_torch_jit_has_compiled_are_refused(compile_, model, what):
    with fake_world(2), pytest.raises(TransformError) as caught:
        composed(FSDP, model(compile_))
    assert str(caught.value) == (
        f"torch.jit has compiled {what} before compose, and runs it where no plugin sees what it does; hand compose "
        "the module as it was, without torch.jit.script and torch.jit.trace"
    )
