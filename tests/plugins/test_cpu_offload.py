"""Optimizer state in host memory: the same bits, in pieces, in the right order, of the stated size."""

from __future__ import annotations

import pytest
import torch
from support.models import Net, composed, full, mine, padded, seeded
from torch import nn
from torch.distributed.tensor import DTensor

from composer3d import ComposerError, ManifestError
from composer3d.testing import count_collectives, run_ranks

# Each matrix of the small model is a piece of its own.
TABLE = "[sharding.cpu_offload]\npiece_mib = 0.0001\n"
FSDP = "[sharding.fsdp2]\n"
LAYOUTS = [
    pytest.param(1, "", id="plain"),
    pytest.param(2, FSDP, id="fsdp2"),
    pytest.param(2, "[sharding.ddp]\n", id="ddp"),
    pytest.param(2, "[mesh]\npp = 2\n[scheduling.pipeline]\n[train]\nmicrobatch = 6\n", id="pp"),
    pytest.param(
        2,
        '[mesh]\ntp = 2\n[sharding.tensor_parallel.plan]\n"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n',
        id="tp",
    ),
]
OPTIMIZERS = [
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
]


class Even(Net):
    """With inner sizes that divide by tp."""

    def __init__(self, **options):
        super().__init__(**options)
        for layer in self.layers:
            layer.up, layer.down = nn.Linear(8, 16), nn.Linear(16, 8)


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def transfers_of(run):
    return next(value for value in run.context.state.values() if type(value).__name__ == "HostTransfers")


def trained(text, cls, options, num_steps=4):
    """Train; return losses, full weights and state."""
    run = composed(text, seeded(Even if "tp = 2" in text else Net, dim=8))
    optimizer = run.optimizer(cls, lr=1e-2, weight_decay=0.1, **options)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(len(steps)))
    groups = optimizer.param_groups
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for number in range(num_steps):
        with run.step(number), count_collectives(run.mesh) as collectives:
            losses.append(float(run.forward_backward(tokens, target=targets)))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.param_groups is groups and steps == list(range(num_steps))
    found = {name: full(p) for name, p in run.named_parameters()}
    state = {
        f"{name}/{key}": full(value) if isinstance(value, DTensor) else value
        for name, p in run.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    run.close()
    return losses, found, state, collectives.summary()


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS)
def test_every_bit_is_that_of_the_run_without_it(world_size, layout, cls, options):
    if layout == "" and options.get("fused") is None:
        options = {**options, "foreach": False}
    plain = run_ranks(trained, world_size, layout, cls, options)
    for without, with_offload in zip(plain, run_ranks(trained, world_size, layout + TABLE, cls, options), strict=True):
        assert with_offload[0] == without[0]
        assert with_offload[0][-1] < with_offload[0][0]
        for one, other in zip(with_offload[1:3], without[1:3], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)
        assert with_offload[3] == without[3]


def test_collectives_are_those_without_it():
    plain, with_offload = (run_ranks(trained, 2, FSDP + text, torch.optim.AdamW, {}, 1)[0][3] for text in ("", TABLE))
    assert plain == with_offload


# ---- order and memory ------------------------------------------------------------------------------------------------


def stepped(text, num_steps=2):
    run = composed(text, seeded(dim=8))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    for number in range(num_steps):
        with run.step(number):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
    transfers = transfers_of(run)
    sizes = [local(p).numel() * 4 for _, p in run.named_parameters()]
    moments = [local(state[name]) for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    host_bytes = sum(moment.untyped_storage().nbytes() for moment in moments)
    run.close()
    return transfers.log, transfers.largest_bytes, sizes, host_bytes


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS[:2])
def test_the_next_piece_is_fetched_before_the_last_is_waited_for(world_size, layout):
    for log, *_ in run_ranks(stepped, world_size, layout + TABLE):
        num_pieces = 1 + max(index for what, index in log if what == "fetch")
        assert num_pieces > 5
        wanted = [("fetch", 0)]
        for index in range(num_pieces):
            wanted += [("fetch", index + 1)] if index + 1 < num_pieces else []
            wanted += [("wait", index), ("store", index)]
        # Nothing is on the device when the step is over.
        assert log == [*wanted, ("finish", 0)]


@pytest.mark.parametrize(("world_size", "layout"), LAYOUTS[:2])
def test_bytes(world_size, layout):
    for _, largest_bytes, sizes, host_bytes in run_ranks(stepped, world_size, layout + TABLE):
        # Two moments of every parameter on the host; on the device those of at most two pieces of this size.
        assert host_bytes == 2 * sum(sizes)
        piece_bytes = max(max(sizes), 0.0001 * 2**20)
        assert 0 < largest_bytes <= 2 * 2 * piece_bytes
        assert largest_bytes < host_bytes / 2


def test_a_large_piece_is_stepped_at_once():
    for log, largest_bytes, _, host_bytes in run_ranks(stepped, 1, "[sharding.cpu_offload]\n"):
        assert log == [("fetch", 0), ("wait", 0), ("store", 0), ("finish", 0)]
        assert largest_bytes == host_bytes


def test_state_of_other_parameters_stays():
    text = TABLE + 'parameters = ["layers.*.up", "out.weight"]\n'
    for log, largest_bytes, sizes, host_bytes in run_ranks(stepped, 1, text):
        kept = [index for what, index in log if what == "fetch"]
        # The others are one piece, the first; three matrices, their biases together with the next, and the output's.
        assert 4 < len(kept) < 9
        assert 0 < largest_bytes < host_bytes / 4
        assert host_bytes == 2 * sum(sizes)


# ---- state -----------------------------------------------------------------------------------------------------------


def resumed(path, text, load, num_steps, shift=0):
    run = composed(text, seeded(dim=8))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    tokens, targets = (mine(run, tensor) for tensor in padded())
    if load:
        run.load(path)
    for step in range(num_steps):
        if step == 2 and not load:
            run.save(path, asynchronous=True)
        with run.step(step + shift):
            run.forward_backward(tokens, target=targets)
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: full(p) for name, p in run.named_parameters()}
    run.close()
    return weights


def test_a_resumed_run_is_the_same_and_reshards(tmp_path):
    path = tmp_path / "step-2"
    whole = run_ranks(resumed, 2, path, FSDP + TABLE, False, 4)[0]
    # With it and without it: checkpoints are the same.
    for text in (FSDP + TABLE, FSDP):
        again = run_ranks(resumed, 2, path, text, True, 2, 2)[0]
        assert all(torch.equal(whole[name], again[name]) for name in whole)
    for weights in run_ranks(resumed, 4, path, FSDP + TABLE, True, 2, 2):
        assert all(torch.allclose(whole[name], weights[name], atol=1e-5) for name in whole)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text, options):
    try:
        run = composed(text)
    except ManifestError as error:
        return str(error).partition("run.toml")[2]
    with pytest.raises(ComposerError) as caught:
        run.optimizer(torch.optim.AdamW, lr=1e-2, **options)
    run.close()
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            "",
            {"differentiable": True},
            "cpu_offload does not do what differentiable = true asks: its pieces are stepped in place",
        ),
        (
            'parameters = ["layers.*.ups"]',
            {},
            ':3:1: [sharding.cpu_offload] the pattern "layers.*.ups" matches nothing in the model; '
            'did you mean "layers.*.up"?',
        ),
        (
            "piece_mib = 0.0",
            {},
            ":3:1: [sharding.cpu_offload] sharding.cpu_offload.piece_mib must be greater than 0.0, not 0.0",
        ),
    ],
)
def test_refusals(text, options, message):
    assert run_ranks(refusal, 1, "[sharding.cpu_offload]\n" + text, options)[0] == message
