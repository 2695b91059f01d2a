"""Random numbers under tp: drawn apart on cut tensors, alike on whole ones, whatever they are called."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.family_models import batch_of, class_loss
from support.models import mine, write_manifest
from support.random_blocks import CUT, DRAWING, SEEN, WHOLE
from support.selected_cases import selected
from support.tensor_parallel import AUTO

import composer3d
from composer3d.propagation.function_mode import Propagation
from composer3d.propagation.functions.random_functions import draws
from composer3d.propagation.functions.view_shapes import Placed
from composer3d.propagation.shards import PropagationError, mark
from composer3d.testing import full, run_ranks

SP = "sequence_parallel = true\n"
AC = "[scheduling.activation_checkpoint]\n"


def whole_on_ranks(gradient):
    """Return this rank's copy of what every rank has a copy of."""
    placements = getattr(gradient, "placements", ())
    if any(placement.is_shard() for placement in placements):
        return None
    return gradient.to_local() if placements else gradient


def drawn(cases):
    """Return, of each case, what its sites let through, and this rank's parameters and gradients."""
    found = []
    torch.set_default_dtype(torch.float64)
    for family, text in cases:
        run = composer3d.compose(DRAWING[family], write_manifest(f"[mesh]\ntp = 2\n{text}"), loss_fn=class_loss)
        inputs, targets = (mine(run, tensor) for tensor in batch_of("GPTJ"))
        with run.step(0):
            run.forward_backward(inputs, target=targets)
            gradients = {name: full(p.grad) for name, p in run.named_parameters()}
            replicas = {name: g for name, p in run.named_parameters() if (g := whole_on_ranks(p.grad)) is not None}
        found.append(([SEEN[layer] for layer in run.model.layers], gradients, replicas))
        run.close()
    return found


def alike(one, other):
    return one.shape == other.shape and torch.equal(one, other)


CASES = [(family, AUTO + settings) for family in DRAWING for settings in ("", SP)]
REPLAYED = "test_replicas_stay_equal_and_recomputation_draws_the_same"


@pytest.fixture(scope="module")
def ranks(request):
    wanted = {(family, AUTO + settings) for family, settings in selected(request, "family", "settings")}
    replayed = any(item.originalname == REPLAYED for item in request.session.items if item.path == request.path)
    cases = [
        (family, text + more) for family, text in CASES if (family, text) in wanted for more in ("", AC)[: 1 + replayed]
    ]
    return [dict(zip(cases, found, strict=True)) for found in run_ranks(drawn, 2, cases)]


@pytest.mark.parametrize("family", DRAWING)
@pytest.mark.parametrize("settings", ["", SP])
def test_masks_differ_on_cut_tensors_and_are_alike_on_whole_ones(ranks, family, settings):
    one, other = (rank[family, AUTO + settings][0] for rank in ranks)
    cut = CUT | (WHOLE - {"path"} if settings else set())
    for mine_, others in zip(one, other, strict=True):
        assert mine_.keys() == others.keys()
        for site in mine_:
            assert alike(mine_[site][0], others[site][0]) == (site not in cut), site
    # No two layers, and no two sites, draw the same numbers.
    sites = [(layer, site) for layer in one for site in layer if site != "path"]
    masks = {tuple(layer[site][0].flatten()[:64].tolist()) for layer, site in sites}
    assert len(masks) == len(sites)


@pytest.mark.parametrize("family", DRAWING)
@pytest.mark.parametrize("settings", ["", SP])
def test_replicas_stay_equal_and_recomputation_draws_the_same(ranks, family, settings):
    one, other = (rank[family, AUTO + settings] for rank in ranks)
    assert one[2] and one[2].keys() == other[2].keys()
    assert all(torch.equal(one[2][name], other[2][name]) for name in one[2])
    for rank in ranks:
        (plain, gradients, _), (again, regained, _) = (rank[family, AUTO + settings + more] for more in ("", AC))
        for layer, recomputed in zip(plain, again, strict=True):
            # A recomputation stops early, before the last site.
            assert all(len(masks) == 2 for site, masks in recomputed.items() if site != "module on whole")
            assert all(alike(masks[0], masks[-1]) for masks in recomputed.values())
            assert all(alike(layer[site][0], recomputed[site][0]) for site in layer)
        assert all(torch.equal(gradients[name], regained[name]) for name in gradients)


DRAWS = {
    "dropout": (True, lambda x: F.dropout(x)),
    "dropout of nothing": (False, lambda x: F.dropout(x, 0.0)),
    "dropout in evaluation": (False, lambda x: F.dropout(x, 0.5, False)),
    "dropout in place": (True, lambda x: torch.dropout_(x, 0.5, True)),
    "channels": (True, lambda x: F.dropout1d(x, p=0.5, training=True)),
    "alpha": (True, lambda x: F.alpha_dropout(x, 0.5, training=True)),
    "alpha in evaluation": (False, lambda x: F.alpha_dropout(x, 0.5)),
    "native": (True, lambda x: torch.native_dropout(x, 0.5, train=True)),
    "rrelu": (True, lambda x: F.rrelu(-x, training=True)),
    "rrelu in evaluation": (False, lambda x: F.rrelu(x)),
    "bernoulli": (True, lambda x: torch.bernoulli(x)),
    "multinomial": (True, lambda x: torch.multinomial(x[0], 1)),
    "in place": (True, lambda x: x.normal_()),
    "like": (True, lambda x: torch.randn_like(x)),
    "attention": (True, lambda x: F.scaled_dot_product_attention(x, x, x, None, 0.5)),
    "attention without": (False, lambda x: F.scaled_dot_product_attention(x, x, x)),
}


class Asked(torch.overrides.TorchFunctionMode):
    """Notes whether any function of those called draws, and then whether the generator has moved."""

    def __init__(self):
        super().__init__()
        self.said = False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.said = self.said or draws(func.__name__, args, kwargs or {})
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", DRAWS)
def test_what_draws(name):
    expected, function = DRAWS[name]
    x = torch.rand(2, 3, 4)
    before = torch.get_rng_state()
    with Asked() as asked:
        function(x)
    moved = not torch.equal(before, torch.get_rng_state())
    assert moved == asked.said == expected


def test_a_generator_of_the_codes_own_is_refused():
    x = mark(torch.rand(2, 4), placed=Placed(dim=1, parts=(8,)), degree=2)
    with pytest.raises(PropagationError, match="it draws from a generator of its own"), Propagation(2, "test"):
        torch.bernoulli(x, generator=torch.Generator())
