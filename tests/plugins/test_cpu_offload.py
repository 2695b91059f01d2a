"""Optimizer state in host memory: the same bits, in pieces, in the right order, of the stated size."""

from __future__ import annotations

import functools

import pytest
import torch
from support import offloading
from support.interrupted_runs import go_on
from support.models import Net, composed, full, mine, one_step, padded, seeded, sum_loss, write_manifest
from support.shared_worlds import by_world_size, in_one_world
from torch import nn
from torch.distributed.tensor import DTensor

from composer3d import Batch, ComposerError, ManifestError, torch_compat
from composer3d.testing import assert_parity, count_collectives, run_ranks

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


def trained(text, cls, options, num_steps=3):
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


def assert_equal(ranks, plain):
    """Compare losses, weights, state and collectives of all ranks to the last bit."""
    for found, wanted in zip(ranks, plain, strict=True):
        assert found[0] == wanted[0] and found[0][-1] < found[0][0]
        for one, other in zip(found[1:3], wanted[1:3], strict=True):
            assert one.keys() == other.keys()
            assert all(torch.equal(torch.as_tensor(one[name]), torch.as_tensor(other[name])) for name in one)
        assert found[3] == wanted[3]


@pytest.mark.parametrize(("world_size", "layouts"), by_world_size(LAYOUTS))
def test_every_bit_is_that_of_the_run_without_it(world_size, layouts):
    cases = []
    for layout in layouts:
        for cls, stated in OPTIMIZERS if layout == "" else OPTIMIZERS[:1]:
            options = {**stated, "foreach": False} if layout == "" and stated.get("fused") is None else stated
            cases += [(layout + text, cls, options) for text in ("", TABLE)]
    found = in_one_world(trained, world_size, *cases)
    for plain, ranks in zip(found[::2], found[1::2], strict=True):
        assert_equal(ranks, plain)


# ---- gradients, parameters, all --------------------------------------------------------------------------------------

OTHERS = ["gradients", "parameters", "all"]


def table(mode):
    """Return the plugin's table; with "all" nothing moves by pieces."""
    return (TABLE if mode != "all" else "[sharding.cpu_offload]\n") + f'mode = "{mode}"\n'


@pytest.mark.parametrize(
    ("world_size", "layouts"),
    [
        (2, [LAYOUTS[2].values[1], FSDP + LAYOUTS[3].values[1]]),
        pytest.param(
            4, [FSDP + LAYOUTS[4].values[1].replace("tp = 2", "tp = 2\ndp_shard = 2")], marks=pytest.mark.slow
        ),
    ],
)
def test_every_mode_gives_the_bits_and_collectives_of_the_run_without_it(world_size, layouts):
    tables = ("", *map(table, OTHERS))
    cases = [(layout + table, torch.optim.AdamW, {}, 2) for layout in layouts for table in tables]
    found = in_one_world(trained, world_size, *cases)
    for index in range(0, len(cases), len(tables)):
        for ranks in found[index + 1 : index + len(tables)]:
            assert_equal(ranks, found[index])


@pytest.mark.parametrize(("world_size", "layout"), [(1, ""), (2, FSDP + "zero = 1\n")])
def test_gradients_of_several_microbatches_equal_one_device(world_size, layout):
    text = layout + '[sharding.cpu_offload]\nmode = "gradients"\n'
    for error in run_ranks(functools.partial(one_step, text, microbatch=2), world_size):
        assert max(error[:3]) < 1e-12


def test_gradients_of_a_schedule_that_computes_them_itself():
    layout = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "ZBVZeroBubble"\n[train]\nmicrobatch = 3\n'
    factory = functools.partial(Net, num_layers=4)
    plain = run_ranks(offloading.trained, 2, layout, torch.optim.AdamW, {}, 2, factory)
    text = layout + '[sharding.cpu_offload]\nmode = "gradients"\n'
    for found, wanted in zip(
        run_ranks(offloading.trained, 2, text, torch.optim.AdamW, {}, 2, factory), plain, strict=True
    ):
        offloading.assert_same(found, wanted)


def in_backward(mode, microbatch):
    """Return bytes of gradients on the device after every micro-batch, those on the host, and those of all."""
    run = composed(f'[sharding.cpu_offload]\nmode = "{mode}"\n[train]\nmicrobatch = {microbatch}\n', seeded(dim=8))
    tokens, targets = padded()
    seen = []
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        seen.append(sum(p.grad is not None for _, p in run.named_parameters()))
        gradients = run.context.state.get(next(key for key in run.context.state if type(key).__name__ == "CPUOffload"))
        held = gradients.host_bytes, gradients.peak_bytes
        run.clip_grad_norm_(1.0)
        seen.append(sum(p.grad is not None for _, p in run.named_parameters()))
        left = gradients.host_bytes
    sizes = [p.numel() * 4 for _, p in run.named_parameters()]
    run.close()
    return seen, held, left, sizes


def test_gradients_are_on_the_host_until_they_are_used():
    for microbatch in (12, 3):
        seen, held, left, sizes = run_ranks(in_backward, 1, "gradients", microbatch)[0]
        assert seen == [0, len(sizes)]
        assert held == (sum(sizes), sum(sizes)) and left == 0


def units_of(mode, patterns):
    from torch.distributed.fsdp import CPUOffloadPolicy

    text = FSDP + table(mode) + (f"parameters = {patterns}\n" if patterns else "")
    run = composed(text, seeded(dim=8))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    groups = {
        fqn: isinstance(next(torch_compat.fsdp_groups(module))[0].offload_policy, CPUOffloadPolicy)
        for fqn, module in run.parts[0].module.named_modules()
        if hasattr(module, "_get_fsdp_state")
    }
    tokens, targets = padded()
    with run.step(0):
        run.forward_backward(tokens, target=targets)
        optimizer.step()
    plugin = next((key for key in run.context.state if type(key).__name__ == "CPUOffload"), None)
    log = getattr(run.context.state.get(plugin), "log", None)
    run.close()
    return groups, log


def test_units_are_told_to_the_data_parallel_plugin():
    blocks = [f"layers.{index}" for index in range(3)]
    groups, log = run_ranks(units_of, 1, "all", None)[0]
    assert groups == dict.fromkeys(["", *blocks], True) and log is None
    groups, log = run_ranks(units_of, 1, "parameters", '["layers.1", "layers.2"]')[0]
    assert groups == {"": False, "layers.0": False, "layers.1": True, "layers.2": True}
    # Parameters and gradients visit the device piece by piece, the next one on its way before one is waited for.
    assert log[:5] == [("fetch", 0), ("fetch", 1), ("wait", 0), ("store", 0), ("fetch", 2)]


# The fast tests have one in tests/verification/test_verify_plugins.py, beside activations on the host.
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["all", *OTHERS[:2]])
def test_verify_passes(mode):
    tokens, targets = padded()
    path = write_manifest(FSDP + "[mesh]\ndp_shard = 2\n" + table(mode))
    assert_parity(Net, path, Batch(args=(tokens,), target=targets), loss_fn=sum_loss)


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


def resumed(path, text, load, num_steps):
    run = composed(text, seeded(dim=8))
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    weights = go_on(run, optimizer, padded(), path, load=load, num_steps=num_steps, asynchronous=True)
    run.close()
    return weights


def test_a_resumed_run_is_the_same_and_reshards(tmp_path):
    # Saved where the optimizer's state is on the host, and where all is.
    paths = {mode: tmp_path / mode / "step-2" for mode in ("optimizer", "all")}
    texts = {mode: FSDP + table(mode) for mode in ("optimizer", *OTHERS)}
    cases = [(path, texts[mode], False, 4) for mode, path in paths.items()]
    # With it and without it, and in any mode: checkpoints are the same.
    cases += [(paths["all"], text, True, 2) for text in (FSDP, texts["optimizer"], texts["parameters"])]
    cases += [(paths["optimizer"], texts[mode], True, 2) for mode in ("gradients", "all")]
    (whole, _), *others = in_one_world(resumed, 2, *cases)
    for again, _ in others:
        assert all(torch.equal(whole[name], again[name]) for name in whole)
    for (moved,) in in_one_world(resumed, 1, *((path, texts[mode], True, 2) for mode, path in paths.items())):
        assert all(torch.allclose(whole[name], moved[name], atol=1e-5) for name in whole)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text, options):
    try:
        run = composed(text)
    except ManifestError as error:
        return str(error).partition("run.toml")[2]
    except ComposerError as error:
        return str(error)
    with pytest.raises(ComposerError) as caught:
        run.optimizer(torch.optim.AdamW, lr=1e-2, **options)
    run.close()
    return str(caught.value)


REFUSED = [
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
        'mode = "all"',
        {},
        ':2:11: [sharding.cpu_offload] mode = "all" needs a data-parallel plugin, which gathers parameters for '
        "their use; add [sharding.fsdp2]; on one rank it works too",
    ),
    (
        'mode = "parameters"\nparameters = ["layers.*.up"]\n[sharding.fsdp2]',
        {},
        'mode = "parameters": the data-parallel plugin does not gather layers.0.up as a unit; name its units in '
        "[sharding.cpu_offload] parameters, or let fsdp2 or ddp's units gather it",
    ),
    (
        'mode = "gradients"\n[sharding.ddp]\nreducer = "bucketed"',
        {},
        ':4:11: [sharding.ddp] reducer = "bucketed" reduces gradients where they lie, and they are to be '
        'in host memory before; write reducer = "unit"',
    ),
    (
        'mode = "all"\n[sharding.ddp]\nreducer = "bucketed"',
        {},
        ':4:11: [sharding.ddp] reducer = "bucketed" gathers no parameters for their use, and those of the model '
        'are to be in host memory; write reducer = "unit"',
    ),
    (
        "parameters = []",
        {},
        ":2:11: [sharding.cpu_offload] parameters = [] names none, so nothing is offloaded; leave it out for all of "
        "them",
    ),
    (
        'mode = "all"\npiece_mib = 1.0\n[sharding.fsdp2]',
        {},
        ':2:11: [sharding.cpu_offload] piece_mib has no effect with mode = "all", in which units move, and nothing by '
        "pieces; remove piece_mib",
    ),
    (
        "piece_mib = 0.0",
        {},
        ":3:1: [sharding.cpu_offload] sharding.cpu_offload.piece_mib must be greater than 0.0, not 0.0",
    ),
]


def test_refusals():
    # On one rank gradients are where they are reduced; with ddp on two they would be reduced elsewhere.
    for world_size, is_reduced in ((1, False), (2, True)):
        chosen = [case for case in REFUSED if case[0].startswith('mode = "gradients"') == is_reduced]
        cases = (("[sharding.cpu_offload]\n" + text, options) for text, options, _ in chosen)
        found = in_one_world(refusal, world_size, *cases)
        assert [ranks[0] for ranks in found] == [message for *_, message in chosen]
