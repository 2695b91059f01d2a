"""Sources whose values have another shape than their system reads: no block, a table as a text, one key twice."""

from __future__ import annotations

import pytest
from support.imported import manifest_of, translated, verdicts_of

from composer3d.errors import ManifestError
from composer3d.importing.importer import import_config

TRAINER = "--output_dir out --per_device_train_batch_size 2 --max_steps 100 --learning_rate 1e-4"
DEEPSPEED = '{{"train_micro_batch_size_per_gpu": 2, {}}}'


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("ds.json", DEEPSPEED.format('"zero_optimization": 3'), "zero_optimization"),
        ("ds.json", DEEPSPEED.format('"optimizer": "AdamW"'), "optimizer"),
        ("ds.json", DEEPSPEED.format('"fp16": true'), "fp16"),
        ("a.yaml", "distributed_type: FSDP\nfsdp_config: FULL_SHARD\n", "fsdp_config"),
        ("t.toml", 'optimizer = "AdamW"\n[training]\nsteps = 3\n', "optimizer"),
    ],
)
def test_a_value_in_place_of_a_table_is_refused(name, text, key, tmp_path):
    translation = translated(tmp_path, name, text)
    assert translation.verdicts[key].verdict == "refused"
    assert "is no table" in translation.verdicts[key].note


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("ds.json", DEEPSPEED.format('"scheduler": null'), "scheduler"),
        ("t.toml", "[activation_checkpoint]\n[training]\nsteps = 3\n", "activation_checkpoint"),
    ],
)
def test_an_empty_table_states_nothing(name, text, key, tmp_path):
    assert verdicts_of(translated(tmp_path, name, text))[key] == "equal"


def test_a_number_that_is_none_is_named(tmp_path):
    (tmp_path / "ds.json").write_text(DEEPSPEED.format('"gradient_clipping": NaN'))
    with pytest.raises(ManifestError, match="gradient_clipping holds a number that is not finite"):
        import_config(tmp_path / "ds.json")


@pytest.mark.parametrize("key", ["gradient_accumulation_steps", "gradient_clipping", "mixed_precison"])
def test_what_accelerate_refuses_is_refused(key, tmp_path):
    translation = translated(tmp_path, "a.yaml", f"distributed_type: FSDP\nfsdp_config: {{}}\n{key}: 4\n")
    assert translation.verdicts[key].verdict == "refused"


def test_one_key_in_two_spellings_is_told(tmp_path):
    text = "train_iters: 10\ntrain-iters: 20\nnum_layers: 2\n"
    problems = import_config(_written(tmp_path, "n.yml", text), world_size=1).problems
    assert any("train-iters stands in line 1 too, as train_iters" in problem.message for problem in problems)


@pytest.mark.parametrize("program", ["", "torchrun --nproc_per_node 4 train.py ", "python train.py "])
@pytest.mark.parametrize("name", ["run.sh", "run.txt", "run"])
def test_a_command_line_is_the_trainers_by_its_flags(program, name, tmp_path):
    """Its tables are texts of JSON, with a colon as YAML has; the file's name says nothing."""
    text = f"""{program}{TRAINER} --lr_scheduler_type polynomial --lr_scheduler_kwargs '{{"power": 2.0}}' \\
        --fsdp "full_shard auto_wrap" --fsdp_config '{{"min_num_params": 2000}}'
"""
    result = import_config(_written(tmp_path, name, text))
    assert result.system["system"] == "trainer"
    manifest = manifest_of(translated(tmp_path, name, text))
    assert manifest["lr_schedule"]["power"] == 2.0
    assert manifest["sharding"]["fsdp2"]["unit_numel"] == 2000


def test_a_lowest_rate_that_is_not_stated_is_named(tmp_path):
    translation = translated(tmp_path, "run.sh", f"{TRAINER} --lr_scheduler_type cosine_with_min_lr")
    assert translation.verdicts["lr_scheduler_type"].verdict == "refused"


@pytest.mark.parametrize(("stated", "zero"), [("true", 3), ("false", 2)])
def test_version_2_of_fsdp_reads_no_word_of_a_strategy(stated, zero, tmp_path):
    text = f"""
output_dir: out
max_steps: 3
fsdp: [shard_grad_op, auto_wrap]
fsdp_config: {{fsdp_version: 2, reshard_after_forward: {stated}}}
"""
    translation = translated(tmp_path, "t.yaml", text, system="trainer")
    assert manifest_of(translation)["sharding"]["fsdp2"]["zero"] == zero


def test_a_norm_of_0_is_no_norm_of_torchtitan(tmp_path):
    translation = translated(tmp_path, "t.toml", "[training]\nmax_norm = 0\nsteps = 3\n")
    assert translation.verdicts["training.max_norm"].verdict == "refused"


def _written(folder, name, text):
    (folder / name).write_text(text)
    return folder / name
