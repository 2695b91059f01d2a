"""What a model hangs on its parameters: kept in every layout, or refused with the FQN."""

from __future__ import annotations

import pytest
import torch
from support.models import VOCAB, Even, Net, write_manifest
from torch import nn
from torch.nn.functional import cross_entropy

import composer3d
from composer3d.errors import ComposerError, InitialisationError
from composer3d.initialisation import Attachments, record
from composer3d.initialisation.linearity import Kind, kind_of
from composer3d.testing import assert_gradients_equal, gather_full, run_ranks
from composer3d.torch_compat import fake_tensors

ONE = ""
SHARDED_ONCE = "[sharding.fsdp2]\n"
FSDP = "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"
DDP = "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"
TP = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"
PIPELINE = "[train]\nmicrobatch = 3\n[mesh]\npp = 2\n[scheduling.pipeline]\n"
RANKS = {ONE: 1, SHARDED_ONCE: 1, FSDP: 2, DDP: 2, TP: 2, PIPELINE: 2}


class Marked(nn.Parameter):
    pass


def hooked():
    model = Even()
    mask = torch.ones(VOCAB, 7)
    mask[3], mask[5] = 0.0, 2.0
    model.tok.weight.register_hook(lambda grad: grad * mask)
    model.layers[0].up.weight.register_hook(lambda grad: grad - grad.mean(0))
    model.out.bias.register_hook(lambda grad: 0.5 * grad)
    return model


class ScaledBlock(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.up, self.down = nn.Linear(7, 16), nn.Linear(16, 7)
        self.up.weight.scale = 0.5 + number

    def forward(self, x):
        return x + self.up.weight.scale * self.down(torch.tanh(self.up(x)))


class Scaled(Even):
    """Attributes that a block's forward reads of a parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(map(ScaledBlock, range(4)))


class ReadInside(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.weight.multiplier


def marked_inside():
    """Attributes that a module's own forward reads, as muP's readout does."""
    model = Net()
    model.out = ReadInside(7, VOCAB)
    model.out.weight.multiplier = 0.25
    return model


class Listed(Even):
    """A head that is the embedding, kept in a list."""

    def __init__(self):
        super().__init__()
        self.shared = {"head": [self.tok.weight]}

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x) @ self.shared["head"][0].T + self.out(x)


class Viewed(Net):
    def __init__(self):
        super().__init__()
        self.head = self.tok.weight.T

    def forward(self, tokens):
        return super().forward(tokens) + self.norm(self.tok(tokens)) @ self.head


def enclosed():
    model = Even()
    weight, bonus = model.tok.weight, {"x": torch.linspace(0.0, 1.0, VOCAB)}

    class Head(nn.Linear):
        def forward(self, x):
            return super().forward(x) + x @ weight.T + bonus["x"]

    model.out = Head(7, VOCAB)
    return model


def clamped():
    model = Net()
    model.tok.weight.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    return model


def tripled_(parameter):
    parameter.grad.mul_(3.0)


def accumulated():
    model = Net()
    model.tok.weight.register_post_accumulate_grad_hook(tripled_)
    return model


def classed():
    model = Net()
    model.tok.weight = Marked(torch.randn(VOCAB, 7))
    return model


def sums(output, target):
    return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum"), target.numel()


def compared(factory, path, existing):
    """Compare a step's gradients with those of the factory as written, on the same weights; return what is kept."""
    torch.set_default_dtype(torch.float64)
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, VOCAB, (2, 6, 4), generator=generator)
    torch.manual_seed(0)
    model, reference = factory(), factory()
    reference.load_state_dict(model.state_dict())
    run = composer3d.compose(model if existing else factory, path, loss_fn=sums)
    if not existing:
        weights = gather_full(run.named_parameters())
        with torch.no_grad():
            for fqn, parameter in reference.named_parameters():
                parameter.copy_(weights[fqn])
    loss, count = sums(reference(x), y)
    (loss / count).backward()
    rank, size = run.context.data_parallel_rank, 6 // run.context.data_parallel_degree
    with run.step(0):
        run.forward_backward(x[rank * size : (rank + 1) * size], target=y[rank * size : (rank + 1) * size])
        run.clip_grad_norm_(float("inf"))
        gradients = gather_full([(fqn, p.grad) for fqn, p in run.named_parameters()])
    kept = {fqn: (type(p).__name__, getattr(p, "scale", None)) for fqn, p in run.named_parameters()}
    run.close()
    assert_gradients_equal(gradients, {f: p.grad for f, p in reference.named_parameters()}, tolerance=1e-12)
    return kept


def slow(*cells):
    """Leave further cells of a guarantee, each of which has one in the fast tier, to the slow one."""
    return [pytest.param(*cell, marks=pytest.mark.slow) for cell in cells]


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        *((hooked, text) for text in (FSDP, TP, PIPELINE)),
        *((Scaled, text) for text in (FSDP, TP)),
        *((marked_inside, FSDP), (Listed, TP), (enclosed, PIPELINE)),
        *((factory, ONE) for factory in (clamped, accumulated, classed)),
        *slow(*((hooked, text) for text in (ONE, SHARDED_ONCE, DDP)), (Scaled, ONE), (Scaled, PIPELINE)),
        *slow((marked_inside, ONE), (marked_inside, DDP), (Listed, ONE), (Listed, PIPELINE)),
        *slow((enclosed, ONE), (enclosed, TP)),
    ],
)
def test_gradients_are_those_of_the_model_as_written(factory, text):
    kept = run_ranks(compared, RANKS[text], factory, write_manifest(text), False)[0]
    if factory is Scaled:
        assert kept["layers.0.up.weight"][1] == 0.5
    if factory is classed:
        assert kept["tok.weight"][0] == "Marked"


@pytest.mark.parametrize(("factory", "text"), [(hooked, FSDP), (Viewed, ONE), *slow((Scaled, FSDP), (clamped, ONE))])
def test_a_module_that_exists_keeps_them_too(factory, text):
    run_ranks(compared, RANKS[text], factory, write_manifest(text), True)


CLAMPED = (
    '"tok.weight" has a gradient hook that is not linear in the gradient (clamped.<locals>.<lambda>, {file}:{line}): '
    "what it makes of the gradients of micro-batches, ranks or shards does not add up to what it makes of the whole; "
    "write it as a step action at StepPoint.GRADIENTS_REDUCED, which sees gradients once they are added up over ranks"
)
ACCUMULATED = (
    '"tok.weight" has a hook that runs after its gradient is accumulated (tripled_, {file}:{line}): with several ranks '
    "or shards the gradient is not complete by then; write it as a step action at StepPoint.GRADIENTS_REDUCED, which "
    "sees gradients once they are added up over ranks"
)
HELD = (
    '"{path}" holds the parameter "tok.weight" itself, which this layout replaces: computing with it would use old '
    "values and lose gradients; read it from its module in every forward"
)
SUBCLASS = (
    '"tok.weight" is a Marked, a subclass of nn.Parameter, and this layout replaces it by a sharded one, which cannot '
    "be of that class; mark parameters by an attribute, which is carried over"
)


@pytest.mark.parametrize(
    ("factory", "text", "message"),
    [
        (clamped, FSDP, CLAMPED.format(file=__file__, line=clamped.__code__.co_firstlineno + 2)),
        (clamped, SHARDED_ONCE, CLAMPED.format(file=__file__, line=clamped.__code__.co_firstlineno + 2)),
        (accumulated, DDP, ACCUMULATED.format(file=__file__, line=tripled_.__code__.co_firstlineno)),
        (Listed, FSDP, HELD.format(path="shared['head'][0]")),
        (enclosed, DDP, HELD.format(path="out.forward.weight")),
        (classed, FSDP, SUBCLASS),
    ],
)
@pytest.mark.parametrize("existing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_a_layout_cannot_keep_is_refused(factory, text, message, existing):
    with pytest.raises((ComposerError, RuntimeError)) as caught:
        run_ranks(compared, RANKS[text], factory, write_manifest(text), existing)
    assert message in str(caught.value)


def test_what_a_module_that_exists_cannot_keep_is_refused():
    with pytest.raises(ComposerError) as caught:
        run_ranks(compared, 2, Listed, write_manifest(FSDP), True)
    assert HELD.format(path="shared['head'][0]") in str(caught.value)


def test_all_stages_refuse_what_one_cannot_keep():
    text = PIPELINE.replace("pp = 2\n", "pp = 2\ndp_shard = 2\n").replace("= 3", "= 1") + "[sharding.fsdp2]\n"
    with pytest.raises(ComposerError) as caught:
        run_ranks(compared, 4, classed, write_manifest(text), False)
    assert SUBCLASS in str(caught.value) or "another stage's parameters were refused" in str(caught.value)
    assert "Connection" not in str(caught.value) and "in all_reduce" not in str(caught.value)


def twice():
    model = Net()
    model.norm.bias = nn.Parameter(model.norm.weight.data)
    return model


def halves():
    model = nn.Module()
    both = torch.randn(4, 6)
    model.left, model.right = nn.Parameter(both[:, :3]), nn.Parameter(both[:, 3:])
    return model


def test_shared_memory_is_refused_and_parts_of_one_memory_are_not():
    for factory, message in [
        (
            twice,
            'the parameters "norm.weight" and "norm.bias" are two that share memory, and would have memory of their '
            "own in a composition; make them one parameter, by assigning it: module.weight = other.weight",
        ),
        (
            Viewed,
            '"head" is a view of the parameter "tok.weight", and would be a tensor of its own in a composition: no '
            'gradient and no update of "tok.weight" would reach it; make the view in forward, or in a property',
        ),
    ]:
        with pytest.raises(InitialisationError) as caught:
            record(factory)
        assert str(caught.value) == message
    assert record(halves)[1].fqns == ("left", "right")
    older = nn.utils.spectral_norm(nn.Linear(3, 3))  # its weight is a view until its first forward, which computes it
    assert Attachments.of(older).views == ()
    assert "weight_orig" in record(lambda: nn.utils.spectral_norm(nn.Linear(3, 3)))[1].fqns


def removed(path):
    torch.set_default_dtype(torch.float64)
    handles = []

    def factory():
        model = Net()
        handles.append(model.out.bias.register_hook(lambda grad: 0.0 * grad))
        return model

    run = composer3d.compose(factory, path, loss_fn=sums)
    x = torch.arange(12).view(3, 4) % VOCAB
    norms = []
    for number in range(2):
        with run.step(number):
            run.forward_backward(x, target=x)
            run.clip_grad_norm_(float("inf"))
            norms.append(float(dict(run.named_parameters())["out.bias"].grad.full_tensor().norm()))
            for _, parameter in run.named_parameters():
                parameter.grad = None
        handles[0].remove()
    run.close()
    return norms


def test_a_handle_removes_a_hook_that_is_carried_over():
    first, second = run_ranks(removed, 2, write_manifest(FSDP))[0]
    assert first == 0.0 and second > 0.0


@pytest.mark.parametrize(("factor", "kind"), [(0.5, Kind.LINEAR), (None, Kind.OTHER)])
def test_hooks_are_judged_by_values_where_check_composes_on_fake_tensors(factor, kind):
    hook = (lambda grad: grad * factor) if factor else (lambda grad: grad.clamp(-0.01, 0.01))
    with fake_tensors():
        assert kind_of(hook, (4, 3), torch.float64, device=torch.device("cpu")) is kind
