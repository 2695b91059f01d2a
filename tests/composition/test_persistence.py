from __future__ import annotations

import pytest
import torch
from support.models import Net, composed, mine, padded, seeded
from support.shared_worlds import in_one_world

from composer3d import CheckpointError, StepError
from composer3d.testing import full, run_ranks

COUNTING = '[profiling.counting]\nuse = "support.plugins:Counting"\n'
FSDP = "[sharding.fsdp2]\n" + COUNTING
LAYOUTS = {1: COUNTING, 2: FSDP, 4: "[mesh]\ndp_replicate = 2\n" + FSDP}


class Buffered(Net):
    """A model with a buffer that steps change and one that is not saved."""

    def __init__(self, **options):
        super().__init__(**options)
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens):
        if self.training:
            self.seen += 1
        return super().forward(tokens)


def start(text, *, weights=0, dropout=0.0, optimizer=torch.optim.AdamW):
    """Compose with an optimizer and an attached scheduler."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(weights)
    run = composed(text, Buffered(dropout=dropout, tied=True))
    made = run.optimizer(optimizer, groups=[{"match": "norm", "lr": 0.01}], lr=3e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 / (1 + step))
    run.attach("scheduler", scheduler)
    return run, made, scheduler


def advance(run, optimizer, scheduler, numbers):
    tokens, targets = (mine(run, tensor) for tensor in padded())
    losses = []
    for number in numbers:
        with run.step(number):
            losses.append(float(run.forward_backward(tokens, target=targets)))
            run.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
    return losses


def facts(run, optimizer):
    """What must have come back: weights, buffers, rates, the plugin's state."""
    tally = run.context.state["tally"]
    return {
        **{name: full(tensor).clone() for name, tensor in (*run.model.named_parameters(), *run.model.named_buffers())},
        "rates": [group["lr"] for group in optimizer.param_groups],
        "tally": (tally.steps, tally.tensor.tolist()),
    }


def first_half(text, path, asynchronous=False, **options):
    run, optimizer, scheduler = start(text, **options)
    advance(run, optimizer, scheduler, range(3))
    run.save(path, asynchronous=asynchronous)
    saved = facts(run, optimizer)
    losses = advance(run, optimizer, scheduler, range(3, 6))
    run.close()
    return saved, losses


def second_half(text, path, **options):
    run, optimizer, scheduler = start(text, weights=9, **options)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("step"))
    if text != LAYOUTS[1]:
        # State that is there already is overwritten.
        advance(run, optimizer, scheduler, [0])
    calls.clear()
    final = run.context.state["final"]
    run.load(path)
    assert calls == []
    assert run.context.state["final"] == final + 1
    loaded = facts(run, optimizer)
    losses = advance(run, optimizer, scheduler, range(3, 6))
    run.close()
    return loaded, losses


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name], name


@pytest.mark.parametrize("asynchronous", [False, True], ids=["", "asynchronous"])
def test_the_same_world_goes_on_bit_by_bit(tmp_path, asynchronous):
    results = run_ranks(lambda: first_half(FSDP, tmp_path / "a", asynchronous, dropout=0.3), 2)
    again = run_ranks(lambda: second_half(FSDP, tmp_path / "a", dropout=0.3), 2)
    for (saved, losses), (loaded, same_losses) in zip(results, again, strict=True):
        # What is not persistent is not saved.
        same({**saved, "scratch": 0}, {**loaded, "scratch": 0})
        assert losses == same_losses
    saved = results[0][0]
    assert saved["tally"] == (3, [4.5] * 3)
    assert saved["seen"].tolist() == [3.0] * 3
    assert saved["rates"] == pytest.approx([0.01 / 4, 3e-2 / 4])


@pytest.mark.parametrize(("saves", "loads"), [(2, 1), (2, 4), (1, 2), (4, 2)])
def test_other_worlds_go_on_too(tmp_path, saves, loads):
    (saved, losses), *_ = run_ranks(first_half, saves, LAYOUTS[saves], tmp_path / "a")
    for loaded, same_losses in run_ranks(second_half, loads, LAYOUTS[loads], tmp_path / "a"):
        same(saved, loaded)
        assert losses == pytest.approx(same_losses, rel=1e-12)


def bare(path, text="", model=Net, save=False, optimizer=None, attach=()):
    """Compose without the rest, then save or load; return what it says."""
    torch.manual_seed(0)
    run = composed(text, model())
    if optimizer is not None:
        run.optimizer(optimizer, lr=0.1)
    for name in attach:
        run.attach(name, Clock())
    if save:
        return run.save(path)
    with pytest.raises(CheckpointError) as caught:
        run.load(path)
    return str(caught.value)


class Clock:
    """A loader's position, say."""

    ticks = 3

    def state_dict(self):
        return {"ticks": self.ticks}

    def load_state_dict(self, state):
        self.ticks = state["ticks"]


def wide_head(model):
    model.out.float()
    return model


SGD = torch.optim.SGD
OTHER = "; the run that saved it had other plugins, or other options of theirs"

REFUSED = {
    "no such checkpoint": (None, {}, "{path}: there is no checkpoint here"),
    "another model": (
        {},
        {"model": lambda: Net(dim=5, num_layers=2)},
        "{path}: of another model or optimizer: the checkpoint holds model/layers.0.down.bias of shape [7], the model "
        "has [5]; the checkpoint holds model/layers.0.down.weight of shape [7, 15], the model has [5, 11]; the "
        "checkpoint holds model/layers.0.up.bias of shape [15], the model has [11]; the checkpoint holds "
        "model/layers.0.up.weight of shape [15, 7], the model has [11, 5]; the checkpoint holds "
        "model/layers.1.down.bias of shape [7], the model has [5]; and 11 more",
    ),
    "fewer layers": (
        {"model": lambda: Net(num_layers=2)},
        {},
        "{path}: of another model or optimizer: the checkpoint lacks model/layers.2.down.bias; the checkpoint lacks "
        "model/layers.2.down.weight; the checkpoint lacks model/layers.2.up.bias; the checkpoint lacks "
        "model/layers.2.up.weight",
    ),
    "another dtype": (
        {"model": lambda: Net().bfloat16()},
        {"model": lambda: wide_head(Net().bfloat16())},
        "{path}: of another model or optimizer: the checkpoint holds model/out.bias as bfloat16, the model has "
        "float32; the checkpoint holds model/out.weight as bfloat16, the model has float32",
    ),
    "no optimizer": ({}, {"optimizer": SGD}, "{path}: holds no optimizer state, and this run has an optimizer"),
    "another optimizer": (
        {"optimizer": torch.optim.AdamW},
        {"optimizer": SGD},
        "optimizer state: the checkpoint's optimizer is AdamW, this run's is SGD",
    ),
    "no state": ({}, {"attach": ["clock"]}, '{path}: holds no state "attached/clock", which this run has' + OTHER),
    "a state too many": (
        {"attach": ["clock", "loader"]},
        {"attach": ["loader"]},
        '{path}: holds the state "attached/clock", which nothing in this run takes' + OTHER,
    ),
    "no plugin": (
        {"text": COUNTING},
        {},
        '{path}: holds the state "plugin/counting/tally", which nothing in this run takes' + OTHER,
    ),
}


@pytest.mark.parametrize(("saved", "loaded", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused(tmp_path, saved, loaded, message):
    path = tmp_path / "checkpoints" / "a"
    if saved is not None:
        run_ranks(lambda: bare(path, save=True, **saved), 1)
    # Loads on two ranks say the same on both.
    for said in run_ranks(lambda: bare(path, **{"text": "[sharding.fsdp2]\n", **loaded}), 2):
        assert said == message.format(path=path)


class Guess(Clock):
    """What a run finds again by itself."""

    is_dispensable = True

    def __init__(self, ticks):
        self.ticks, self.tensor = ticks, torch.full((2,), float(ticks))

    def state_dict(self):
        return {"ticks": self.ticks, "tensor": self.tensor}

    def load_state_dict(self, state):
        self.ticks, self.tensor = state["ticks"], state["tensor"]


def dispensed(caplog, path, names, load):
    """Save or load with guesses; return them, what was logged, and a weight."""
    torch.manual_seed(int(load))
    run = composed("[sharding.fsdp2]\n", Net())
    guesses = {name: Guess(7 if load else 3) for name in names}
    for name, guess in guesses.items():
        run.attach(name, guess)
    caplog.clear()
    run.load(path) if load else run.save(path)
    weight = full(run.model.tok.weight).clone()
    run.close()
    return {name: (guess.ticks, guess.tensor.tolist()) for name, guess in guesses.items()}, caplog.messages, weight


def test_a_state_that_a_run_can_do_without_begins_anew_or_is_left_behind(tmp_path, caplog):
    path = tmp_path / "a"
    cases = ((caplog, path, ("kept", "gone"), False), (caplog, path, ("kept", "new"), True))
    ((_, _, saved), _), ((guesses, told, weight), (other, untold, _)) = in_one_world(dispensed, 2, *cases)
    assert guesses == other == {"kept": (3, [3.0, 3.0]), "new": (7, [7.0, 7.0])}
    assert torch.equal(saved, weight)
    assert told == [
        f'{path}: holds no state "attached/new"; it begins anew',
        f'{path}: the state "attached/gone" is left behind: nothing in this run takes it',
    ]
    assert untold == []


def weights_only(path):
    torch.set_default_dtype(torch.float64)
    run = composed(FSDP, Buffered(tied=True))
    scheduler = {}
    run.attach("scheduler", Taking(scheduler))
    run.load(path)
    return full(run.model.tok.weight), scheduler


class Taking:
    """Takes any state."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        self.state.update(state)


def test_weights_can_be_loaded_without_an_optimizer(tmp_path):
    (saved, _), *_ = run_ranks(first_half, 1, COUNTING, tmp_path / "a")
    for weight, scheduler in run_ranks(weights_only, 2, tmp_path / "a"):
        assert torch.equal(weight, saved["tok.weight"])
        assert scheduler["last_epoch"] == 3


def misused(path):
    run, optimizer, _ = start(COUNTING)
    run.save(path)
    with pytest.raises(StepError) as twice:
        run.attach("scheduler", Clock())
    with pytest.raises(StepError) as inside, run.step(4):
        run.load(path)
    run.attach("odd", Odd())
    with pytest.raises(CheckpointError) as odd:
        run.save(path)
    return str(twice.value), str(inside.value), str(odd.value)


class Odd(Clock):
    """Has a state that JSON cannot carry."""

    def state_dict(self):
        return {"clock": Clock()}


def test_misuse_is_refused(tmp_path):
    twice, inside, odd = run_ranks(misused, 1, tmp_path / "a")[0]
    assert twice == '"scheduler" is attached already'
    assert inside == "load was called inside step 4; call it between steps"
    assert odd == (
        f"{tmp_path / 'a'}: state.states.attached/odd.clock is a Clock, which JSON cannot carry; "
        "make it a string, number, bool, list or dict, or save it among the tensors"
    )


def raised(function):
    try:
        return function()
    except StepError as error:
        return str(error)


def out_of_place():
    """Return the errors of calls that cannot do what they say, and of calls after the close."""
    tokens, targets = padded()
    run = composed("", seeded())
    optimizer = run.optimizer(SGD, lr=0.1)
    with torch.no_grad():
        without = raised(lambda: run.forward_backward(tokens, target=targets))
    found = [without, raised(lambda: run.attach("odd", 3)), raised(lambda: run.full_tensor("nrom", torch.ones(1)))]
    run.close()
    with torch.no_grad():
        run.model(tokens)  # it is a module like any
    late = [
        lambda: run.forward_backward(tokens, target=targets),
        lambda: run.evaluate(tokens, target=targets),
        lambda: run.backward(run.model(tokens).sum()),
        lambda: run.step(0).__enter__(),
        run.sync_buffers,
        optimizer.step,
    ]
    named = [raised(lambda: run.save("a")), raised(lambda: run.load("a")), raised(run.full_state_dict)]
    return found, {raised(each) for each in late}, named


def test_calls_out_of_place_are_refused():
    found, late, named = run_ranks(out_of_place, 1)[0]
    assert found[0].startswith("run.forward_backward(...) was called under torch.no_grad() or inference_mode")
    assert found[1].startswith('run.attach("odd", ...) was given a int, which has no state_dict()')
    assert found[2].startswith('the model has no parameter "nrom"')
    closed = "after run.close(), which is the last call; compose again for more steps"
    assert late == {f"run was used {closed}"}
    assert named == [f"run.{call}(...) was called {closed}" for call in ("save", "load", "full_state_dict")]


def newest_of_a_folder(path):
    """Save twice under names of the loop's own; load the folder, and the folder without its marker."""
    run, optimizer, scheduler = start(FSDP)
    advance(run, optimizer, scheduler, [0])
    run.save(path / "first")
    advance(run, optimizer, scheduler, [1])
    run.save(path / "second")
    run.load(path)
    found = [scheduler.last_epoch]
    run.load(path / "first")
    found.append(scheduler.last_epoch)
    torch.distributed.barrier()
    if run.context.rank == 0:
        (path / "latest").unlink()
    torch.distributed.barrier()
    with pytest.raises(CheckpointError) as caught:
        run.load(path)
    run.close()
    return found, str(caught.value)


def test_of_a_folder_the_newest_checkpoint_is_loaded(tmp_path):
    message = (
        f"{tmp_path}: a folder of checkpoints without a marker `latest` and none that is called step-N; name the one "
        'to load: run.load("first") or run.load("second")'
    ).replace('run.load("', f'run.load("{tmp_path}/')
    assert run_ranks(newest_of_a_folder, 2, tmp_path) == [([2, 1], message)] * 2
