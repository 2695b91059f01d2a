"""Compiled blocks of sequences that are sharded over cp: graphs of what the propagation does, equal to one device."""

from __future__ import annotations

import functools
import logging
import types

import pytest
import torch
from layout_matrix_cells import distance, one_device, train
from support.family_models import class_loss
from support.mixer_models import MIXERS, Staged
from support.models import mine, write_manifest
from support.sequence_models import LENGTH, Language, Window
from support.sequence_steps import context, padded_batch, seeded
from torch import nn

import composer3d
from composer3d.testing import full, run_ranks

# Dynamo looks at the .grad of everything that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
COMPILE = '[scheduling.compile]\nbackend = "aot_eager"\n'
FSDP, AC = "[sharding.fsdp2]\n", "[scheduling.activation_checkpoint]\n"
FLOAT8 = "[precision.float8]\nmin_dim = 1\nemulate = true\n"
STAGES = '[scheduling.pipeline]\nschedule = "1F1B"\n'


def cp(method, tables, *, mesh="", microbatch=16):
    return (
        f"composer3d = 1\n[mesh]\ncp = 2\n{mesh}\n[train]\nglobal_batch = 32\nmicrobatch = {microbatch}\n{tables}"
        f'[sharding.context_parallel]\nmethod = "{method}"\n'
    )


def trained(cases, reference):
    """Return how far two optimizer steps of each case are from one device, and the number of graphs compiled."""
    found = []
    for text in cases:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        tensors = train(text)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        found.append((max(distance(tensor, reference[name]) for name, tensor in tensors.items()), graphs))
    return found


def assert_compiled(world_size, cases):
    for ranks in run_ranks(trained, world_size, cases, one_device(), timeout_s=300.0):
        for text, (apart, graphs) in zip(cases, ranks, strict=True):
            assert apart <= 1e-12, text
            # Equal blocks share a graph of their forward, which recomputations run too, and one of their backward.
            assert graphs == 2, text


def test_blocks_are_compiled_once_and_equal_one_device():
    assert_compiled(2, [cp("ring", FSDP + COMPILE)])


@pytest.mark.slow
def test_methods_recomputation_and_inductor():
    cases = [cp("gather", FSDP + AC + COMPILE), cp("gather_once", FSDP + COMPILE)]
    cases.append(cp("ulysses", "[sharding.ddp]\n" + COMPILE))
    assert_compiled(2, [*cases, cp("universal", COMPILE), cp("ring", FSDP + "[scheduling.compile]\n")])


@pytest.mark.slow
def test_stages():
    assert_compiled(4, [cp("ring", FSDP + STAGES + COMPILE, mesh="pp = 2", microbatch=8)])


def logged_of(name):
    """Return the list that takes what a module logs from now on."""
    lines, handler = [], logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    return lines


@pytest.mark.slow
@pytest.mark.parametrize("settings", ["", "sequence_parallel = true\n"], ids=["tp", "sp"])
@pytest.mark.parametrize("tables", ["", FSDP + AC], ids=["alone", "recomputed"])
def test_blocks_whose_weights_tensor_parallelism_shards(settings, tables):
    text = cp("ring", tables + "[sharding.tensor_parallel]\n" + settings + COMPILE, mesh="tp = 2")
    assert_compiled(4, [text])


# ---- code beside tensors -------------------------------------------------------------------------------------------


class Remembering(nn.Module):
    """Is given an object to which it writes, as a cache of keys and values is."""

    def forward(self, x, cache=None):
        return x if cache is None else x + 0.0 * len(cache.seen)


class Reading(nn.Module):
    """Reads a value of its activations."""

    def forward(self, x):
        return x if float(x.detach().abs().max()) >= 0.0 else -x


class Counting(nn.Module):
    """Counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls, self.seen = 0, []

    def forward(self, x):
        self.calls += 1
        self.seen.append(self.calls)
        return x * (1.0 + 0.0 * self.calls)


class Scaling(nn.Module):
    """Reads a number that a loop changes."""

    factor = 1.0

    def __init__(self):
        super().__init__()
        self.factor = 1.0

    def forward(self, x):
        return x * self.factor


class Configured(Scaling):
    """Reads it of a configuration, which is no module."""

    def __init__(self):
        nn.Module.__init__(self)
        self.config = types.SimpleNamespace(factor=1.0)

    @property
    def factor(self):
        return self.config.factor

    @factor.setter
    def factor(self, value):
        self.config.factor = value


class Nested(Configured):
    """Reads it of a configuration in a configuration."""

    def __init__(self):
        nn.Module.__init__(self)
        self.config = types.SimpleNamespace(inner=types.SimpleNamespace(factor=1.0))

    @property
    def factor(self):
        return self.config.inner.factor

    @factor.setter
    def factor(self, value):
        self.config.inner.factor = value


GATES, WARM = [1.0], 1.0


def warm():
    return WARM


class Surrounded(Scaling):
    """Reads a list and, through a function, a number of its file."""

    def __init__(self):
        nn.Module.__init__(self)

    def forward(self, x):
        return x * GATES[0] * warm()

    @property
    def factor(self):
        return WARM

    @factor.setter
    def factor(self, value):
        global WARM
        WARM, GATES[0] = value, value / 2


class Block(nn.Module):
    def __init__(self, language, inner):
        super().__init__()
        self.parts, self.inner, self.language = language.block(), inner, [language]

    def forward(self, x, tokens, cache=None):
        block, (language,) = self.parts, self.language
        x = x + language.mixed(block, block["norm"](x), tokens)
        return self.inner(x) if cache is None else self.inner(x, cache)


class Inside(Language):
    """A language model whose blocks have a forward."""

    def __init__(self, attention, inner):
        super().__init__()
        self.attend = functools.partial(attention.attend, self)
        self.layers = nn.ModuleList(Block(self, inner()) for _ in range(2))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        cache = types.SimpleNamespace(seen=[]) if isinstance(self.layers[0].inner, Remembering) else None
        for block in self.layers:
            x = block(x, tokens, cache)
        return self.head(x)


def stepped(inner, attention, text, length):
    """Run two steps; return losses and gradients beside one device's, the graphs compiled, and what was logged."""
    torch.set_default_dtype(torch.float64)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    logged = logged_of("composer3d.propagation.captured_forward")
    make = functools.partial(Inside, attention, inner)
    (tokens,), _, targets = padded_batch(length)
    alone, errors = seeded(make), []
    run = composer3d.compose(seeded(make), write_manifest(text), loss_fn=class_loss, example=((tokens,), {}))
    for step in range(2):
        for model in (alone, run.parts[0].module):
            for module in model.modules():
                if isinstance(module, Scaling):
                    module.factor = 1.0 + step
        total, count = class_loss(alone(tokens), targets)
        alone.zero_grad()
        (total / count).backward()
        with run.step(step):
            loss = run.forward_backward(mine(run, tokens), target=mine(run, targets))
            own = {name: full(p.grad) for name, p in run.named_parameters() if p.grad is not None}
            for _, p in run.named_parameters():
                p.grad = None
        errors.append(float((loss - total.detach() / count).abs()))
        scale = max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
        errors += [float((own[n] - p.grad).abs().max()) / scale for n, p in alone.named_parameters() if n in own]
    calls = [module.calls for module in run.parts[0].module.modules() if isinstance(module, Counting)]
    run.close()
    return max(errors), torch._dynamo.utils.counters["stats"]["unique_graphs"], sorted(set(logged)), calls


CAPTURED = context("gather", more=FSDP + COMPILE)


def test_code_that_reads_values_or_writes_to_modules_runs_as_it_is():
    cases = [(Reading, "data-dependent"), (Counting, "it writes to Counting.calls")]
    plain = context("gather", more=FSDP)
    eager = run_ranks(stepped, 2, Counting, Window, plain, LENGTH)[0][3]
    for inner, reason in cases:
        for apart, graphs, logged, calls in run_ranks(stepped, 2, inner, Window, CAPTURED, LENGTH):
            assert apart <= 1e-12 and graphs == 0
            assert len(logged) == 2 and reason in logged[0], logged
            assert logged[0].startswith('compile: "layers.0" runs as it is, since its graph cannot be captured: ')
            assert calls == (eager if inner is Counting else [])


def test_blocks_that_are_given_what_code_may_write_to_run_as_they_are_and_are_named_once():
    for apart, graphs, logged, _ in run_ranks(stepped, 2, Remembering, Window, CAPTURED, LENGTH):
        assert apart <= 1e-12 and graphs == 0
        assert logged == [
            'compile: "layers.0" runs as it is, and so do others like it, since it is given a SimpleNamespace, to '
            "which its code may write"
        ]


@pytest.mark.parametrize("inner", [Scaling, Configured, Nested, Surrounded])
def test_numbers_that_a_loop_changes_are_a_part_of_a_graphs_form(inner):
    for apart, graphs, logged, _ in run_ranks(stepped, 2, inner, Window, CAPTURED, LENGTH):
        assert apart <= 1e-12 and graphs == 4 and logged == []


def test_masks_of_padded_lengths_are_looked_at_in_every_step():
    ((apart, graphs, logged, _), *_) = run_ranks(stepped, 2, nn.Identity, Window, CAPTURED, LENGTH - 2)
    assert apart <= 1e-12 and graphs == 0 and "a mask of padded positions is looked at" in logged[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Conformer", "Rwkv", "Mamba"])
def test_mixers_and_attention_written_out(name):
    for apart, graphs, logged, _ in run_ranks(mixed, 2, name, timeout_s=300.0):
        assert apart <= 1e-12 and graphs >= 1 and logged == []


def mixed(name):
    """Run a step of a model of mixers with compiled blocks."""
    torch.set_default_dtype(torch.float64)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    make = functools.partial(Staged, MIXERS[name])
    (tokens,), _, targets = padded_batch()
    alone = seeded(make)
    total, count = class_loss(alone(tokens), targets)
    (total / count).backward()
    run = composer3d.compose(seeded(make), write_manifest(CAPTURED), loss_fn=class_loss, example=((tokens,), {}))
    with run.step(0):
        loss = run.forward_backward(mine(run, tokens), target=mine(run, targets))
        own = {n: full(p.grad) for n, p in run.named_parameters() if p.grad is not None}
    scale = max(float(p.grad.abs().max()) for p in alone.parameters() if p.grad is not None)
    apart = [float((own[n] - p.grad).abs().max()) / scale for n, p in alone.named_parameters() if n in own]
    run.close()
    return max(*apart, float((loss - total.detach() / count).abs())), *_counted()


def _counted():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], [], []


@pytest.mark.slow
@pytest.mark.parametrize(
    "tables",
    [FLOAT8, "[precision.int8]\n", "[precision.mixed]\n" + FSDP],
    ids=["float8", "int8", "mixed"],
)
def test_products_in_other_dtypes_are_compiled_to_the_last_bit(tables):
    both = [cp("ring", tables + compiling) for compiling in ("", COMPILE)]
    for (eager, none), (compiled, some) in run_ranks(parameters, 2, both, timeout_s=300.0):
        assert (none, some) == (0, 2)
        assert all(torch.equal(compiled[name], eager[name]) for name in eager)


def parameters(cases):
    """Return the parameters after two steps of each case, and the number of graphs compiled."""
    found = []
    for text in cases:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        found.append((train(text), _counted()[0]))
    return found
