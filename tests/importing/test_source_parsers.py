"""Values of imported manifests beside those that each source's own parser resolves, in an environment that has it.

`COMPOSER3D_PARSERS` names a Python that has the three; without it one is made in a temporary folder. What cannot be
installed is skipped, with pip's last words.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import tomli

from composer3d.importing import import_config

TESTS = Path(__file__).parents[1]
# torchtitan's parser alone is used, without the loaders and kernels that it depends on.
PACKAGES = (("accelerate", "deepspeed", "tyro"), ("--no-deps", "torchtitan==0.2.2"))
CASES = {
    "deepspeed float16": (
        "ds.json",
        """{"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2, "steps_per_print": 7,
        "fp16": {"enabled": true, "initial_scale_power": 12, "loss_scale_window": 5e2, "hysteresis": 3},
        "zero_optimization": {"stage": 2}, "gradient_clipping": 0.5, // hjson
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-4, "betas": [0.9, 0.98], "weight_decay": 0.05}}}""",
    ),
    "deepspeed defaults of float16": (
        "ds.json",
        "{train_micro_batch_size_per_gpu: 4, fp16: {enabled: true}, zero_optimization: {stage: 3}, steps_per_print: 2}",
    ),
    "deepspeed bfloat16": (
        "ds.json",
        """{"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 3, "bf16": {"enabled": true},
        "communication_data_type": "fp32", "zero_optimization": {"stage": 1}, "steps_per_print": 1}""",
    ),
    "deepspeed without a stage": ("ds.json", '{"train_batch_size": 8, "gradient_clipping": 0.0, "steps_per_print": 9}'),
    "accelerate fsdp": (
        "default.yaml",
        """distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
""",
    ),
    "accelerate no": ("default.yaml", "distributed_type: NO\nmixed_precision: no\nnum_machines: 1\nnum_processes: 1\n"),
    "accelerate degrees": (
        "default.yaml",
        """distributed_type: FSDP
mixed_precision: fp16
num_processes: 8
num_machines: 1
fsdp_config: {fsdp_version: 2}
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 2
  parallelism_config_tp_size: 2
""",
    ),
    "torchtitan": (
        "job.toml",
        """[training]
local_batch_size = 3
global_batch_size = 24
seq_len = 512
steps = 77
max_norm = 0.7
[optimizer]
lr = 4e-4
beta2 = 0.99
[lr_scheduler]
warmup_steps = 5
min_lr_factor = 0.1
[parallelism]
tensor_parallel_degree = 2
""",
    ),
    "torchtitan defaults": ("job.toml", "[training]\nsteps = 300\n"),
}


@pytest.fixture(scope="module")
def parsers(tmp_path_factory):
    """Return a Python that has DeepSpeed, Accelerate and torchtitan, beside this one's torch."""
    if given := os.environ.get("COMPOSER3D_PARSERS"):
        return given
    folder = tmp_path_factory.mktemp("parsers")
    venv.create(folder, with_pip=True)
    python = str(folder / "bin" / "python")
    (site,) = folder.glob("lib/python*/site-packages")
    # torch and what it needs are those of this environment.
    (site / "tested.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    for packages in PACKAGES:
        pip = [python, "-m", "pip", "install", "-q", "-c", str(TESTS / "constraints.txt"), *packages]
        done = subprocess.run(pip, capture_output=True, text=True, timeout=1200, check=False)
        if done.returncode:
            why = (done.stderr.strip() or "no reason given").splitlines()[-1]
            pytest.skip(
                f"{', '.join(packages)} cannot be installed here: {why}; COMPOSER3D_PARSERS names a Python with it"
            )
    return python


def value_at(manifest, path):
    for key in path.split("."):
        manifest = manifest.get(key) if isinstance(manifest, dict) else None
    return manifest


def assert_equal(case, python, folder):
    (name, text), system = CASES[case], case.split()[0]
    (folder / name).write_text(text)
    result = import_config(folder / name, system=system, world_size=8 if "degrees" in case else 1, target="run")
    assert result.manifest, result.problems
    manifest = tomli.loads(result.manifest)
    script = [python, str(TESTS / "support" / "source_parsers.py"), system, str(folder / name), str(folder / "out")]
    done = subprocess.run(script, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    resolved = json.loads((folder / "out").read_text())
    assert {path: value_at(manifest, path) for path in resolved} == resolved


def test_accelerates_values_are_those_of_its_own_parser(tmp_path):
    pytest.importorskip("accelerate")
    assert_equal("accelerate fsdp", sys.executable, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_values_are_those_of_the_sources_own_parser(case, parsers, tmp_path):
    assert_equal(case, parsers, tmp_path)
