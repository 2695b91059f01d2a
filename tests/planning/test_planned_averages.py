"""Moving averages (`[ema]`) in plans: bytes of a rank's shards, and the time of their update."""

from __future__ import annotations

import pytest

import composer3d
from composer3d.models import llama
from composer3d.planning.hardware.hardware_file import load_hardware
from composer3d.planning.reports.plan_page import plan_to_html
from composer3d.planning.reports.plan_text import size

ARGS = {"dim": 256, "num_layers": 6, "num_heads": 4, "vocab_size": 1024}
RUN = """composer3d = 1
[model]
use = "composer3d.models:llama"
args = { dim = 256, num_layers = 6, num_heads = 4, vocab_size = 1024 }
[data]
use = "synthetic"
seq_len = 64
[train]
steps = 1
global_batch = 4
microbatch = 2
[mesh]
dp_shard = 2
[sharding.fsdp2]
"""
DECAY = "ema.decay=0.9"


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setenv("COMPOSER3D_TRACES", "off")
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return lambda *overrides: composer3d.plan(path, hardware="h100", overrides=overrides)


def memory(planned):
    return planned.to_json()["ranks"][0]["memory"]


def test_averages_are_as_many_bytes_as_the_shards_of_what_is_trained(plan):
    sizes = {name: 4 * parameter.numel() for name, parameter in llama(**ARGS).named_parameters()}
    plain, kept = memory(plan()), memory(plan(DECAY))
    # Every dim is even, so that both ranks have half.
    assert kept["averages"] == sum(sizes.values()) // 2
    assert kept["peak"] - plain["peak"] == kept["averages"]
    assert "averages" not in plain
    partly = memory(plan(DECAY, 'train.frozen=["tok_embeddings"]'))
    assert partly["averages"] == (sum(sizes.values()) - sizes["tok_embeddings.weight"]) // 2


def test_an_update_reads_averages_and_weights_and_writes_averages(plan):
    device = load_hardware("h100").device
    plain, kept = plan(), plan(DECAY)
    seconds = [planned.to_json()["time"]["step_s"]["value"] for planned in (plain, kept)]
    moved = 3 * memory(kept)["averages"] / (device.memory_bandwidth * device.memory_efficiency)
    # One operator on lists of all shards, and the dispatch of a DTensor's, take the time of launches at least.
    assert seconds[1] - seconds[0] >= moved
    assert seconds[1] - seconds[0] == pytest.approx(max(moved, device.launch_s), rel=0.01)


def test_the_text_and_the_page_show_averages_only_where_a_run_keeps_them(plan):
    plain, kept = plan(), plan(DECAY)
    text, page = str(kept), plan_to_html(kept.plan, title="a run")
    assert f"  moving averages {size(memory(kept)['averages'])} [exact]" in text
    assert "E averages" in text
    assert f"<title>averages: {size(memory(kept)['averages'])}</title>" in page
    assert "averages" not in str(plain) + plan_to_html(plain.plan, title="a run")


def test_checkpoints_have_the_averages_too(plan, tmp_path):
    failures = composer3d.planning.Failures(hours=1000, storage=1e9)
    path = tmp_path / "run.toml"
    plain, kept = (
        composer3d.plan(path, hardware="h100", overrides=more, failures=failures).to_json()["time"]["failures"]
        for more in ((), (DECAY,))
    )
    whole = sum(4 * parameter.numel() for parameter in llama(**ARGS).parameters())
    assert kept["checkpoint_bytes"] - plain["checkpoint_bytes"] == whole


def test_what_is_not_in_the_planned_step_is_noted(plan):
    notes = plan(DECAY, "ema.every=10", "evaluation.every=5").to_json()["notes"]
    assert any(note.startswith("ema.every = 10: the planned step updates the averages") for note in notes)
    assert any(note.startswith("ema.evaluate: while it is evaluated with the averages") for note in notes)
    assert not any("ema." in note for note in plan(DECAY).to_json()["notes"])
