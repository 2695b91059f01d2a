"""`composer3d plan` as its user meets it: JSON, one screen, a page, a verdict, what moved between two."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stdout
from dataclasses import replace

import pytest

from composer3d import plan
from composer3d.cli import main
from composer3d.planning.reports import difference_to_json, show_difference, size
from composer3d.planning.reports.plan_difference import moved_terms

MANIFEST = """composer3d = 1
[mesh]
pp = 2
dp_shard = 2
gpus_per_node = 2
[model]
use = "composer3d.models:llama"
args = { dim = 32, num_layers = 6, num_heads = 4, vocab_size = 256 }
[data]
use = "synthetic"
seq_len = 16
[train]
steps = 2
global_batch = 16
[sharding.fsdp2]
[scheduling.pipeline]
"""


@pytest.fixture
def manifest(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(MANIFEST)
    return path


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """The exit code, the JSON and the page of one plan."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "run.toml").write_text(MANIFEST)
    page, out = folder / "plan.html", io.StringIO()
    with redirect_stdout(out):
        code = main(["plan", str(folder / "run.toml"), "--json", "--memory", "80GiB", "--html", str(page)])
    return code, json.loads(out.getvalue()), page.read_text()


def planned(capsys, *arguments):
    code = main(["plan", *map(str, arguments)])
    return code, capsys.readouterr().out


def test_json_has_every_figure_and_how_it_is_known(reported):
    code, plan, _ = reported
    assert (code, plan["composer3d"], plan["world_size"], plan["verdict"]) == (0, 1, 4, "fits")
    assert [(rank["rank"], rank["stands_for"]) for rank in plan["ranks"]] == [(0, 2), (2, 2)]
    for rank in plan["ranks"]:
        memory = rank["memory"]
        parts = ("parameters", "buffers", "optimizer", "gradients_at_peak", "activations_at_peak", "transient")
        assert sum(memory[name] for name in parts) == memory["peak"] > 0
        assert set(rank["provenance"]) >= {*memory, "collectives", "flops", "moment", "module", "verdict"}
        assert set(rank["provenance"].values()) <= {"exact", "traced", "modelled", "calibrated", "assumed"}
        assert set(rank["memory_bands"]) == set(memory)
        for name, (low, high) in rank["memory_bands"].items():
            assert low == high == memory[name] if rank["provenance"][name] == "exact" else low <= memory[name] <= high
        low, high = rank["memory_bands"]["total"]
        assert low < memory["total"] < high
    rows = {(row["op"], row["axis"], row["plugin"]): row for row in plan["ranks"][0]["collectives"]}
    assert rows["send", "pp", "pipeline"]["count"] == 8
    assert rows["send", "pp", "pipeline"]["bytes"] == 8 * 16 * 32 * 4
    assert rows["all_reduce", "world", None]["count"] == 3
    assert plan["pipeline"]["schedule"] == "1F1B" and plan["pipeline"]["in_flight"] == [2.0, 1.0]
    assert 0.05 < plan["pipeline"]["bubble"] < 0.25


GPUS = """composer3d = 1
mesh.dp_shard = 4
model = { use = "composer3d.models:llama", args = { dim = 32, num_layers = 1, num_heads = 2 } }
data = { use = "synthetic", seq_len = 4, vocab_size = 32 }
train = { steps = 1, global_batch = 4 }
sharding.fsdp2 = {}
communication.process_groups.axes.dp_shard = { min_ctas = 4 }
profiling.memory_snapshot.history = 100
precision.float8 = { emulate = false }
"""


@pytest.mark.parametrize("asked", [{"overrides": ["run.device=cuda"]}, {"hardware": "h100"}], ids=["stated", "named"])
def test_a_plan_is_of_the_run_s_device_and_not_of_this_machine_s(tmp_path, asked):
    """Options of GPUs alone are none of gloo's, whose reduce-scatters these plugins would replace."""
    path = tmp_path / "run.toml"
    path.write_text(GPUS)
    (rank,) = plan(path, **asked).to_json()["ranks"]
    rows = {row["op"]: row for row in rank["collectives"] if row["plugin"] == "fsdp2"}
    assert set(rows) == {"all_gather", "reduce_scatter"}
    assert all(row["wire_bytes"] == pytest.approx(3 / 4 * row["bytes"], abs=8) for row in rows.values())


@pytest.mark.parametrize(
    ("device", "asked"), [("cuda", {}), ("cpu", {"hardware": "h100"})], ids=["on-gpus", "of-cpus-asked-for-gpus"]
)
def test_an_axis_that_states_gloo_has_its_bytes_on_gpus_too(tmp_path, device, asked):
    """Over gloo a reduce-scatter is an all-reduce inside; other axes' and other collectives are a ring's."""
    path = tmp_path / "run.toml"
    groups = 'communication.process_groups = { reduce_scatter = "native", axes.dp_shard.backend = "gloo" }'
    kept = [line for line in GPUS.splitlines() if not line.startswith(("communication", "profiling", "precision"))]
    path.write_text("\n".join([*kept, groups, f'run.device = "{device}"']))
    (rank,) = plan(path, **asked).to_json()["ranks"]
    rows = {row["op"]: row for row in rank["collectives"] if row["plugin"] == "fsdp2"}
    sent = {op: row["wire_bytes"] / row["bytes"] for op, row in rows.items()}
    assert sent == {"all_gather": pytest.approx(0.75, abs=0.01), "reduce_scatter": pytest.approx(1.5, abs=0.01)}


def test_a_plan_for_cpus_says_that_gloo_s_reduce_scatters_send_twice_as_much(reported):
    _, found, _ = reported
    (row,) = [row for row in found["ranks"][0]["collectives"] if row["op"] == "reduce_scatter"]
    assert row["wire_bytes"] == row["bytes"]  # an all-reduce over two ranks
    assert any("gloo's reduce-scatter" in note for note in found["notes"])


def test_what_does_not_fit_ends_with_1(manifest, capsys):
    code, out = planned(capsys, manifest, "--memory", "512MiB")
    assert code == 1
    assert "does not fit [modelled]: rank 0 needs" in out
    assert re.search(r"rank 0 needs [0-9.]+ .iB of 512 MiB \([0-9.]+ .iB to [0-9.]+ .iB\)", out)


def test_one_screen_says_how_each_figure_is_known(manifest, reported, capsys):
    code, out = planned(capsys, manifest, "--memory", "80GiB")
    assert code == 0
    assert "fits [modelled]" in out and "exact" in out and "assumed" not in out.split("note:")[0]
    assert "pipeline 1F1B: bubble" in out and "note: no time: no hardware was named" in out
    assert len(out.splitlines()) < 50
    found = reported[1]["ranks"]
    assert len(re.findall(r"  peak (.+) to (.+) \[traced\], device (.+) to (.+) \[modelled\]", out)) == len(found)
    # Of the fullest rank: what is there at the peak, and all that it holds after the last backward.
    memory = found[0]["memory"]
    title = "memory of a rank at its peak: params, optim [exact], grads, activ, transient, peak [traced]"
    assert title in " ".join(out.split())
    assert f"gradients after the last backward {size(memory['gradients'])} [exact]" in out
    assert memory["gradients_at_peak"] < memory["gradients"]


def test_the_page_holds_everything_itself(reported):
    text = reported[2]
    # Of every rank a table: what is counted has no bounds, everything else has.
    cells = re.findall(r"<tr><td>([a-z ]+)</td><td>([^<]+)</td><td>([^<]*)</td><td>([a-z]+)</td></tr>", text)
    assert {name for name, *_ in cells} >= {"parameters", "activations", "peak", "reserved", "context", "total"}
    assert all(bool(within) == (known != "exact" and told != "0 B") for _, told, within, known in cells)
    assert re.findall(r'(?:src|href)="', text) == []
    assert text.count("overflow-x:auto") == 2, "nodes and schedule may be wider than a page"
    assert text.count("<rect") > 20 and "node 1" in text and "reduce_scatter" in text and "1F1B" in text


def test_a_difference_says_which_terms_moved(manifest, tmp_path, capsys):
    other = tmp_path / "other.toml"
    other.write_text(MANIFEST + "[scheduling.activation_checkpoint]\n")
    code, out = planned(capsys, manifest, "--diff", other, "--json")
    terms = {(term["group"], term["name"]): term for term in json.loads(out)["terms"]}
    assert code == 0
    assert terms["memory", "activations at peak"]["change"] < 0 < terms["compute", "FLOPs"]["change"]
    assert not any(group == "memory" and name in ("parameters", "optimizer") for group, name in terms)


def test_a_difference_has_the_terms_of_time_where_hardware_is_given(manifest):
    before, after = (plan(manifest, hardware=hardware).plan for hardware in ("v100-32", "h100"))
    terms = {t["name"]: t for t in difference_to_json(before, after)["terms"] if t["group"] == "time"}
    for name in ("step", "compute"):
        assert terms[name]["before"] == before.time[f"{name}_s"]["value"] != terms[name]["after"]
        assert terms[name]["after"] == after.time[f"{name}_s"]["value"]
    assert terms.keys() >= {"communication over dp_shard beside compute", "communication over world waited for"}
    assert re.search(r"\ntime +step +\S+ s -> +\S+ s  -\S+ s\n", show_difference(before, after))
    assert "time" not in {term.group for term in moved_terms(before, replace(after, time=None))}


def test_a_wrong_manifest_is_told_as_check_tells_it(manifest, capsys):
    manifest.write_text(MANIFEST.replace("[sharding.fsdp2]", "[sharding.fsdp2]\nzeero = 3"))
    assert main(["plan", str(manifest)]) == 2
    assert 'unknown key "zeero"; did you mean "zero"?' in capsys.readouterr().err


def test_a_rank_of_a_later_stage_is_planned_alone(manifest, capsys):
    code, out = planned(capsys, manifest, "--rank", "3", "--json")
    (rank,) = json.loads(out)["ranks"]
    assert (code, rank["rank"], rank["stands_for"], rank["coordinates"]["pp"]) == (0, 3, 1, 1)
    assert {(row["op"], row["axis"]) for row in rank["collectives"]} >= {("receive", "pp"), ("send", "pp")}


def test_a_rank_that_is_no_number_is_refused_with_what_there_is(manifest, capsys):
    assert main(["plan", str(manifest), "--rank", "best"]) == 2
    assert '"best" is not a whole number of at least 0, nor worst or all' in capsys.readouterr().err


def test_a_rank_that_there_is_not_is_refused(manifest, capsys):
    assert main(["plan", str(manifest), "--rank", "9"]) == 2
    assert "--rank 9: it is not in a world of 4 ranks" in capsys.readouterr().err


CLASSES = """
import torch
from torch import nn

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(48, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.stem(x.flatten(1))
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)

class Images:
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((3, 4, 4), 0.1 * index), index % 4
"""


def test_what_has_one_target_a_sample_is_planned(tmp_path, capsys):
    (tmp_path / "planned_classes.py").write_text(CLASSES)
    path = tmp_path / "classes.toml"
    path.write_text(
        'composer3d = 1\nmesh.dp_shard = 2\nmodel.use = "planned_classes:Classifier"\n'
        'data.use = "planned_classes:Images"\ntrain = { steps = 2, microbatch = 4, global_batch = 8 }\n'
        "[sharding.fsdp2]\n"
    )
    code, out = planned(capsys, path, "--json")
    (rank,) = json.loads(out)["ranks"]
    assert code == 0 and rank["flops"] == 4 * 2 * (2 * 48 * 16 + 3 * 3 * 16 * 16 + 3 * 16 * 4)


CP = ["--set", "mesh.pp=1", "--set", "scheduling.pipeline=false", "--set", "mesh.cp=2"]
CP += ["--set", "sharding.context_parallel={}", "--set", "data.seq_len=64"]


def test_the_choice_between_methods_of_attention_is_shown_with_its_figures(manifest, capsys):
    code, out = planned(capsys, manifest, *CP, "--json")
    notes = [note for note in json.loads(out)["notes"] if note.startswith("context_parallel")]
    assert code == 0
    # Of one sequence in float32 a quarter of queries, keys, values and outputs each way, 4 x 64 x 32 x 4 bytes.
    assert notes == [
        'context_parallel: method = "auto" is "ulysses" for 4 heads, 4 of keys, and 64 positions: '
        "16,384 bytes sent an attention, the fewest (gather 24,576, ring 32,768)"
    ]


@pytest.mark.slow
def test_the_choice_by_time_is_shown_with_its_figures(manifest, capsys):
    by_time = ["--set", 'sharding.context_parallel.hardware="h100"']
    _, out = planned(capsys, manifest, *CP, *by_time, "--json")
    (note,) = [note for note in json.loads(out)["notes"] if note.startswith("context_parallel")]
    assert " us of exchanges that no block hides (" in note
