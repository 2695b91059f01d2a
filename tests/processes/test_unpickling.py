"""Nothing that comes from another rank is unpickled, torch's own messages included."""

from __future__ import annotations

import pickle
import sys

import pytest
import torch
import torch.distributed as dist
from layout_matrix_cells import batch, factory, loss_fn
from support.models import write_manifest
from torch.distributed import distributed_c10d

import composer3d
from composer3d.testing import run_ranks

FSDP, PIPELINE = "[sharding.fsdp2]\n", "[scheduling.pipeline]\n"
LAYOUTS = {
    "zero 3": FSDP,
    "buckets": '[sharding.ddp]\nreducer = "bucketed"\n[mesh]\ndp_replicate = 2\n',
    "tp": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true\n",
    "cp": "[mesh]\ncp = 2\n[sharding.context_parallel]\n",
    "1F1B": "[mesh]\npp = 2\n" + PIPELINE,
    "interleaved": '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "Interleaved1F1B"\n',
}


class Refusing(pickle.Unpickler):
    def load(self):
        raise AssertionError("what another rank sent was unpickled")


def refuse(event, arguments):
    if event == "pickle.find_class":
        raise AssertionError(f"{arguments} was looked up by a pickle")


def watched(text, folder):
    """Do what a run does, where nothing can be unpickled; return whether the watch would have seen it."""
    torch.set_default_dtype(torch.float64)
    distributed_c10d._unpickler = Refusing
    sys.addaudithook(refuse)
    with composer3d.compose(factory, write_manifest(text + "[train]\nmicrobatch = 2\n"), loss_fn=loss_fn) as run:
        optimizer = run.optimizer(torch.optim.AdamW, lr=0.01)
        for step in range(2):
            degree, rank = run.context.data_parallel_degree, run.context.data_parallel_rank
            tokens, targets = (tensor.chunk(degree)[rank] for tensor in batch(step))
            with run.step(step):
                run.forward_backward(tokens, target=targets)
                run.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
        run.evaluate(tokens, target=targets)
        run.save(folder / "step-1")
        run.save(folder / "step-2", asynchronous=True)
        run.load(folder)
    seen, objects = [], [None, None]
    for exchange in (lambda: dist.all_gather_object(objects, 1), lambda: pickle.loads(pickle.dumps(torch.Size))):
        with pytest.raises(AssertionError) as caught:
            exchange()
        seen.append("pickle" in str(caught.value))
    return seen


FAST = ("zero 3", "1F1B")


@pytest.mark.parametrize(
    "layout", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS]
)
def test_nothing_from_another_rank_is_unpickled(layout, tmp_path):
    assert run_ranks(watched, 2, LAYOUTS[layout], tmp_path)[1] == [True, True]
