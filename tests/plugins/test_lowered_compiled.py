"""Layers that precision plugins convert, compiled as one graph a block: what they compute without the compiler."""

from __future__ import annotations

import pytest
import torch
from support.models import VOCAB, composed, full, mine, padded, seeded
from support.shared_worlds import in_one_world
from torch import nn

from composer3d import torch_compat

# Before ranks are forked: each of them would import it anew.
for name in (
    "prototype.moe_training.mxfp8_linear",
    "prototype.mx_formats.config",
    "prototype.quantized_training",
    "quantization.qat.fake_quantizer",
    "quantization.quantize_.workflows.nf4.nf4_tensor",
):
    torch_compat.import_torchao(f"torchao.{name}")

FSDP = "[sharding.fsdp2]\n"
TP_PLAN = '[sharding.tensor_parallel.plan]\n"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'
TP = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n" + TP_PLAN
COMPILE = '[scheduling.compile]\nbackend = "aot_eager"\n'
AC = "[scheduling.activation_checkpoint]\n"
TABLES = {
    "int8": "[precision.int8]\n",
    "qat": "[precision.qat]\n",
    "mxfp8": '[precision.mxfp8]\nrecipe = "mxfp8_wgrad_hp"\n',
    "qlora": "[precision.qlora]\nrank = 4\nscale_block = 1\n",
    # Under tp what ranks draw differs, and no compiler follows that: the block runs as it is. Compiled code draws by
    # rank, and so does the other to be compared.
    "qlora, dropout": (
        '[precision.qlora]\nrank = 4\nscale_block = 1\ndropout = 0.1\n[train]\nrandom_numbers = "ranks"\n' + AC
    ),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.out = nn.Embedding(VOCAB, 64), nn.Linear(64, VOCAB)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + 0.0


def trained(text):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = composed(text, seeded(Wide))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for number in range(2):
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            optimizer.step()
            optimizer.zero_grad()
    weights = {fqn: full(p.detach()) for fqn, p in run.named_parameters()}
    run.close()
    return losses, weights, torch._dynamo.utils.counters["stats"]["unique_graphs"]


TOGETHER = ("int8", "qlora")


@pytest.mark.slow
@pytest.mark.parametrize("tables", [TOGETHER, *((name,) for name in TABLES if name not in TOGETHER)])
def test_compiled_layers_compute_what_others_do(tables):
    texts = [layout + TABLES[n] + end for n in tables for layout in (FSDP, TP) for end in ("", COMPILE)]
    found = in_one_world(trained, 2, *((text,) for text in texts))
    for index, table in enumerate(tables):
        assert_same_steps(table, *found[4 * index : 4 * index + 4])


def assert_same_steps(table, plain, compiled, plain_cut, compiled_cut):
    for one, other in ((plain, compiled), (plain_cut, compiled_cut)):
        for (losses, weights, graphs), (wanted, reference, none) in zip(other, one, strict=True):
            assert losses == pytest.approx(wanted, rel=1e-6) and losses[-1] < losses[0]
            for fqn, value in reference.items():
                assert (weights[fqn] - value).abs().max() <= 1e-5 * value.abs().max().clamp(min=1e-3), fqn
            assert none == 0
            # Equal blocks share a graph; the second block's input has a gradient, which the first's may lack. Beside a
            # recomputed block, and a unit whose input lacks one, the hook of torch_compat.keep_output_hooks is a graph
            # of its own, without operators.
            if "dropout" in table:
                assert graphs == (0 if other is compiled_cut else 3)
            else:
                assert graphs in ((3,) if table == "qlora" and other is compiled else (1, 2))
