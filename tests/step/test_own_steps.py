"""Loops as others write them, compared with the same lines on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.models import composed, mine, padded, seeded, unpadded
from torch.utils.data import DataLoader, TensorDataset

from composer3d import BatchError, StepError
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
FSDP = "[sharding.fsdp2]\n"
EPOCHS, NUM_BATCHES, ACCUMULATED = 2, 5, 2


def batches():
    tokens, targets = unpadded(num_sequences=4 * NUM_BATCHES)
    return list(zip(tokens.chunk(NUM_BATCHES), targets.chunk(NUM_BATCHES), strict=True))


def mean(model, tokens, targets):
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def loop(model, optimizer, backward, clip, part, evaluate):
    """Train as a script without a trainer does: accumulate, step now and then and at the end of an epoch, evaluate."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in range(EPOCHS):
        model.train()
        for number, (tokens, targets) in enumerate(batches()):
            loss = mean(model, part(tokens), part(targets)) / ACCUMULATED
            backward(loss)
            if (number + 1) % ACCUMULATED == 0 or number == NUM_BATCHES - 1:
                clip(0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        evaluate()


def one_device():
    model = seeded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    clip = lambda norm: torch.nn.utils.clip_grad_norm_(model.parameters(), norm)  # noqa: E731
    loop(model, optimizer, torch.Tensor.backward, clip, lambda tensor: tensor, lambda: None)
    return model


def embedded(layout, path):
    """Run the loop without a `with run.step(n)`, saving and loading in its middle."""
    torch.set_default_dtype(torch.float64)
    run = composed(layout)
    optimizer = run.optimizer(torch.optim.AdamW, lr=0.01)
    opened = []

    def evaluate():
        with torch.no_grad():
            run.model(mine(run, batches()[0][0]))
        run.save(path / f"step-{len(opened)}")
        opened.append(run._engine.own_steps.next)

    loop(run.model, optimizer, run.backward, run.clip_grad_norm_, lambda tensor: mine(run, tensor), evaluate)
    reference = one_device()
    error = max(
        float((full(parameter.detach()) - reference.get_parameter(fqn).detach()).abs().max())
        for fqn, parameter in run.named_parameters()
    )
    run.load(path / "step-0")
    assert run._engine.own_steps.next == opened[0]
    run.close()
    return error, opened


@pytest.mark.parametrize(
    "layout", [FSDP, FSDP + "zero = 1\n", "[sharding.ddp]\n", '[sharding.ddp]\nreducer = "bucketed"\n']
)
def test_a_loop_that_opens_no_steps_trains_as_on_one_device(layout, tmp_path):
    for error, opened in run_ranks(embedded, 2, layout, tmp_path):
        assert error < TIGHT
        assert opened == [3, 6]


def mixed_steps():
    """Open some steps, leave others to open themselves, and give one up; return their numbers."""
    run = composed(FSDP)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    tokens, targets = (mine(run, tensor) for tensor in unpadded())
    numbers = []
    for number in (None, 7, None):
        if number is None:
            run.backward(mean(run.model, tokens, targets))
            numbers.append(run._engine.state.step)
            optimizer.step()
        else:
            run.model(tokens)  # looked at, and no backward follows
            with run.step(number) as state:
                run.forward_backward(tokens, target=targets)
                numbers.append(state.step)
                optimizer.step()
        optimizer.zero_grad()
    run.model(tokens)
    run.close()
    return numbers


def test_numbers_go_on_after_those_of_the_loop():
    assert run_ranks(mixed_steps, 2) == [[0, 7, 8]] * 2


def read_by(layout, shuffle):
    run = composed(layout)
    data = torch.utils.data.TensorDataset(torch.arange(22))
    loader = run.loader(torch.utils.data.DataLoader(data, batch_size=4, shuffle=shuffle, drop_last=True))
    torch.manual_seed(run.context.rank)
    epochs = [[batch.tolist() for (batch,) in loader] for _ in range(2)]
    return epochs, len(loader)


@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_share_the_batches_of_a_loader(shuffle):
    one, two = (found[0] for found in run_ranks(read_by, 2, FSDP, shuffle))
    (whole,) = (found[0] for found in run_ranks(read_by, 1, FSDP, shuffle))
    joined = [[a + b for a, b in zip(*epochs, strict=True)] for epochs in zip(one, two, strict=True)]
    assert joined == whole
    assert (whole[0] == whole[1]) is not shuffle
    assert sorted(sum(whole[0], [])) == list(range(20)) or shuffle


def small_batches():
    run = composed(FSDP)
    data = torch.utils.data.TensorDataset(torch.arange(9))
    loader, read = run.loader(torch.utils.data.DataLoader(data, batch_size=4)), []
    with pytest.warns(UserWarning) as told, pytest.raises(BatchError) as caught:
        for (batch,) in loader:
            read.append(len(batch))
    return [str(each.message) for each in told], read, str(caught.value)


def test_batches_of_fewer_samples_than_ranks_are_told_as_an_epoch_begins():
    small = (
        "a batch of 1 sample is too small for 2 ranks that read samples of their own; give the DataLoader "
        "drop_last=True, or a batch_size that leaves more for its last batch"
    )
    told = [f"batch 3 of the 3 of an epoch will be refused: {small}"]
    assert run_ranks(small_batches, 2) == [(told, [2], small)] * 2


def uneven_epoch(layout):
    """Train on 22 sequences in batches of five: a rank has three or two of them, of other numbers of targets."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded(num_sequences=22)
    run = composed(layout)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    sizes = []
    for own_tokens, own_targets in run.loader(DataLoader(TensorDataset(tokens, targets), batch_size=5)):
        sizes.append(len(own_tokens))
        logits = run.model(own_tokens)
        run.backward(F.cross_entropy(logits.flatten(0, -2), own_targets.flatten()))
        optimizer.step()
        optimizer.zero_grad()
    return sizes, {fqn: full(parameter) for fqn, parameter in run.named_parameters()}


def test_batches_that_do_not_divide_over_ranks_are_one_devices():
    (_, alone), *found = [*run_ranks(uneven_epoch, 1, FSDP), *run_ranks(uneven_epoch, 2, FSDP)]
    assert [sizes for sizes, _ in found] == [[3, 3, 3, 3, 1], [2, 2, 2, 2, 1]]
    for _, weights in found:
        assert max(float((weights[fqn] - alone[fqn]).abs().max()) for fqn in alone) < 1e-12


def skipping():
    """Skip a batch on one rank in steps that number themselves; return what is said, and in which step."""
    tokens, targets = unpadded(num_sequences=20)
    run = composed(FSDP)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    loader, steps = DataLoader(TensorDataset(tokens, targets), batch_size=4), 0
    with pytest.raises(StepError) as caught:
        for number, (own_tokens, own_targets) in enumerate(run.loader(loader)):
            if number == 2 and run.context.rank == 1:
                continue
            run.backward(mean(run.model, own_tokens, own_targets))
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
    return str(caught.value), steps


def test_a_rank_that_skips_a_batch_of_the_loader_is_named_before_its_next_step():
    for said, steps in run_ranks(skipping, 2):
        assert steps == 2 and said == (
            "the loop of rank 1 (dp_shard 1) decided something else than that of rank 0 before step 2: batches that "
            "run.loader has given the loop: 4, not 3; all ranks must decide alike"
        )
