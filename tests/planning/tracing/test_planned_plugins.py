"""What plugins do in a plan, where nothing has a value, takes time, or is written anywhere."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from support.planned_runs import Case, figures, tracer_of

AC = "[scheduling.activation_checkpoint]\n"
PLAIN = Case("", world_size=1, num_layers=5, num_microbatches=1)


def planned(text, folder, **options):
    return figures(tracer_of(replace(PLAIN, text=text), folder, **options).trace(0))


@pytest.mark.parametrize("mode", ['mode = "sqrt"\n', 'mode = "budget"\nbudget_gib = 0.0003\n'])
def test_what_hangs_on_the_number_of_blocks_is_traced_with_all_of_them(mode, tmp_path):
    assert planned(AC + mode, tmp_path) == planned(AC + mode, tmp_path, extrapolate=False)


def test_a_budget_is_met_by_what_is_computed_again(tmp_path):
    plain, *cut = (
        planned(text, tmp_path)
        for text in ("", *(AC + f'mode = "budget"\nbudget_fraction = {part}\n' for part in (1.0, 0.4)), AC)
    )
    flops = [figures["flops"] for figures in cut]
    # With all of it nothing is computed again, and with less of it more, but for what is wholly recomputed.
    assert plain["flops"] == flops[0] < flops[1] <= flops[2]
    assert cut[0]["memory"]["peak"] > cut[1]["memory"]["peak"]


def test_state_on_disk_is_counted_and_kept_nowhere(tmp_path):
    before = set(os.listdir("/proc/self/fd"))
    plain, away = (
        planned(text, tmp_path)["memory"] for text in ("", "[sharding.nvme_offload]\nchunk_mib = 0.01\ndepth = 1\n")
    )
    # The numbers of steps stay; of the moments there are a few pieces at a time.
    assert away["optimizer"] < plain["optimizer"] / 100
    assert plain["peak"] - away["peak"] > plain["optimizer"] / 2
    assert set(os.listdir("/proc/self/fd")) <= before
    assert {path.suffix for path in tmp_path.iterdir()} == {".toml"}


def test_compressed_exchanges_are_those_of_compression_in_bytes_of_payloads(tmp_path):
    layout = "[mesh]\ndp_replicate = 2\ndp_shard = 2\n[sharding.fsdp2]\n"
    coded = layout + '[communication.compression]\ngradients = "int8"\nweights = "int8"\n'
    plain, compressed = (
        tracer_of(Case(text, world_size=4, num_layers=2, num_microbatches=1), tmp_path).trace(0)
        for text in (layout, coded)
    )
    found = {(each.op, each.axis): each for segment in compressed.segments for each in segment.transfers}
    assert {each.plugin for key, each in found.items() if key[1] != "world"} == {"compression"}
    assert all(each.plugin is None for key, each in found.items() if key[1] == "world")
    assert {key for key in found if key[1] == "dp_replicate"} == {
        ("all_to_all", "dp_replicate"),
        ("all_gather", "dp_replicate"),
    }
    sent, before = (
        sum(each.wire_bytes for segment in trace.segments for each in segment.transfers if each.axis != "world")
        for trace in (compressed, plain)
    )
    assert 0.2 < sent / before < 0.35
