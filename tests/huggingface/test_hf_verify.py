"""`composer3d verify` of Hugging Face models: no false alarm."""

from __future__ import annotations

import json

import pytest
from support.huggingface import make

from composer3d.cli import main
from composer3d.huggingface.folder import import_transformers
from composer3d.processes.forking import limit_ranks

MANIFEST = """\
composer3d = 1
model.hf = "model"
data = { use = "synthetic", seq_len = 16, vocab_size = 64 }
train = { steps = 2, global_batch = 4, microbatch = 1 }
run.device = "cpu"
"""


@pytest.mark.parametrize(
    ("family", "text"),
    [
        pytest.param("llama", '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n', id="pp"),
        pytest.param(
            "qwen2",
            '[mesh]\npp = 2\ntp = 2\n[sharding.tensor_parallel]\n[scheduling.pipeline]\nschedule = "1F1B"\n',
            id="tied, tp and pp",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt2",
            "[mesh]\npp = 2\ndp_shard = 2\n[sharding.fsdp2]\n[precision.mixed]\n[scheduling.pipeline]\n"
            'schedule = "Interleaved1F1B"\n',
            id="mixed, two stages a rank",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt2",
            '[mesh]\npp = 2\ntp = 2\n[sharding.tensor_parallel]\n[scheduling.pipeline]\nschedule = "1F1B"\n',
            id="kept in another order on one stage",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "mixtral",
            '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n',
            id="experts",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_right_composition_is_proven(tmp_path, capfd, family, text):
    import_transformers()
    make(family, tmp_path / "model")
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST + text)
    with limit_ranks(4):
        code = main(["verify", str(path), "--steps", "1", "--json"])
    told = capfd.readouterr()
    assert code in (0, 1), told.err
    report = json.loads(told.out)
    assert (code, report["failures"], report["diagnosis"]) == (0, [], [])
    assert {row["op"] for row in report["collectives"] if row["axis"] == "pp"} >= {"send", "recv"}
