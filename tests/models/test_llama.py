from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from composer3d.models import Llama, llama, num_flops_per_token
from composer3d.models.llama import Attention, LlamaConfig, rotate


def tiny(**changes: object) -> Llama:
    torch.manual_seed(0)
    sizes: dict[str, object] = {"dim": 24, "num_layers": 2, "num_heads": 6, "num_kv_heads": 2, "vocab_size": 17}
    return llama(**{**sizes, **changes})  # type: ignore[arg-type]


def naive_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    rows = [row / math.sqrt(float((row * row).mean()) + eps) * weight for row in x.reshape(-1, x.shape[-1])]
    return torch.stack(rows).reshape(x.shape)


def naive_rotation(vector: Tensor, position: int, theta: float) -> Tensor:
    """Multiply pairs, read as complex numbers, by a unit number."""
    width = len(vector)
    result = []
    for pair in range(width // 2):
        number = complex(float(vector[2 * pair]), float(vector[2 * pair + 1]))
        angle = position * theta ** (-2 * pair / width)
        turned = number * complex(math.cos(angle), math.sin(angle))
        result += [turned.real, turned.imag]
    return torch.tensor(result, dtype=vector.dtype)


def naive_attention(attention: Attention, x: Tensor) -> Tensor:
    config = attention.config
    width, per_kv = config.head_dim, config.num_heads // config.kv_heads
    q, k, v = x @ attention.wq.weight.T, x @ attention.wk.weight.T, x @ attention.wv.weight.T
    out = torch.zeros(len(x), config.dim, dtype=x.dtype)
    for head in range(config.num_heads):
        mine = slice(head * width, (head + 1) * width)
        shared = slice(head // per_kv * width, (head // per_kv + 1) * width)
        for query in range(len(x)):
            turned = naive_rotation(q[query, mine], query, config.rope_theta)
            keys = [naive_rotation(k[key, shared], key, config.rope_theta) for key in range(query + 1)]
            scores = torch.stack([turned @ key for key in keys]) / math.sqrt(width)
            weights = scores.exp() / scores.exp().sum()
            out[query, mine] = sum(w * value for w, value in zip(weights, v[: query + 1, shared], strict=True))
    return out @ attention.wo.weight.T


def naive_forward(model: Llama, tokens: Tensor) -> Tensor:
    eps = model.config.norm_eps
    x = torch.stack([model.tok_embeddings.weight[int(token)] for token in tokens])
    for block in model.layers:
        x = x + naive_attention(block.attention, naive_norm(x, block.attention_norm.weight, eps))
        h = naive_norm(x, block.ffn_norm.weight, eps)
        up, gate = h @ block.feed_forward.w3.weight.T, h @ block.feed_forward.w1.weight.T
        x = x + (gate / (1 + (-gate).exp()) * up) @ block.feed_forward.w2.weight.T
    return naive_norm(x, model.norm.weight, eps) @ model.output.weight.T


@torch.no_grad()
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
def test_forward_is_that_of_an_independent_implementation(num_kv_heads: int) -> None:
    model = tiny(num_kv_heads=num_kv_heads, rope_theta=50.0).double()
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    tokens = torch.randint(17, (2, 7))
    expected = torch.stack([naive_forward(model, row) for row in tokens])
    torch.testing.assert_close(model(tokens), expected, rtol=1e-12, atol=1e-12)


def test_grouped_heads_equal_repeated_heads() -> None:
    grouped, repeated = tiny(), tiny(num_kv_heads=6)
    width = grouped.config.head_dim
    state = grouped.state_dict()
    for name in list(state):
        if name.endswith(("wk.weight", "wv.weight")):
            state[name] = state[name].unflatten(0, (2, width)).repeat_interleave(3, dim=0).flatten(0, 1)
    repeated.load_state_dict(state)
    tokens = torch.randint(17, (2, 9))
    torch.testing.assert_close(grouped(tokens), repeated(tokens))


@pytest.mark.parametrize("changed", [0, 3, 8])
def test_logits_do_not_depend_on_later_tokens(changed: int) -> None:
    model = tiny()
    tokens = torch.randint(17, (1, 9))
    other = tokens.clone()
    other[0, changed] = (other[0, changed] + 1) % 17
    before, after = model(tokens), model(other)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])


def test_positions_are_those_of_the_sequence_unless_given() -> None:
    model = tiny().double()
    tokens = torch.randint(17, (2, 6))
    counted = model(tokens)
    assert torch.equal(model(tokens, torch.arange(6)), counted)
    assert torch.equal(model(tokens, torch.arange(6).expand(2, 6)), counted)
    # Rotary positions are relative: shifting all of them changes nothing, spreading them does.
    torch.testing.assert_close(model(tokens, positions=torch.arange(6) + 40), counted, rtol=1e-10, atol=1e-12)
    assert (model(tokens, torch.arange(6) * 5) - counted).abs().max() > 1e-4


def test_each_row_has_positions_of_its_own() -> None:
    model = tiny()
    tokens = torch.randint(17, (2, 6))
    positions = torch.stack([torch.arange(6), torch.arange(6) * 3])
    rows = [model(tokens[row : row + 1], positions[row]) for row in range(2)]
    torch.testing.assert_close(model(tokens, positions), torch.cat(rows))


def test_bfloat16_rounds_results_but_not_angles() -> None:
    x = torch.randn(1, 3, 2, 8).bfloat16()
    positions = torch.tensor([1, 1001, 100003])
    exact = rotate(x.double(), positions=positions, theta=500.0)
    turned = rotate(x, positions=positions, theta=500.0)
    assert turned.dtype == torch.bfloat16
    torch.testing.assert_close(turned.double(), exact, rtol=2**-8, atol=2**-8)


def test_tied_embedding_is_one_parameter_and_gets_both_gradients() -> None:
    tied, untied = tiny(tie_embeddings=True), tiny()
    assert tied.output.weight is tied.tok_embeddings.weight
    untied.load_state_dict(tied.state_dict())
    tokens = torch.randint(17, (2, 5))
    for model in (tied, untied):
        model(tokens).square().sum().backward()
    both = untied.output.weight.grad + untied.tok_embeddings.weight.grad
    torch.testing.assert_close(tied.tok_embeddings.weight.grad, both)


@pytest.mark.parametrize("kernel", ["flash", "math"])
def test_kernels_agree(kernel: str) -> None:
    tokens = torch.randint(17, (2, 8))
    chosen, auto = tiny(attention=kernel), tiny()
    torch.testing.assert_close(chosen(tokens), auto(tokens))
    chosen(tokens).sum().backward()


def test_a_kernel_that_is_not_there_fails_instead_of_another_being_used() -> None:
    with pytest.raises(RuntimeError, match="No viable backend|No available kernel"):
        tiny(attention="efficient")(torch.zeros(1, 4, dtype=torch.int64))


def test_every_parameter_gets_a_gradient_that_matches_finite_differences() -> None:
    model = tiny(num_layers=1).double()
    tokens, targets = torch.randint(17, (1, 5)), torch.randint(17, (1, 5))

    def loss() -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    loss().backward()
    for name, parameter in model.named_parameters():
        direction = torch.randn_like(parameter)
        expected = float((parameter.grad * direction).sum())
        with torch.no_grad():
            parameter += 1e-6 * direction
            above = loss()
            parameter -= 2e-6 * direction
            below = loss()
            parameter += 1e-6 * direction
        assert float(above - below) / 2e-6 == pytest.approx(expected, rel=1e-4, abs=1e-9), name


def test_dropout_acts_in_training_only() -> None:
    model = tiny(dropout=0.5)
    tokens = torch.randint(17, (2, 5))
    assert not torch.equal(model(tokens), model(tokens))
    assert torch.equal(model.eval()(tokens), model(tokens))
    assert torch.equal(model(tokens), tiny()(tokens))


def test_initial_spread() -> None:
    model = llama(dim=128, num_layers=8, num_heads=4, vocab_size=512)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones(128))
            continue
        expected = 0.02 / 4 if name.endswith(("wo.weight", "w2.weight")) else 0.02
        # The standard deviation of n draws is itself spread by 1 / sqrt(2 n): five of them.
        assert float(parameter.detach().std()) == pytest.approx(expected, rel=5 / math.sqrt(2 * parameter.numel())), (
            name
        )


def test_reset_parameters_makes_the_model_of_the_seed_again() -> None:
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(1)
    model.reset_parameters()
    assert not torch.equal(model.layers[0].attention.wq.weight, before["layers.0.attention.wq.weight"])
    torch.manual_seed(1)
    other = {name: value.clone() for name, value in model.state_dict().items()}
    model.reset_parameters()
    assert all(torch.equal(value, other[name]) for name, value in model.state_dict().items())


def test_attention_takes_its_head_count_from_its_projections() -> None:
    # What tensor parallelism does: half of the heads, and rows of wo to match; halves add up to the whole.
    attention = Attention(LlamaConfig(dim=32, num_heads=8, num_kv_heads=2))
    x = torch.randn(2, 5, 32)
    whole, parts = attention(x), []
    for half in range(2):
        part = Attention(LlamaConfig(dim=32, num_heads=8, num_kv_heads=2))
        for name in ("wq", "wk", "wv"):
            full = getattr(attention, name).weight
            getattr(part, name).weight = nn.Parameter(full.chunk(2)[half])
        part.wo.weight = nn.Parameter(attention.wo.weight.chunk(2, dim=1)[half])
        parts.append(part(x))
    torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"dim": 30, "num_heads": 4}, "dim = 30 does not divide into num_heads = 4"),
        ({"dim": 12, "num_heads": 4}, "dim / num_heads = 3 is odd; rotary positions turn pairs"),
        ({"num_heads": 8, "num_kv_heads": 3}, "num_heads = 8 does not divide into num_kv_heads = 3"),
        ({"num_kv_heads": 0}, "num_kv_heads = 0; it must be at least 1"),
        ({"ffn_dim": 0}, "ffn_dim = 0; it must be at least 1"),
        ({"num_layers": 0}, "num_layers = 0; it must be at least 1"),
        ({"attention": "fast"}, 'attention = "fast"; it must be one of: auto, flash, efficient, math, cudnn'),
        ({"dropout": 1.0}, "dropout = 1.0; it must be at least 0 and below 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        llama(**sizes)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(ValueError) as caught:
        tiny(max_seq_len=4)(torch.zeros(1, 5, dtype=torch.int64))
    assert str(caught.value) == "a sequence of 5 is longer than max_seq_len = 4"


@pytest.mark.parametrize(("changes", "expected"), [({}, 64), ({"dim": 48}, 128), ({"ffn_dim": 10}, 10)])
def test_width_of_the_feed_forward(changes: dict[str, object], expected: int) -> None:
    assert tiny(**changes).layers[0].feed_forward.w1.out_features == expected


def test_flops_count_multiplying_parameters_and_attention() -> None:
    with torch.device("meta"):
        model = tiny(ffn_dim=40)
    matrices = 2 * (24 * (24 + 8 + 8 + 24) + 3 * 24 * 40) + 24 * 17
    norms = 5 * 24
    assert num_flops_per_token(model, 32) == 6 * (matrices + norms) + 12 * 2 * 24 * 32


def test_flops_count_a_tied_embedding_once() -> None:
    assert num_flops_per_token(tiny(tie_embeddings=True), 32) == num_flops_per_token(tiny(), 32)


def test_flops_of_other_models() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, dim_feedforward=32)
    model = nn.Sequential(nn.Embedding(100, 16), layer)
    parameters = sum(parameter.numel() for parameter in layer.parameters())
    assert num_flops_per_token(model, 8) == 6 * parameters + 12 * 16 * 8
