"""Code of the user's own that differs between machines is named before the first step."""

from __future__ import annotations

import os
import sys

import pytest
import torch.distributed as dist
from support.models import write_manifest

import composer3d
from composer3d import StepError
from composer3d.testing import run_ranks

MODEL = "from torch import nn\nfrom {name}_parts import SCALE\n\n\nclass Net(nn.Linear):\n    {body}\n"
FORWARD = "def forward(self, x):\n        return SCALE * super().forward(x)"


def compose_on_two_machines(folder, name, sources):
    """Compose a model of a folder of this rank's own; return what is said against it."""
    own = folder / str(dist.get_rank())
    own.mkdir(exist_ok=True)
    for module, text in sources[dist.get_rank()].items():
        (own / f"{name}{module}.py").write_text(text)
    sys.path.append(str(own))
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    factory = __import__(name).Net
    try:
        composer3d.compose(lambda: factory(4, 4), write_manifest("[sharding.fsdp2]\n")).close()
    except StepError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, ""),
        ({"": "# a comment\n" + MODEL.format(name="c3d_net1", body=FORWARD)}, ""),
        ({"": MODEL.format(name="c3d_net2", body=FORWARD.replace("SCALE", "1.01 * SCALE"))}, "source.c3d_net2 is "),
        ({"_parts": "SCALE = 2.5\n"}, "source.c3d_net3_parts is "),
    ],
    ids=["alike", "a comment", "the model", "what it imports"],
)
def test_code_that_one_machine_alone_has_is_named(tmp_path, changed, said, request):
    name = f"c3d_net{request.node.callspec.indices['changed']}"
    same = {"": MODEL.format(name=name, body=FORWARD), "_parts": "SCALE = 2.0\n"}
    first, second = run_ranks(compose_on_two_machines, 2, tmp_path, name, (same, {**same, **changed}))
    assert first == second
    assert bool(first) == bool(said)
    assert not said or first.startswith(f"rank 1 (dp_shard 1) runs another manifest than rank 0: {said}")
