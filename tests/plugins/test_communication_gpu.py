"""The communication family on GPUs: codecs, exchanges of CUDA tensors, NCCL's options, streams, and fused projections.

Two ranks share one GPU over gloo, which exchanges CUDA tensors by way of the host; NCCL needs a GPU for each.
"""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from composer3d_plugins.communication.compression.codecs import make_codec
from composer3d_plugins.communication.compression.exchange import gather_rows, mean_of_replicas, reduce_rows
from support.family_models import batch_of, class_loss
from support.models import composed, full, unpadded, write_manifest
from support.tensor_parallel import built, table

import composer3d
from composer3d import torch_compat
from composer3d.testing import count_collectives, run_ranks

pytestmark = pytest.mark.gpu

NCCL = "cpu:gloo,cuda:nccl"  # as `compose` makes it
CODECS = ["bf16", "int8", "int4", "fp8", "topk", "onebit"]
FSDP, DDP, ISLANDS = "[sharding.fsdp2]\n", "[sharding.ddp]\n", "[mesh]\nisland = 2\n"
INT8 = '[communication.compression]\ngradients = "int8"\nblock = 16\n'
OF_AXIS = FSDP + "[communication.process_groups.axes.dp_shard]\n"
STREAMING = '[communication.local_sgd]\nmethod = "streaming_diloco"\nevery = 2\noverlap = 1\n'


@pytest.fixture
def two_gpus():
    if (count := torch.cuda.device_count()) < 2:
        pytest.skip(f"needs two CUDA devices, one for each rank of NCCL, and torch.cuda.device_count() is {count} here")


# ---- one GPU ---------------------------------------------------------------------------------------------------------


def coded(name, device):
    """Return what is wrong with the payloads of rows of a device."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(3, 100_001, generator=generator) * torch.logspace(-6, 3, 100_001)).to(device)
    codec, found = make_codec(name, block=256), []
    payload = codec.encode(x)
    decoded = codec.decode(payload, x.shape[1])
    if payload.device != x.device or payload.shape != (3, codec.num_bytes(x.shape[1])):
        found.append(f"a payload is on {payload.device}, and has the shape {tuple(payload.shape)}")
    if not torch.equal(codec.encode(x), payload):
        found.append("the same elements have another payload")
    if not torch.equal(codec.decode(payload.cpu(), x.shape[1]), decoded.cpu()):
        found.append("a payload is decoded as other numbers on CPU")
    if bool(((decoded - x).abs() > codec.bound(x)).any()):
        found.append("errors are beyond the bound")
    x[1, 5] = torch.inf
    decoded = codec.decode(codec.encode(x), x.shape[1])
    if bool(decoded[1].isfinite().all()) or not bool(decoded[0].isfinite().all()):
        found.append("what is not finite is lost, or spoils other rows")
    return found


@pytest.mark.parametrize("name", CODECS)
def test_codecs_hold_on_a_gpu_what_they_hold_on_cpu(name):
    assert run_ranks(coded, 1, name, "cuda") == [[]]


def exchanged(name, device):
    """Return whether a sum, rows and a mean of a device's tensors are what one rank makes of all ranks'."""
    group, rank, codec = dist.group.WORLD, dist.get_rank(), make_codec(name, block=16)
    numbers = [torch.randn(2, 500, generator=torch.Generator().manual_seed(each)).to(device) for each in range(2)]
    decoded = [codec.decode(codec.encode(x), 500) for x in numbers]
    mean = (0.0 + decoded[0] + decoded[1]) / 2
    expected = (
        0.0 + decoded[0][rank] + decoded[1][rank],
        torch.stack([codec.decode(codec.encode(x[:1]), 500)[0] for x in numbers]),
        torch.cat([codec.decode(codec.encode(chunk.view(1, -1)), 500)[0] for chunk in mean]),
    )
    own = numbers[rank]
    in_place = own.flatten()
    found = (
        reduce_rows(own, codec, group),
        gather_rows(own[0].clone(), codec, group),
        mean_of_replicas(in_place, codec, group, out=in_place),
    )
    return [torch.equal(one, other) for one, other in zip(found, expected, strict=True)]


@pytest.mark.parametrize("name", CODECS)
def test_exchanges_of_cuda_tensors_are_the_codec_on_one_device(name):
    """To the bit; over gloo, with both ranks on one GPU."""
    assert run_ranks(exchanged, 2, name, "cuda") == [[True] * 3] * 2


# ---- two GPUs --------------------------------------------------------------------------------------------------------


def trained(text, device):
    """Return how far four steps have moved this rank's parameters, and what travelled in the last."""
    torch.set_default_dtype(torch.float64)
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    run = composed(text, device=device)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    before = {name: full(p.detach()).clone() for name, p in run.named_parameters()}
    for step in range(4):
        batch = unpadded(num_sequences=8, seed=step)
        tokens, targets = (each.chunk(run.context.num_readers)[run.context.reader].to(device) for each in batch)
        with count_collectives(run.mesh) as collectives, run.step(step):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
    moved = torch.cat([(full(p.detach()) - before[name]).flatten() for name, p in run.named_parameters()]).cpu()
    run.close()
    return moved, collectives.summary()


@pytest.mark.parametrize(
    ("text", "plain", "tolerance"),
    [
        pytest.param(DDP + INT8, DDP + INT8, 1e-3, id="replicas in int8"),
        pytest.param(FSDP + INT8 + 'weights = "int8"\n', FSDP + INT8 + 'weights = "int8"\n', 1e-3, id="shards in int8"),
        pytest.param(OF_AXIS + "high_priority_stream = true\nmin_ctas = 2\n", FSDP, 1e-12, id="options of NCCL"),
        pytest.param(OF_AXIS + "registered_buffers = true\n", FSDP, 1e-12, id="registered buffers"),
        pytest.param(FSDP + "gather_early = 2\n", FSDP, 1e-12, id="gathered early"),
        pytest.param(FSDP + "overlap_optimizer = 2\n", FSDP, 1e-12, id="overlapped optimizer"),
        pytest.param(ISLANDS + STREAMING, ISLANDS + STREAMING, 1e-12, id="streaming"),
    ],
)
def test_two_gpus_train_as_two_ranks_on_cpu(two_gpus, text, plain, tolerance):
    """Collectives run on streams of their own there: one that nobody waits for would give other numbers.

    Of elements that lie in the middle of two integers of a codec a rounding decides, which differs between devices; the
    codecs themselves change these parameters by 5e-3 and 8e-3 of how far they move.
    """
    payloads = ("all_to_all", "all_gather")
    on_gpus, on_cpu = run_ranks(trained, 2, text, "cuda", backend=NCCL), run_ranks(trained, 2, plain, "cpu")
    for (found, counted), (wanted, on_gloo) in zip(on_gpus, on_cpu, strict=True):
        assert float((found - wanted).norm() / wanted.norm()) < tolerance
        if text == plain:
            assert [counted.get((op, axis)) for op, axis in on_gloo if op in payloads] == [
                number for (op, _), number in on_gloo.items() if op in payloads
            ]


FUSED = "sequence_parallel = true\n"
MICRO = '[communication.async_tensor_parallel]\nmethod = "micro_pipelined"\n[scheduling.compile]\n'


def fused():
    """Return what symmetric memory lacks, errors of gradients in float32, and what the compiler has fused."""
    torch.cuda.set_device(dist.get_rank())
    lacking = torch_compat.lacking_symmetric_memory(torch.device("cuda"), 2)
    if lacking is not None:
        return lacking, None, None
    model, (tokens, targets) = built("llama").float(), batch_of("llama")
    reference = copy.deepcopy(model).double()
    loss, count = class_loss(reference(tokens), targets)
    (loss / count).backward()
    text = "[mesh]\ntp = 2\n" + table("llama", FUSED, MICRO)
    run = composer3d.compose(model, write_manifest(text), loss_fn=class_loss, device="cuda")
    with count_collectives(run.mesh) as collectives, run.step(0):
        run.forward_backward(tokens.cuda(), target=targets.cuda())
        run.clip_grad_norm_(float("inf"))
    (plugin,) = (each.instance for each in run.context.plugins if each.name == "async_tensor_parallel")
    pairs = run.context.state[plugin][0]
    found = {name: full(p.grad).cpu().double() for name, p in run.named_parameters()}
    run.close()
    wanted = {name: p.grad for name, p in reference.named_parameters()}
    errors = [float((found[name] - grad).abs().max() / grad.abs().max()) for name, grad in wanted.items()]
    return None, max(errors), (pairs.gathered, pairs.summed, pairs.found, collectives.summary())


def test_micro_pipelined_projections_have_the_gradients_of_one_device(two_gpus):
    """Of two blocks, each with two gathers and two sums of the sequence, as many in the backward."""
    for lacking, error, what in run_ranks(fused, 2, backend=NCCL):
        if lacking is not None:
            pytest.skip(f"needs symmetric memory: {lacking}")
        gathered, summed, found, counted = what
        assert error < 1e-4
        assert 4 <= gathered and 4 <= summed and gathered + summed <= found
        assert counted.get(("reduce_scatter", "tp"), (0, 0))[0] <= found - gathered - summed + 2  # those of embeddings
