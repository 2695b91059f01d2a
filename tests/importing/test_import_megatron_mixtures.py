"""Mixtures in Megatron-LM's distributed checkpoints: what is imported computes and trains as it does in their form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.megatron_checkpoints import DIM, GROUPS, HEADS, ROWS, VOCAB, arguments, attended, tensors_in, write_folder
from support.models import composed, mean_loss, mine

from composer3d import CheckpointError
from composer3d.importing.foreign_checkpoints import import_checkpoint
from composer3d.models import moe
from composer3d.testing import run_ranks

LAYERS, EXPERTS, TOP, WIDE, NARROW = 3, 4, 2, 20, 10
ATTENTION = {
    "self_attention.linear_qkv.layer_norm_weight": (DIM,),
    "self_attention.linear_qkv.weight": (ROWS, DIM),
    "self_attention.linear_proj.weight": (DIM, DIM),
}
DENSE = {
    "mlp.linear_fc1.layer_norm_weight": (DIM,),
    "mlp.linear_fc1.weight": (2 * WIDE, DIM),
    "mlp.linear_fc2.weight": (DIM, WIDE),
}
MIXTURE = {
    "pre_mlp_layernorm.weight": (DIM,),
    "mlp.router.weight": (EXPERTS, DIM),
    "mlp.router.expert_bias": (EXPERTS,),
    "mlp.experts.experts.linear_fc1.weight": (EXPERTS, 2 * NARROW, DIM),
    "mlp.experts.experts.linear_fc2.weight": (EXPERTS, DIM, NARROW),
    "mlp.shared_experts.linear_fc1.weight": (2 * NARROW, DIM),
    "mlp.shared_experts.linear_fc2.weight": (DIM, NARROW),
}
WHOLE = {
    "embedding.word_embeddings.weight": (VOCAB, DIM),
    "decoder.final_layernorm.weight": (DIM,),
    "output_layer.weight": (VOCAB, DIM),
}
MOMENTS = ("exp_avg", "exp_avg_sq")
BIAS = "expert_bias"
RATES = {"lr": 1e-2, "betas": (0.8, 0.9), "weight_decay": 0.1}


def drawn(*, num_dense=0, without=(), seed=0):
    """Return tensors in float64 by Megatron-LM's names, each layer's by its number."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict(WHOLE)
    for number in range(LAYERS):
        layer = {**ATTENTION, **(DENSE if number < num_dense else MIXTURE)}
        shapes |= {
            f"decoder.layers.{number}.{k}": v for k, v in layer.items() if not any(part in k for part in without)
        }
    return {name: torch.randn(*shape, generator=generator, dtype=torch.float64) / 3 for name, shape in shapes.items()}


def layer_of(name):
    return name.split(".")[2] if name.startswith("decoder.layers.") else None


def stacked(tensors):
    """Return them as a homogeneous model is saved: all layers' in one."""
    found = {name: tensor for name, tensor in tensors.items() if layer_of(name) is None}
    for name in tensors:
        if layer_of(name) == "0":
            layers = [tensors[name.replace(".0.", f".{number}.", 1)] for number in range(LAYERS)]
            found[name.replace(".0.", ".", 1)] = torch.stack(layers)
    return found


def apart(tensors):
    """Return them as with `singleton_local_shards`: experts by their numbers, and halves of gated projections."""
    found = {}
    for name, tensor in tensors.items():
        before, experts, after = name.partition("mlp.experts.experts.")
        named = {f"{before}{experts}{n}.{after}": each for n, each in enumerate(tensor)} if experts else {name: tensor}
        for one, value in named.items():
            halves = zip("wv", value.chunk(2), strict=True) if one.endswith("linear_fc1.weight") else ()
            found |= {f"{one}_{half}": each.clone() for half, each in halves} or {one: value.clone()}
    return found


FORMS = {"numbered": dict, "stacked": stacked, "apart": apart}


def write(folder, weights, form, *, moments=True):
    """Write what two optimizers chained keep: that of the experts has a prefix of its own."""
    state = form(weights)
    for place, kind in enumerate(MOMENTS if moments else ()):
        for name, value in form(moment(weights, place)).items():
            chained = "chained_1." if ".experts.experts." in name else "chained_0."
            state[f"{chained}optimizer.state.{kind}.{name}"] = value
    write_folder(folder, state, arguments())


def moment(weights, place):
    """Return a moment of every parameter, of its own numbers."""
    return {name: (value + place).square() / 9 for name, value in weights.items() if not name.endswith(BIAS)}


def norm(x, weight):
    return F.rms_norm(x, (DIM,), weight, 1e-5)


def gated(x, first, second):
    gate, up = (x @ first.T).chunk(2, dim=-1)
    return (F.silu(gate) * up) @ second.T


def mixed(x, own):
    """Return routed and shared experts of x, batch x sequence x width: those of the largest scores."""
    scores = (x @ own["mlp.router.weight"].T).softmax(-1)
    chosen = (scores + own.get(f"mlp.router.{BIAS}", 0.0)).topk(TOP, -1).indices
    weights = torch.zeros_like(scores).scatter(-1, chosen, scores.gather(-1, chosen))
    weights = weights / weights.sum(-1, keepdim=True)
    first, second = (own[f"mlp.experts.experts.linear_fc{n}.weight"] for n in (1, 2))
    routed = sum(weights[..., n : n + 1] * gated(x, first[n], second[n]) for n in range(EXPERTS))
    if "mlp.shared_experts.linear_fc1.weight" not in own:
        return routed
    shared = gated(x, own["mlp.shared_experts.linear_fc1.weight"], own["mlp.shared_experts.linear_fc2.weight"])
    gate = own.get("mlp.shared_experts.gate_weight")
    return routed + (shared if gate is None else shared * (x @ gate.T).sigmoid())


def logits_in_its_form(weights, tokens):
    x = weights["embedding.word_embeddings.weight"][tokens]
    for number in range(LAYERS):
        before = f"decoder.layers.{number}."
        own = {name.removeprefix(before): value for name, value in weights.items() if name.startswith(before)}
        normed = norm(x, own["self_attention.linear_qkv.layer_norm_weight"])
        x = x + attended(normed, own["self_attention.linear_qkv.weight"], own["self_attention.linear_proj.weight"])
        if "mlp.router.weight" in own:
            x = x + mixed(norm(x, own["pre_mlp_layernorm.weight"]), own)
        else:
            x = x + gated(
                norm(x, own["mlp.linear_fc1.layer_norm_weight"]),
                own["mlp.linear_fc1.weight"],
                own["mlp.linear_fc2.weight"],
            )
    return norm(x, weights["decoder.final_layernorm.weight"]) @ weights["output_layer.weight"].T


def own_model(**sizes):
    shared = {"num_shared_experts": 1, "bias_rate": 0.001, "balance_loss": 0.0}
    return moe(
        dim=DIM, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=GROUPS, vocab_size=VOCAB, ffn_dim=WIDE,
        rope_theta=10000.0, num_experts=EXPERTS, top_k=TOP, expert_dim=NARROW, **{**shared, **sizes},
    ).double()  # fmt: skip


def loaded(model, path):
    found = tensors_in(path)
    model.load_state_dict({name.removeprefix("model/"): v for name, v in found.items() if name.startswith("model/")})
    return model


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("form", FORMS)
def test_an_imported_mixture_computes_the_same(form, tokens, tmp_path):
    weights = drawn()
    write(tmp_path / "iter_0000008", weights, FORMS[form], moments=False)
    result = import_checkpoint(tmp_path / "iter_0000008", tmp_path / "own")
    assert (result.system, result.step, result.skipped) == ("megatron", 8, ())
    model = loaded(own_model(), result.path)
    assert (model(tokens) - logits_in_its_form(weights, tokens)).abs().max() < 1e-12


def test_dense_layers_before_mixtures(tokens, tmp_path):
    weights = drawn(num_dense=1, without=("shared_experts", BIAS))
    write(tmp_path / "iter_0000008", weights, apart, moments=False)
    path = import_checkpoint(tmp_path / "iter_0000008", tmp_path).path
    model = loaded(own_model(num_dense_layers=1, num_shared_experts=0, bias_rate=0.0), path)
    assert (model(tokens) - logits_in_its_form(weights, tokens)).abs().max() < 1e-12


@pytest.mark.parametrize("form", FORMS)
def test_moments_stand_as_their_weights(form, tmp_path):
    weights = drawn()
    write(tmp_path / "iter_0000008", weights, FORMS[form])
    result = import_checkpoint(tmp_path / "iter_0000008", tmp_path / "own")
    found = tensors_in(result.path)
    parameters = dict(own_model().named_parameters())
    assert result.num_states == len(parameters)
    for fqn in parameters:
        for place, kind in enumerate(MOMENTS):
            wanted = (found[f"model/{fqn}"] + place).square() / 9
            assert torch.equal(found[f"optimizer/{fqn}/{kind}"], wanted), (fqn, kind)
        assert found[f"optimizer/{fqn}/step"] == 7


def batch(seed):
    tokens = torch.randint(VOCAB, (4, 10), generator=torch.Generator().manual_seed(seed))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trained_in_its_form():
    """Take three steps with the moments; return the losses."""
    weights = drawn()
    parameters = {name: value.requires_grad_(not name.endswith(BIAS)) for name, value in weights.items()}
    optimizer = torch.optim.AdamW([each for each in parameters.values() if each.requires_grad], **RATES)
    kept = [moment({name: value.detach() for name, value in weights.items()}, place) for place in (0, 1)]
    for name in kept[0]:
        state = {kind: kept[place][name].clone() for place, kind in enumerate(MOMENTS)}
        optimizer.state[parameters[name]] = {"step": torch.tensor(7.0), **state}
    losses = []
    for seed in range(3):
        tokens, targets = batch(seed)
        loss = F.cross_entropy(logits_in_its_form(parameters, tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def gone_on(folder, layout):
    """Load what was imported, and take three steps; return the losses."""
    torch.set_default_dtype(torch.float64)
    # A rate so small that biases stay: Megatron-LM's counts would move them by the same signs.
    run = composed(layout, own_model(bias_rate=1e-30))
    optimizer = run.optimizer(torch.optim.AdamW, **RATES)
    run.load(folder)
    losses = []
    for seed in range(3):
        tokens, targets = batch(seed)
        loss = run.backward(mean_loss(run.model(mine(run, tokens)), mine(run, targets)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


LAYOUTS = {
    "experts": "[mesh]\nep = 2\ndp_shard = 2\n[sharding.fsdp2]\n[sharding.expert_parallel]\n",
    "tensors": "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_goes_on_with_experts_and_their_moments(layout, tmp_path):
    write(tmp_path / "iter_0000008", drawn(), stacked)
    import_checkpoint(tmp_path / "iter_0000008", tmp_path / "own")
    wanted = trained_in_its_form()
    for found in run_ranks(gone_on, 2, tmp_path / "own", LAYOUTS[layout]):
        assert max(abs(a - b) for a, b in zip(found, wanted, strict=True)) < 1e-12


def transformers_model(kind):
    import transformers

    sizes = dict(
        hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        vocab_size=VOCAB, intermediate_size=WIDE, moe_intermediate_size=NARROW, rms_norm_eps=1e-5, norm_topk_prob=True,
        num_experts=EXPERTS, num_experts_per_tok=TOP, num_local_experts=EXPERTS, tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    if kind == "Mixtral":
        sizes |= {"intermediate_size": NARROW}
    if kind == "Qwen2Moe":
        sizes |= {"shared_expert_intermediate_size": NARROW, "qkv_bias": False}
    config = getattr(transformers, f"{kind}Config")(**sizes)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    model.set_experts_implementation("eager")  # grouped products are not of float64
    return model


@pytest.mark.parametrize("kind", ["Mixtral", "Qwen2Moe"])
def test_mixtures_of_transformers_compute_the_same(kind, tokens, tmp_path):
    model = transformers_model(kind)
    weights = drawn(without=(BIAS, *(["shared_experts"] if kind == "Mixtral" else [])))
    if kind == "Qwen2Moe":
        generator = torch.Generator().manual_seed(9)
        for number in range(LAYERS):
            gate = torch.randn(1, DIM, generator=generator, dtype=torch.float64)
            weights[f"decoder.layers.{number}.mlp.shared_experts.gate_weight"] = gate
    write(tmp_path / "iter_0000008", weights, stacked)
    path = import_checkpoint(tmp_path / "iter_0000008", tmp_path, naming="huggingface").path
    # transformers keeps the angles and the scores of experts in float32.
    assert (loaded(model, path)(tokens).logits - logits_in_its_form(weights, tokens)).abs().max() < 1e-5


def lost(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


BEFORE = "decoder.layers.0.mlp.experts.experts."


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lost(f"{BEFORE}1.linear_fc2.weight"), r"experts 0, 2, 3 are there, and others are not"),
        (lost(f"{BEFORE}1.linear_fc1.weight_v"), r"1\.linear_fc1\.weight_w is half of a projection"),
        (
            lambda tensors: {**tensors, f"{BEFORE}2.linear_fc2.weight": torch.ones(DIM, 3, dtype=torch.float64)},
            r"2\.linear_fc2\.weight \[24, 3\]",
        ),
    ],
    ids=["expert", "half", "shape"],
)
def test_pieces_that_do_not_fit_are_named(spoil, problem, tmp_path):
    write(tmp_path / "iter_0000008", drawn(), lambda weights: spoil(apart(weights)), moments=False)
    with pytest.raises(CheckpointError, match=problem):
        import_checkpoint(tmp_path / "iter_0000008", tmp_path)


@pytest.mark.parametrize("of", ["mlp.experts.experts", "mlp.shared_experts"])
def test_a_feed_forward_without_a_gate_is_refused(of, tmp_path):
    def ungated(weights):
        name = f"decoder.layers.{of}.linear_fc1.weight"
        return {**stacked(weights), name: stacked(weights)[name][..., :NARROW, :].clone()}

    write(tmp_path / "iter_0000008", drawn(), ungated, moments=False)
    with pytest.raises(CheckpointError, match=rf"{of}\.linear_fc1\.weight has 10 rows.* 10 columns.*has no gate"):
        import_checkpoint(tmp_path / "iter_0000008", tmp_path)


@pytest.mark.parametrize("form", [stacked, apart])
def test_a_shared_expert_of_a_width_that_the_model_has_not_is_refused(form, tmp_path):
    def widened(weights):
        wider = {
            name: torch.cat([tensor, tensor[: 2 * 3]])
            if "linear_fc1" in name
            else torch.cat([tensor, tensor[:, :3]], 1)
            for name, tensor in weights.items()
            if "shared_experts" in name
        }
        return form({**weights, **wider})

    write(tmp_path / "iter_0000008", drawn(), widened, moments=False)
    with pytest.raises(
        CheckpointError, match=r"shared_experts\.linear_fc2\.weight is of an expert 13 wide.* 10 wide: "
    ):
        import_checkpoint(tmp_path / "iter_0000008", tmp_path)
    import_checkpoint(tmp_path / "iter_0000008", tmp_path / "other", naming="huggingface")
