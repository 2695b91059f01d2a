"""Accelerate's YAML as manifests."""

from __future__ import annotations

import pytest
import tomli
from support.imported import manifest_of, translated, verdicts_of

from composer3d.importing.importer import import_config

pytest.importorskip("yaml")

LAUNCH = "compute_environment: LOCAL_MACHINE\nnum_processes: 16\nnum_machines: 2\ntpu_use_sudo: false\nuse_cpu: false\n"
FSDP = f"""{LAUNCH}distributed_type: FSDP
mixed_precision: bf16
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,VisionBlock
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: true
  fsdp_offload_params: true
  fsdp_activation_checkpointing: true
deepspeed_config: {{zero_stage: 3}}
dynamo_config: {{dynamo_backend: INDUCTOR}}
"""


def test_fsdp_in_its_first_version(tmp_path):
    translation = translated(tmp_path, "a.yaml", FSDP)
    assert manifest_of(translation) == {
        "composer3d": 1,
        "mesh": {"gpus_per_node": 8, "dp_shard": 8, "dp_replicate": 2},
        "sharding": {
            "fsdp2": {"zero": 3, "forward_prefetch": 1, "unit_classes": ["LlamaDecoderLayer", "VisionBlock"]},
            "cpu_offload": {"mode": "all"},
        },
        "scheduling": {
            "activation_checkpoint": {"mode": "full"},
            "compile": {"backend": "inductor", "fullgraph": False},
        },
        "precision": {"mixed": {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "output_dtype": "float32"}},
    }
    verdicts = verdicts_of(translation)
    assert verdicts["fsdp_config.fsdp_backward_prefetch_policy"] == "ignored-there"
    assert verdicts["fsdp_config.fsdp_transformer_layer_cls_to_wrap"] == "carried"
    assert verdicts["deepspeed_config.zero_stage"] == "ignored-there"
    assert verdicts["dynamo_config.dynamo_backend"] == "changed"
    assert "torchrun --nnodes 2 --nproc-per-node 8" in translation.verdicts["num_processes"].note
    hint = 'did you mean "fsdp_backward_prefetch"?'
    assert hint in translation.verdicts["fsdp_config.fsdp_backward_prefetch_policy"].note


def test_fsdp_in_its_second_version(tmp_path):
    text = "distributed_type: FSDP\nmixed_precision: 'no'\nfsdp_config:\n  fsdp_version: 2\n"
    translation = translated(tmp_path, "a.yaml", text + "  fsdp_reshard_after_forward: false\n")
    # NO_WRAP is the default.
    assert manifest_of(translation) == {"composer3d": 1, "sharding": {"fsdp2": {"zero": 2, "units": []}}}
    assert set(verdicts_of(translation).values()) == {"derived", "equal", "carried"}


@pytest.mark.parametrize(("stated", "zero"), [("4", None), ("FULL_SHARD", None), ("'no'", 2), ("1", 3)])
def test_the_second_version_of_fsdp_has_no_strategies(tmp_path, stated, zero):
    text = f"{LAUNCH}distributed_type: FSDP\nfsdp_config: {{fsdp_version: 2, fsdp_reshard_after_forward: {stated}}}\n"
    translation = translated(tmp_path, "a.yaml", text)
    said = [problem.message for problem in translation.problems if problem.severity == "error"]
    if zero is None:
        assert any("must be true or false in version 2 of FSDP" in each for each in said)
        assert "mesh.dp_replicate" not in translation.settings
    else:
        assert not said and manifest_of(translation)["sharding"]["fsdp2"]["zero"] == zero


@pytest.mark.parametrize(("stated", "numel"), [("  fsdp_min_num_params: 1e6\n", 1_000_000), ("", 100_000_000)])
def test_units_by_size_are_fsdps(tmp_path, stated, numel):
    text = "distributed_type: FSDP\nfsdp_config:\n  fsdp_auto_wrap_policy: SIZE_BASED_WRAP\n"
    translation = translated(tmp_path, "a.yaml", f"{text}{stated}")
    assert manifest_of(translation)["sharding"]["fsdp2"]["unit_numel"] == numel
    assert verdicts_of(translation)["fsdp_config.fsdp_auto_wrap_policy"] == "carried"
    nested = translated(tmp_path, "b.yaml", f"{text}  fsdp_version: 2\n{stated}")
    assert verdicts_of(nested)["fsdp_config.fsdp_auto_wrap_policy"] == "changed"


DEEPSPEED = """distributed_type: DEEPSPEED
mixed_precision: fp16
deepspeed_config:
  zero_stage: {stage}
  gradient_accumulation_steps: 4
  offload_optimizer_device: cpu
  offload_param_device: cpu
  zero3_init_flag: true
fsdp_config: {{}}
"""


@pytest.mark.parametrize(("stage", "mode", "verdict"), [(2, "optimizer", "ignored-there"), (3, "all", "carried")])
def test_deepspeed_inside(tmp_path, stage, mode, verdict):
    translation = translated(tmp_path, "a.yaml", DEEPSPEED.format(stage=stage))
    assert manifest_of(translation)["sharding"] == {"fsdp2": {"zero": stage}, "cpu_offload": {"mode": mode}}
    assert manifest_of(translation)["precision"]["mixed"] == {
        "param_dtype": "float16",
        "reduce_dtype": "float16",
        "norms": "as_others",
        "growth_interval": 1000,
        "hysteresis": 2,
        "min_scale": 1.0,
    }
    assert verdicts_of(translation)["deepspeed_config.offload_param_device"] == verdict
    assert any(line.startswith("with run.accumulate(4):") for line in translation.loop)


def test_degrees_and_a_bare_no(tmp_path):
    text = "distributed_type: NO\nmixed_precision: no\nparallelism_config:\n"
    text += "".join(f"  parallelism_config_{key}: {n}\n" for key, n in {"tp_size": 2, "dp_shard_size": 4}.items())
    translation = translated(tmp_path, "a.yaml", text + "  parallelism_config_sp_size: 2\n")
    assert manifest_of(translation)["mesh"] == {"dp_shard": 4, "tp": 2, "cp": 2}
    assert manifest_of(translation)["sharding"]["context_parallel"] == {"method": "ulysses"}
    assert verdicts_of(translation)["distributed_type"] == "equal"


@pytest.mark.parametrize(
    ("text", "key", "verdict"),
    [
        ("distributed_type: XLA\n", "distributed_type", "refused"),
        ("distributed_type: FSPD\n", "distributed_type", "refused"),
        ("distributed_type: MULTI_GPU\nmixed_precision: bf16\n", "mixed_precision", "changed"),
        ("distributed_type: MULTI_GPU\nmixed_precison: bf16\n", "mixed_precison", "refused"),
        ("distributed_type: 'NO'\nmixed_precision: fp8\nfp8_config: {backend: TE}\n", "fp8_config.backend", "refused"),
        ("distributed_type: 'NO'\nmixed_precision: fp8\n", "mixed_precision", "changed"),
        ("compute_environment: AMAZON_SAGEMAKER\n", "compute_environment", "refused"),
        (
            "distributed_type: FSDP\nfsdp_config: {fsdp_sharding_strategy: 9}\n",
            "fsdp_config.fsdp_sharding_strategy",
            "refused",
        ),
        ("distributed_type: FSDP\nuse_cpu: true\n", "use_cpu", "changed"),
        (
            "distributed_type: MULTI_GPU\nparallelism_config: {parallelism_config_dp_shard_size: 2}\n",
            "parallelism_config.parallelism_config_dp_shard_size",
            "refused",
        ),
    ],
)
def test_verdicts_of_single_keys(tmp_path, text, key, verdict):
    assert verdicts_of(translated(tmp_path, "a.yaml", text, system="accelerate"))[key] == verdict


@pytest.mark.parametrize(
    ("sizes", "ranks", "said"),
    [
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 2}, 8, "are 16 ranks, and the run has 8"),
        ({"tp": 2}, 8, "tp_size = 2 are 2 ranks, and the run has 8"),
        ({"cp": 2, "sp": 2}, 4, "cp_size = 2 shards the sequence already"),
        ({"dp_shard": 4, "tp": 2}, 8, ""),
        ({"dp_shard": 1}, 8, ""),
        ({"sp": 2}, 8, ""),  # DeepSpeed's groups
    ],
)
def test_degrees_that_are_not_the_number_of_ranks_are_refused(tmp_path, sizes, ranks, said):
    text = f"distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: {ranks}\nparallelism_config:\n"
    text += "".join(f"  parallelism_config_{name}_size: {size}\n" for name, size in sizes.items())
    entries = translated(tmp_path, "a.yaml", text).verdicts.values()
    notes = [entry.note for entry in entries if entry.verdict == "refused"]
    assert len(notes) == bool(said) and all(said in note for note in notes)


def test_micro_batches_of_megatron_are_what_its_pipeline_needs(tmp_path):
    text = """
distributed_type: MEGATRON_LM
num_processes: 8
megatron_lm_config: {megatron_lm_pp_degree: 2, megatron_lm_tp_degree: 2, megatron_lm_num_micro_batches: 2}
"""
    (tmp_path / "a.yaml").write_text(text)
    result = import_config(tmp_path / "a.yaml")
    assert result.ok, result.problems
    assert tomli.loads(result.manifest)["train"] == {"microbatch": 1, "global_batch": 4}
