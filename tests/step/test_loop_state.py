"""Faults of one rank's loop that the opening of the next step names."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from support.composition_faults import Even, local
from support.models import Net, composed, mine, seeded, sum_loss, unpadded
from torch import nn

from composer3d import StepError
from composer3d.step.loops.loop_state import EVERY
from composer3d.testing import run_ranks

FSDP = "[sharding.fsdp2]\n"
DDP = "[sharding.ddp]\n[mesh]\ndp_replicate = -1\n"


def learning_rate(run, optimizer):
    optimizer.param_groups[0]["lr"] *= 2


def momentum(run, optimizer):
    optimizer.param_groups[0]["betas"] = (0.5, 0.999)


def mode(run, optimizer):
    run.model.eval()


def mode_of_one_module(run, optimizer):
    run.model.layers[1].dropout.eval()


def frozen(run, optimizer):
    run.model.norm.weight.requires_grad_(False)


def half_frozen():
    model = seeded()
    model.norm.weight.requires_grad_(False)
    model.layers[0].eval()
    return model


def another_half(run, optimizer):
    """Freeze and evaluate as much as the other ranks do, and something else."""
    run.model.norm.weight.requires_grad_(True)
    run.model.norm.bias.requires_grad_(False)
    run.model.layers[0].train()
    run.model.layers[1].eval()


def kept_gradients(run, optimizer):
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)


def cleared_state(run, optimizer):
    optimizer.state.clear()


def counted_steps(run, optimizer):
    for state in optimizer.state.values():
        state["step"] += 50


def nudged(run, optimizer):
    with torch.no_grad():
        run.model.norm.weight.add_(1e-6)


def nudged_data(run, optimizer):
    local(run.model.norm.weight.detach()).data.add_(1e-6)  # which counts no write


def nudged_norm(run, optimizer):
    with torch.no_grad():
        local(run.model.layers[0].norm.weight).add_(1e-6)


def nothing(run, optimizer):
    pass


BEFORE = "the loop of rank 1 (dp_shard 1) decided something else than that of rank 0 before step 2: "
ALIKE = "; all ranks must decide alike"
NAMED = {
    learning_rate: BEFORE + '"lr" of the optimizer\'s group 0: 0.002, not 0.001' + ALIKE,
    momentum: BEFORE + '"betas" of the optimizer\'s group 0: [0.5, 0.999], not [0.9, 0.999]' + ALIKE,
    mode: BEFORE
    + '"".training: False, not True, "tok".training: False, not True, "layers".training: False, not True, '
    + '"layers.0".training: False, not True and 13 more'
    + ALIKE,
    mode_of_one_module: BEFORE + '"layers.1.dropout".training: False, not True' + ALIKE,
    frozen: BEFORE + '"norm.weight".requires_grad: False, not True' + ALIKE,
    cleared_state: BEFORE + "steps that the optimizer's state counts: 0.0, not 2.0" + ALIKE,
    counted_steps: BEFORE + "steps that the optimizer's state counts: 52.0, not 2.0" + ALIKE,
    kept_gradients: BEFORE + "gradients before the step's first backward: some, not none" + ALIKE,
}


def faulty(text, fault, at, num_steps, clip=(1.0, 1.0), is_own=False, factory=None):
    """Train with a fault on the last rank before step `at`; return what each rank is told, and in which step."""
    run = composed(text, factory)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.001)
    tokens, targets = (mine(run, tensor) for tensor in unpadded(seq_len=4))
    number = 0
    with pytest.raises(StepError) as caught:
        for number in range(num_steps):
            if number == at and dist.get_rank() == 1:
                fault(run, optimizer)
            with run.step(number):
                if is_own:
                    run.backward(sum_loss(run.model(tokens), targets))
                else:
                    run.forward_backward(tokens, target=targets)
                run.clip_grad_norm_(clip[dist.get_rank()] if number == at else 1.0)
                optimizer.step()
                optimizer.zero_grad()
        run.close()
        raise StepError("nothing was told")
    return number, str(caught.value)


def left_out_on_one_rank():
    """Train with an optimizer whose state counts no steps, one of which a rank leaves out; return what is told."""
    run = composed(FSDP)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.001)
    tokens, targets = (mine(run, tensor) for tensor in unpadded(seq_len=4))
    with pytest.raises(StepError) as caught:
        for number in range(3):
            with run.step(number):
                run.forward_backward(tokens, target=targets)
                if (number, dist.get_rank()) != (1, 1):
                    optimizer.step()
                optimizer.zero_grad()
    return str(caught.value)


def test_a_step_that_one_rank_leaves_out_is_named_where_no_state_counts_it():
    told = set(run_ranks(left_out_on_one_rank, 2))
    assert told == {BEFORE + "calls of optimizer.step: 1, not 2" + ALIKE}


@pytest.mark.parametrize("is_own", [False, True], ids=["forward_backward", "own forward"])
@pytest.mark.parametrize(("fault", "message"), NAMED.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_what_one_rank_does_otherwise_is_named_in_the_next_step(fault, message, is_own):
    assert run_ranks(faulty, 2, FSDP, fault, 2, 4, (1.0, 1.0), is_own) == [(2, message)] * 2


def test_a_rank_that_freezes_as_many_parameters_and_others_is_named():
    for number, said in run_ranks(faulty, 2, FSDP, another_half, 2, 4, (1.0, 1.0), True, half_frozen):
        assert number == 2 and said.startswith(BEFORE) and "more" in said


def test_another_clipping_norm_is_named_in_the_next_step():
    message = BEFORE.replace("step 2", "step 3") + "max_norm of run.clip_grad_norm_: 2.0, not 1.0" + ALIKE
    assert run_ranks(faulty, 2, FSDP, nothing, 2, 4, (1.0, 2.0)) == [(3, message)] * 2


def test_a_nudged_weight_is_named_at_once():
    written = 'writes between steps into the shards of "norm.weight": 1, not 0'
    for step, message in run_ranks(faulty, 2, DDP, nudged, EVERY - 1, EVERY + 1):
        assert step == EVERY - 1 and f"before step {EVERY - 1}: {written}" in message


def test_a_replica_whose_write_is_not_counted_is_named_by_its_values():
    message = (
        f"rank 1 (dp_replicate 1) holds other values than rank 0, its replica, at step {EVERY}: "
        'parameter "norm.weight"; something changed parameters on some ranks alone'
    )
    assert run_ranks(faulty, 2, DDP, nudged_data, EVERY - 1, EVERY + 1) == [(EVERY, message)] * 2


HYBRID = FSDP + "[mesh]\ndp_replicate = 2\n"


def written_on_one(text, call, folder, fault=True, make=None):
    """Train for six steps; rank 1 writes past autograd before step 2, or after the last. Return what ranks are told."""
    run = composed(text) if make is None else composed(text, make())
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in unpadded(seq_len=4))
    told = "nothing was told"
    try:
        for number in range(6):
            if number == 2 and call == "step":
                write_on_one(run, fault)
            run.backward(sum_loss(run.model(tokens), targets))
            optimizer.step()
            optimizer.zero_grad()
        if call != "step":
            write_on_one(run, fault)
        if call == "run.full_state_dict":
            run.full_state_dict()
        elif call != "run.close":
            run.save(folder / "saved")
        run.close()
    except StepError as error:
        told = str(error)
    return told, (folder / "saved").exists()


def write_on_one(run, fault):
    if fault and dist.get_rank() == 1:
        local((run.model.scale if isinstance(run.model, Scaled) else run.model.norm.weight).data).add_(0.1)


class Scaled(Net):
    """A model with a parameter that has no dims, which FSDP2 leaves whole."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


@pytest.mark.parametrize("call", ["step", "run.save"])
def test_a_parameter_that_stays_whole_beside_sharded_ones_is_compared(call, tmp_path):
    at = "step 2" if call == "step" else "run.save before step 6"
    message = (
        f"rank 1 (dp_shard 1) holds other values than rank 0, its replica, at {at}: "
        'parameter "scale"; something changed parameters on some ranks alone'
    )
    assert run_ranks(written_on_one, 2, FSDP, call, tmp_path, True, Scaled) == [(message, False)] * 2


@pytest.mark.parametrize(
    ("call", "at"),
    [
        ("step", "step 2"),
        ("run.save", "run.save before step 6"),
        ("run.full_state_dict", "run.full_state_dict before step 6"),
        ("run.close", "run.close before step 6"),
    ],
)
@pytest.mark.parametrize("text", [DDP, HYBRID])
def test_a_weight_that_one_replica_writes_is_named_in_the_first_steps_and_before_it_is_kept(text, call, at, tmp_path):
    message = (
        f"rank 1 (dp_replicate 1) holds other values than rank 0, its replica, at {at}: "
        'parameter "norm.weight"; something changed parameters on some ranks alone'
    )
    assert run_ranks(written_on_one, 2, text, call, tmp_path) == [(message, False)] * 2


@pytest.mark.parametrize("text", [DDP, HYBRID, FSDP])
def test_replicas_that_are_alike_are_told_nothing(text, tmp_path):
    found = run_ranks(written_on_one, 2, text, "run.save", tmp_path, False)
    assert found == [("nothing was told", True)] * 2


TP = "[sharding.tensor_parallel]\n[mesh]\ntp = 2\n"


@pytest.mark.parametrize(
    ("text", "world_size", "message"),
    [
        (  # a plain parameter, whose version says that it was written
            TP,
            2,
            f"rank 1 (tp 1) holds other values than rank 0, its replica, at step {EVERY - 1}: "
            'parameter "layers.0.norm.weight"; something changed parameters on some ranks alone',
        ),
        (
            "[sharding.fsdp2]\n" + TP + "dp_shard = 2\n",
            4,
            "the loop of rank 1 (dp_shard 0, tp 1) decided something else than that of rank 0 before step "
            f'{EVERY - 1}: writes between steps into the shards of "layers.0.norm.weight": 1, not 0; all ranks must '
            "decide alike",
        ),
    ],
    ids=["tp", "fsdp2, tp"],
)
def test_a_nudged_parameter_that_tensor_parallelism_leaves_whole_is_named(text, world_size, message):
    found = run_ranks(faulty, world_size, text, nudged_norm, EVERY - 1, EVERY + 1, (1.0,) * 4, False, Even)
    assert found == [(EVERY - 1, message)] * world_size


@pytest.mark.parametrize(
    "text", [TP, TP.replace("[mesh]", "sequence_parallel = true\n[mesh]")], ids=["tp", "sequence parallel"]
)
def test_tensor_parallel_ranks_that_are_alike_are_told_nothing(text):
    found = run_ranks(faulty, 2, text, nothing, 1, EVERY + 1, (1.0,) * 2, False, Even)
    assert found == [(EVERY, "nothing was told")] * 2


@pytest.mark.parametrize(("text", "world_size"), [(FSDP, 2), (DDP, 2), (FSDP + "[mesh]\ndp_replicate = 2\n", 4)])
def test_loops_that_are_alike_are_told_nothing(text, world_size):
    found = run_ranks(faulty, world_size, text, nothing, 1, 3, (1.0,) * 4)
    assert found == [(2, "nothing was told")] * world_size


def keeps_gradients(text):
    """Train in steps that open themselves; rank 1 keeps its gradients once. Return what each rank is told."""
    run = composed(text)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.001)
    tokens, targets = (mine(run, tensor) for tensor in unpadded(seq_len=4))
    with pytest.raises(StepError) as caught:
        for number in range(3):
            run.backward(sum_loss(run.model(tokens), targets))
            optimizer.step()
            if number != 1 or dist.get_rank() != 1:
                optimizer.zero_grad()
        raise StepError("nothing was told")
    return str(caught.value)


@pytest.mark.parametrize("text", [FSDP, DDP])
def test_gradients_that_one_rank_keeps_are_named_where_a_forward_opens_the_step(text):
    axis = "dp_shard" if text == FSDP else "dp_replicate"
    message = BEFORE.replace("dp_shard", axis) + "gradients before the step's first backward: some, not none" + ALIKE
    assert run_ranks(keeps_gradients, 2, text) == [message] * 2
