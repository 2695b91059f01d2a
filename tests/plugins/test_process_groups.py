"""Process groups by axis: reduce-scatters on gloo, backends and timeouts that hold, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from support.models import composed, mine, one_step, padded, seeded, write_manifest

from composer3d import GroupOptions, NCCLOptions, StepError, torch_compat
from composer3d.communication.group_options import override_of
from composer3d.mesh import arrange, build, resolve
from composer3d.testing import assert_parity, count_collectives, full, run_ranks

UNITS = 4  # three blocks and the root
FSDP, GROUPS = "[sharding.fsdp2]\n", "[communication.process_groups]\n"


def of_axis(axis, text):
    return f"[communication.process_groups.axes.{axis}]\n{text}\n"


# ---- reduce-scatter --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "reduce_scatter"), [(1, "auto"), (2, "auto"), (3, "auto"), (3, "all_to_all"), (3, "native")]
)
def test_gradients_and_collectives(zero, reduce_scatter):
    """Float64, uneven shards, two micro-batches; gloo's own reduce-scatter only where it is asked for."""
    text = f'[sharding.fsdp2]\nzero = {zero}\n{GROUPS}reduce_scatter = "{reduce_scatter}"\n'
    text += of_axis("dp_shard", "own_group = true")
    op, other = ("reduce_scatter", "all_to_all") if reduce_scatter == "native" else ("all_to_all", "reduce_scatter")
    for *errors, counted in run_ranks(partial(one_step, microbatch=3), 2, text):
        assert max(errors) < 1e-12
        assert counted[op, "dp_shard"] == UNITS * (2 if zero == 3 else 1)
        assert (other, "dp_shard") not in counted


@pytest.mark.slow
@pytest.mark.parametrize("text", ["[mesh]\ndp_replicate = 2\n", "[mesh]\ndp_shard = 4\n"])
def test_gradients_over_four_ranks(text):
    for *errors, counted in run_ranks(partial(one_step, microbatch=3), 4, text + FSDP + GROUPS):
        assert max(errors) < 1e-12 and ("reduce_scatter", "dp_shard") not in counted


def sums(dtype, op):
    """Return this rank's part by the exchange and by gloo, of 3 elements a rank."""
    from composer3d_plugins.communication.process_groups.exchanged_sums import ExchangedReduceScatter

    exchange = ExchangedReduceScatter(is_exchanged=lambda group: True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randint(-5, 6, (6,), generator=generator).to(dtype)
    found, native = exchange.allocate((3,), dtype=dtype, device=x.device), torch.empty(3, dtype=dtype)
    group = dist.group.WORLD
    exchange(output_tensor=found, input_tensor=x.clone(), group=group, op=op)
    torch_compat.reduce_scatter_single(native, x, group=group)
    return found, native / (2 if op == dist.ReduceOp.AVG else 1)


@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=["sum", "mean"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sums_of_whole_numbers_are_those_of_gloo(dtype, op):
    assert all(torch.equal(found, native) for found, native in run_ranks(sums, 2, dtype, op))


def narrow():
    """Add 1 and 2**-8 three times over, which bfloat16 loses one by one."""
    from composer3d_plugins.communication.process_groups.exchanged_sums import sum_exchanged

    own = 1.0 if dist.get_rank() == 0 else 2.0**-8
    return sum_exchanged(torch.full((3, 1), own, dtype=torch.bfloat16), dist.group.WORLD)


def test_narrow_gradients_are_added_in_float32():
    for total in run_ranks(narrow, 3):
        assert total.dtype == torch.float32 and float(total) == 1 + 2 * 2.0**-8


def operators(shape, dim):
    """Return the reduce-scatters of a DTensor that holds partial sums, exchanged and as gloo makes them."""
    from composer3d_plugins.communication.process_groups.operator_sums import exchange_operator_sums
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    local = torch.randn(shape, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)

    def scattered():
        with count_collectives(mesh) as collectives:
            part = DTensor.from_local(local, mesh, [Partial()], run_check=False).redistribute(mesh, [Shard(dim)])
        return full(part), collectives.count("reduce_scatter"), collectives.count("all_to_all")

    native = scattered()
    end = exchange_operator_sums(lambda group: True)
    found = scattered()
    end()
    return native, found, scattered()


@pytest.mark.parametrize(("shape", "dim"), [((3, 4, 5), 1), ((5, 2), 0)])
def test_operators_of_sharded_tensors_are_exchanged_too(shape, dim):
    for (native, *counts), (found, *exchanged), (_, *after) in run_ranks(operators, 2, shape, dim):
        assert torch.equal(native, found)  # of two terms either order is the same
        assert (counts, exchanged, after) == ([1, 0], [0, 1], [1, 0])


PARALLEL = """
[mesh]
dp_shard = 2
tp = 2
[sharding.fsdp2]
[sharding.tensor_parallel]
sequence_parallel = true
sequence_dim = 1
[sharding.tensor_parallel.plan]
tok = "vocab"
"layers.*.up" = "colwise"
"layers.*.down" = "rowwise"
norm = "sequence"
out = "head"
"""


def parallel_step(text):
    from support.models import Even

    model = seeded(Even, dim=8)
    model.tok, model.out = torch.nn.Embedding(12, 8), torch.nn.Linear(8, 12)
    run = composed(text, model)
    tokens, targets = padded(seq_len=6)
    with count_collectives(run.mesh) as collectives, run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
    gradients = {name: full(p.grad).clone() for name, p in run.named_parameters()}  # while its groups are there
    run.close()
    return gradients, collectives.summary()


@pytest.mark.slow
def test_sequence_parallelism_is_exchanged_with_the_same_gradients():
    torch.set_default_dtype(torch.float64)
    try:
        native, plain = run_ranks(parallel_step, 4, PARALLEL)[0]
        found, summary = run_ranks(parallel_step, 4, PARALLEL + GROUPS)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(float((found[name] - native[name]).abs().max()) < 1e-14 for name in native)
    moved = {axis: plain["reduce_scatter", axis] for axis in ("dp_shard", "tp")}
    assert not any(op == "reduce_scatter" for op, _ in summary)
    assert {axis: summary["all_to_all", axis] for axis in moved} == moved


# ---- bytes -----------------------------------------------------------------------------------------------------------

COUNTING = """
import fcntl, json, socket, struct, sys
from pathlib import Path
import torch, torch.distributed as dist
from composer3d import torch_compat
from composer3d.testing import run_ranks
from composer3d_plugins.communication.process_groups.exchanged_sums import ExchangedReduceScatter

NUMEL, TIMES = 1 << 18, 4
SIOCSIFFLAGS, IFF_UP = 0x8914, 1

with socket.socket() as opened:  # the loopback of a new namespace is down
    fcntl.ioctl(opened, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))

def sent():
    lines = Path("/proc/net/dev").read_text().splitlines()
    return next(int(line.split()[9]) for line in lines if line.strip().startswith("lo:"))

def counted():
    exchange = ExchangedReduceScatter(is_exchanged=lambda group: sys.argv[1] == "all_to_all")
    x, part = torch.ones(NUMEL), torch.empty(NUMEL // 4)
    reduce = lambda: exchange(output_tensor=part, input_tensor=x, group=dist.group.WORLD, op=dist.ReduceOp.SUM)
    reduce()  # connects
    dist.barrier()
    before = sent()
    for _ in range(TIMES):
        reduce()
    dist.barrier()
    return (sent() - before) / TIMES / x.nbytes

print(json.dumps(run_ranks(counted, 4)[0]))
"""


def on_the_loopback(algorithm):
    """Return the bytes of one reduce-scatter over 4 ranks, in sizes of the tensor, in a network of its own."""
    command = ["unshare", "-n", "-r", sys.executable, "-c", COUNTING, algorithm]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def has_namespaces():
    try:
        return subprocess.run(["unshare", "-n", "-r", "true"], capture_output=True).returncode == 0
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not has_namespaces(), reason="needs unshare -n, for a loopback of its own")
def test_gloo_sends_half_as_much():
    """6.0 and 3.0 sizes of the tensor, and a few percent of headers."""
    assert 6.0 <= on_the_loopback("native") < 6.3
    assert 3.0 <= on_the_loopback("all_to_all") < 3.15


# ---- groups ----------------------------------------------------------------------------------------------------------


def groups(text):
    run = composed(text)
    cpu = torch.device("cpu")
    found = {}
    for axis in ("dp_replicate", "dp_shard"):
        group = run.mesh.get_group(axis)
        timeout = torch_compat.group_timeout(group, cpu).total_seconds()
        found[axis] = timeout, dist.get_backend(group), group is dist.group.WORLD
    world = torch_compat.group_timeout(dist.group.WORLD, cpu).total_seconds()
    run.close()
    return found, world


def test_an_axis_has_its_own_timeout_and_the_world_keeps_its():
    """The axis has all ranks of the world, whose group it would share."""
    found, world = run_ranks(groups, 2, FSDP + GROUPS + of_axis("dp_shard", 'timeout_s = 7.5\nbackend = "gloo"'))[0]
    assert found["dp_shard"] == (7.5, "gloo", False) and world == 300
    shared, _ = run_ranks(groups, 2, FSDP + GROUPS)[0]
    assert shared["dp_shard"] == (300, "gloo", True)


def told_late(text):
    """Hold up rank 1 in the forward of a second step until rank 0 was told why it waits; return that, and how long."""
    run = composed(text)
    batch = [mine(run, tensor) for tensor in padded()]
    store = torch_compat.default_store()

    def step(number):
        with run.step(number):
            run.forward_backward(batch[0], target=batch[1])

    step(0)
    if dist.get_rank() == 1:
        run.model.layers[1].register_forward_pre_hook(lambda *_: store.wait(["told"], timedelta(seconds=100)))
    begin = time.monotonic()
    with pytest.raises((StepError, RuntimeError) if dist.get_rank() else StepError) as caught:
        step(1)
    seconds = time.monotonic() - begin
    if dist.get_rank() == 0:
        store.set("told", "1")
    return str(caught.value), seconds


def test_a_timeout_is_kept_and_names_its_axis():
    text, seconds = run_ranks(told_late, 2, FSDP + GROUPS + of_axis("dp_shard", "timeout_s = 3"))[0]
    assert 3.0 <= seconds < 250  # the world's is 300
    assert "dp_shard" in text and "rank 1" in text


def test_options_of_nccl_are_those_of_its_group():
    from composer3d_plugins.communication.process_groups.axis_options import AxisOptions

    stated = {"high_priority_stream": True, "min_ctas": 2, "max_ctas": 4, "cga_cluster_size": 2, "cta_policy": "zero"}
    stated |= {"nvls_ctas": 4, "split_share": False, "net_name": "Socket", "traffic_class": 3, "blocking": True}
    options = AxisOptions(**stated, sharp=True, timeout_s=9.0).of_group()
    assert options.nccl == NCCLOptions(**stated, collnet=True) and options.timeout_s == 9.0
    assert AxisOptions(timeout_s=9.0).of_group().nccl is None


def registered():
    run = composed(FSDP)
    from composer3d import Units

    for unit in run.context.stash(Units).by_module.values():
        unit.register_buffers()
    kinds = {
        (type(gather).__name__, type(scatter).__name__, group.force_sum_reduction_for_comms)
        for module in run.model.modules()
        for group, gather, scatter in torch_compat.fsdp_groups(module)
    }
    run.close()
    return kinds


def test_registered_buffers_are_the_process_groups():
    assert run_ranks(registered, 2)[0] == {("ProcessGroupAllocAllGather", "ProcessGroupAllocReduceScatter", True)}


def overridden():
    """Return what the mesh takes for an axis with options of NCCL, from a world on gloo."""
    options = GroupOptions(nccl=NCCLOptions(max_ctas=4, collnet=True, high_priority_stream=True), timeout_s=30.0)
    backend, made = override_of(options)
    config = made.config
    return backend, config.max_ctas, config.collnet_enable, made.is_high_priority_stream, made._timeout.total_seconds()


@pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch is built without NCCL")
def test_the_mesh_takes_the_options_of_nccl():
    assert run_ranks(overridden, 1) == [("gloo", 4, 1, True, 30.0)]


def made_on_a_gpu():
    options = {"tp": GroupOptions(nccl=NCCLOptions(max_ctas=4, high_priority_stream=True), timeout_s=30.0)}
    layout = resolve({}, axes=arrange(()), world_size=1, default=None)
    made = build(layout, device_type="cuda", options=options).get_group("tp")._get_backend(torch.device("cuda")).options
    return made.config.max_ctas, made.is_high_priority_stream, made._timeout.total_seconds()


@pytest.mark.gpu
def test_options_of_nccl_on_a_gpu():
    assert run_ranks(made_on_a_gpu, 1, backend="nccl") == [(4, True, 30.0)]


@pytest.mark.slow
def test_verify_proves_it():
    from support.composition_faults import Even
    from support.models import sum_loss
    from support.verification_cases import batch

    path = write_manifest("[mesh]\ndp_shard = 2\n" + FSDP + GROUPS)
    found = assert_parity(Even, path, batch(), loss_fn=sum_loss, grad_clip=0.5, microbatch=3).verdict
    assert (found.failures, found.diagnosis) == ((), ())
    rows = {(row.op, row.axis): row for row in found.evidence.rows}
    assert ("reduce_scatter", "dp_shard") not in rows and rows["all_to_all", "dp_shard"].ok
