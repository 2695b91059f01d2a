"""Parameters of every position of a pipeline, which a plan compares to trace alike ones once."""

from __future__ import annotations

import pytest
import torch

from composer3d.checking import inspect, open_manifest
from composer3d.planning.tracing.rank_roles import contents_of

PIPELINE = """composer3d = 1
mesh.pp = 4
model = { use = "composer3d.models:llama", args = { dim = 32, num_layers = 8, num_heads = 2 } }
data = { use = "synthetic", seq_len = 4, vocab_size = 32 }
train = { steps = 1, microbatch = 1, global_batch = 4 }
scheduling.pipeline = {}
"""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_positions_are_compared_for_devices_that_this_machine_has_not(device, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(PIPELINE)
    found = inspect(open_manifest(str(path), []), world_size=4, rank=0, device=torch.device(device))
    assert found.preparation is not None, found.problems
    context = found.preparation.context
    first, second, third, last = contents_of(found.preparation)
    assert second == third and first != second != last
    assert (context.purpose, context.device.type) == ("check", device)
