"""Adapters on frozen weights, in NF4 or as they are, beside one device that was written with torchao's own tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.interrupted_runs import go_on
from support.models import VOCAB, composed, full, mine, padded, seeded, sum_loss
from support.shared_worlds import by_world_size, in_one_world
from torch import nn

from composer3d import ManifestError, torch_compat
from composer3d.testing import count_collectives, fake_world, run_ranks

# Before ranks are forked: each of them would import it anew.
nf4 = torch_compat.import_torchao("torchao.quantization.quantize_.workflows.nf4.nf4_tensor")

DIM, WIDE, RANK, NUM_LAYERS, GROUP = 128, 256, 4, 2, 1
TABLE = f"[precision.qlora]\nrank = {RANK}\nscale_block = {GROUP}\n"
LORA = f'[precision.qlora]\nrank = {RANK}\nquantize = "none"\n'
LAYOUTS = [
    pytest.param(1, "", id="one"),
    pytest.param(2, "[sharding.fsdp2]\n", id="fsdp2"),
    pytest.param(2, "[sharding.fsdp2]\nzero = 2\n", id="zero2"),
    pytest.param(2, "[sharding.ddp]\n", id="ddp"),
]
TP_PLAN = '[sharding.tensor_parallel.plan]\n"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'
TP = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n" + TP_PLAN
TP_FSDP = "[mesh]\ntp = 2\ndp_shard = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\n" + TP_PLAN
PP = "[mesh]\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 6\n"


class Block(nn.Module):
    def __init__(self, wide):
        super().__init__()
        self.up, self.down = nn.Linear(DIM, wide), nn.Linear(wide, DIM)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Wide(nn.Module):
    def __init__(self, wide=WIDE):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Block(wide) for _ in range(NUM_LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x)) + 0.0


class Reference(nn.Module):
    """A linear layer with an adapter, as one writes it with torchao."""

    def __init__(self, linear, a, quantise):
        super().__init__()
        weight = self.frozen = linear.weight.detach()
        if quantise:
            self.frozen = nf4.to_nf4(weight.float(), 64, GROUP).get_original_weight().to(weight.dtype)
        self.bias = linear.bias.detach()
        self.lora_a, self.lora_b = nn.Parameter(a.clone()), nn.Parameter(torch.zeros(len(weight), RANK).to(a.dtype))

    def forward(self, x):
        return F.linear(x, self.frozen, self.bias) + 2.0 * F.linear(F.linear(x, self.lora_a), self.lora_b)


def reference(weights, adapters, chunks, num_steps, quantise):
    """Train one device, chunk by chunk as ranks do; return losses, and the last gradients and adapters."""
    model = Wide().requires_grad_(False)
    model.load_state_dict(weights)
    for index, layer in enumerate(model.layers):
        for name in ("up", "down"):
            made = Reference(getattr(layer, name), adapters[f"layers.{index}.{name}.lora_a"], quantise)
            setattr(layer, name, made)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.SGD(trained.values(), lr=0.5)
    tokens, targets = padded()
    count, losses = (targets != -100).sum(), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        total = 0.0
        for part, wanted in zip(tokens.chunk(chunks), targets.chunk(chunks), strict=True):
            loss, _ = sum_loss(model(part), wanted)
            (loss * (1 / count)).backward()
            total += float(loss.detach())
        losses.append(total / int(count))
        optimizer.step()
    return losses, {name: p.grad for name, p in trained.items()}, {name: p.detach() for name, p in trained.items()}


def trained(text, chunks, quantise, dtype, num_steps=4, factory=False):
    """Train in a layout; return losses beside the reference's, and the largest errors of gradients and adapters."""
    torch.set_default_dtype(dtype)
    weights = seeded(Wide).state_dict()
    run = composed(text, Wide if factory else seeded(Wide))
    names = [name for name, p in run.named_parameters() if p.requires_grad]
    start = {name: full(p.detach()).clone() for name, p in run.named_parameters() if "lora" in name}
    everyone = [None] * run.context.world_size
    torch.distributed.all_gather_object(everyone, start)
    start = {name: value for each in everyone for name, value in each.items()}
    losses_1, gradients, adapters = reference(weights, start, chunks, num_steps, quantise)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for number in range(num_steps):
        optimizer.zero_grad()
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            run.clip_grad_norm_(float("inf"))
            optimizer.step()
    found = {name: (full(p.grad), full(p)) for name, p in run.named_parameters() if p.requires_grad}
    run.close()
    assert all("lora" in name for name in names)
    errors = [
        max(float((pair[index] - wanted[name]).abs().max() / wanted[name].abs().max()) for name, pair in found.items())
        for index, wanted in enumerate((gradients, adapters))
    ]
    return losses, losses_1, *errors


# ---- numerics --------------------------------------------------------------------------------------------------------


FORMATS = [(TABLE, True), (LORA, False)]


@pytest.mark.parametrize(("world_size", "layouts"), by_world_size(LAYOUTS))
def test_data_parallel_equals_one_device_bit_for_bit(world_size, layouts):
    cases = ((layout + t, world_size, quantise, torch.float32) for layout in layouts for t, quantise in FORMATS)
    for results in in_one_world(trained, world_size, *cases):
        for losses, losses_1, gradients, adapters in results:
            assert max(gradients, adapters) == 0.0
            assert losses == pytest.approx(losses_1, rel=1e-6)
            assert losses[-1] < losses[0]
        assert len({tuple(losses) for losses, *_ in results}) == 1


@pytest.mark.parametrize(
    ("world_size", "layout", "chunks"), [(2, TP, 1), pytest.param(4, TP_FSDP, 2, marks=pytest.mark.slow), (2, PP, 2)]
)
def test_tensor_and_pipeline_parallel_equal_one_device(world_size, layout, chunks):
    # In float64, so that another order of sums is told from another result; NF4's own values stay float32.
    cases = ((layout + text, chunks, quantise, torch.float64) for text, quantise in FORMATS)
    for results in in_one_world(trained, world_size, *cases):
        for losses, _, gradients, adapters in results:
            assert gradients < 1e-12
            assert adapters < 1e-12
            assert losses[-1] < losses[0]


# ---- collectives -----------------------------------------------------------------------------------------------------


def counted(text):
    run = composed(text, seeded(Wide))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with count_collectives(run.mesh) as collectives, run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
    run.close()
    return collectives.summary()


def test_collectives_of_data_parallelism():
    units = NUM_LAYERS + 1
    (found, _), (plain, _) = in_one_world(counted, 2, *(("[sharding.fsdp2]\n" + text,) for text in (TABLE, "")))
    # The root, whose parameters are all frozen, is gathered and has no gradients.
    assert found["all_gather", "dp_shard"][0] == plain["all_gather", "dp_shard"][0]
    assert found["reduce_scatter", "dp_shard"] == (units - 1, 4 * NUM_LAYERS * 2 * RANK * (DIM + WIDE))
    assert found["all_gather", "dp_shard"][1] < plain["all_gather", "dp_shard"][1] * 0.3


def test_collectives_of_tensor_parallelism():
    key = ("all_reduce", "tp")
    (found, _), (plain, _) = in_one_world(counted, 2, (TP + TABLE,), (TP,))
    # lora_a of up and lora_b of down are whole on every rank; the first block's input needs no gradient.
    assert found[key][0] == plain[key][0] - 1 + 2 * NUM_LAYERS
    assert {k: v for k, v in found.items() if k[1] != "tp"} == {k: v for k, v in plain.items() if k[1] != "tp"}


# ---- memory ----------------------------------------------------------------------------------------------------------


def bytes_held(text):
    """Return the bytes of this rank's parameters in blocks: stored, of adapters, and of their optimizer state."""
    run = composed(text, Wide)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
        optimizer.zero_grad()
    local = {
        name: p.to_local() if hasattr(p, "to_local") else p.detach()
        for name, p in run.named_parameters()
        if "layers" in name
    }
    stored = sum(t.untyped_storage().nbytes() for name, t in local.items() if name.endswith("weight"))
    adapters = sum(t.numel() * t.element_size() for name, t in local.items() if "lora" in name)
    states = [value for state in optimizer.state.values() for name, value in state.items() if name != "step"]
    states = sum(s.to_local().numel() * 4 if hasattr(s, "to_local") else s.numel() * 4 for s in states)
    run.close()
    return stored, adapters, states


@pytest.mark.parametrize(("world_size", "layout"), [(1, ""), (2, "[sharding.fsdp2]\n")])
def test_bytes_of_weights_adapters_and_state(world_size, layout):
    text = layout + f"[precision.qlora]\nrank = {RANK}\nscale_block = 4\n"
    elements, adapters = NUM_LAYERS * 2 * DIM * WIDE, NUM_LAYERS * 2 * RANK * (DIM + WIDE) * 4
    # 64 elements: 32 bytes of codes and one of a scale; a factor and a mean for the 2 or 4 scales of a group.
    wanted = elements // 64 * 33 + NUM_LAYERS * DIM * WIDE // 64 * 8 // 2 + NUM_LAYERS * DIM * WIDE // 64 * 8 // 4
    for stored, held, state in run_ranks(bytes_held, world_size, text):
        assert stored == wanted // world_size
        assert held == adapters // world_size
        assert state == 2 * adapters // world_size


# ---- state -----------------------------------------------------------------------------------------------------------


def saved(path, text, load, num_steps, seed=0):
    """Train to a checkpoint and on, or from it; return full parameters, and what the checkpoint holds."""
    from composer3d.checkpoint import contents

    run = composed(text + f"[train]\nseed = {seed}\n", Wide)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2, groups=[{"match": "lora_b$", "lr": 2e-2}])
    weights = go_on(run, optimizer, padded(), path, load=load, num_steps=num_steps)
    run.close()
    return weights, sorted(key for key in contents(path) if key.startswith("model/")) if path.exists() else []


@pytest.mark.parametrize(
    "text",
    [pytest.param(TABLE + "dropout = 0.1\n", id="nf4"), pytest.param(LORA, id="lora", marks=pytest.mark.slow)],
)
def test_a_resumed_run_is_the_same_and_reshards(tmp_path, text):
    path, fsdp = tmp_path / "step-2", "[sharding.fsdp2]\n" + text
    cases = ((path, fsdp, False, 4), (path, fsdp, True, 2), (path, fsdp, True, 0), (path, TP + text, True, 0))
    (whole, keys), (again, _), (two, _), (resharded, _) = (ranks[0] for ranks in in_one_world(saved, 2, *cases))
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert keys == sorted(f"model/{name}" for name in whole if "lora" in name)
    (one, _), *_ = run_ranks(saved, 1, path, text, True, 0)
    # What is stored is the same in every layout, and so are adapters that were trained in another.
    for loaded in (resharded, one):
        assert all(torch.equal(two[name], loaded[name]) for name in two)


def test_every_layout_starts_from_the_same_adapters(tmp_path):
    ((one, _),) = run_ranks(saved, 1, tmp_path / "none", TABLE, False, 0)
    cases = ((tmp_path / "none", layout + TABLE, False, 0) for layout in (TP, "[sharding.fsdp2]\n"))
    ((resharded, _), _), ((sharded, _), _) = in_one_world(saved, 2, *cases)
    for name, value in one.items():
        assert torch.equal(resharded[name], value) and torch.equal(sharded[name], value)
        assert "lora_a" not in name or value.std() > 0


def dropping(path, layout):
    torch.set_default_dtype(torch.float64)
    return saved(path, layout + LORA + "dropout = 0.3\n", False, 2)[0]


def test_dropout_of_sharded_inputs_is_that_of_one_device(tmp_path):
    one = run_ranks(dropping, 1, tmp_path / "none", "")[0]
    for weights in run_ranks(dropping, 2, tmp_path / "none", TP):
        assert all((weights[name] - value).abs().max() <= 1e-10 * value.abs().max() for name, value in one.items())


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text, seeded(Wide))
    return str(caught.value).partition("run.toml")[2]


REFUSED = [
    (
        '[precision.qlora]\nquantize = "none"\nkeep = ["layers.0"]\n',
        ':2:12: [precision.qlora] keep = [...] with quantize = "none", which keeps all weights; remove keep',
    ),
    (
        '[precision.qlora]\nquantize = "none"\nscale_block = 4\n',
        ':2:12: [precision.qlora] scale_block has no effect with quantize = "none": weights that are kept have no '
        "scales; remove scale_block",
    ),
    (
        '[precision.qlora]\nmodules = ["norm"]\n',
        ':2:12: [precision.qlora] the pattern "norm" matches modules without linear layers',
    ),
    (
        '[precision.qlora]\nkeep = ["layers"]\n',
        ":2:12: [precision.qlora] no layer is left to quantise: 64 neighbours in a row of a weight share a "
        'scale, and no layer that is neither tied nor kept has rows of a multiple of that; write quantize = "none"',
    ),
    (
        "[precision.qlora]\n[precision.float8]\n",
        ':2:12: [precision.qlora] "qlora" cannot be combined with "float8": both replace what the same linear '
        "layers compute; float8 has no products of 4-bit weights",
    ),
]


def test_refusals():
    found = in_one_world(refusal, 1, *((text,) for text, _ in REFUSED))
    assert [message for (message,) in found] == [message for _, message in REFUSED]


# ---- shards within a group of scales ---------------------------------------------------------------------------------


def cut_through(text, dim=WIDE):
    """Train in float64; return losses, and bytes of stored weights."""
    torch.set_default_dtype(torch.float64)
    run = composed(text, seeded(Wide, wide=dim))
    optimizer = run.optimizer(torch.optim.SGD, lr=0.5)
    tokens, targets = padded()
    losses = []
    for number in range(3):
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            optimizer.step()
            optimizer.zero_grad()
    stored = dict(run.named_parameters())["layers.0.down.weight"]
    run.close()
    return losses, (stored.to_local() if hasattr(stored, "to_local") else stored).nbytes


# Rows of 256 are a group of four scales, sharded in the middle; rows of 192 three of one, the second of them sharded.
@pytest.mark.parametrize(("dim", "num_bytes"), [(256, 64 + 2 + 8), (192, 3 * (16 + 1 + 8))])
def test_a_cut_through_a_group_changes_no_value(dim, num_bytes):
    table = f"[precision.qlora]\nrank = {RANK}\nscale_block = 4\n"
    ((losses_1, whole),) = run_ranks(cut_through, 1, table, dim)
    assert whole == DIM * {256: 128 + 4 + 8, 192: 3 * (32 + 1 + 8)}[dim]
    for losses, stored in run_ranks(cut_through, 2, TP + table, dim):
        assert losses == pytest.approx(losses_1, rel=1e-12) and losses[-1] < losses[0]
        assert stored == DIM * num_bytes


def test_refuses_a_cut_through_a_byte():
    text = TP.replace("tp = 2", "tp = 64") + TABLE
    with fake_world(64), pytest.raises(ManifestError) as caught:
        composed(text, lambda: Wide(wide=64))
    assert str(caught.value).partition("run.toml")[2] == (
        ':8:12: [precision.qlora] tp = 64 shards the weight of "layers.0.down" into 1 columns, and in NF4 two of '
        "them are stored in one byte; name the layer in keep, or choose another tp"
    )


# ---- the format ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("group", [1, 4])
def test_the_format_is_torchaos(group):
    from composer3d_plugins.precision.qlora.nf4 import Format, levels

    torch.manual_seed(0)
    weight = torch.randn(96, 256) * torch.logspace(-3, 1, 96)[:, None]
    form = Format.of(256, group=group)
    stored = form.quantised(weight)
    assert stored.shape == (96, form.width(256)) and stored.dtype is torch.uint8
    values = form.dequantised(stored, levels("cpu"))
    assert torch.equal(values, nf4.to_nf4(weight, 64, group).get_original_weight())
    # A share of rows or groups is complete by itself.
    assert torch.equal(form.dequantised(stored[10:20], levels("cpu")), values[10:20])
    width = form.piece_bytes
    assert torch.equal(form.dequantised(stored[:, -width:].contiguous(), levels("cpu")), values[:, -64 * group :])
    for runs in ((128,), (96, 32), (24,)):
        fitted = form.fitted(runs)
        pieces = fitted.quantised(weight)
        assert torch.equal(fitted.dequantised(pieces, levels("cpu")), values)
        right = fitted.dequantised(pieces[:, -fitted.width(runs[-1]) :].contiguous(), levels("cpu"))
        assert torch.equal(right, values[:, -runs[-1] :])


def test_zeros_stay_zeros():
    from composer3d_plugins.precision.qlora.nf4 import Format, levels

    weight, form = torch.randn(4, 128, generator=torch.Generator().manual_seed(0)), Format.of(128, group=2)
    weight[1:3] = 0.0
    values = form.dequantised(form.quantised(weight), levels("cpu"))
    assert torch.equal(values[1:3], weight[1:3]) and values[0].abs().max() > 0
    assert torch.equal(form.dequantised(form.quantised(torch.zeros(4, 128)), levels("cpu")), torch.zeros(4, 128))
