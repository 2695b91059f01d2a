"""Stages of models that were written without a pipeline."""

from __future__ import annotations

import warnings
from functools import partial

import pytest
import torch
from support.models import VOCAB, Block, Net, composed, padded, seeded
from support.pipeline_models import (
    DIM,
    Decoder,
    Functional,
    InPlace,
    Plain,
    assert_equal_to_one_device,
    chain,
    pipelined_step,
    token_sum,
)
from torch import nn

from composer3d import ComposerError, ManifestError, RankError, StepError
from composer3d.testing import run_ranks

PP = "[mesh]\npp = 2\n"
V = PP + '[scheduling.pipeline]\nschedule = "ZBVZeroBubble"\n'
ONE = PP + "[scheduling.pipeline]\n"


def normed_chain(num_layers=4):
    """Every linear layer of the blocks keeps `weight` as an attribute, which a hook computes from parameters."""
    model = chain(num_layers)
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                nn.utils.weight_norm(module)
    return model


class Called(Net):
    """Blocks called through functions that hold them: as default values, in closures, and as a method that was put in.

    Args:
        how: defaults, closures or methods.
    """

    def __init__(self, how, num_layers=4):
        super().__init__(num_layers=num_layers)
        if how == "defaults":
            self.calls = [lambda x, layer=layer: layer(x) for layer in self.layers]
        elif how == "closures":
            self.calls = {"all": self._closures(list(self.layers))}
        else:
            for layer in self.layers:
                layer.forward = self._doubled(layer.forward)

    @staticmethod
    def _closures(layers):
        def call(x):
            for layer in layers:
                x = layer(x)
            return x

        return call

    @staticmethod
    def _doubled(forward):
        return lambda x: 2 * forward(x)

    def forward(self, tokens):
        x = self.tok(tokens)
        for call in getattr(self, "calls", self.layers):
            x = self.calls["all"](x) if call == "all" else call(x)
        return self.out(self.norm(x)) + 0.0


MASK = torch.ones(12, 5, dtype=torch.int64)
MASK[:, 3:] = 0
CASES = [
    pytest.param(ONE, Decoder, None, id="dict-tuple-nested"),
    pytest.param(ONE, Decoder, {"mask": MASK, "scale": 0.5}, id="keyword-mask"),
    pytest.param(V, Decoder, {"mask": MASK}, id="keyword-mask-v"),
    pytest.param(ONE + '[model]\nblocks = "block*"\n', chain, None, id="sequential"),
    pytest.param(V + '[model]\nblocks = "block*"\n', chain, None, id="sequential-v"),
    pytest.param(ONE, Functional, None, id="functional-tie"),
    pytest.param(V, Functional, None, id="functional-tie-v"),
    *(
        pytest.param(text, partial(Called, how), None, id=f"{how}-{index}")
        for how in ("defaults", "closures", "methods")
        for index, text in enumerate((ONE, V, ONE + 'split = "tracer"\n'))
    ),
    pytest.param(ONE, InPlace, None, id="in-place"),
    pytest.param(V, InPlace, None, id="in-place-v"),
    pytest.param(ONE + '[model]\nblocks = "block_*"\n', Plain, None, id="attributes-dataclass"),
    pytest.param(ONE + '[model]\nblocks = "block*"\n', normed_chain, None, id="older-weight-norm"),
    pytest.param(ONE + 'split = "tracer"\n', normed_chain, None, id="older-weight-norm-traced"),
]


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "factory", "kwargs"), CASES)
def test_gradients_equal_one_device(text, factory, kwargs):
    blocks = "" if "[model]" in text or factory is not Decoder else '\n[model]\nblocks = "body.blocks.*"'
    assert_equal_to_one_device(run_ranks(partial(pipelined_step, kwargs=kwargs), 2, text + blocks, factory))


def test_every_rank_makes_only_its_own_stages_from_a_factory():
    first, second = run_ranks(made, 2)
    # The same values as without a pipeline, each on one stage alone.
    assert set(first) == {"tok.weight", *block_names(0, 1)}
    assert set(second) == {"norm.weight", "norm.bias", "out.weight", "out.bias", *block_names(2, 3)}
    (alone,) = run_ranks(made, 1)
    assert all(torch.equal(alone[name], tensor) for name, tensor in (first | second).items())


def made():
    run = composed(
        f"[mesh]\npp = {torch.distributed.get_world_size()}\n[scheduling.pipeline]\n", lambda: Net(num_layers=4)
    )
    values = {name: p.detach().clone() for name, p in run.named_parameters()}
    run.close()
    return values


def block_names(*indices):
    return {f"layers.{i}.{layer}.{kind}" for i in indices for layer in ("up", "down") for kind in ("weight", "bias")}


def with_dropout(microbatch):
    model = seeded(num_layers=4, dropout=0.5)
    run = composed(V + f"[train]\nmicrobatch = {microbatch}\n", model)
    seen = {}

    def keep(name):
        return lambda module, args, output: seen.setdefault(name, []).append((output == 0).flatten())

    for part in run.parts:
        for name, module in part.module.named_modules():
            if name.endswith("dropout"):
                module.register_forward_hook(keep(name))
    tokens, targets = padded()
    for number in range(2):
        with run.step(number):
            run.forward_backward(tokens, target=targets)
    run.close()
    return seen


def test_stages_and_microbatches_draw_different_numbers():
    draws = [zeros for seen in run_ranks(with_dropout, 2, 3) for drawn in seen.values() for zeros in drawn[1:]]
    assert len(draws) == 4 * 2 * 4  # layers, steps, micro-batches; the first forward only learns shapes
    patterns = {tuple(zeros.tolist()) for zeros in draws}
    assert len(patterns) == len(draws)


# ---- state -----------------------------------------------------------------------------------------------------------


def shapes():
    model = seeded(num_layers=4)
    before = {name: p.clone() for name, p in model.named_parameters()}
    children = [name for name, _ in model.named_modules()]
    run = composed(ONE, model)
    part = run.parts[0]
    owned = {name: p.data_ptr() for name, p in part.module.named_parameters()}
    shared = all(dict(model.named_parameters())[name].data_ptr() == at for name, at in owned.items())
    same = all(torch.equal(before[name], p) for name, p in model.named_parameters())
    untouched = children == [name for name, _ in model.named_modules()] and type(model) is Net
    modules = [name for name, _ in part.module.named_modules()]
    run.close()
    return modules, shared, same, untouched, (part.index, part.num_stages, part.is_first, part.is_last)


def test_a_stage_holds_its_own_modules_under_their_names():
    (first, *checks, place), (second, *more, last_place) = run_ranks(shapes, 2)
    assert [name for name in first if "." not in name] == ["", "tok", "layers"]
    assert [name for name in second if "." not in name] == ["", "layers", "norm", "out"]
    assert [name for name in second if name.count(".") == 1] == ["layers.2", "layers.3"]
    assert checks == more == [True, True, True]
    assert place == (0, 2, True, False)
    assert last_place == (1, 2, False, True)


def cuts(text, num_layers):
    run = composed(PP + "[scheduling.pipeline]\n" + text, seeded(num_layers=num_layers))
    found = [[int(n.split(".")[1]) for n, _ in p.module.named_modules() if n.count(".") == 1] for p in run.parts]
    run.close()
    return found


@pytest.mark.parametrize(
    ("text", "num_layers", "expected"),
    [
        ("", 4, [[[0, 1]], [[2, 3]]]),
        ('split = ["layers.1"]', 4, [[[0]], [[1, 2, 3]]]),
        ('schedule = "Interleaved1F1B"', 4, [[[0], [2]], [[1], [3]]]),
        ('schedule = "ZBVZeroBubble"', 4, [[[0], [3]], [[1], [2]]]),
        ('schedule = "LoopedBFS"\nstages_per_rank = 3', 7, [[[0], [2, 3], [5]], [[1], [4], [6]]]),
        ('schedule = "DualPipeV"\nsplit = ["layers.1", "layers.2", "layers.4"]', 5, [[[0], [4]], [[1], [2, 3]]]),
    ],
)
def test_stages(text, num_layers, expected):
    found = run_ranks(cuts, 2, text, num_layers)
    if "stages_per_rank" in text:  # where the seventh block goes is the balance's choice
        assert sorted(index for rank in found for part in rank for index in part) == list(range(num_layers))
        assert [len(rank) for rank in found] == [3, 3]
    else:
        assert found == expected


# ---- refusals --------------------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """A model that does to its blocks what `how` says."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.tok = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(Keyword() for _ in range(3))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = first = self.tok(tokens)
        a, b, c = self.layers
        how = self.how
        if how == "twice":
            x = c(b(a(a(x))))
        elif how == "order":
            x = c(a(b(x)))
        elif how == "skipped":
            x = c(a(x))
        elif how == "keyword":
            x = c(b(x=a(x)))
        elif how == "first":
            x = c(b(a(x)) * 0 + x) if False else c(b(a(x) + 0), a.up(x))
        elif how == "parallel":
            x = a(x) + b(x) + c(x)
        elif how == "averaged":
            y = a(x)
            x = c(b(y)) + y
        elif how == "reads":
            x = c(b(a(x)))
            if float(x.sum()) > 1e9:
                x = first
        elif how == "dict":
            x = c(b(a(x, wrapped=True)["x"]))
        return self.out(x)


class Keyword(Block):
    def __init__(self):
        super().__init__(DIM)

    def forward(self, x, extra=None, wrapped=False):
        y = super().forward(x if extra is None else x + extra.mean())
        return {"x": y} if wrapped else y


@pytest.mark.parametrize("how", ["twice", "order", "skipped", "keyword", "parallel", "averaged", "dict"])
def test_blocks_that_are_not_called_straight_are_traced(how):
    assert_equal_to_one_device(run_ranks(partial(pipelined_step, options={"how": how}), 2, ONE, Odd))


def test_a_forward_that_decides_by_what_another_stage_computed_is_refused():
    for text in run_ranks(refusal, 2, "reads"):
        assert text.startswith(
            ":4:13: [scheduling.pipeline] between the modules that it calls, the forward decides by values that it has "
            'computed from "layers.2", and stages that hold other weights would decide otherwise; move the decision '
            "into a module"
        )


def refusal(how):
    with pytest.raises(ManifestError) as caught:
        composed(ONE, seeded(Odd, how=how))
    return str(caught.value).partition("run.toml")[2]


class Images(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, DIM, 4, 4)
        self.layers = nn.ModuleList(Block(DIM) for _ in range(2))
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, images):
        x = self.patches(images).flatten(2).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.out(x) + 0.0


def images(with_example):
    torch.set_default_dtype(torch.float64)
    example = ((torch.zeros(1, 3, 8, 8),), {}) if with_example else None
    data, targets = (
        torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(16).view(4, 4) % VOCAB,
    )
    model = seeded(Images)
    total, count = token_sum(model(data), targets)
    run = composed(ONE + "[train]\nmicrobatch = 1\n", seeded(Images), loss_fn=token_sum, example=example)
    with run.step(0):
        loss = run.forward_backward(data, target=targets)
    run.close()
    return float((loss - total.detach() / count).abs())


def test_an_example_shows_what_the_model_takes():
    assert max(run_ranks(images, 2, True)) < 1e-12
    with pytest.raises(Exception, match="hand compose example="):
        run_ranks(images, 2, False)


class Moody(Net):
    bad = False

    def forward(self, tokens):
        if not self.bad:
            return super().forward(tokens)
        return self.out(self.norm(self.layers[0](self.layers[1](self.layers[2](self.tok(tokens))))))


def test_a_forward_that_changes_its_mind_is_refused():
    outcome = run_ranks(outcome_of_mood, 1)[0]
    assert "in another place than when the model was split" in outcome


def outcome_of_mood():
    from composer3d.testing import fake_world

    torch.distributed.destroy_process_group()
    with fake_world(2, rank=1):
        model = seeded(Moody)
        run = composed(ONE, model)
        run.parts[0].module.bad = True
        runtime = run._assembled.schedule
        tokens, targets = padded()
        from composer3d import Batch

        runtime._microbatches = [Batch(args=(tokens,), target=targets)]
        with pytest.raises(StepError) as caught:
            run.parts[0].module(torch.zeros(12, 5, 7), microbatch=torch.tensor(0))
        run.close()
    return str(caught.value)


class Refusing(Block):
    def forward(self, x):
        if not x.is_meta:
            raise StepError("the last block refuses")
        return super().forward(x)


def refusing():
    tokens, targets = padded()
    model = seeded()
    model.layers[-1] = Refusing(model.layers[-1].up.in_features)
    run = composed(ONE + "[train]\nmicrobatch = 3\n", model)
    with run.step(0):
        run.forward_backward(tokens, target=targets)


def refused(loss_fn):
    """Run a step that one stage alone refuses; return what each rank ends with."""
    with pytest.raises(ComposerError) as caught:
        if loss_fn is None:
            refusing()
        tokens, targets = padded()
        run = composed(ONE + "[train]\nmicrobatch = 3\n", seeded(), loss_fn=loss_fn)
        with run.step(0):
            run.forward_backward(tokens, target=targets)
    return str(caught.value)


@pytest.mark.parametrize(
    ("loss_fn", "message"),
    [
        (None, "the last block refuses"),
        (lambda output, target: output, "the loss is a Tensor of shape [3, 5, 11], not a scalar; "),
    ],
    ids=["block", "loss"],
)
def test_what_one_stage_refuses_is_the_message_of_all_ranks(loss_fn, message):
    first, last = run_ranks(refused, 2, loss_fn)
    assert first == last and first.startswith(message)


def test_a_refusal_inside_a_stage_arrives_as_it_was_raised():
    with pytest.raises(RankError, match=r"rank 1 of 2 failed: composer3d.errors.StepError: the last block refuses\n"):
        run_ranks(refusing, 2)
