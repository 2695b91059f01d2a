"""The shipped mixture of experts against one that goes token by token."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from composer3d.models import moe
from composer3d.models.moe import Experts, MoEConfig, Router

SIZES = {"dim": 8, "num_layers": 2, "num_heads": 2, "vocab_size": 11, "num_experts": 6, "expert_dim": 12}


@pytest.fixture(autouse=True)
def precise():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def router(**sizes):
    torch.manual_seed(0)
    made = Router(MoEConfig(**{**SIZES, **sizes}))
    torch.nn.init.normal_(made.weight)
    return made


def drawn(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_experts_are_run_on_their_tokens_and_weighed():
    torch.manual_seed(0)
    experts = Experts(MoEConfig(**SIZES))
    experts.reset_parameters()
    x_TD, weights_TK = drawn(5, 8), drawn(5, 2).sigmoid()
    index_TK = torch.tensor([[0, 1], [1, 4], [4, 0], [1, 0], [4, 1]])  # 2, 3 and 5 get nothing
    found = experts(x_TD, index_TK, weights_TK)
    for token in range(5):
        wanted = torch.zeros(8)
        for number, weight in zip(index_TK[token].tolist(), weights_TK[token], strict=True):
            gate, up = x_TD[token] @ experts.w1_NDF[number], x_TD[token] @ experts.w3_NDF[number]
            wanted += weight * (F.silu(gate) * up) @ experts.w2_NFD[number]
        assert (found[token] - wanted).abs().max() < 1e-14


def test_grouped_products_are_those_of_single_rows():
    model = moe(**SIZES).float()
    tokens = torch.arange(10).reshape(2, 5) % 11
    with torch.no_grad():
        narrow = model(tokens)
        wide = model.double()(tokens)
    assert (narrow.logits - wide.logits).abs().max() < 1e-5
    assert abs(float(narrow.auxiliary) - float(wide.auxiliary)) < 1e-7


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_a_token_has_its_best_experts_with_weights_that_add_up(scores):
    made, x_BSD = router(scores=scores, scale=1.5), drawn(2, 3, 8)
    index_BSK, weights_BSK, _ = made(x_BSD)
    logits_BSN = x_BSD @ made.weight.T
    known = logits_BSN.softmax(-1) if scores == "softmax" else logits_BSN.sigmoid()
    for place in range(6):
        scores_N, index_K = known.flatten(0, 1)[place], index_BSK.flatten(0, 1)[place]
        assert index_K.tolist() == scores_N.argsort(descending=True)[:2].tolist()
        wanted_K = 1.5 * scores_N[index_K] / scores_N[index_K].sum()
        assert (weights_BSK.flatten(0, 1)[place] - wanted_K).abs().max() < 1e-14


@pytest.mark.parametrize(("scores", "best"), [("softmax", 1), ("sigmoid", 2)])
def test_a_token_chooses_among_the_experts_of_its_best_groups(scores, best):
    made, x_BSD = router(scores=scores, num_groups=3, top_groups=1), drawn(1, 20, 8)
    index_BSK, _, _ = made(x_BSD)
    logits_BSN = x_BSD @ made.weight.T
    known = logits_BSN.softmax(-1) if scores == "softmax" else logits_BSN.sigmoid()
    for place in range(20):
        groups = known[0, place].view(3, 2).topk(best).values.sum(-1)
        assert {int(index) // 2 for index in index_BSK[0, place]} == {int(groups.argmax())}


@pytest.mark.parametrize("balance", ["microbatch", "sequence"])
def test_the_balance_loss_counts_rows_and_means_scores(balance):
    made, x_BSD = router(balance=balance, balance_loss=0.5), drawn(3, 4, 8)
    index_BSK, _, loss = made(x_BSD)
    shares_BSN = (x_BSD @ made.weight.T).softmax(-1)

    def naive(rows, shares):
        total = sum((rows == number).sum() / rows.numel() * shares[..., number].mean() for number in range(6))
        return 6 * total

    if balance == "microbatch":
        wanted = naive(index_BSK, shares_BSN)
    else:
        wanted = sum(naive(index_BSK[sample], shares_BSN[sample]) for sample in range(3)) / 3
    assert abs(float((loss - 0.5 * wanted).detach())) < 1e-14


def test_the_balance_loss_is_one_where_routing_is_even():
    made = router(balance_loss=1.0, top_k=6)
    *_, loss = made(drawn(2, 3, 8))
    assert abs(float(loss.detach()) - 1.0) < 1e-14


def test_the_z_loss_is_the_mean_square_of_the_normaliser():
    made, x_BSD = router(balance_loss=0.0, z_loss=0.1), drawn(2, 3, 8)
    *_, loss = made(x_BSD)
    wanted = 0.1 * (x_BSD @ made.weight.T).exp().sum(-1).log().square().mean()
    assert abs(float((loss - wanted).detach())) < 1e-14


def test_losses_of_layers_add_up_and_without_them_there_are_logits_alone():
    tokens = torch.arange(6).reshape(2, 3)
    model = moe(**{**SIZES, "balance_loss": 1.0, "top_k": 6})
    assert abs(float(model(tokens).auxiliary.detach()) - 2.0) < 1e-13  # two layers, each even
    assert moe(**{**SIZES, "balance_loss": 0.0})(tokens).shape == (2, 3, 11)


def test_dense_layers_come_first_and_shared_experts_take_every_token():
    model = moe(**SIZES, num_dense_layers=1, num_shared_experts=2)
    names = dict(model.named_parameters())
    assert "layers.0.feed_forward.w1.weight" in names and "layers.1.feed_forward.experts.w1_NDF" in names
    assert names["layers.1.feed_forward.shared.w1.weight"].shape == (2 * 12, 8)


def test_an_expert_is_narrower_by_the_experts_of_a_token():
    config = MoEConfig(dim=8, num_heads=2, ffn_dim=24, top_k=3, num_experts=6)
    assert config.routed_dim == 8 and math.isclose(config.residual_std, 0.02 / 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"top_k": 7}, "top_k = 7 is more than num_experts = 6"),
        ({"num_groups": 4}, "num_experts = 6 does not divide into num_groups = 4"),
        ({"num_groups": 2, "top_groups": 3}, "top_groups = 3 is more than num_groups = 2"),
        ({"num_groups": 6, "top_groups": 1}, "top_k = 2 is more than the 1 experts of top_groups groups"),
        ({"num_dense_layers": 3}, "num_dense_layers = 3; it must be 0 to 2"),
        ({"scores": "tanh"}, 'scores = "tanh"; it must be "softmax" or "sigmoid"'),
        ({"z_loss": -1.0}, "z_loss = -1.0; it must be at least 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes, message):
    with pytest.raises(ValueError) as caught:
        moe(**{**SIZES, **sizes})
    assert str(caught.value) == message
