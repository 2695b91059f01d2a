"""Sources of every system whose model is to be filled in: nothing is told of a model that nobody named."""

from __future__ import annotations

from pathlib import Path

import pytest

import composer3d

pytest.importorskip("yaml")

SOURCES = {
    "torchtitan": (
        "job.toml",
        '[model]\nname = "deepseek_v3"\nflavor = "16B"\n[training]\nsteps = 9\nglobal_batch_size = 96\n[parallelism]\n'
        "tensor_parallel_degree = 3\npipeline_parallel_degree = 12\n",
        ["data"],
    ),
    "neox": (
        "neox.yml",
        '"num_layers": 5\n"hidden_size": 60\n"num_attention_heads": 3\n"train_iters": 9\n"model_parallel_size": 3\n'
        '"pipe_parallel_size": 5\n"train_micro_batch_size_per_gpu": 1\n"gradient_accumulation_steps": 8\n',
        ["data"],
    ),
    "automodel": (
        "recipe.yaml",
        "step_scheduler: {global_batch_size: 12, local_batch_size: 1, max_steps: 9}\n"
        "distributed: {strategy: fsdp2, tp_size: 3, sequence_parallel: true}\n",
        ["data"],
    ),
    "trainer": (
        "args.json",
        '{"per_device_train_batch_size": 1, "max_steps": 9, "fsdp": "full_shard auto_wrap",'
        ' "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": "SomeLayer"}}',
        ["data"],
    ),
    "megatron": (
        "train.sh",
        "torchrun pretrain_gpt.py --num-layers 5 --hidden-size 60 --num-attention-heads 3 --vocab-size 63 --mock-data"
        " --micro-batch-size 1 --global-batch-size 12 --train-iters 9 --lr 1e-3 --seq-length 16"
        " --tensor-model-parallel-size 3 --pipeline-model-parallel-size 5 --sequence-parallel",
        [],
    ),
}


@pytest.mark.parametrize("system", SOURCES)
@pytest.mark.parametrize("target", ["run", "compose"])
def test_only_what_is_to_be_filled_in_is_told(tmp_path: Path, system: str, target: str) -> None:
    name, text, more = SOURCES[system]
    (tmp_path / name).write_text(text)
    result = composer3d.import_config(tmp_path / name, system=system, target=target, name=str(tmp_path / "out.toml"))
    assert result.ok, result.problems
    open_ = ["model", *more] if target == "run" else []
    assert [problem.message.partition(" ")[0] for problem in result.problems] == [f'"FILL_IN:{what}"' for what in open_]
