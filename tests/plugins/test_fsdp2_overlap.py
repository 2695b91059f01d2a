"""Units whose all-gathers begin before the forward that needs them: at the end of a step, or inside the optimizer's."""

from __future__ import annotations

import re

import pytest
import torch
from support.models import Even, Net, composed, full, mine, seeded, sum_loss, unpadded

from composer3d import ManifestError, PluginError, StepError, torch_compat
from composer3d.runner import EMA
from composer3d.runner.objective.muon import Muon, group_matrices, matrices_of
from composer3d.testing import count_collectives, run_ranks

TIGHT = 1e-12
OVERLAPPED = "[sharding.fsdp2]\noverlap_optimizer = 3\n"
RECORDED = '[profiling.names]\nuse = "support.recording_plugin:Names"\n'
BATCHES = [unpadded(seed=step) for step in range(5)]


def early(texts, writes=True):
    """Return losses, parameters and gathers of a step for each manifest, with shards written between steps."""
    found = []
    for text in texts:
        run = composed(text)
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        losses, counted = [], {}
        for step in range(4):
            tokens, targets = (mine(run, tensor) for tensor in BATCHES[step])
            with count_collectives(run.mesh) as collectives, run.step(step):
                losses.append(float(run.forward_backward(tokens, target=targets)))
                optimizer.step()
                optimizer.zero_grad()
            counted = {op: count for (op, _), (count, _) in collectives.summary().items()}
            if writes and step == 1:  # no version counter of a shard says so
                for parameter in run.model.parameters():
                    parameter.to_local().data.mul_(0.5)
            if writes and step == 2:
                losses.append(float(run.evaluate(tokens, target=targets).loss))
        found.append((losses, {fqn: full(p.detach()).clone() for fqn, p in run.named_parameters()}, counted))
        run.close()
    return found


@pytest.mark.parametrize("zero", [3, pytest.param(2, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)])
def test_units_that_are_gathered_early_are_those_of_the_next_forward(zero):
    """To the bit, whatever is written between steps; gathers move, and one all-reduce a step is more."""
    texts = [f"[sharding.fsdp2]\nzero = {zero}\n{more} = 2\n" for more in ("gather_early", "overlap_optimizer")]
    plain_text = f"[sharding.fsdp2]\nzero = {zero}\n"
    for plain, *moved in run_ranks(early, 2, [plain_text, *texts]):
        for losses, parameters, _ in moved:
            assert plain[0] == losses
            assert all(torch.equal(tensor, parameters[fqn]) for fqn, tensor in plain[1].items())
    for plain, *moved in run_ranks(early, 2, [plain_text, *texts], False):
        for losses, _, counted in moved:
            assert counted == {**plain[2], "all_reduce": plain[2]["all_reduce"] + 1}
            assert plain[0] == losses


def one_device(model, decay):
    """Return losses, parameters and their moving averages of plain torch on one device."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    averages = {fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()}
    for tokens, targets in BATCHES:
        loss, count = sum_loss(model(tokens), targets)
        (loss / count).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((loss / count).detach())
        for fqn, parameter in model.named_parameters():
            averages[fqn].lerp_(parameter.detach(), 1 - decay)
    return torch.stack(losses), dict(model.named_parameters()), averages


def trained(text, model, folder):
    """Return the largest errors of losses, parameters and averages: clipped, accumulated, evaluated, saved, resumed."""
    torch.set_default_dtype(torch.float64)
    losses_1, parameters_1, averages_1 = one_device(seeded(model), 0.9)
    run, losses, steps = None, [], 0
    for stop in (3, len(BATCHES)):
        if run is not None:
            run.close()
        run = composed(f"{text}[train]\nmicrobatch = 3\n", seeded(model))
        optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        ema = EMA(run, decay=0.9, every=1)
        run.attach("ema", ema)
        if steps:
            run.load(folder / "kept")
        for step in range(steps, stop):
            tokens, targets = (mine(run, tensor) for tensor in BATCHES[step])
            with run.step(step):
                losses.append(run.forward_backward(tokens, target=targets))
                run.clip_grad_norm_(0.05)
                optimizer.step()
                optimizer.zero_grad()
            ema.update(step)
            with ema.applied():
                run.evaluate(tokens, target=targets)
            run.evaluate(tokens, target=targets)
        steps = stop
        run.save(folder / "kept")
    found = {fqn: full(p.detach()) for fqn, p in run.named_parameters()}
    with ema.applied():
        averaged = {fqn: full(p.detach()).clone() for fqn, p in run.named_parameters()}
    run.close()
    errors = [(torch.stack(losses) - losses_1).abs().max()]
    for own, device in ((found, parameters_1), (averaged, averages_1)):
        errors.append(max((tensor - device[fqn].detach()).abs().max() for fqn, tensor in own.items()))
    return [float(error) for error in errors]


LAYOUTS = [
    pytest.param(2, "", Net, id="zero3"),
    pytest.param(2, "zero = 2\n", Net, id="zero2", marks=pytest.mark.slow),
    pytest.param(4, "[mesh]\ndp_replicate = 2\n", Net, id="hsdp", marks=pytest.mark.slow),
    pytest.param(4, '[mesh]\ntp = 2\n[sharding.tensor_parallel]\nplan = "auto"\n', Even, marks=pytest.mark.slow),
    pytest.param(4, "[mesh]\npp = 2\n[scheduling.pipeline]\n", Even, id="pp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("world_size", "more", "model"), LAYOUTS)
def test_overlapped_training_is_one_devices(world_size, more, model, tmp_path):
    for errors in run_ranks(trained, world_size, OVERLAPPED + more, model, tmp_path):
        assert max(errors) < TIGHT


def ordered():
    """Return the spans of the optimizer's step, and whether the first rank's ended before the second's began."""
    run = composed(OVERLAPPED + RECORDED)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
    (seen,) = [value.seen for value in run.context.state.values() if hasattr(value, "seen")]
    store = torch_compat.default_store()
    with run.step(0):
        run.forward_backward(*(mine(run, tensor) for tensor in BATCHES[0][:1]), target=mine(run, BATCHES[0][1]))
        seen.clear()
        if run.context.rank:
            store.wait(["stepped"])
        optimizer.step()
        if not run.context.rank:
            store.set("stepped", "")
    run.forward_backward(mine(run, BATCHES[1][0]), target=mine(run, BATCHES[1][1]))
    run.close()
    return [(name, unit) for name, _, unit in seen]


def test_all_gathers_begin_between_the_steps_of_units_and_wait_for_none():
    """A rank steps all units, and gathers three, while another has not begun: what is gathered travels meanwhile."""
    gathered = [[("optimizer_unit", unit), ("all_gather", unit)] for unit in ("(root)", "layers.0", "layers.1")]
    for spans in run_ranks(ordered, 2):
        begin = spans.index(("optimizer", None)) + 1
        assert spans[begin : begin + 7] == [*sum(gathered, []), ("optimizer_unit", "others")]
        forward = spans[begin + 7 :]
        assert [unit for name, unit in forward if name == "all_gather"][:1] == ["layers.2"]


BESIDE = {
    "muon": "",
    "low-bit moments": "[precision.low_bit_optimizer]\nmin_numel = 16\nblock_size = 16\n",
    "parameters in host memory": '[sharding.cpu_offload]\nmode = "all"\n',
    "gradients in host memory": '[sharding.cpu_offload]\nmode = "gradients"\n',
    "float16": '[precision.mixed]\nparam_dtype = "float16"\n',
}


def stepped(name):
    """Return parameters after three steps, without the overlap and with it."""
    found = []
    for key in ("", "overlap_optimizer = 4\n"):
        run = composed(f"[sharding.fsdp2]\n{key}{BESIDE[name]}", seeded(Even))
        if name == "muon":
            optimizer = run.optimizer(Muon, groups=group_matrices([], matrices_of(run, None)), lr=1e-3)
        else:
            optimizer = run.optimizer(torch.optim.AdamW, lr=1e-2)
        for step, (tokens, targets) in enumerate(BATCHES[:3]):
            with run.step(step):
                run.forward_backward(mine(run, tokens), target=mine(run, targets))
                run.clip_grad_norm_(0.05)
                optimizer.step()
                optimizer.zero_grad()
        found.append({fqn: full(p.detach()).clone() for fqn, p in run.named_parameters()})
        run.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", BESIDE)
def test_optimizers_and_plugins_beside_it_give_the_same_bits(name):
    for plain, overlapped in run_ranks(stepped, 2, name):
        assert all(torch.equal(tensor, overlapped[fqn]) for fqn, tensor in plain.items())


class Counting(torch.optim.AdamW):
    """An optimizer that writes into its groups what it computes of all their parameters."""

    is_elementwise = True

    def step(self, closure=None):
        for group in self.param_groups:
            group["numel"] = sum(parameter.numel() for parameter in group["params"])
        return super().step(closure)


class Unknown(torch.optim.AdamW):
    """An optimizer that does not say how it steps."""

    def step(self, closure=None):
        return super().step(closure)


def refused(text, cls, in_backward=False):
    try:
        run = composed(text)
        optimizer = run.optimizer(cls, in_backward=in_backward)
        with run.step(0):
            run.forward_backward(mine(run, BATCHES[0][0]), target=mine(run, BATCHES[0][1]))
            optimizer.step()
    except (ManifestError, PluginError, StepError) as error:
        return re.sub(r"\S*(?=run\.toml)", "", str(error)).removeprefix("run.toml")
    return "it ran"


@pytest.mark.parametrize(
    ("more", "cls", "in_backward", "message"),
    [
        (
            "[sharding.cpu_offload]\n",
            torch.optim.AdamW,
            False,
            ":3:1: [sharding.fsdp2] overlap_optimizer steps units one after the other, and [sharding.cpu_offload] "
            "run.toml:4) pieces of many parameters, whose transfers hide behind each other; write gather_early, which "
            "waits for all of them",
        ),
        (
            "",
            Unknown,
            False,
            "Unknown is not known to step every parameter by itself, and units are to be stepped one after the other; "
            "if it does, give it the attribute `is_elementwise = True`",
        ),
        (
            "",
            Counting,
            False,
            'Counting computes "numel" of a group from its parameters, and units of a plugin are stepped one after the '
            "other; leave out the key that asks for it",
        ),
        (
            "",
            torch.optim.AdamW,
            True,
            "in_backward cannot be: [sharding.fsdp2] run.toml:2) has units stepped one after the other once the "
            "backward is over, and none is left to step; remove one of the two",
        ),
    ],
)
def test_refusals(more, cls, in_backward, message):
    assert run_ranks(refused, 2, OVERLAPPED + more, cls, in_backward)[0] == message
