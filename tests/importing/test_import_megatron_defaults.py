"""Megatron-LM's defaults where flags are silent, and what its report says of flags that mean nothing beside others."""

from __future__ import annotations

import itertools

import pytest
from support.imported import manifest_of, translated, verdicts_of

import composer3d
from composer3d.importing.commented_manifest import write_manifest

SHAPE = {
    "num-layers": "4",
    "hidden-size": "32",
    "num-attention-heads": "4",
    "swiglu": "",
    "normalization": "RMSNorm",
    "position-embedding-type": "rope",
    "disable-bias-linear": "",
    "hidden-dropout": "0",
    "attention-dropout": "0",
    "seq-length": "16",
    "vocab-size": "64",
    "micro-batch-size": "1",
    "global-batch-size": "8",
    "train-iters": "9",
    "lr": "1e-3",
    "mock-data": "",
}
EVERYTHING = {
    **SHAPE,
    "ffn-hidden-size": "64",
    "max-position-embeddings": "64",
    "group-query-attention": "",
    "num-query-groups": "2",
    "num-experts": "8",
    "moe-ffn-hidden-size": "32",
    "moe-shared-expert-intermediate-size": "64",
    "moe-router-topk": "4",
    "moe-layer-freq": "([0]*1+[1]*3)",
    "moe-router-num-groups": "4",
    "moe-router-group-topk": "2",
    "moe-router-score-function": "sigmoid",
    "moe-router-enable-expert-bias": "",
    "moe-aux-loss-coeff": "1e-2",
    "moe-router-load-balancing-type": "seq_aux_loss",
    "expert-model-parallel-size": "2",
    "tensor-model-parallel-size": "2",
    "sequence-parallel": "",
    "pipeline-model-parallel-size": "2",
    "num-layers-per-virtual-pipeline-stage": "1",
    "use-distributed-optimizer": "",
    "num-distributed-optimizer-instances": "2",
    "fp16": "",
    "initial-loss-scale": "1024",
    "clip-grad": "1.0",
    "weight-decay": "0.1",
    "lr-decay-style": "cosine",
    "lr-warmup-samples": "16",
    "min-lr": "1e-5",
    "lr-decay-iters": "8",
    "rampup-batch-size": "4 4 16",
    "save-interval": "3",
    "eval-interval": "3",
    "eval-iters": "1",
    "split": "9,1,0",
}


def written(flags):
    return " ".join(f"--{name} {value}".strip() for name, value in flags.items())


def imported(folder, flags, **options):
    return translated(
        folder, "flags.txt", flags if isinstance(flags, str) else written(flags), system="megatron", **options
    )


@pytest.mark.parametrize(("hidden", "wide"), [(32, 64), (96, 256), (4096, 10880), (64, 128)])
def test_a_feed_forward_has_megatrons_width(tmp_path, hidden, wide):
    assert wide == int((4 * hidden * 2 / 3) / 64) * 64
    dense = manifest_of(imported(tmp_path, {**SHAPE, "hidden-size": hidden}))["model"]["args"]
    assert dense["ffn_dim"] == wide
    flags = {**SHAPE, "hidden-size": hidden, "num-experts": 4, "moe-shared-expert-intermediate-size": 2 * wide}
    mixture = manifest_of(imported(tmp_path, flags))["model"]["args"]
    assert (mixture["ffn_dim"], mixture["expert_dim"], mixture["num_shared_experts"]) == (wide, wide, 2)


def test_a_feed_forward_that_megatron_makes_of_nothing_is_none_here(tmp_path):
    translation = imported(tmp_path, {**SHAPE, "hidden-size": 32, "num-attention-heads": 2} | {"hidden-size": 16})
    assert manifest_of(translation)["model"]["use"] == "FILL_IN:model"
    assert "width 0, the default beside --hidden-size 16" in translation.verdicts["swiglu"].note


def has_none(value):
    if isinstance(value, dict):
        return any(map(has_none, value.values()))
    return value is None or (isinstance(value, list) and any(map(has_none, value)))


def test_no_flag_that_is_left_out_leaves_nothing_behind(tmp_path):
    plugins = ("sharding", "scheduling", "precision", "profiling", "communication")
    for left_out in itertools.chain(((name,) for name in EVERYTHING), [("ffn-hidden-size", "moe-ffn-hidden-size")]):
        translation = imported(tmp_path, {name: value for name, value in EVERYTHING.items() if name not in left_out})
        empty = [path for path, each in translation.settings.items() if has_none(each.value)]
        assert [path for path in empty if path.split(".")[0] not in plugins] == [], left_out
        write_manifest(translation)


def test_values_of_null_are_flags_that_are_not_there(tmp_path):
    for name in EVERYTHING:
        lines = "".join(f"  --{key}: {value or 'true'}\n" for key, value in EVERYTHING.items() if key != name)
        text = f"MODEL_ARGS:\n  --{name}: null\n{lines}"
        translation = translated(tmp_path, "model.yaml", text, system="megatron")
        assert not [
            each for each in translation.settings.values() if isinstance(each.value, dict) and has_none(each.value)
        ]
        write_manifest(translation)


def test_attentions_dropout_is_told_where_no_flag_asks_for_it(tmp_path):
    (problem,) = imported(tmp_path, {name: v for name, v in SHAPE.items() if name != "attention-dropout"}).problems
    assert problem.severity == "warning"
    assert problem.message.startswith("--attention-dropout is 0.1 in Megatron-LM by default")
    assert imported(tmp_path, SHAPE).problems == []


def test_rotary_positions_need_no_learned_ones(tmp_path):
    translation = imported(tmp_path, f"{written(SHAPE)} --no-position-embedding")
    assert verdicts_of(translation)["no_position_embedding"] == "equal"
    learned = {name: value for name, value in SHAPE.items() if name != "position-embedding-type"}
    translation = imported(tmp_path, f"{written(learned)} --no-position-embedding")
    assert verdicts_of(translation)["no_position_embedding"] == "missing"


def test_sinkhorn_is_told_as_itself(tmp_path):
    flags = "--num-experts 4 --moe-router-topk 1 --moe-router-load-balancing-type sinkhorn"
    translation = imported(tmp_path, f"{written(SHAPE)} {flags}")
    assert "routing by sinkhorn" in translation.verdicts["moe_router_load_balancing_type"].note
    assert "pre-softmax" not in translation.verdicts["moe_router_topk"].note


SCRIPT = "torchrun --nproc_per_node 2 pretrain_gpt.py"


@pytest.mark.parametrize("target", ["run", "compose"])
def test_experts_that_are_shared_pass_the_check_that_is_advised(tmp_path, target):
    path, output = tmp_path / "train.sh", tmp_path / f"{target}.toml"
    path.write_text(f"{SCRIPT} {written(SHAPE)} --num-experts 4 --expert-model-parallel-size 2 --bf16\n")
    result = composer3d.import_config(path, target=target, name=str(output))
    assert result.ok and result.world_size == 2, result.problems
    output.write_text(result.manifest)
    found = composer3d.check(output, world_size=result.world_size)
    assert found.ok, found
    assert "Llama" not in str(found) and "llama" not in str(found)


@pytest.mark.parametrize("more", ["--moe-shared-expert-gate", "--moe-latent-size 16"])
def test_of_a_model_that_is_to_be_filled_in_nothing_is_told(tmp_path, more):
    flags = {**SHAPE, "vocab-size": "63", "tensor-model-parallel-size": "2", "sequence-parallel": ""}
    flags |= {"num-experts": "4", "expert-model-parallel-size": "4", "moe-shared-expert-intermediate-size": "64"}
    path = tmp_path / "train.sh"
    path.write_text(f"{SCRIPT} {written(flags)} {more}\n")
    result = composer3d.import_config(path)
    assert [problem.message for problem in result.problems] == [
        '"FILL_IN:model" is to be filled in before check passes'
    ]
    assert result.ok


def test_what_no_flag_says_and_megatron_has_no_default_of_is_told(tmp_path):
    for name, message in (("lr", "there is no --lr"), ("vocab-size", "no flag says how many tokens there are")):
        (problem,) = imported(tmp_path, {key: value for key, value in SHAPE.items() if key != name}).problems
        assert problem.severity == "warning" and problem.message.startswith(message)
    without = {name: value for name, value in SHAPE.items() if name != "vocab-size"}
    flags = f"{written(without)} --tokenizer-type GPT2BPETokenizer --tensor-model-parallel-size 2"
    translation = imported(tmp_path, flags)
    assert translation.problems == [] and manifest_of(translation)["model"]["args"]["vocab_size"] == 50432
    assert verdicts_of(translation)["tokenizer_type"] == "meaningless"


@pytest.mark.parametrize("more", ["", "--qk-layernorm"])
def test_names_of_blocks_are_those_of_a_model_that_is_here(tmp_path, more):
    flags = {**SHAPE, "pipeline-model-parallel-size": "2", "decoder-first-pipeline-num-layers": "1"}
    translation = imported(tmp_path, f"{written(flags)} {more}", target="run")
    split = manifest_of(translation)["scheduling"]["pipeline"].get("split")
    assert split == (None if more else ["layers.1"])
    verdict = verdicts_of(translation)["decoder_first_pipeline_num_layers"]
    assert verdict == ("changed" if more else "derived")


@pytest.mark.parametrize(("version", "rows"), [("0.17", 384), (None, 256)])
def test_the_null_tokenizer_had_one_token_more(tmp_path, version, rows):
    flags = {**SHAPE, "tokenizer-type": "NullTokenizer", "vocab-size": 256}
    assert manifest_of(imported(tmp_path, flags, version=version))["model"]["args"]["vocab_size"] == rows
