from __future__ import annotations

import pytest
import torch
from support.mixtures import MIXTURES
from support.models import Net, composed, mine, one_step, padded, seeded
from torch.distributed.tensor import Replicate

from composer3d import ManifestError, RankError
from composer3d.testing import count_collectives, fake_world, full, run_ranks

TIGHT = 1e-12
UNITS = 4

MODES = [
    pytest.param("[sharding.ddp]", id="unit"),
    pytest.param('[sharding.ddp]\nreducer = "bucketed"', id="bucketed"),
    pytest.param(
        '[sharding.ddp]\nreducer = "bucketed"\ngradient_as_bucket_view = true\nbucket_mib = 0.0002', id="view"
    ),
    pytest.param('[sharding.ddp]\nreducer = "bucketed"\nstatic_graph = true', id="static"),
    pytest.param(
        '[sharding.ddp]\nreducer = "bucketed"\nfind_unused_parameters = true\nbroadcast_buffers = false', id="unused"
    ),
]


def step_with(text, microbatch=None, options=None, calls=1):
    return one_step(text, microbatch=microbatch, options=options, calls=calls)


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("text", MODES)
@pytest.mark.parametrize("microbatch", [None, 1])
def test_gradients_equal_one_device(world_size, text, microbatch):
    for loss, norm, gradients, _ in run_ranks(step_with, world_size, text, microbatch):
        assert loss < TIGHT
        assert norm < TIGHT
        assert gradients < TIGHT


@pytest.mark.parametrize("text", MODES[:2])
def test_tied_weights(text):
    for _, norm, gradients, _ in run_ranks(step_with, 2, text, 2, {"tied": True}):
        assert norm < TIGHT
        assert gradients < TIGHT


@pytest.mark.parametrize("microbatch", [6, 2])
def test_collectives_of_units(microbatch):
    for *_, counted in run_ranks(step_with, 2, "[sharding.ddp]", microbatch):
        assert counted == {("all_reduce", "dp_replicate"): UNITS + 3}


@pytest.mark.parametrize("microbatch", [6, 2])
def test_collectives_of_buckets(microbatch):
    """One bucket holds the whole small model; the rest is torch's first forward: shapes compared, weights sent."""
    for *_, counted in run_ranks(step_with, 2, '[sharding.ddp]\nreducer = "bucketed"', microbatch):
        assert counted[("all_reduce", "dp_replicate")] == 1 + 3
        assert counted.keys() <= {(op, "dp_replicate") for op in ("all_reduce", "broadcast", "all_gather")}


def state(text):
    run = composed(text)
    names = [name for name, _ in run.parts[0].module.named_parameters()]
    kinds = {type(p).__name__ for _, p in run.named_parameters()}
    placements = {tuple(p.placements) for _, p in run.named_parameters() if hasattr(p, "placements")}
    children = [type(m).__name__ for m in run.parts[0].module.children()]
    run.close()
    return names, kinds, placements, children


def test_state():
    expected = [name for name, _ in Net().named_parameters()]
    children = [type(m).__name__ for m in Net().children()]
    names, kinds, placements, _ = run_ranks(state, 2, "[sharding.ddp]")[0]
    assert (names, kinds, placements) == (expected, {"DTensor"}, {(Replicate(),)})
    names, kinds, placements, seen = run_ranks(state, 2, '[sharding.ddp]\nreducer = "bucketed"')[0]
    assert (names, kinds, placements, seen) == (expected, {"Parameter"}, set(), children)


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[sharding.ddp]\nstatic_graph = true",
            ':2:11: [sharding.ddp] static_graph has no effect with reducer = "unit"; write reducer = "bucketed"',
        ),
        (
            '[sharding.ddp]\nreducer = "bucketed"\nunits = ["layers.*"]',
            ':2:11: [sharding.ddp] units has no effect with reducer = "bucketed"; write reducer = "unit"',
        ),
    ],
)
def test_refusals(text, message):
    assert run_ranks(refusal, 1, text)[0] == message


class WithBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, tokens):
        with torch.no_grad():
            self.seen += tokens.float().mean()
        return super().forward(tokens)


def buffers(text):
    run = composed(text, seeded(WithBuffer))
    tokens, targets = (mine(run, tensor) for tensor in padded())
    with count_collectives(run.mesh) as collectives:
        for number in range(2):
            with run.step(number):
                run.forward_backward(tokens, target=targets)
    seen = run.model.seen.clone()
    run.close()
    sent = [one for one in collectives.rows if one.op == "broadcast" and one.bytes == 8]
    return seen, float(tokens.float().mean()), len(sent)


def test_buffers_are_those_of_the_first_rank_before_every_forward():
    (first, mean, sent), (second, other, _) = run_ranks(
        buffers, 2, '[sharding.ddp]\nreducer = "bucketed"\nbroadcast_buffers = true'
    )
    assert (sent, first.tolist()) == (2, pytest.approx([2 * mean] * 2))
    # The last forward's change is each rank's own.
    assert mean != other and second.tolist() == pytest.approx([mean + other] * 2)


def test_buffers_are_left_alone_otherwise():
    (_, _, sent), (second, other, _) = run_ranks(buffers, 2, '[sharding.ddp]\nreducer = "bucketed"')
    assert (sent, second.tolist()) == (0, pytest.approx([2 * other] * 2))


def own_loop(text):
    """Two micro-batches with the loop's own forward and backward, against one device."""
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    reference = seeded()
    loss = torch.nn.functional.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    run = composed(text)
    optimizer = run.optimizer(torch.optim.SGD, lr=0.1)
    mine_tokens, mine_targets = mine(run, tokens), mine(run, targets)
    errors = []
    for number in range(2):
        with run.step(number, target=mine_targets):
            for half in range(2):
                part = slice(half * 3, half * 3 + 3)
                logits = run.model(mine_tokens[part])
                total = torch.nn.functional.cross_entropy(
                    logits.flatten(0, 1), mine_targets[part].flatten(), reduction="sum"
                )
                result = run.backward((total, (mine_targets[part] != -100).sum()), last=half == 1)
            run.clip_grad_norm_(float("inf"))
            gradients = {name: full(p.grad) for name, p in run.named_parameters()}
            errors.append(
                max(
                    float((gradients[n] - p.grad).abs().max() / p.grad.abs().max())
                    for n, p in reference.named_parameters()
                )
            )
            errors.append(float((result - loss.detach()).abs()))
            optimizer.zero_grad()
    run.close()
    return max(errors)


@pytest.mark.parametrize("text", MODES[:2])
def test_a_loop_that_keeps_its_own_forward(text):
    assert max(run_ranks(own_loop, 2, text)) < TIGHT


class Reversed(torch.autograd.Function):
    """Recomputes what it was given in its backward, which runs another one, as reversible networks do."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x)

    @staticmethod
    def backward(ctx, grad):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            ctx.layer(x).backward(grad)
        return x.grad, None


class Reversible(Net):
    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = Reversed.apply(x, layer)
        return self.out(self.norm(x))


def reversible_step(text):
    torch.set_default_dtype(torch.float64)
    tokens, targets = padded()
    reference = seeded(Reversible)
    torch.nn.functional.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten()).backward()
    run = composed(text, model=seeded(Reversible))
    with run.step(0):
        run.forward_backward(mine(run, tokens), target=mine(run, targets))
        found = {name: full(p.grad) for name, p in run.named_parameters()}
    run.close()
    return max(float((found[name] - p.grad).abs().max()) for name, p in reference.named_parameters())


def test_a_backward_inside_of_a_backward_is_reduced_by_units_and_refused_of_buckets_that_search_the_graph():
    assert max(run_ranks(reversible_step, 2, "[sharding.ddp]")) < TIGHT
    with pytest.raises(RankError) as caught:
        run_ranks(reversible_step, 2, MODES[-1].values[0])
    assert (
        'StepError: torch\'s DistributedDataParallel counts a gradient of "layers.2.down.bias" twice: a backward '
        "inside of the backward gives it one, where an autograd.Function of the model's own calls backward(), as "
        "reversible networks do, or a checkpoint with use_reentrant = True; in [sharding.ddp] write "
        'reducer = "unit", the default'
    ) in str(caught.value)


def test_buckets_are_refused_experts_on_a_mesh_of_their_own():
    mesh = "[mesh]\ncp = 2\nep = 2\n"
    text = f'{mesh}[sharding.ddp]\nreducer = "bucketed"\n[sharding.context_parallel]\n[sharding.expert_parallel]\n'
    with fake_world(2), pytest.raises(ManifestError, match='reducer = "bucketed" does not work with ep = 2: torch'):
        composed(text, seeded(MIXTURES["looped"]))
