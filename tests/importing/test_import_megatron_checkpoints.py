"""Megatron-LM's distributed checkpoints: the imported model computes what a model in its own form computes."""

from __future__ import annotations

import argparse

import pytest
import torch
import torch.nn.functional as F
from support.megatron_checkpoints import (
    DIM,
    GROUPS,
    HEADS,
    ROWS,
    VOCAB,
    arguments,
    attended,
    tensors_in,
    write_folder,
)

from composer3d import CheckpointError
from composer3d.checkpoint import read_state
from composer3d.cli import main
from composer3d.importing.foreign_checkpoints import import_checkpoint
from composer3d.models import llama

LAYERS, HIDDEN = 3, 20
LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": (DIM,),
    "self_attention.linear_qkv.weight": (ROWS, DIM),
    "self_attention.linear_proj.weight": (DIM, DIM),
    "mlp.linear_fc1.layer_norm_weight": (DIM,),
    "mlp.linear_fc1.weight": (2 * HIDDEN, DIM),
    "mlp.linear_fc2.weight": (DIM, HIDDEN),
}
WHOLE = {
    "embedding.word_embeddings.weight": (VOCAB, DIM),
    "decoder.final_layernorm.weight": (DIM,),
    "output_layer.weight": (VOCAB, DIM),
}


def drawn(*, numbered=False, seed=0):
    """Return tensors by Megatron-LM's names: each layer's by its number, or all layers' stacked."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 3

    layers = {name: draw(LAYERS, *shape) for name, shape in LAYER.items()}
    found = {name: draw(*shape) for name, shape in WHOLE.items()}
    if numbered:
        return found | {f"decoder.layers.{n}.{k}": v[n].clone() for k, v in layers.items() for n in range(LAYERS)}
    return found | {f"decoder.layers.{name}": value for name, value in layers.items()}


def write(folder, weights, *, moments=True, args=None, **beside):
    """Write what core 0.17 writes: weights, `optimizer.state.NAME.WEIGHT`, and the plain rest in `common.pt`."""
    state = dict(weights)
    if moments:
        for number, name in enumerate(("exp_avg", "exp_avg_sq")):
            other = drawn(seed=number + 1, numbered="decoder.layers.0.mlp.linear_fc2.weight" in weights)
            state |= {f"optimizer.state.{name}.{key}": other[key].square() for key in weights}
    write_folder(folder, {**state, **beside}, args or arguments())


def logits_in_its_form(weights, tokens, *, neighbours=False, offset=0.0):
    """Compute with fused and stacked tensors."""

    def norm(x, weight):
        return F.rms_norm(x, (DIM,), weight + offset, 1e-5)

    x = weights["embedding.word_embeddings.weight"][tokens]
    for number in range(LAYERS):
        own = {name: weights[f"decoder.layers.{name}"][number] for name in LAYER}
        normed = norm(x, own["self_attention.linear_qkv.layer_norm_weight"])
        x = x + attended(
            normed,
            own["self_attention.linear_qkv.weight"],
            own["self_attention.linear_proj.weight"],
            neighbours=neighbours,
        )
        wide = norm(x, own["mlp.linear_fc1.layer_norm_weight"]) @ own["mlp.linear_fc1.weight"].T
        gate, up = wide.chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ own["mlp.linear_fc2.weight"].T
    return norm(x, weights["decoder.final_layernorm.weight"]) @ weights["output_layer.weight"].T


def imported_logits(path, tokens):
    model = llama(
        dim=DIM, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=GROUPS, vocab_size=VOCAB, ffn_dim=HIDDEN,
        rope_theta=10000.0,
    ).double()  # fmt: skip
    found = tensors_in(path)
    model.load_state_dict({name.removeprefix("model/"): v for name, v in found.items() if name.startswith("model/")})
    return model(tokens)


@pytest.fixture
def tokens():
    return torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("neighbours", [False, True], ids=["halves", "neighbours"])
def test_the_imported_model_computes_the_same(neighbours, tokens, tmp_path):
    weights = drawn()
    write(tmp_path / "iter_0000008", weights, args=arguments(rotary_interleaved=neighbours))
    result = import_checkpoint(tmp_path / "iter_0000008", tmp_path / "own")
    assert (result.system, result.step) == ("megatron", 8)
    assert result.num_weights == result.num_states == 3 + 9 * LAYERS
    wanted = logits_in_its_form(weights, tokens, neighbours=neighbours)
    assert (imported_logits(result.path, tokens) - wanted).abs().max() < 1e-12


def test_layers_that_are_numbered_are_those_that_are_stacked(tmp_path):
    for name, numbered in (("stacked", False), ("numbered", True)):
        write(tmp_path / name / "iter_0000008", drawn(numbered=numbered), moments=False)
        import_checkpoint(tmp_path / name / "iter_0000008", tmp_path / name)
    stacked, numbered = (tensors_in(tmp_path / name / "step-8") for name in ("stacked", "numbered"))
    assert stacked.keys() == numbered.keys()
    assert all(torch.equal(value, numbered[name]) for name, value in stacked.items())


def test_moments_go_with_the_rows_of_their_weights(tmp_path):
    """Moments are square of weights here, so they are after the import what squares of the weights are."""
    weights = drawn()
    folder = tmp_path / "iter_0000008"
    squares = {f"optimizer.state.exp_avg_sq.{name}": value.square() for name, value in weights.items()}
    write(folder, weights, moments=False, **squares)
    path = import_checkpoint(folder, tmp_path).path
    found = tensors_in(path)
    moments = {name for name in found if name.endswith("/exp_avg_sq")}
    assert len(moments) == 3 + 9 * LAYERS
    for name in moments:
        fqn = name.removeprefix("optimizer/").removesuffix("/exp_avg_sq")
        assert torch.equal(found[name], found[f"model/{fqn}"].square())
        assert found[f"optimizer/{fqn}/step"] == 7
    assert read_state(path)["optimizer"]["class"] == "AdamW"


def test_weights_are_the_optimizers_in_float32(tmp_path):
    weights = drawn()
    low = {name: value.bfloat16() for name, value in weights.items()}
    masters = {f"chained_0.optimizer.state.fp32_param.{name}": value.float() for name, value in weights.items()}
    write(tmp_path / "iter_0000008", low, moments=False, **masters)
    found = tensors_in(import_checkpoint(tmp_path / "iter_0000008", tmp_path).path)
    assert torch.equal(found["model/output.weight"], weights["output_layer.weight"].float())


def test_norms_that_count_from_one(tokens, tmp_path):
    weights = drawn()
    write(tmp_path / "iter_0000008", weights, moments=False, args=arguments(apply_layernorm_1p=True))
    path = import_checkpoint(tmp_path / "iter_0000008", tmp_path).path
    assert (imported_logits(path, tokens) - logits_in_its_form(weights, tokens, offset=1.0)).abs().max() < 1e-12


@pytest.mark.slow
def test_names_of_transformers_compute_the_same(tokens, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    weights = drawn()
    write(tmp_path / "iter_0000008", weights)
    path = import_checkpoint(tmp_path / "iter_0000008", tmp_path, naming="huggingface").path
    config = LlamaConfig(
        hidden_size=DIM, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=GROUPS,
        vocab_size=VOCAB, intermediate_size=HIDDEN, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = LlamaForCausalLM(config).double()
    found = tensors_in(path)
    model.load_state_dict({name.removeprefix("model/"): v for name, v in found.items() if name.startswith("model/")})
    # transformers keeps the angles in float32.
    assert (model(tokens).logits - logits_in_its_form(weights, tokens)).abs().max() < 1e-5


def test_a_runs_folder_and_its_marker(tmp_path):
    write(tmp_path / "run" / "iter_0000008", drawn(), moments=False)
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("8\n")
    assert import_checkpoint(tmp_path / "run", tmp_path / "own").step == 8


def test_buckets_and_pickled_entries_are_named(tmp_path):
    buckets = {"optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg": torch.ones(4)}
    extra = {f"decoder.layers.{n}.self_attention.linear_qkv._extra_state": argparse.Namespace() for n in range(2)}
    write(tmp_path / "iter_0000008", drawn(), moments=False, **buckets, **extra, rng_state=argparse.Namespace())
    result = import_checkpoint(tmp_path / "iter_0000008", tmp_path)
    assert result.num_states == 0
    assert result.skipped == (
        "rng_state: pickled, which is not read",
        "decoder.layers.0.self_attention.linear_qkv._extra_state and 1 more: what layers keep for float8, pickled",
        "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.exp_avg: the optimizer's state in flat buckets of a layout; "
        "save once more with --dist-ckpt-optim-fully-reshardable to take it along",
    )


def test_state_of_another_shape_is_named(tmp_path):
    flat = {"optimizer.state.exp_avg.output_layer.weight": torch.ones(1, 1, VOCAB * DIM)}
    write(tmp_path / "iter_0000008", drawn(), moments=False, **flat)
    (line,) = import_checkpoint(tmp_path / "iter_0000008", tmp_path).skipped
    assert (
        line
        == f"optimizer.state.exp_avg.output_layer.weight: has the shape {[1, 1, VOCAB * DIM]}, and the weight "
        + str([VOCAB, DIM])
    )


def test_heads_that_nothing_says(tmp_path, capsys):
    folder = tmp_path / "iter_0000008"
    write(folder, drawn(), moments=False)
    (folder / "common.pt").unlink()
    assert main(["import", str(folder), "--to", str(tmp_path / "own")]) == 2
    assert "add --arg num_attention_heads=N" in capsys.readouterr().err
    heads = ["--arg", f"num_attention_heads={HEADS}", "--arg", f"num-query-groups={GROUPS}"]
    assert main(["import", str(folder), "--to", str(tmp_path / "own"), *heads]) == 0


@pytest.mark.parametrize(
    ("heads", "problem"),
    [(5, "rows do not divide into 5 query, 5 key and 5 value heads"), (0, "nothing says of how many heads")],
)
def test_heads_that_do_not_fit(heads, problem, tmp_path):
    write(tmp_path / "iter_0000008", drawn(), moments=False)
    with pytest.raises(CheckpointError, match=problem):
        import_checkpoint(
            tmp_path / "iter_0000008",
            tmp_path,
            arguments={"num_attention_heads": str(heads), "num_query_groups": str(heads)},
        )


@pytest.mark.parametrize("name", ["mlp.router.bias", "scale"])
def test_a_tensor_without_a_place_is_named(name, tmp_path):
    other = {f"decoder.layers.{name}": torch.ones(LAYERS, 8) if "bias" in name else torch.tensor(1.0)}
    write(tmp_path / "iter_0000008", drawn(), moments=False, **other)
    with pytest.raises(CheckpointError, match=rf"decoder\.layers\.{name} has no place in the model"):
        import_checkpoint(tmp_path / "iter_0000008", tmp_path)


def test_a_file_for_each_rank_is_refused(tmp_path):
    folder = tmp_path / "iter_0000008" / "mp_rank_00"
    folder.mkdir(parents=True)
    torch.save({"model": {}}, folder / "model_optim_rng.pt")
    with pytest.raises(CheckpointError, match="--ckpt-format torch_dist"):
        import_checkpoint(tmp_path / "iter_0000008", tmp_path)


def test_names_for_another_system_are_refused(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "weights.pt")
    with pytest.raises(CheckpointError, match="is no checkpoint of Megatron-LM"):
        import_checkpoint(tmp_path / "weights.pt", tmp_path / "own", naming="llama")
    with pytest.raises(CheckpointError, match='"gpt" names no kind of model; one of: llama, huggingface'):
        import_checkpoint(tmp_path / "weights.pt", tmp_path / "own", naming="gpt")
