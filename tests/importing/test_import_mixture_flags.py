"""Megatron-LM's flags of experts as arguments of `composer3d.models:moe`, which routes as they say."""

from __future__ import annotations

import pytest
import torch
from support.imported import manifest_of, translated, verdicts_of

import composer3d
from composer3d.models import moe

DIM, EXPERTS, TOKENS, SEQUENCES = 16, 8, 12, 2
SHAPE = f"""--num-layers 4 --hidden-size {DIM} --ffn-hidden-size 48 --num-attention-heads 4 --swiglu
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
    --hidden-dropout 0 --attention-dropout 0 --seq-length 64 --max-position-embeddings 64 --vocab-size 128
    --micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 --mock-data --num-experts {EXPERTS} """
DEEPSEEK = """--moe-layer-freq ([0]*1+[1]*3) --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 48
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-topk 4
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-topk-scaling-factor 2.5
    --moe-router-num-groups 4 --moe-router-group-topk 2 --moe-router-dtype fp32 --moe-z-loss-coeff 1e-3
    --moe-grouped-gemm --expert-model-parallel-size 2 """
DEFAULTS = {
    "num_experts": 8,
    "top_k": 2,
    "expert_dim": 48,
    "num_shared_experts": 0,
    "num_dense_layers": 0,
    "scores": "softmax",
    "normalise": True,
    "scale": 1.0,
    "z_loss": 0.0,
    "bias_rate": 0.0,
    "balance_loss": 0.0,
}


def imported(folder, flags, *, shape=SHAPE):
    return translated(folder, "flags.txt", shape + flags, system="megatron", target="run")


def arguments_of(translation):
    model = manifest_of(translation)["model"]
    assert model["use"] == "composer3d.models:moe"
    return {
        key: model["args"][key] for key in model["args"] if key in (*DEFAULTS, "num_groups", "top_groups", "balance")
    }


def test_experts_by_megatrons_defaults(tmp_path):
    assert arguments_of(imported(tmp_path, "")) == DEFAULTS


def test_the_flags_of_a_mixture_are_arguments(tmp_path):
    translation = imported(tmp_path, DEEPSEEK)
    assert arguments_of(translation) == {
        **DEFAULTS,
        "top_k": 4,
        "expert_dim": 24,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "scores": "sigmoid",
        "scale": 2.5,
        "z_loss": 1e-3,
        "bias_rate": 1e-3,
        "balance": "sequence",
        "balance_loss": 1e-4,
        "num_groups": 4,
        "top_groups": 2,
    }
    told = verdicts_of(translation)
    assert {key for key, verdict in told.items() if verdict in ("missing", "refused")} == set()
    assert told["moe_aux_loss_coeff"] == "changed"
    assert translation.verdicts["moe_aux_loss_coeff"].note == (
        "counted over the experts that scores alone would choose there, over those that are chosen here, with groups "
        "and biases"
    )
    path = tmp_path / "run.toml"
    import_result = composer3d.import_config(tmp_path / "flags.txt", system="megatron", target="run")
    path.write_text(import_result.manifest)
    assert composer3d.check(path, world_size=4).ok


def scores_of(logits, *, scores, pre, top, scale, groups=None, top_groups=None):
    """Return weights by token and expert, as `topk_routing_with_score_function` of Megatron-LM has them."""
    if scores == "sigmoid":
        ranked = logits.sigmoid()
    else:
        ranked = logits.softmax(-1) if pre else logits
    if groups:
        apart = ranked.unflatten(-1, (groups, -1))
        best = apart.topk(top // top_groups, -1).values.sum(-1).topk(top_groups, -1).indices
        is_open = torch.zeros(len(ranked), groups, dtype=torch.bool).scatter(1, best, True)
        ranked = apart.masked_fill(~is_open.unsqueeze(-1), float("-inf")).flatten(1)
    values, chosen = ranked.topk(top, -1)
    if scores == "sigmoid":
        values = values / values.sum(-1, keepdim=True) if top > 1 else values
    elif not pre:
        values = values.softmax(-1)
    return torch.zeros_like(logits).scatter(1, chosen, values * scale), chosen


def balance_of(logits, chosen, *, scores, coefficient, sequences=1):
    """Return `switch_load_balancing_loss_func`, the mean over sequences."""
    shares = logits.softmax(-1) if scores == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    counted = torch.zeros_like(logits).scatter(1, chosen, 1.0)
    total = 0.0
    for share, count in zip(shares.chunk(sequences), counted.chunk(sequences), strict=True):
        tokens = len(share)
        factor = EXPERTS * coefficient / (chosen.shape[1] * tokens * tokens)
        total = total + (share.sum(0) * count.sum(0)).sum() * factor
    return total / sequences


ROUTED = {
    "softmax": ("--moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01", {"coefficient": 0.1, "z": 0.01}),
    "before": (
        "--moe-router-pre-softmax --moe-router-topk 1 --moe-aux-loss-coeff 0.2",
        {"pre": True, "top": 1, "coefficient": 0.2},
    ),
    "scaled": (
        "--moe-router-pre-softmax --moe-router-topk 3 --moe-router-topk-scaling-factor 16",
        {"pre": True, "top": 3, "scale": 16.0},
    ),
    "sigmoid": (
        "--moe-router-score-function sigmoid --moe-router-topk 3 --moe-router-load-balancing-type seq_aux_loss "
        "--moe-aux-loss-coeff 0.1",
        {"scores": "sigmoid", "top": 3, "coefficient": 0.1, "sequences": SEQUENCES},
    ),
    "sigmoid of one": ("--moe-router-score-function sigmoid --moe-router-topk 1", {"scores": "sigmoid", "top": 1}),
    "groups of sigmoids": (
        "--moe-router-score-function sigmoid --moe-router-topk 4 --moe-router-num-groups 4 --moe-router-group-topk 2",
        {"scores": "sigmoid", "top": 4, "groups": 4, "top_groups": 2},
    ),
    "groups": (
        "--moe-router-topk 2 --moe-router-num-groups 4 --moe-router-group-topk 2",
        {"groups": 4, "top_groups": 2},
    ),
    "devices": (
        "--moe-router-topk 2 --moe-router-topk-limited-devices 2 --expert-model-parallel-size 4",
        {"groups": 4, "top_groups": 2},
    ),
}


@pytest.mark.parametrize(("flags", "said"), ROUTED.values(), ids=ROUTED)
def test_it_routes_as_megatron_does(tmp_path, flags, said):
    translation = imported(tmp_path, flags)
    assert "missing" not in verdicts_of(translation).values()
    torch.manual_seed(0)
    model = moe(**manifest_of(translation)["model"]["args"]).double()
    router = model.layers[0].feed_forward.router
    torch.nn.init.normal_(router.weight)
    x = torch.randn(SEQUENCES, TOKENS // SEQUENCES, DIM, dtype=torch.float64)
    index, weights, loss = router(x)
    found = torch.zeros(TOKENS, EXPERTS, dtype=torch.float64)
    found = found.scatter(1, index.flatten(0, 1), weights.flatten(0, 1))
    reach = torch.randn(TOKENS, EXPERTS, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((found * reach).sum() + loss, router.weight)

    given = {"scores": "softmax", "pre": False, "top": 2, "scale": 1.0, "coefficient": 0.0, "z": 0.0, "sequences": 1}
    given |= said
    weight = router.weight.detach().clone().requires_grad_()
    logits = x.flatten(0, 1) @ weight.T
    routed = {key: given[key] for key in ("scores", "pre", "top", "scale", "groups", "top_groups") if key in given}
    expected, chosen = scores_of(logits, **routed)
    balance = {key: given[key] for key in ("scores", "coefficient", "sequences")}
    auxiliary = balance_of(logits, chosen, **balance) + given["z"] * logits.logsumexp(-1).square().mean()
    (reference,) = torch.autograd.grad((expected * reach).sum() + auxiliary, weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(loss, torch.as_tensor(auxiliary, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("flags", "key", "what"),
    [
        ("--moe-shared-expert-gate", "moe_shared_expert_gate", "a gate of the shared experts"),
        ("--moe-latent-size 8", "moe_latent_size", "experts in a narrower space than the residual stream's"),
        ("--moe-layer-freq 2", "moe_layer_freq", "dense layers elsewhere than before all others"),
        ("--moe-layer-freq [1]*3+[0]", "moe_layer_freq", "dense layers elsewhere than before all others"),
        (
            "--moe-router-score-function sqrtsoftplus",
            "moe_router_score_function",
            "scores by sqrtsoftplus",
        ),
        (
            "--moe-router-topk 1",
            "moe_router_topk",
            "one expert a token by softmax, which Megatron-LM trains with --moe-router-pre-softmax alone",
        ),
        (
            "--moe-shared-expert-intermediate-size 50",
            "moe_shared_expert_intermediate_size",
            "shared experts of 50, which is no multiple of an expert's 48",
        ),
        (
            "--moe-router-topk 6 --moe-router-num-groups 4 --moe-router-group-topk 3",
            "moe_router_group_topk",
            "groups by the sum of their 2 highest scores; here by 1",
        ),
        (
            "--moe-router-load-balancing-type sinkhorn",
            "moe_router_load_balancing_type",
            "routing by sinkhorn",
        ),
        (
            "--moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 1e-2 1e-3",
            "moe_router_load_balancing_type",
            "two losses of balance at once",
        ),
        ("--qk-layernorm", "num_experts", None),
        ("--moe-router-enable-expert-bias", "moe_router_enable_expert_bias", "biases of softmax scores"),
    ],
)
def test_what_the_factory_has_not_is_named(tmp_path, flags, key, what):
    translation = imported(tmp_path, flags)
    assert manifest_of(translation)["model"]["use"] == "FILL_IN:model"
    found = translation.verdicts[key]
    assert str(found.verdict) == "missing"
    expected = "a model that is not here; name it with --model, for qk layernorm" if what is None else what
    assert found.note.startswith(expected)
    # Others are told why, too.
    assert str(translation.verdicts["hidden_size"].verdict) == "missing"
    assert (what or "qk layernorm") in translation.verdicts["hidden_size"].note


@pytest.mark.parametrize(
    ("flags", "verdicts"),
    [
        ("--moe-expert-capacity-factor 1.5 --moe-pad-expert-input-to-capacity", ("missing", "meaningless")),
        ("--moe-expert-capacity-factor -1", ("meaningless",)),
        ("--moe-input-jitter-eps 1e-2", ("missing",)),
        ("--moe-router-dtype fp64", ("changed",)),
        ("--moe-router-dtype fp32 --bf16", ("equal", "carried")),
        ("--moe-router-load-balancing-type none --moe-aux-loss-coeff 1e-2", ("carried", "ignored-there")),
        ("--moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2", ("changed", "changed")),
        ("--moe-router-score-function sigmoid --moe-router-pre-softmax", ("carried", "ignored-there")),
        ("--moe-router-bias-update-rate 1e-2", ("meaningless",)),
        ("--moe-router-group-topk 2", ("refused",)),
        ("--moe-layer-freq [0]*5", ("refused",)),
    ],
)
def test_what_experts_do_besides_has_its_verdict(tmp_path, flags, verdicts):
    translation = imported(tmp_path, flags)
    told = verdicts_of(translation)
    keys = [word.removeprefix("--").replace("-", "_") for word in flags.split() if word.startswith("--")]
    assert tuple(told[key] for key in keys) == verdicts
    assert arguments_of(translation)["num_experts"] == EXPERTS


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [
        ("1", 0),
        ("[0,0,1,1]", 2),
        ("([0]*2+[1]*2)", 2),
        ("[0]+([1]+[1])+[1]", 1),
        ("([0]*2)*2", 4),
        ("[1, 1, 1, 1]", 0),
    ],
)
def test_patterns_of_dense_layers(tmp_path, pattern, dense):
    script = f'python pretrain_gpt.py {" ".join(SHAPE.split())} --moe-layer-freq "{pattern}"\n'
    translation = translated(tmp_path, "train.sh", script, target="run")
    assert arguments_of(translation)["num_dense_layers"] == dense


@pytest.mark.parametrize("pattern", ["[1]*4+", "__import__('os')", "[1]*999999*999999", "(" * 99 + "[1]", "[2]*4", "0"])
def test_a_pattern_is_not_evaluated(tmp_path, pattern):
    script = f'python pretrain_gpt.py {" ".join(SHAPE.split())} --moe-layer-freq "{pattern}"\n'
    translation = translated(tmp_path, "train.sh", script, target="run")
    assert verdicts_of(translation)["moe_layer_freq"] == "refused"
    assert "must be a number, or a pattern of 4 layers as ([0]*1+[1]*3)" in str(translation.problems[0])


LOG = """------------------------ arguments ------------------------
  bf16 ............................................ True
  disable_bias_linear ............................. True
  ffn_hidden_size ................................. 48
  hidden_size ..................................... 16
  moe_aux_loss_coeff .............................. [0.01]
  moe_expert_capacity_factor ...................... None
  moe_ffn_hidden_size ............................. 24
  moe_layer_freq .................................. [0, 1, 1, 1]
  moe_router_dtype ................................ None
  moe_router_load_balancing_type .................. ['aux_loss']
  moe_router_pre_softmax .......................... True
  moe_router_topk ................................. 3
  moe_shared_expert_intermediate_size ............. 24
  normalization ................................... RMSNorm
  num_attention_heads ............................. 4
  num_experts ..................................... 8
  num_layers ...................................... 4
  position_embedding_type ......................... rope
  swiglu .......................................... True
-------------------- end of arguments ---------------------
"""


def test_a_logs_arguments_are_those_of_flags(tmp_path):
    translation = translated(tmp_path, "train.log", LOG, target="run")
    expected = {"top_k": 3, "expert_dim": 24, "num_shared_experts": 1, "num_dense_layers": 1, "normalise": False}
    balanced = {"balance": "microbatch", "balance_loss": 0.01}
    assert arguments_of(translation) == {**DEFAULTS, **expected, **balanced}
    assert verdicts_of(translation)["moe_router_dtype"] == "changed"  # bfloat16 there


def test_experts_are_shared_by_ranks_that_shard(tmp_path):
    flags = "--expert-model-parallel-size 2"
    manifest = manifest_of(imported(tmp_path, flags))
    assert manifest["sharding"] == {"fsdp2": {"zero": 1}, "expert_parallel": {}}
    stated = manifest_of(
        imported(tmp_path, f"{flags} --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads")
    )
    assert stated["sharding"]["fsdp2"] == {"zero": 2}
    assert manifest_of(imported(tmp_path, ""))["sharding"] == {"ddp": {}}


def test_without_experts_their_flags_do_nothing(tmp_path):
    told = verdicts_of(translated(tmp_path, "flags.txt", "--moe-router-topk 2 --lr 1e-3 --bf16", system="megatron"))
    assert told["moe_router_topk"] == "meaningless"
    dense = imported(tmp_path, "--moe-z-loss-coeff 1e-3", shape=SHAPE.replace(f"--num-experts {EXPERTS}", ""))
    assert verdicts_of(dense)["moe_z_loss_coeff"] == "meaningless"
    assert manifest_of(dense)["model"]["use"] == "composer3d.models:llama"
