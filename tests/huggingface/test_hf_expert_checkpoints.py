"""Transformers' mixtures whose experts are saved over one ep and read over another, each rank its part alone."""

from __future__ import annotations

import math

import pytest
import torch
from support.huggingface import batch, make, options_of, token_sum
from support.models import largest, write_manifest

import composer3d
from composer3d import checkpoint
from composer3d.checkpoint import reader
from composer3d.huggingface import HuggingFaceModel
from composer3d.huggingface.folder import import_transformers
from composer3d.runner.weights.weight_export import export
from composer3d.testing import full, run_ranks

FAMILIES = ["mixtral", "qwen2_moe"]
FSDP = "[mesh]\ndp_shard = {}\n[sharding.fsdp2]\n[train]\nmicrobatch = 1\n"
EP = "[mesh]\ndp_shard = {0}\nep = {0}\n[sharding.fsdp2]\n[sharding.expert_parallel]\n[train]\nmicrobatch = 1\n"


def text_of(degree):
    return (FSDP if degree == 1 else EP).format(degree)


@pytest.fixture(scope="module", autouse=True)
def _imported():
    import_transformers()


def counted(load):
    """Call a function; return the elements of tensors that it has read from checkpoints."""
    read, sizes = reader._read, []

    def counting(saved, chunk, *args):
        sizes.append(math.prod(chunk.sizes))
        return read(saved, chunk, *args)

    reader._read = counting
    try:
        load()
    finally:
        reader._read = read
    return sum(sizes)


def trained(folder, path, degree, to=None):
    """Run on a rank: load a checkpoint if there is one, train a step in float64, and save one if there was none.

    Returns the weights before the step and after it, the bytes read of the folder, and elements of the checkpoint.
    """
    torch.set_default_dtype(torch.float64)
    factory = HuggingFaceModel(folder, dtype="float64", config=options_of(folder))
    run = composer3d.compose(factory, write_manifest(text_of(degree)), loss_fn=token_sum)
    optimizer, from_folder, from_checkpoint = run.optimizer(torch.optim.AdamW, lr=1e-2), factory.files.num_bytes_read, 0
    if path is not None and path.exists():
        from_checkpoint = counted(lambda: run.load(path))
    rank, number = run.context.data_parallel_rank, run.context.data_parallel_degree
    tokens, targets = (tensor.chunk(number)[rank] for tensor in batch())
    before = weights_of(run)
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    after = weights_of(run)
    if path is not None and not path.exists():
        run.save(path)
        if run.context.rank == 0:
            factory.save_description(to)
    run.close()
    return before, after, from_folder, from_checkpoint


def weights_of(run):
    named = ((name, full(parameter.detach()).clone()) for name, parameter in run.named_parameters())
    return {name: run.context.in_model_order(name, tensor) for name, tensor in named}


def farthest(ranks, other):
    """Return how far weights of all ranks together are from those of another run, which has all of them."""
    assert {name for held in ranks for name in held} == other.keys()
    return largest(float((held[name] - other[name]).abs().max()) for held in ranks for name in held)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, request):
    """Write a mixture's folder, train a step with an expert a rank, and save it."""
    root = tmp_path_factory.mktemp(request.param)
    folder = make(request.param, root / "model", max_shard_size="60KB")
    ranks = run_ranks(trained, 4, folder, root / "step-1", 4, root / "description")
    held = {name: tensor for _, after, *_ in ranks for name, tensor in after.items()}
    total = sum(tensor.numel() for tensor in held.values())
    read = [num_bytes / (4 * total) for *_, num_bytes, _ in ranks]
    return root, held, total, read


@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
def test_experts_saved_by_four_ranks_are_read_by_two_and_by_one(saved):
    root, held, total, of_folder = saved
    assert max(of_folder) <= 0.27  # of the folder: a quarter, and tensors of few rows
    (alone,) = run_ranks(trained, 1, root / "model", root / "step-1", 1)
    two = run_ranks(trained, 2, root / "model", root / "step-1", 2)
    for ranks, share in (([alone], 1.0), (two, 0.51)):
        assert farthest([before for before, *_ in ranks], held) == 0.0
        read = [num_elements / (3 * total) for *_, num_elements in ranks]  # weights and both moments
        assert 1.0 <= sum(read) <= 1.02 and max(read) <= share + 0.001
    assert farthest([after for _, after, *_ in two], alone[1]) < 1e-12


@pytest.mark.parametrize("saved", FAMILIES, indirect=True)
def test_experts_saved_by_four_ranks_become_a_folder_that_two_read(saved, tmp_path):
    from transformers import AutoModelForCausalLM

    root, held, total, _ = saved
    export(root / "step-1", to=tmp_path / "exported", description=root / "description", max_shard_bytes=60_000)
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(parameter, held[name]) for name, parameter in model.named_parameters())
    for degree, share in ((1, 1.0), (2, 0.51)):
        ranks = run_ranks(trained, degree, tmp_path / "exported", None, degree)
        assert farthest([before for before, *_ in ranks], held) == 0.0
        assert max(num_bytes for *_, num_bytes, _ in ranks) <= share * 8 * total
    assert set(checkpoint.contents(root / "step-1")) >= {f"model/{name}" for name in held}
