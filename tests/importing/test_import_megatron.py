"""Megatron-LM's flags, launch scripts, functional tests and logs as manifests."""

from __future__ import annotations

import json
import math

import pytest
from support.imported import manifest_of, translated, verdicts_of

from composer3d.cli import main
from composer3d.importing.importer import Flags, read_translation
from composer3d.importing.translation import Options
from composer3d.runner import TABLES
from composer3d.runner.objective.batch_size import BatchSize
from composer3d.runner.objective.lr_schedule import multiplier_of
from composer3d.runner.runner_tables import BatchRampTable

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
TP=${TP:-2}; NODES=2
GPUS=8
WORLD=$((GPUS*NODES))   # 16
SIZE=$1
touch executed
DTYPE="bf16"
MODEL_ARGS=(
    --num-layers 8  # blocks
    --hidden-size 256 --ffn-hidden-size 704 --num-attention-heads 8
    --group-query-attention --num-query-groups 4
    --swiglu --normalization RMSNorm --position-embedding-type rope --rotary-base 10000
    --disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0.0 --attention-dropout 0.0
    --vocab-size 1000 --seq-length 512 --max-position-embeddings 512
)
TRAIN="--micro-batch-size 2 --global-batch-size 64 --train-iters 100 --lr 3e-4 --min-lr 3e-5
       --lr-decay-style cosine --lr-warmup-iters 10 --weight-decay 0.1 --adam-beta2 0.95"
if [[ "$DTYPE" == "bf16" ]]; then
    TRAIN+=" --bf16"
else
    TRAIN+=" --fp16"
fi
python tools/preprocess.py --input x --output y
torchrun --nproc_per_node $GPUS --nnodes $NODES pretrain_gpt.py \\
    ${MODEL_ARGS[@]} $TRAIN --tensor-model-parallel-size $TP --sequence-parallel \\
    --use-distributed-optimizer --save "$HOME/out" 2>&1 | tee log.txt
"""


def test_a_launch_script_is_read_and_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    translation = translated(tmp_path, "train.sh", SCRIPT)
    assert not (tmp_path / "executed").exists()
    manifest = manifest_of(translation)
    assert manifest["mesh"] == {"tp": 2}
    assert manifest["model"] == {
        "use": "composer3d.models:llama",
        "args": {
            "dim": 256,
            "num_layers": 8,
            "num_heads": 8,
            "num_kv_heads": 4,
            "ffn_dim": 704,
            "max_seq_len": 512,
            "rope_theta": 10000.0,
            "norm_eps": 1e-5,
            "tie_embeddings": False,
            "dropout": 0.0,
            "vocab_size": 1024,  # padded to a multiple of 128 x 2
        },
    }
    assert manifest["train"] == {"microbatch": 2, "global_batch": 64, "steps": 100, "grad_clip": 1.0, "seed": 1234}
    assert manifest["optimizer"] == {
        "use": "adamw",
        "lr": 3e-4,
        "weight_decay": 0.1,
        "betas": [0.9, 0.95],
        "eps": 1e-8,
    }
    assert manifest["lr_schedule"] == {
        "use": "cosine",
        "warmup": 10,
        "warmup_start": 0.0,
        "min_ratio": pytest.approx(0.1),
    }
    assert manifest["sharding"] == {
        "tensor_parallel": {"sequence_parallel": True, "loss_parallel": True},
        "fsdp2": {"zero": 1},
    }
    assert manifest["precision"]["mixed"] == {"param_dtype": "bfloat16", "reduce_dtype": "float32"}
    assert manifest["data"]["use"] == "FILL_IN:data"
    entry = translation.verdicts["num_query_groups"]
    assert (entry.key, entry.line, entry.value) == ("num-query-groups", 12, 4)
    assert verdicts_of(translation)["lr_decay_style"] == "carried"


def test_what_depends_on_an_unknown_argument_is_told_with_its_line(tmp_path):
    text = SCRIPT.replace('DTYPE="bf16"', "DTYPE=$2").replace("--num-layers 8", "--num-layers $SIZE")
    translation = translated(tmp_path, "train.sh", text)
    said = [str(problem) for problem in (*translation.tree.problems, *translation.problems)]
    assert any("num-layers = $1 is not known without running the script; --arg 1=VALUE" in line for line in said)
    assert any("$TRAIN depends on line 19" in line and "--arg 2=VALUE" in line for line in said)
    file = tmp_path / "train.sh"
    given = Flags(values={"1": "12", "2": "bf16"})
    filled = read_translation(file, Options(), flags=given)
    assert (
        not filled.problems
        and not filled.tree.problems
        and filled.get("num_layers") == 12
        and filled.get("bf16") is True
    )


def test_flags_after_two_dashes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    flags = "--num-layers 2 --lr 1e-3 --train-iters 5 --fp16 --micro-batch-size 1 --pipeline-model-parallel-size 2"
    more = "--global-batch-size 8 --frobnicate 3".split()
    assert main(["import", "--json", "--world-size", "2", "--", *flags.split(), *more]) == 1
    report = json.loads(capsys.readouterr().out)
    verdicts = {entry["key"]: entry["verdict"] for entry in report["keys"]}
    assert verdicts["frobnicate"] == "refused" and report["manifest"] == ""
    arguments = ["import", "--json", "--world-size", "2", "--allow", "frobnicate", "--", *flags.split(), *more]
    assert main(arguments) == 0
    manifest = json.loads(capsys.readouterr().out)["manifest"]
    assert "initial_scale = 4294967296.0" in manifest and 'schedule = "1F1B"' in manifest
    assert main(["import"]) == 2
    assert main(["import", "--arg", "X", "--", "--lr", "1"]) == 2
    assert "write NAME=VALUE" in capsys.readouterr().err


LOG = """some lines before
[default0]:------------------------ arguments ------------------------
[default0]:  accumulate_allreduce_grads_in_fp32 .............. True
[default0]:  bf16 ............................................ True
[default0]:  check_for_nan_in_loss_and_grad .................. True
[default0]:  cp_comm_type .................................... ['p2p']
[default0]:  global_batch_size ............................... 16
[default0]:  lr .............................................. 0.001
[default0]:  micro_batch_size ................................ 2
[default0]:  perform_rl_step ................................. False
[default0]:  save ............................................ None
[default0]:  tensor_model_parallel_size ...................... 2
[default0]:  train_iters ..................................... 40
[default0]:  world_size ...................................... 8
[default0]:-------------------- end of arguments ---------------------
 iteration  1/40 | loss: 9
"""


def test_the_block_of_arguments_of_a_log(tmp_path):
    translation = translated(tmp_path, "run.log", LOG)
    assert len(translation.tree.leaves) == 12 and translation.verdicts["lr"].line == 8
    manifest = manifest_of(translation)
    assert manifest["mesh"] == {"tp": 2} and manifest["train"]["steps"] == 40
    assert manifest["sharding"]["ddp"] == {}
    assert verdicts_of(translation)["save"] == "meaningless"


def test_a_functional_tests_file(tmp_path):
    text = "ENV_VARS:\n  X: 1\nMODEL_ARGS:\n  --num-layers: 4\n  --lr: 1e-3\n  --cp-comm-type: a2a+p2p\n"
    text += "  --context-parallel-size: 4\n  --hierarchical-context-parallel-sizes: 2 2\n  --bf16: true\n"
    translation = translated(tmp_path, "model_config.yaml", text)
    manifest = manifest_of(translation)
    assert manifest["mesh"] == {"cp": 4}
    assert manifest["sharding"]["context_parallel"] == {"method": "usp", "inner_degree": 2}
    assert translation.verdicts["num_layers"].key == "MODEL_ARGS.--num-layers"


@pytest.mark.parametrize(
    ("flags", "key", "verdict"),
    [
        ("--fp8-format hybrid --bf16", "fp8_format", "refused"),
        ("--fp8-format hybrid --fp8-recipe tensorwise --bf16", "fp8_format", "changed"),
        ("--recompute-granularity selective", "recompute_granularity", "equal"),
        (
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
            "recompute_num_layers",
            "equal",
        ),
        (
            "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
            "recompute_num_layers",
            "changed",
        ),
        ("--optimizer lion", "optimizer", "refused"),
        ("--perform-rl-step", "perform_rl_step", "refused"),
        ("--lr-decay-style inverse-square-root", "lr_decay_style", "carried"),
        ("--lr-decay-style polynomial", "lr_decay_style", "refused"),
        ("--calculate-per-token-loss", "calculate_per_token_loss", "equal"),
        ("--overlap-grad-reduce", "overlap_grad_reduce", "meaningless"),
        ("--eod-mask-loss", "eod_mask_loss", "missing"),
        ("--rampup-batch-size 16 16 1000 --global-batch-size 64", "rampup_batch_size", "carried"),
        ("--sequence-parallel", "sequence_parallel", "ignored-there"),
    ],
)
def test_verdicts_of_single_flags(tmp_path, flags, key, verdict):
    translation = translated(tmp_path, "flags.txt", f"{flags} --lr 1e-3", system="megatron")
    assert verdicts_of(translation)[key] == verdict


@pytest.mark.parametrize("samples", [40, 100, 1000, 12345])
def test_iterations_of_samples_with_a_growing_batch_are_megatrons(tmp_path, samples):
    flags = f"--lr 1e-3 --rampup-batch-size 16 16 1000 --global-batch-size 64 --train-samples {samples}"
    translation = translated(tmp_path, "flags.txt", flags, system="megatron")
    iterations = consumed = 0
    while consumed <= min(1000, samples):
        consumed += 64 if consumed > 1000 else 16 + int(consumed / (1000 / 3)) * 16
        iterations += 1
    iterations += max(samples - consumed, 0) // 64
    assert manifest_of(translation)["train"] == {
        "seed": 1234,
        "steps": iterations,
        "global_batch": 64,
        "batch_ramp": {"start": 16, "step": 16, "samples": 1000},
        "grad_clip": 1.0,
    }
    assert verdicts_of(translation)["train_samples"] == "derived"


# Megatron-LM's scheduler counts the samples of every batch: lr 1e-3, min-lr 1e-4 here.
SAMPLED = {
    "--rampup-batch-size 2 2 200 --train-samples 803 --lr-warmup-samples 100 --lr-decay-samples 700": (
        2,
        803,
        100,
        700,
    ),
    "--rampup-batch-size 4 4 50 --train-samples 803 --lr-warmup-fraction 0.1": (4, 803, 80.3, 803),
    "--train-samples 803 --lr-warmup-samples 44": (8, 803, 44, 803),
    "--train-samples 800 --lr-decay-samples 700 --lr-warmup-samples 16": (8, 800, 16, 700),
    "--train-samples 800 --lr-decay-samples 800 --lr-warmup-fraction 0.1": (8, 800, 80, 800),
}


@pytest.mark.parametrize("style", ["cosine", "linear"])
@pytest.mark.parametrize("flags", SAMPLED)
def test_rates_of_a_run_by_samples_are_megatrons(tmp_path, flags, style):
    start, samples, warmup, decay = SAMPLED[flags]
    text = f"{flags} --global-batch-size 8 --lr-decay-style {style} --lr 1e-3 --min-lr 1e-4"
    translation = translated(tmp_path, "flags.txt", text, system="megatron")
    manifest = manifest_of(translation)
    whole = int(flags.split()[3]) if start < 8 else 0
    expected, consumed = [], 0
    while consumed + (8 if consumed > whole else start) <= samples:
        left = max((decay - consumed) / (decay - warmup), 0.0)
        fallen = left if style == "linear" else 0.5 * (1 + math.cos(math.pi * (1 - left)))
        expected.append(consumed / warmup if consumed < warmup else 0.1 + 0.9 * fallen)
        grown = min(int(consumed / (whole / ((8 - start) // start))), (8 - start) // start) if whole else 0
        consumed += 8 if consumed > whole else start + start * grown
    table, num_steps = TABLES["lr_schedule"](**manifest["lr_schedule"]), manifest["train"]["steps"]
    train = manifest["train"]
    if whole:
        train["batch_ramp"] = BatchRampTable(**train["batch_ramp"])
    sizes = BatchSize(TABLES["train"](**train), degree=1)
    rate = multiplier_of(table, num_steps=num_steps, folder=tmp_path, sizes=sizes)
    # A warm-up of a broken number of samples is rounded, which its verdict says.
    tolerance = 1e-12 if warmup == int(warmup) else 0.005
    assert [rate(step) for step in range(num_steps)] == pytest.approx(expected[:num_steps], rel=tolerance)
    assert len(expected) >= num_steps
    told = {key: verdict for key, verdict in verdicts_of(translation).items() if key.startswith(("lr_", "min_lr"))}
    assert set(told.values()) - {"changed"} <= {"carried", "derived", "equal", "meaningless"}, told
    assert ("changed" in told.values()) == (warmup != int(warmup))


def test_a_warmup_beyond_the_run_is_megatrons_where_the_fall_is_beyond_it_too(tmp_path):
    flags = "--lr 1e-3 --min-lr 1e-5 --train-iters 100 --lr-decay-iters 320000 --lr-decay-style cosine"
    translation = translated(tmp_path, "flags.txt", f"{flags} --lr-warmup-fraction .0005", system="megatron")
    written = manifest_of(translation)
    rate = multiplier_of(TABLES["lr_schedule"](**written["lr_schedule"]), num_steps=100, folder=tmp_path)
    assert [rate(step) for step in range(100)] == pytest.approx([step / 160 for step in range(100)])


def test_an_inverse_root_without_a_warmup_is_megatrons_root_of_samples(tmp_path):
    flags = "--lr 1e-3 --min-lr 1e-5 --train-iters 20 --global-batch-size 8 --lr-decay-style inverse-square-root"
    written = manifest_of(translated(tmp_path, "flags.txt", flags, system="megatron"))
    table, sizes = (
        TABLES["lr_schedule"](**written["lr_schedule"]),
        BatchSize(TABLES["train"](**written["train"]), degree=1),
    )
    rate = multiplier_of(table, num_steps=20, folder=tmp_path, sizes=sizes)
    assert [rate(step) for step in range(20)] == pytest.approx([max(8 * step, 1) ** -0.5 for step in range(20)])


@pytest.mark.parametrize(
    ("flags", "use", "verdict"),
    [
        ("--apply-layernorm-1p", "composer3d.models:llama", "equal"),
        ("--apply-layernorm-1p --normalization LayerNorm", "FILL_IN:model", "missing"),
    ],
)
def test_norms_around_one_are_those_of_a_llama(tmp_path, flags, use, verdict):
    translation = translated(
        tmp_path,
        "train.sh",
        SCRIPT.replace("--swiglu", f"--swiglu {flags}", 1).replace(
            "--normalization RMSNorm", "" if "LayerNorm" in flags else "--normalization RMSNorm"
        ),
    )
    assert manifest_of(translation)["model"]["use"] == use
    assert verdicts_of(translation)["apply_layernorm_1p"] == verdict


def test_a_batch_that_does_not_grow_in_whole_steps_is_refused(tmp_path):
    flags = "--lr 1e-3 --rampup-batch-size 16 20 1000 --global-batch-size 64"
    translation = translated(tmp_path, "flags.txt", flags, system="megatron")
    assert verdicts_of(translation)["rampup_batch_size"] == "refused"
    assert "does not grow from 16 to 64 in whole steps" in str(translation.problems[0])


def test_stages_of_unequal_length_and_several_on_a_rank(tmp_path):
    shape = SCRIPT.replace(
        "--sequence-parallel",
        "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 1 --decoder-last-pipeline-num-layers 1",
    )
    assert manifest_of(translated(tmp_path, "a.sh", shape))["scheduling"]["pipeline"] == {
        "schedule": "1F1B",
        "split": ["layers.1", "layers.4", "layers.7"],
    }
    shape = SCRIPT.replace(
        "--sequence-parallel", "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2"
    )
    assert manifest_of(translated(tmp_path, "b.sh", shape))["scheduling"]["pipeline"] == {
        "schedule": "Interleaved1F1B",
        "stages_per_rank": 2,
    }


def _half_wave(done):
    return 0.5 * (1 + math.cos(math.pi * done))


# Megatron-LM's formulae at iterations 0 to 19, 4 of them warm-up where there is one; lr 1e-3, min-lr 1e-4.
ANNEALED = {
    "--lr-decay-style cosine --lr-warmup-iters 4": lambda s: 0.1 + 0.9 * _half_wave((s - 4) / 16),
    "--lr-decay-style linear --lr-warmup-iters 4 --lr-decay-iters 12": lambda s: 0.1 + 0.9 * (1 - min(s - 4, 8) / 8),
    "--lr-decay-style cosine --lr-warmup-fraction 0.1 --lr-decay-iters 40": lambda s: (
        0.1 + 0.9 * _half_wave((s - 4) / 36)
    ),
    "--lr-decay-style WSD --lr-wsd-decay-iters 5 --lr-warmup-iters 4": lambda s: (
        0.1 + 0.9 * (2 * 0.5 ** (max(s - 15, 0) / 5) - 1)
    ),
    "--lr-decay-style WSD --lr-wsd-decay-style minus_sqrt --lr-wsd-decay-iters 5 --lr-warmup-iters 4": lambda s: (
        0.1 + 0.9 * (1 - math.sqrt(max(s - 15, 0) / 5))
    ),
    "--lr-decay-style inverse-square-root --lr-warmup-iters 4": lambda s: max(0.1, 2 / math.sqrt(s)),
    "--lr-decay-style inverse-square-root": lambda s: max(0.1, 1 / math.sqrt(max(s, 1))),
    "--lr-decay-style constant --lr-warmup-iters 4 --lr-warmup-init 5e-4": lambda s: 1.0,
}


@pytest.mark.parametrize("flags", ANNEALED)
def test_rates_are_megatrons(tmp_path, flags):
    translation = translated(
        tmp_path, "flags.txt", f"{flags} --lr 1e-3 --min-lr 1e-4 --train-iters 20", system="megatron"
    )
    written = manifest_of(translation)["lr_schedule"]
    rate = multiplier_of(TABLES["lr_schedule"](**written), num_steps=20, folder=tmp_path)
    first = 0.5 if "init" in flags else 0.0
    warmup = 4 if "warmup" in flags else 0
    rising = [first + (1 - first) * step / 4 for step in range(warmup)]
    expected = [*rising, *(ANNEALED[flags](step) for step in range(warmup, 20))]
    assert [rate(step) for step in range(20)] == pytest.approx(expected)
    told = {key: verdict for key, verdict in verdicts_of(translation).items() if key.startswith(("lr_", "min_lr"))}
    assert set(told.values()) <= {"carried", "derived", "meaningless"}, told


def test_two_16_bit_formats_are_refused(tmp_path):
    translation = translated(tmp_path, "train.sh", SCRIPT.replace("--sequence-parallel", "--sequence-parallel --fp16"))
    assert any("fp16 = true cannot stand beside bf16" in problem.message for problem in translation.problems)
