"""Bytes in a timeline: those that a plan counts, encoded where a codec encodes them."""

from __future__ import annotations

import pytest
import torch
from support.planned_runs import MICROBATCH, SEQ, VOCAB, Case, factory, figures, loss_fn, tracer_of

from composer3d import compose
from composer3d.diagnostics.timeline import Traffic, measure, read_trace, statements
from composer3d.testing import run_ranks

CODED = '[communication.compression]\ngradients = "int8"\nblock = 32\nmin_numel = 1\n'
HYBRID = "[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n"
CASES = {
    "coded": Case(f'mesh.dp_shard = 2\n[sharding.fsdp2]\n{CODED}weights = "int8"\n'),
    "coded_replicas": Case(f'{HYBRID}{CODED}axes = ["dp_replicate"]\n', world_size=4),
    "coded_buckets": Case(f'mesh.dp_replicate = 2\n[sharding.ddp]\nreducer = "bucketed"\n{CODED}'),
    "low_rank": Case(f'{HYBRID}[communication.compression]\ngradients = "powersgd"\naxes = ["dp_replicate"]\n', 4),
    "hybrid": Case(HYBRID, world_size=4),
    "plain": Case("mesh.dp_shard = 2\n[sharding.fsdp2]\n"),
    "replicated": Case("mesh.dp_replicate = 2\n[sharding.ddp]\n"),
    "sequence": Case('mesh.tp = 2\n[sharding.tensor_parallel]\nplan = "auto"\nsequence_parallel = true\n'),
}
NUMBERS = 256  # bytes at most, of the numbers that ranks agree on


def trained(case, folder):
    traced = f'[profiling.opentelemetry]\nfolder = "{folder}"\n'
    manifest = Case(case.text + traced, world_size=case.world_size).manifest(folder)
    run = compose(factory(case.num_layers), manifest, loss_fn=loss_fn, device="cpu")
    optimizer = case.optimizer(run)
    tokens, target = (torch.randint(VOCAB, (MICROBATCH * case.num_microbatches, SEQ)) for _ in range(2))
    for number in range(3):
        with run.step(number):
            run.forward_backward(tokens, target=target)
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    run.close()


@pytest.mark.parametrize("name", ["coded", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES if n != "coded")])
def test_bytes_of_a_timeline_are_those_of_the_plan(name, tmp_path):
    case = CASES[name]
    run_ranks(trained, case.world_size, case, tmp_path)
    report = measure(read_trace(tmp_path))
    for rank in (0, case.world_size - 1):
        planned = {}
        for (op, axis, plugin), (count, size) in figures(tracer_of(case, tmp_path).trace(rank))["collectives"].items():
            if plugin is not None:
                before = planned.get((op, axis), (0, 0))
                planned[op, axis] = (before[0] + count, before[1] + size)
        assert {(sent.op, sent.axis): (sent.count, sent.bytes) for sent in report.traffic[rank]} == planned
    sent = report.traffic[0][0]
    assert any(line == f"traffic of a step: {sent} (every rank)" for line in statements(report))


def test_sizes_are_told_for_people():
    sent = Traffic(op="all_to_all", axis="dp_shard", count=10, bytes=3 * 2**19)
    assert str(sent) == "all_to_all over dp_shard, 10 of 1.50 MiB in all"
