"""Correct compositions of plugins that change how a run computes, and of others' plugins: no false alarm."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
from support.composition_faults import Even
from support.models import sum_loss, write_manifest
from support.verification_cases import batch

from composer3d.runner.objective.muon import Muon, group_matrices, matrices_of
from composer3d.testing import assert_parity

# Of Dynamo, which looks at the gradients of what a block is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

FSDP = "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"
AC = "[scheduling.activation_checkpoint]\n"
PP = "[mesh]\npp = 2\n[scheduling.pipeline]\n"
SEQUENCE = (
    "[mesh]\ntp = 2\n[sharding.tensor_parallel]\nsequence_parallel = true\n"
    'plan = { "layers.*.up" = "colwise", "layers.*.down" = "rowwise", "layers.*.norm" = "sequence", '
    '"layers.*" = "split_gather", tok = "replicate", out = "replicate" }\n'
)
JOURNAL = '[profiling.journal]\nuse = "support.plugins:Journal"\n'


def proven(text, **options):
    found = assert_parity(
        options.pop("factory", functools.partial(Even, dropout=0.2)),
        write_manifest(text),
        batch(),
        loss_fn=sum_loss,
        grad_clip=0.5,
        own_dtype=True,
        **options,
    ).verdict
    assert (found.failures, found.diagnosis) == ((), ())
    assert all(row.ok for row in found.evidence.rows)
    return found


def muon(run):
    groups = group_matrices([], matrices_of(run, None))
    return run.optimizer(Muon, groups=groups, lr=1e-3)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        pytest.param(
            FSDP + AC + 'mode = "selective"\n' + '[scheduling.compile]\nbackend = "aot_eager"\n',
            {"microbatch": 3, "factory": Even},
            id="compiled, selectively recomputed",
        ),
        pytest.param(SEQUENCE + JOURNAL, {}, id="sequence parallel, a plugin by reference"),
        pytest.param(FSDP, {"microbatch": 3, "optimizer": muon}, id="muon"),
        pytest.param(
            FSDP + '[precision.qlora]\nrank = 2\nquantize = "none"\n', {"microbatch": 3, "steps": 2}, id="adapters"
        ),
        pytest.param(
            FSDP + "[precision.qlora]\nrank = 2\n[precision.mixed]\n",
            {"microbatch": 3, "factory": functools.partial(Even, dim=64)},
            id="adapters on NF4, mixed",
        ),
        pytest.param(
            FSDP + '[precision.mixed]\nparam_dtype = "float16"\ninitial_scale = 1024.0\n',
            {"microbatch": 3, "steps": 2},
            id="a loss scale",
        ),
        pytest.param(
            '[mesh]\ndp_replicate = 2\n[sharding.ddp]\n[precision.mixed]\nnorms = "float32_units"\n'
            + AC
            + 'mode = "selective"\n',
            {"microbatch": 3},
            id="units inside what is recomputed by operator",
        ),
    ],
)
def test_plugins_that_are_right_are_proven(text, options):
    assert proven(text, **options).ok


@pytest.mark.parametrize("schedule", ["Interleaved1F1B", "DualPipeV"])
def test_stages_that_share_a_rank_are_proven(schedule):
    factory = functools.partial(Even, num_layers=4, dropout=0.2)
    found = proven(PP + f'schedule = "{schedule}"\n', factory=factory, microbatch=3)
    rows = {(row.op, row.axis): (row.count, row.expected) for row in found.evidence.rows}
    assert rows["send", "pp"][0] == rows["send", "pp"][1] > 0


def test_a_step_that_overflows_at_its_loss_scale_is_compared_when_it_is_taken():
    # 2^21 times the largest gradient is beyond float16, on ranks and on one device.
    text = '[precision.mixed]\nparam_dtype = "float16"\ninitial_scale = 2097152.0\ngrowth_interval = 1\n'
    found = proven(FSDP + text, microbatch=3, steps=2)
    overflows = [step.overflows for step in found.evidence.ranks[0].steps["own"].steps]
    assert overflows[0] > 0, "the scale was not too high"
    assert any(
        note.startswith(f"step 1 of the run's dtypes overflowed at its loss scale {overflows[0]} time")
        for note in found.notes
    )


def test_a_third_partys_plugin_beside_state_and_activations_on_the_host_is_proven(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "third_party" / "composer3d_nvtx"))
    offloads = '[sharding.cpu_offload]\nmode = "optimizer"\n[scheduling.activation_offload]\n'
    nvtx = '[profiling.nvtx]\nuse = "composer3d_nvtx:Nvtx"\nevery = 2\n'
    proven(FSDP + offloads + nvtx, microbatch=3, steps=2)
    assert "composer3d_nvtx" in sys.modules
