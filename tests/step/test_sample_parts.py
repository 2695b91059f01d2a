"""Losses that add up means over parts of a rank's samples: computed as one device does, refused, or named."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from support.models import composed, mine
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss

from composer3d import LossError
from composer3d.testing import full, run_ranks

LENGTHS = {"uneven": (1, 2, 3, 4, 6, 5, 4, 2), "even": (3,) * 8, "alike on a rank": (3, 3, 3, 3, 2, 2, 2, 2)}


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x_BSI):
        return self.head(torch.tanh(self.hidden(x_BSI)))


def of_tokens(logits, target):
    return cross_entropy(logits.flatten(0, -2), target.flatten())


def rows(model, x, target):
    return [of_tokens(*each) for each in zip(model(x), target, strict=True)]


def halves(model, x, target):
    return sum(of_tokens(*each) for each in zip(model(x).chunk(2), target.chunk(2), strict=True)) / 2


def halves_of_inputs(model, x, target):
    return sum(of_tokens(model(own), labels) for own, labels in zip(x.chunk(2), target.chunk(2), strict=True)) / 2


def ranges(model, x, target):
    logits, half = model(x), len(x) // 2
    return torch.stack([of_tokens(logits[at : at + half], target[at : at + half]) for at in (0, half)]).mean()


LOSSES = {
    "rows, averaged": lambda *given: sum(rows(*given)) / len(given[1]),
    "rows, stacked": lambda *given: torch.stack(rows(*given)).mean(),
    "rows, added": lambda *given: sum(rows(*given)),
    "halves": halves,
    "halves of inputs": halves_of_inputs,
    "ranges": ranges,
    "all at once": lambda model, x, target: of_tokens(model(x), target),
    "two views": lambda model, x, target: (of_tokens(model(x), target) + of_tokens(model(x.flip(-1)), target)) / 2,
    "squares of halves": lambda model, x, _: sum(mse_loss(each, each.detach() - 1) for each in model(x).chunk(2)) / 2,
}


def batch(kind):
    generator = torch.Generator().manual_seed(1)
    x, target = torch.randn(8, 6, 5, generator=generator), torch.randint(0, 4, (8, 6), generator=generator)
    target[torch.arange(6) >= torch.tensor(LENGTHS[kind])[:, None]] = -100
    return x, target


def seeded():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return Tagger()


def steps(cases):
    """Return how far a step of each case is from one device's, or its error, and what is warned of, in one run."""
    reference, said, found = seeded(), [], {}
    logging.getLogger("composer3d.step.losses.mixed_values").filters = [lambda each: said.append(each.getMessage())]
    run = composed("[sharding.ddp]\n", seeded(), loss_fn=None)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    for number, (kind, name, *form) in enumerate(cases):
        given, options = batch(kind), STATED.get(*form, {}) if form else {}
        expected = LOSSES[name](reference, *given)
        expected.backward()
        try:
            with run.step(number):
                loss = LOSSES[name](run.model, *(mine(run, each) for each in given))
                loss = run.backward((loss * 4, 4) if form == ["counted"] else loss, **options)
            own = {fqn: full(parameter.grad) for fqn, parameter in run.named_parameters()}
            distance = max(
                float((own[fqn] - parameter.grad).abs().max()) for fqn, parameter in reference.named_parameters()
            )
            found[kind, name, *form] = max(distance, abs(float(loss) - float(expected.detach()))), list(said)
        except LossError as error:
            found[kind, name, *form] = str(error), list(said)
        for each in (optimizer, reference):
            each.zero_grad()
        said.clear()
    run.close()
    return found


def parts_of(run, x, target, cut):
    """Return the parts of a rank's samples, as a loop cuts them."""
    if cut == "strided":
        ranks = run.context.data_parallel_degree
        x, target = (each[run.context.data_parallel_rank :: ranks] for each in (x, target))
        return zip(x.chunk(2), target.chunk(2), strict=True)
    x, target = mine(run, x), mine(run, target)
    if cut == "columns":  # of which a model is given all but the last
        x = torch.cat([x, x[..., :1]], -1)[..., :-1]
    if cut == "loaded":
        return [(x[:2].clone(), target[:2]), (x[2:].clone(), target[2:])]
    return zip(x.chunk(2), target.chunk(2), strict=True)


def accumulated(cases):
    """Return how far a step whose parts have a backward each is from one device's, and what it warns of."""
    said, found = [], {}
    logging.getLogger("composer3d.step.losses.mixed_values").filters = [lambda each: said.append(each.getMessage())]
    for kind, cut, form in cases:
        reference = seeded()
        LOSSES["all at once"](reference, *batch(kind)).backward()
        run = composed("[sharding.ddp]\n", seeded(), loss_fn=None)
        optimizer = run.optimizer(torch.optim.SGD, lr=0.0)
        for own, labels in parts_of(run, *batch(kind), cut):
            count = int((labels != -100).sum())
            with run.accumulate(2) if form == "counted" else contextlib.nullcontext():
                loss = of_tokens(run.model(own), labels)
                stated = {"reduction": "mean"} if form == "stated" else {}
                run.backward((loss * count, count) if form == "counted" else loss / 2, **stated)
        gradients = zip(run.model.parameters(), reference.parameters(), strict=True)
        distance = max(float((full(own.grad) - other.grad).abs().max()) for own, other in gradients)
        optimizer.step()
        run.close()
        found[kind, cut, form] = distance, list(said)
        said.clear()
    return found


ACCUMULATED = {
    ("uneven", "chunks", "as written"): "3, 11",
    ("uneven", "columns", "as written"): "3, 11",
    ("uneven", "strided", "as written"): "4, 6",
    ("alike on a rank", "chunks", "as written"): "6, 4",
    ("even", "chunks", "as written"): "",
    ("uneven", "loaded", "as written"): "",
    ("uneven", "chunks", "stated"): "",
    ("uneven", "chunks", "counted"): "",
}


STATED = {"averaged": {"reduction": "mean"}, "added": {"reduction": "sum"}}
WRITTEN = [
    ("uneven", "rows, averaged", "averaged"),
    ("uneven", "rows, averaged", "counted"),
    ("even", "rows, added", "added"),
]
NAMED = ["halves", "halves of inputs", "ranges"]


def of_loss_fn(kind):
    """Return the error of a loss function that adds up means over halves; empty where it is one device's."""
    reference, (x, target) = seeded(), batch(kind)
    halves(reference, x, target).backward()
    run = composed(
        "[sharding.ddp]\n", seeded(), loss_fn=lambda output, target: halves(lambda given: given, output, target)
    )
    try:
        with run.step(0):
            run.forward_backward(mine(run, x), target=mine(run, target))
            gradients = zip(run.model.parameters(), reference.parameters(), strict=True)
            return "" if all((full(own.grad) - other.grad).abs().max() < 1e-12 for own, other in gradients) else "wrong"
    except LossError as error:
        return str(error)
    finally:
        run.close()


def several():
    torch.set_default_dtype(torch.float64)
    others = [(kind, name) for kind in LENGTHS for name in LOSSES if kind == "even" or name not in NAMED]
    found = steps([*others, *WRITTEN, ("uneven", "halves", "averaged")])
    for kind in ("uneven", "alike on a rank"):
        for name in NAMED:
            found |= steps([(kind, name)])
    return found, accumulated(ACCUMULATED), [of_loss_fn(kind) for kind in LENGTHS]


@pytest.fixture(scope="module")
def all_found():
    return run_ranks(several, 2)[0]


@pytest.fixture
def found(all_found):
    return all_found[0]


@pytest.mark.parametrize("kind", LENGTHS)
@pytest.mark.parametrize("name", ["all at once", "two views", "squares of halves"])
def test_losses_over_all_samples_are_one_devices(found, kind, name):
    distance, said = found[kind, name]
    assert distance < 1e-12
    assert said == []


@pytest.mark.parametrize("name", [name for name in LOSSES if name != "rows, added"])
def test_means_over_as_many_targets_are_one_devices(found, name):
    distance, said = found["even", name]
    assert distance < 1e-12
    assert said == []


@pytest.mark.parametrize("kind", LENGTHS)
def test_a_sum_of_means_over_samples_is_refused(found, kind):
    assert found[kind, "rows, added"][0] == (
        "the loss adds up 4 means, each over a single entry of the first dim: whether these are samples, of which all "
        "ranks together have more, or positions, of which they have as many, its graph does not show; write "
        "run.backward((torch.stack(losses).sum(), len(losses))), or return that pair from loss_fn, for the mean over "
        'the samples of all ranks; or state what it is: run.backward(loss, reduction="sum") adds ranks\' up, '
        'reduction="mean" averages them'
    )


@pytest.mark.parametrize(("kind", "numbers"), [("uneven", "4, 3, 2, 1"), ("alike on a rank", "3, 2")])
@pytest.mark.parametrize("name", ["rows, averaged", "rows, stacked"])
def test_a_mean_of_uneven_means_over_samples_is_refused(found, kind, name, numbers):
    assert found[kind, name][0].startswith(
        "the loss is the mean of 4 means, each over a single entry of the first dim, of other numbers of targets "
        f"({numbers}): whether these are samples, of which all ranks together have more, or positions, of which they "
        "have as many, its graph does not show; write run.backward((torch.stack(losses).sum(), len(losses)))"
    )


@pytest.mark.parametrize("written", WRITTEN)
def test_what_the_refusals_say_to_write_is_one_devices(found, written):
    distance, said = found[written]
    assert distance < 1e-12
    assert said == []


@pytest.mark.parametrize(("kind", "numbers"), [("uneven", "7, 3"), ("alike on a rank", "6, 4")])
@pytest.mark.parametrize("name", NAMED)
def test_uneven_means_over_parts_are_named_once_with_their_line(found, name, kind, numbers):
    (told,) = found[kind, name][1]
    assert told.startswith("test_sample_parts.py:") and told.partition(": ")[2] == (
        f"the loss adds up means over 2 parts of a rank's samples, of different numbers of targets ({numbers}): one "
        "device has parts of other samples, and another loss than the means over the same part of all ranks, which are "
        'trained on; where these are meant, write run.backward(loss, reduction="mean"), and nothing is said; the sum '
        "over all parts, given backward or returned from loss_fn as (sum, count) with the number of its targets, is "
        "one device's whatever the parts"
    )
    assert found["uneven", "halves", "averaged"][1] == []


@pytest.mark.parametrize(("case", "numbers"), [(case, numbers) for case, numbers in ACCUMULATED.items() if numbers])
def test_uneven_backwards_of_a_batchs_parts_are_named_with_their_line(all_found, case, numbers):
    (told,) = all_found[1][case][1]
    assert told.startswith("test_sample_parts.py:") and told.partition(": ")[2] == (
        f"a step's backwards are of 2 parts of a batch, means over different numbers of targets ({numbers}): one "
        "device has parts of other samples, and another loss than the means over the same part of all ranks, which are "
        'trained on; where these are meant, write run.backward(loss, reduction="mean"), and nothing is said; inside of '
        "`with run.accumulate(n):`, each part's sum given backward as (sum, count) with the number of its targets is "
        "one device's whatever the parts"
    )


@pytest.mark.parametrize("case", [case for case, numbers in ACCUMULATED.items() if not numbers])
def test_other_backwards_of_parts_are_not_named(all_found, case):
    assert all_found[1][case][1] == []


@pytest.mark.parametrize("case", [("even", "chunks", "as written"), ("uneven", "chunks", "counted")])
def test_even_parts_and_counted_ones_are_one_devices(all_found, case):
    assert all_found[1][case][0] < 1e-12


def test_a_loss_function_of_uneven_parts_is_refused(all_found):
    uneven, even, alike = all_found[2]
    assert even == ""
    for refused in (uneven, alike):
        assert refused.startswith(
            "the loss is a mean, but micro-batches of this global batch have different numbers of"
        )
