from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.models import Net, composed, mine, padded, seeded, sum_loss, unpadded, write_manifest
from support.plugins import Measuring

import composer3d
from composer3d import ManifestError, load_manifest
from composer3d.errors import HookError
from composer3d.testing import count_collectives, fake_world, run_ranks

JOURNAL = '[profiling.journal]\nuse = "support.plugins:Journal"\n'
UNCLOSABLE = '[profiling.unclosable]\nuse = "support.plugins:Unclosable"\n'


def alone(function, *args):
    """Run a function in a process of its own, without a process group and without torchrun's environment."""

    def rank():
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
        return function(*args)

    return run_ranks(rank, 1, init=False)[0]


def loop(path, folder):
    """Train as in the documentation."""
    model, loader = seeded(), [unpadded()] * 20

    def loss_fn(logits, targets):
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    losses = []
    run = composer3d.compose(model, path, loss_fn=loss_fn)
    optimizer = run.optimizer(torch.optim.AdamW, lr=3e-2)
    for n, (tokens, targets) in enumerate(loader):
        with run.step(n):
            loss = run.forward_backward(tokens, target=targets)
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss))
    run.save(folder / "checkpoints" / "100")
    had_group = dist.is_initialized()
    run.close()
    return losses, had_group, dist.is_initialized(), sorted(path.name for path in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("text", ["", "[sharding.fsdp2]\n", "[precision.mixed]\n"], ids=["plain", "fsdp2", "mixed"])
def test_the_documented_loop_runs_without_torchrun(tmp_path, text):
    losses, had_group, has_group, files = alone(loop, write_manifest(text), tmp_path)
    assert losses[-1] < 0.8 * losses[0]
    assert (had_group, has_group) == (True, False)
    assert "100" in files


def whole_loop(path):
    loader = [unpadded()] * 3
    with composer3d.compose(seeded(), path, loss_fn=sum_loss) as run:
        optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
        for tokens, targets in run.steps(loader):
            run.forward_backward(mine(run, tokens), target=mine(run, targets))
            optimizer.step()
            optimizer.zero_grad()
    return run.context.state["journal"][-1], dist.is_initialized()


def test_as_a_context_in_a_group_that_is_there():
    # The loop's own process group is left to it.
    assert (
        run_ranks(whole_loop, 2, write_manifest(JOURNAL + "[sharding.fsdp2]\n")) == [(("CLOSE", "NoneType"), True)] * 2
    )


def closing(text):
    run = composed(text)
    with pytest.raises((OSError, ValueError)) as caught, run:
        raise ValueError("of the loop")
    run.close()
    return type(caught.value).__name__, run.context.state["journal"], dist.is_initialized()


def test_plugins_are_told_the_error_once():
    assert alone(closing, JOURNAL) == ("ValueError", [("CLOSE", "ValueError")], False)


def test_a_plugin_that_cannot_close_keeps_nothing_else_open():
    # What ended the loop is raised, not what failed after it.
    assert alone(closing, JOURNAL + UNCLOSABLE) == ("ValueError", [("CLOSE", "ValueError")], False)


def fails(text):
    with pytest.raises(composer3d.ComposerError):
        composed(text)
    return dist.is_initialized()


@pytest.mark.parametrize("text", ["[sharding.fsdp2]\nzeero = 1\n", '[sharding.fsdp2]\nunits = ["nothing"]\n'])
def test_a_composition_that_fails_leaves_no_group(text):
    assert alone(fails, text) is False


RUN = """
[data]
use = "python_docs"
[optimizer]
lr = 1e-3
[train]
steps = 10
"""


def refused(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return [str(problem).partition("run.toml")[2] for problem in caught.value.problems], caught.value.__notes__


def test_tables_that_embedding_does_not_use_are_refused_unless_asked_for():
    known = "one of: communication, mesh, model, precision, profiling, scheduling, sharding, train"
    problems, notes = alone(refused, RUN)
    assert problems == [
        f':3:2: [data] unknown table "data"; {known}',
        f':5:2: [optimizer] unknown table "optimizer"; {known}',
        ':8:1: [train] unknown key "steps"; one of: accumulate, global_batch, microbatch, random_numbers, seed',
    ]
    assert notes == ["what only a run uses is allowed by compose(tables=composer3d.runner.TABLES)"]


def allowed():
    from composer3d.runner import TABLES

    run = composed(RUN, tables=TABLES)
    return run.context.manifest.train.steps


def test_tables_of_the_runner_are_allowed():
    assert alone(allowed) == 10


DESCRIPTION = """\
pp=1 x dp_replicate=2 x dp_shard=4 x cp=1 x tp=1 on cpu
RECOMPUTE    activation_checkpoint    layers.0, layers.1, layers.2
DATA         fsdp2                    layers.0, layers.1, layers.2, ... 4 in all\
"""


@pytest.mark.parametrize(
    "text",
    [
        "[mesh]\ndp_replicate = 2\n[sharding.fsdp2]\n[scheduling.activation_checkpoint]\n[precision.mixed]\n",
        "[precision.mixed]\n[scheduling.activation_checkpoint]\n[sharding.fsdp2]\n[mesh]\ndp_replicate = 2\n",
    ],
)
def test_the_description_does_not_depend_on_the_order_of_tables(text):
    with fake_world(8):
        run = composed(text, Net)
        assert run.describe() == DESCRIPTION
        assert [(row.phase, row.name, row.fqns[-1]) for row in run.plan] == [
            ("RECOMPUTE", "activation_checkpoint", "layers.2"),
            ("DATA", "fsdp2", ""),
        ]
        run.close()


def seen():
    run = composed("[mesh]\ndp_replicate = 2\n[sharding.fsdp2]\n", seeded(tied=True))
    names = [fqn for fqn, _ in run.named_parameters()]
    (part,) = run.parts
    assert part.module is run.model and (part.index, part.num_stages, part.is_first, part.is_last) == (0, 1, True, True)
    assert not run.has_grad_scaler
    return names, dict(run.coordinates), run.mesh.mesh_dim_names, run.context.data_parallel_rank


def test_what_there_is_to_see():
    results = run_ranks(seen, 4)
    for rank, (names, coordinates, axes, data_parallel_rank) in enumerate(results):
        assert names == [name for name, _ in Net(tied=True).named_parameters()]
        assert "out.weight" not in names
        assert coordinates == {"pp": 0, "dp_replicate": rank // 2, "dp_shard": rank % 2, "cp": 0, "tp": 0, "ep": 0}
        assert axes == ("pp", "dp_replicate", "dp_shard", "cp", "tp")
        assert data_parallel_rank == rank


def sampled(text, size):
    run = composed(text)
    sampler = run.sampler(range(size))
    return [list(indices) for _, indices in zip(range(3), sampler, strict=False)]


def test_samples_are_dealt_out_to_data_parallel_ranks():
    text = "[train]\nglobal_batch = 4\nmicrobatch = 1\n"
    (whole,) = run_ranks(sampled, 1, text, 40)
    first, second = run_ranks(sampled, 2, "[sharding.fsdp2]\n" + text, 40)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
    assert len({index for batch in whole for index in batch}) == 12
    # By default a micro-batch for each rank.
    assert [len(batch) for batch in run_ranks(sampled, 2, "[sharding.fsdp2]\n[train]\nmicrobatch = 3\n", 40)[0]] == [
        3
    ] * 3


def reported():
    run = composed(JOURNAL + "[sharding.fsdp2]\n")
    result = run.report(7, {"loss": 1.0})
    return result, run.context.state["metrics"]


def test_plugins_measure_and_take_metrics():
    expected = {"loss": 1.0, "rank_sum": 15.0, "rank_max": 8.0, "rank_mean": 7.5, "rank_rank0": 7.0}
    assert run_ranks(reported, 2) == [(expected, (7, expected))] * 2


def measuring(*steps):
    """Return what `run.report` returns in each step, or its error, and how many collectives it takes."""
    Measuring.measured = dict(enumerate(steps))
    run, found = composed('[profiling.measuring]\nuse = "support.plugins:Measuring"\n[sharding.fsdp2]\n'), []
    for step in range(len(steps)):
        with count_collectives(run.mesh) as collectives:
            try:
                reported = run.report(step, {})
            except HookError as error:
                reported = str(error)
        found.append((reported, collectives.count()))
    run.close()
    return found


A, B = ("a", "sum"), ("b", "max")


def test_metrics_are_reduced_in_one_collective_whatever_a_step_measures():
    nothing, both, one, many = (), (A, B), (B,), [(f"m{number}", "sum") for number in range(20)]
    steps = [(each, each) for each in (nothing, nothing, both, one, nothing, many, many)]
    everything = {name: 3.0 for name, _ in many}
    for found in run_ranks(measuring, 2, *steps):
        reported, counts = zip(*found, strict=True)
        assert reported == ({}, {}, {"a": 3.0, "b": 2.0}, {"b": 2.0}, {}, everything, everything)
        assert counts == (1, 0, 1, 1, 1, 2, 1)


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        (([A], [B]), '"a" (sum) on rank 0 alone'),
        (([A], [A, B]), '"b" (max) on rank 1 alone'),
        (([], [A, B]), '"a" (sum) on rank 1 alone'),
        (([A], [("a", "max")]), '"a" (sum) on rank 0 alone'),
        (([A, B], [B, A]), '"a", with others, in another order on some ranks'),
    ],
)
def test_metrics_that_ranks_measure_differently_are_refused_on_all_of_them(measured, said):
    for found in run_ranks(measuring, 2, measured):
        where, _, told = found[0][0].partition("run.toml:2): ")
        assert where.startswith("[profiling.measuring] (")
        assert told == (
            f"composer3d_measure of measuring returned the metric {said}: ranks reduce them one by one, so return the "
            "same ones on every rank, in one order, with 0 or NaN where a rank has none"
        )


def test_a_plugin_does_not_measure_what_the_run_does():
    def step():
        run = composed(JOURNAL)
        with pytest.raises(composer3d.QueryError) as caught:
            run.report(7, {"loss": 1.0, "rank_sum": 2.0})
        return str(caught.value)

    told = alone(step)
    assert told.startswith("[profiling.") and told.endswith(
        'measures "rank_sum", which is a metric of the run itself; give it another name'
    )


def read_before():
    run = composer3d.compose(seeded(), load_manifest(write_manifest("[train]\nmicrobatch = 3\n")), loss_fn=sum_loss)
    tokens, targets = padded()
    with run.step(0) as state:
        run.forward_backward(tokens, target=targets)
        return state.index


def test_a_manifest_that_was_read_before_may_be_handed_over():
    assert alone(read_before) == 3


def twice():
    """Compose, close and compose again, with the same mesh."""
    losses = []
    tokens, targets = padded()
    for _ in range(2):
        with composed("[mesh]\ndp_replicate = 2\n[sharding.fsdp2]\n", Net) as run:
            optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
            with run.step(0):
                losses.append(float(run.forward_backward(mine(run, tokens), target=mine(run, targets))))
                run.clip_grad_norm_(1.0)
                optimizer.step()
            losses.append(float(run.evaluate(mine(run, tokens), target=mine(run, targets)).loss))
    return losses


def test_one_composition_after_another():
    for losses in run_ranks(twice, 4):
        assert losses[:2] == losses[2:]
        assert losses[1] < losses[0]


def independent_samples():
    run = composed('[mesh]\nsite = 2\n[communication.sites]\nuse = "support.refused_plugins:Sites"\n[sharding.fsdp2]\n')
    return [list(indices) for _, indices in zip(range(3), run.sampler(range(24)), strict=False)]


def test_independent_models_are_fed_samples_of_their_own():
    ranks = run_ranks(independent_samples, 4)
    for step in range(3):
        assert len({index for rank in ranks for index in rank[step]}) == sum(len(rank[step]) for rank in ranks)
