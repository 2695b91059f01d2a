"""Plans derived for models of many habits: gradients equal one device."""

from __future__ import annotations

import pytest
from support import fused_blocks, shared_weight_models, value_reading_models
from support.family_models import class_loss
from support.foreign_models import STRANGERS
from support.models import write_manifest
from support.tensor_parallel import AUTO, built, on_one_rank, one_step, steps_of

import composer3d
from composer3d import ManifestError
from composer3d.testing import run_ranks

TIGHT = 1e-12
SP = "sequence_parallel = true"
FOUR = ["MultiQuery", "Falcon", "Latent", "Alibi", "Gated", "Encoder"]
SETTINGS = {"plain": (2, ""), "four": (4, ""), "sequence": (2, SP)}


def outcomes(names, text):
    """Return what is said of each model: the refusal, or the largest error."""
    found = {}
    for name in names:
        try:
            found[name] = max(one_step(name, text)[:3])
        except ManifestError as error:
            found[name] = str(error).partition("] ")[2]
    return found


@pytest.mark.parametrize(
    "setting", ["plain", *(pytest.param(name, marks=pytest.mark.slow) for name in ("four", "sequence"))]
)
def test_gradients_equal_one_device(setting):
    degree, settings = SETTINGS[setting]
    text = f"[mesh]\ntp = {degree}\n{AUTO}{settings}\n"
    for found in run_ranks(outcomes, degree, FOUR if degree == 4 else list(STRANGERS), text, timeout_s=600):
        refused = {name: said for name, said in found.items() if isinstance(said, str)}
        assert refused == {}
        assert max(error for error in found.values() if not isinstance(error, str)) < TIGHT


# What is cut, per block of the first form: attention is not left out by the plan where it need not be.
CUT = {
    "GPTJ": ["down", "dense", "query_key_value", "up"],
    "MultiQuery": ["down", "o", "q", "up"],
    "MultiQueryRepeated": ["o", "q"],
    "Falcon": ["fhh", "h4h"],
    "FalconGrouped": ["dense", "query_key_value"],
    "Latent": ["kv_b", "o_proj", "q_proj"],
    "LatentAgnostic": ["kv_b", "o_proj", "q_proj"],
    "LatentFilled": ["o_proj", "q_proj"],
    "Alibi": ["k", "o", "q", "v"],
    "Gated": ["head_gate", "k", "o", "q", "v"],
    "Depthwise": ["inp", "out", "select"],
    # Its one head does not divide.
    "UnevenHeads": ["down", "up"],
    "ReadWeight": ["first", "second"],
    "Parametrised": ["first", "second"],
    "ParallelFused": ["attention_out", "ff_out", "fused"],
    "SpatialGating": ["inp", "out"],
    "Selective": ["dt_proj", "in_proj", "out_proj", "x_proj"],
    "Looking": ["down", "o", "qkv", "up"],
    "LookingModel": ["down", "o", "qkv", "up"],
    "Experts": ["down", "up", *(f"experts.{expert}.{layer}" for expert in range(4) for layer in (0, 2))],
}


def cut(names):
    found = {}
    for name in names:
        run = composer3d.compose(built(name), write_manifest(f"[mesh]\ntp = 2\n{AUTO}"), loss_fn=class_loss)
        rules = next(iter(run.context.state.values())).rules
        found[name] = sorted(
            fqn.removeprefix("layers.0.")
            for fqn, rule in rules.items()
            if fqn.startswith("layers.0.") and rule.style.endswith("wise")
        )
        run.close()
    return found


def test_what_is_cut():
    assert on_one_rank(cut, 2, list(CUT)) == {name: sorted(modules) for name, modules in CUT.items()}


def gathered():
    run = composer3d.compose(built("ParallelFused"), write_manifest(f"[mesh]\ntp = 2\n{AUTO}"), loss_fn=class_loss)
    rule = next(iter(run.context.state.values())).rules["layers.0.fused"]
    run.close()
    return rule.parts, rule.gathered


def test_a_key_that_all_heads_share_is_gathered_out_of_a_fused_projection():
    assert run_ranks(gathered, 2)[0] == ((16, 4, 4, 32, 32), (1, 2))


def test_with_fsdp2_and_a_sharded_sequence():
    names = [
        each.__name__
        for each in (
            *shared_weight_models.BLOCKS,
            *shared_weight_models.MODELS,
            *value_reading_models.MODELS,
            *fused_blocks.BLOCKS,
        )
    ]
    names.append("Picked")
    text = f"[mesh]\ntp = 2\ndp_shard = 2\n{AUTO}{SP}\n[sharding.fsdp2]\n"
    for found in run_ranks(outcomes, 4, names, text):
        assert max(found.values()) < TIGHT


def test_key_value_heads_that_are_fewer_than_ranks_stay_whole():
    text = f"[mesh]\ntp = 4\n{AUTO}"
    for [(loss, norm, gradient, _)] in run_ranks(steps_of, 4, [("llama", text, {"num_kv_heads": 2})]):
        assert max(loss, norm, gradient) < TIGHT


def test_a_cut_sequence_is_put_together_where_code_needs_all_of_it():
    """Blocks of several forms, also with nothing else cut: what mixes the sequence runs on all of it.

    So does an embedding whose own code reads its rows again.
    """
    text = f'[model]\nblocks = "layers.*"\n[mesh]\ntp = 2\n{AUTO}{SP}\n'
    for found in run_ranks(outcomes, 2, ["Mixed", "WholeNorm", "NormedEmbedding"], text):
        assert max(found.values()) < TIGHT


def test_an_embedding_that_reads_its_rows_again_sees_whole_ones():
    for found in run_ranks(outcomes, 2, ["NormedEmbedding"], f"[mesh]\ntp = 2\n{AUTO}"):
        assert max(found.values()) < TIGHT


def uncut(name):
    """Return the blocks that are given whole sequences, and what is sharded there and elsewhere."""
    text = f"[mesh]\ntp = 2\n{AUTO}{SP}\n"
    error = max(one_step(name, text)[:3])
    run = composer3d.compose(built(name), write_manifest(text), loss_fn=class_loss)
    made = next(iter(run.context.state.values()))
    styles = {fqn: rule.style for fqn, rule in made.rules.items() if rule.style not in ("replicate", "sequence")}
    run.close()
    return error, made.unsharded, styles


def test_where_no_sequence_can_be_sharded_the_rest_is():
    styles = {"time.0": "colwise", "time.2": "rowwise"}
    for error, blocks, found in run_ranks(uncut, 2, "ShiftedChannels"):
        assert error < TIGHT
        assert (blocks, found) == ({""}, styles)


def head():
    run = composer3d.compose(built("TiedHead"), write_manifest(f"[mesh]\ntp = 2\n{AUTO}"), loss_fn=class_loss)
    rules = next(iter(run.context.state.values())).rules
    model = run.model
    found = rules["word"].style, rules["head.decoder"].style, model.head.bias is model.head.decoder.bias
    shape = tuple(model.head.bias.to_local().shape)
    run.close()
    return found, shape


def test_a_parameter_of_two_names_is_cut_under_both():
    assert on_one_rank(head, 2) == (("vocab", "head", True), (6,))


def refused(name, text):
    with pytest.raises(ManifestError) as caught:
        composer3d.compose(built(name), write_manifest(text), loss_fn=class_loss)
    return str(caught.value).partition("] ")[2]


@pytest.mark.parametrize(
    ("name", "plan", "fqn", "style"),
    [
        ("TransposedHead", 'emb = "vocab"', "emb", "vocab"),
        ("ReadWeight", '"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"', "layers.0.up", "colwise"),
    ],
)
def test_a_stated_plan_does_not_shard_what_other_code_reads(name, plan, fqn, style):
    text = f"[mesh]\ntp = 2\n[sharding.tensor_parallel.plan]\n{plan}\n"
    message = f'"{fqn}" is "{style}", and code outside of it reads its parameters, which are whole there'
    assert on_one_rank(refused, 2, name, text) == f'{message}; write "replicate"'
