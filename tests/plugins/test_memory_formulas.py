"""Memory against formulas, in bytes, by a counter that sees every storage."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from support.live_bytes import LiveBytes
from support.models import composed, seeded
from torch import nn

from composer3d.testing import run_ranks

DIM, HIDDEN, ROWS, BLOCKS = 16, 64, 24, 4
FLOAT = 4
# A block: two matrices without bias; the model nothing else.
BLOCK_BYTES = 2 * DIM * HIDDEN * FLOAT
MODEL_BYTES = BLOCKS * BLOCK_BYTES
# What a block keeps for its backward: its input, and tanh's result.
INPUT_BYTES, TANH_BYTES = ROWS * DIM * FLOAT, ROWS * HIDDEN * FLOAT
KEPT_BYTES = INPUT_BYTES + TANH_BYTES


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x + 0.0


def watched(text, at_most=None):
    """Take two steps; in the second tell the bytes alive at its points, above those of inputs and parameters.

    ``at_most`` has what points may add to those before the step: more is alive as long as a thread has to let go of it.

    Returns parameters, then what is alive beside them: before the step, the most in blocks' forwards and backwards,
    at the end of the forward, after the backward, after the optimizer's step; and the optimizer's state.
    """
    run = composed(text, seeded(Stack), loss_fn=lambda output, _: (output.sum(), output.shape[0]))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3, fused=True)
    rows = torch.ones(ROWS, DIM)
    parameters = [p.to_local() if hasattr(p, "to_local") else p for _, p in run.named_parameters()]
    own = sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in parameters}.values())
    points = {}
    at_most = {"forward": math.inf, "backward": math.inf, **(at_most or {})}
    for number in range(2):
        gc.collect()
        state = [value for values in optimizer.state.values() for value in values.values()]
        with LiveBytes(rows, *parameters, *state) as memory:
            base = memory.live - sum(_bytes(value) for value in state)
            points["before"] = memory.live - base

            def settled(point, memory=memory, base=base):
                points[point] = memory.settled(base + points["before"] + at_most[point]) - base

            handle = run.parts[0].module.register_forward_hook(lambda *_, settled=settled: settled("forward"))
            with run.step(number):
                run.forward_backward(rows, target=rows)
                points["peak"] = memory.peak - base
                gc.collect()
                settled("backward")
                memory.reset()
                optimizer.step()
                points["step_peak"] = memory.peak - base
                optimizer.zero_grad()
            handle.remove()
            gc.collect()
            points["after"] = memory.live - base
    kept = sum(_bytes(value) for values in optimizer.state.values() for value in values.values() if value.dim())
    run.close()
    return own, points, kept


def _bytes(tensor):
    tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return tensor.untyped_storage().nbytes()


# The step counter of every parameter.
COUNTERS = 2 * BLOCKS * FLOAT
# Losses, counts and the like; FSDP2's handful of small tensors.
SMALL = 2048


def close(found, wanted):
    return wanted <= found <= wanted + SMALL


# ---- ZeRO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_zero(zero):
    text = f"[train]\nmicrobatch = 12\n[sharding.fsdp2]\nzero = {zero}\n"
    # The last of two forwards ends: what it keeps (the first block's input was there, the output was not), what of
    # the parameters is whole (of ZeRO-3 the last block), and gradients: whole ones until the last micro-batch, or
    # the first micro-batch's, reduced.
    whole, grads = (MODEL_BYTES, MODEL_BYTES) if zero < 3 else (BLOCK_BYTES, MODEL_BYTES // 2)
    forward = KEPT_BYTES // 2 * BLOCKS + whole + grads
    at_most = {"forward": forward + SMALL, "backward": MODEL_BYTES // 2 + SMALL}
    for own, points, kept in run_ranks(watched, 2, text, at_most):
        # Parameters, gradients and state between steps are those of a half, at every stage.
        assert own == MODEL_BYTES / 2
        assert kept == 2 * MODEL_BYTES / 2
        assert close(points["before"], MODEL_BYTES + COUNTERS)
        assert close(points["forward"] - points["before"], forward)
        assert close(points["backward"] - points["before"], MODEL_BYTES / 2)
        assert close(points["after"], points["before"])


# ---- recomputation ---------------------------------------------------------------------------------------------------


AC = "[scheduling.activation_checkpoint]\n"
RECOMPUTED = {
    "": BLOCKS * KEPT_BYTES,
    AC: BLOCKS * INPUT_BYTES,
    AC + "every = 2\n": BLOCKS // 2 * (KEPT_BYTES + INPUT_BYTES),
    AC + 'mode = "selective"\nsave = ["aten.tanh"]\n': BLOCKS * KEPT_BYTES,
    # Two runs of two blocks.
    AC + 'mode = "sqrt"\n': 2 * INPUT_BYTES,
    # Room for every input and two of four results.
    AC + f'mode = "budget"\nbudget_gib = {(4 * INPUT_BYTES + 2 * TANH_BYTES + 64) / 2**30:.12f}\n': (
        BLOCKS * INPUT_BYTES + 2 * TANH_BYTES
    ),
}


@pytest.mark.parametrize("text", RECOMPUTED)
def test_what_a_forward_keeps(text):
    _, points, _ = run_ranks(watched, 1, text)[0]
    # The batch, which the first block keeps, was there before; as large is the model's output, which was not.
    assert abs(points["forward"] - points["before"] - RECOMPUTED[text]) <= 64


# ---- offloading ------------------------------------------------------------------------------------------------------


def test_activations_that_are_offloaded_are_on_the_host_alone():
    found = {}
    for name, text in (("plain", ""), ("offload", "[scheduling.activation_offload]\nmin_mib = 0.0\n")):
        _, points, _ = run_ranks(watched, 1, text)[0]
        found[name] = points["forward"] - points["before"]
    # On a machine whose device is the host the copies are counted instead of what was copied, and the batch too,
    # which had been there before and is still.
    assert found["offload"] - found["plain"] == INPUT_BYTES


@pytest.mark.parametrize("mode", ["optimizer", "gradients", "parameters", "all"])
def test_offloading_holds_what_it_says(mode):
    sharding = "[sharding.fsdp2]\n" if mode in ("parameters", "all") else ""
    piece_mib = BLOCK_BYTES / 2 / 2**20
    text = sharding + f'[sharding.cpu_offload]\nmode = "{mode}"\n'
    text += f"piece_mib = {piece_mib}\n" if mode != "all" else ""
    own, points, kept = run_ranks(watched, 1, text)[0]
    assert own == MODEL_BYTES and kept == 2 * MODEL_BYTES
    visiting = points["step_peak"] - points["before"] - MODEL_BYTES
    piece = BLOCK_BYTES // 2
    # While it steps: two pieces of two moments, or of a parameter and its gradient. The host's memory for gradients
    # stays for the next step. With "all" nothing travels.
    wanted = {"gradients": MODEL_BYTES, "all": 0}.get(mode, 2 * 2 * piece)
    assert close(visiting, wanted), (visiting, wanted)


def test_state_on_disk_is_not_in_memory(tmp_path):
    text = f"[sharding.nvme_offload]\nfolder = {str(tmp_path)!r}\nchunk_mib = 0.004\ndepth = 1\n"
    own, points, kept = run_ranks(watched, 1, text)[0]
    assert own == MODEL_BYTES and kept == 0
    # One piece is read, one stepped, one written; each is a matrix with two moments.
    buffers = 3 * 2 * BLOCK_BYTES // 2
    assert points["before"] <= SMALL
    assert close(points["step_peak"] - MODEL_BYTES, buffers)
