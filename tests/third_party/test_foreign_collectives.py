"""Collectives that a plugin of somebody else issues in hooks and step actions are in spans that name it."""

from __future__ import annotations

import sys
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from support.models import composed, mine, padded
from support.telemetry import table
from support.trace_files import read

import composer3d
from composer3d.errors import HookError
from composer3d.testing import count_collectives, run_ranks

# Functions imported by name before anything is composed; one that is issued by an operator; one of JSON.
FOREIGN = '''
import torch
from torch.distributed import all_gather, all_reduce, broadcast, reduce_scatter

from composer3d import Metric, StepAction, StepPoint, all_gather_json, hookimpl, plugin


@plugin(family="profiling")
class Foreign:
    """Send what nobody needs. Memory: some. Collectives: those below."""

    @hookimpl
    def composer3d_step_actions(self, context):
        return [
            StepAction(name="foreign.begin", point=StepPoint.BEGIN, run=self._begin),
            StepAction(name="foreign.reduced", point=StepPoint.GRADIENTS_REDUCED, run=self._reduced),
            StepAction(name="foreign.end", point=StepPoint.END, run=self._end),
        ]

    def _begin(self, state):
        broadcast(torch.zeros(5, dtype=torch.float64), src=0)

    def _reduced(self, state):
        group = state.context.mesh["dp_shard"].get_group()
        with state.context.span("mine"):
            all_reduce(torch.ones(3, dtype=torch.float64), group=group)
        work = all_reduce(torch.ones(7), group=group, async_op=True)
        work.wait()
        reduce_scatter(torch.zeros(2), [torch.ones(2), torch.ones(2)], group=group)
        with state.context.span("all_reduce", bytes=8, axis="dp_shard", plugin="its own"):
            all_reduce(torch.ones(2), group=group)

    def _end(self, state):
        first = next(parameter for part in state.parts for parameter in part.module.parameters())
        first.full_tensor()

    @hookimpl
    def composer3d_measure(self, context, step):
        return [Metric(name="ranks", value=float(len(all_gather_json(context.rank))), reduction="max")]

    @hookimpl
    def composer3d_place_batch(self, context, batch):
        all_gather([torch.zeros(6), torch.zeros(6)], torch.ones(6))
'''
PLUGIN = '[profiling.foreign]\nuse = "foreign:Foreign"\n'
OPS = ("all_gather", "all_reduce", "broadcast", "reduce_scatter", "all_to_all")


def step(folder):
    """Run a step with the plugin and one without; return spans that name a plugin, and how many collectives were."""
    counted = []
    for tables in (PLUGIN, ""):
        text = f"[sharding.fsdp2]\n{tables}{table(folder / str(len(tables)), detail='microbatch')}"
        run = composed(text)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        tokens, targets = (mine(run, tensor) for tensor in padded())
        with count_collectives(run.mesh) as collectives:
            with run.step(0):
                run.forward_backward(tokens, target=targets)
                optimizer.step()
            run.report(0, {})
        counted.append(collectives.count())
        rank = run.context.rank
        run.close()
        # What was replaced is bound to a group again, as a method of torch's.
        group = dist.ProcessGroup(dist.HashStore(), 0, 1)
        assert group.allreduce.__self__ is group and not hasattr(group.allreduce, "__wrapped__")
    _, spans = read(folder / str(len(PLUGIN)) / f"rank-{rank}.jsonl")
    told = ("plugin", "axis", "bytes")
    return [(span.name, *map(span.attributes.get, told)) for span in spans if "plugin" in span.attributes], counted


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "foreign.py").write_text(FOREIGN)
    sys.path.insert(0, str(folder))
    yield run_ranks(step, 2, folder)
    sys.path.remove(str(folder))


def test_every_collective_of_a_hook_or_action_is_in_one_span(ranks):
    foreign = [
        ("broadcast", 40),
        ("all_gather", 48),
        ("all_reduce", 24),
        ("all_reduce", 28),
        ("reduce_scatter", 16),
        ("all_gather", 6 * 2 * 7 * 4),  # of an operator: the embedding's rows, padded to be even
        ("all_gather", 16),  # how long every rank's JSON is, and then the longest
        ("all_gather", 2),
    ]
    for spans, (with_plugin, without) in ranks:
        found = [(op, size) for op, plugin, axis, size in spans if (plugin, axis) == ("foreign", "dp_shard")]
        assert Counter(found) == Counter(foreign)
        # The ninth is in a span that the plugin opened itself, and in no other.
        assert [span for span in spans if span[1] != "foreign"] == [("all_reduce", "its own", "dp_shard", 8)]
        assert with_plugin - without == len(foreign) + 2  # one more carries the metric


# What it sends outside of hooks and actions of steps.
LASTING = '''
import torch
from torch.distributed import all_reduce

from composer3d import hookimpl, plugin


class Kept:
    is_dispensable = True

    def state_dict(self):
        all_reduce(torch.ones(10))
        return {}

    def load_state_dict(self, state):
        all_reduce(torch.ones(12))


class Voting(torch.optim.SGD):
    def step(self, closure=None):
        all_reduce(torch.ones(11))
        return super().step(closure)


@plugin(family="profiling")
class Lasting:
    """Send what nobody needs. Memory: none. Collectives: those below."""

    @hookimpl
    def composer3d_optimizer(self, context, cls, groups):
        return Voting(groups)

    @hookimpl
    def composer3d_state(self, context):
        all_reduce(torch.ones(8))
        return {"kept": Kept()}

    @hookimpl
    def composer3d_close(self, context, error):
        all_reduce(torch.ones(9))
'''


def outside_of_actions(folder):
    """Step, save, load and close; return the spans of collectives that name a plugin."""
    text = f'[sharding.fsdp2]\n[profiling.z]\nuse = "lasting:Lasting"\n{table(folder / "spans", detail="microbatch")}'
    run = composed(text)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
    run.save(folder / "saved" / "step-1")
    run.load(folder / "saved" / "step-1")
    rank = run.context.rank
    run.close()
    _, spans = read(folder / "spans" / f"rank-{rank}.jsonl")
    return [(span.name, span.attributes["bytes"]) for span in spans if span.attributes.get("plugin") == "z"]


def test_collectives_of_an_optimizer_of_states_and_of_the_end_are_in_spans(tmp_path, monkeypatch):
    (tmp_path / "lasting.py").write_text(LASTING)
    monkeypatch.syspath_prepend(str(tmp_path))
    sizes = [
        8,
        11,
        10,
        10,
        12,
        9,
    ]  # asked for states; a step; saved; what there is when it is loaded, and then what was saved; the end
    expected = [("all_reduce", 4 * size) for size in sizes]
    assert run_ranks(outside_of_actions, 2, tmp_path) == [expected] * 2


FAILING = '''
import torch
from torch.distributed import all_reduce

from composer3d import hookimpl, plugin


@plugin(family="profiling")
class Failing:
    """Fail on one rank, while the other waits for it. Memory: none. Collectives: that one."""

    @hookimpl
    def composer3d_state(self, context):
        if context.rank == 1:
            raise ValueError("no state here")
        all_reduce(torch.ones(8))
'''


def refused():
    with pytest.raises((composer3d.StepError, HookError)) as caught:
        composed('[sharding.fsdp2]\n[profiling.z]\nuse = "failing:Failing"\n')
    return str(caught.value)


def test_a_rank_that_is_lost_while_states_are_asked_for_is_explained(tmp_path, monkeypatch):
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = run_ranks(refused, 2)
    assert all("composer3d_state of z raised ValueError: no state here, at " in text for text in told), told
