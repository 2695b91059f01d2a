"""Asynchronous tensor parallelism: exchanges of a sequence in chunks beside their products, and torch's own pass."""

from __future__ import annotations

import pytest
import torch
from support.family_models import batch_of, class_loss
from support.models import composed, mine, write_manifest
from support.tensor_parallel import built, on_one_rank, reference, steps_of, table

import composer3d
from composer3d import ManifestError, PluginError, torch_compat
from composer3d.testing import count_collectives, full, run_ranks

TIGHT = 1e-12
SP = "sequence_parallel = true\n"
ASYNC = '[communication.async_tensor_parallel]\nmethod = "decomposed"\n'


def tp(family, more="", degree=2, mesh=""):
    return f"[mesh]\ntp = {degree}\n{mesh}" + table(family, SP, more)


def auto(more=""):
    return f"[mesh]\ntp = 2\n[sharding.tensor_parallel]\n{SP}{more}"


# ---- numerics, collectives -------------------------------------------------------------------------------------------

CASES = {
    # Of two blocks, each with a gather and a sum in attention and feed-forward, as many in the backward: 8 of each.
    "llama": ("llama", tp("llama", ASYNC), 2),
    "biases": ("gpt2", tp("gpt2", ASYNC), 2),
    "a derived plan, three chunks": ("llama", auto(ASYNC + "chunks = 3\n"), 3),
    "more chunks than positions": ("gpt2", tp("gpt2", ASYNC + "chunks = 256\n"), None),
}
MORE = {
    "recomputed": ("llama", tp("llama", ASYNC + "[scheduling.activation_checkpoint]\n"), None),
    "compiled around": ("llama", tp("llama", ASYNC + '[scheduling.compile]\nbackend = "aot_eager"\n'), None),
    "exchanged sums": ("gpt2", tp("gpt2", ASYNC + "[communication.process_groups]\n"), None),
}


@pytest.fixture(scope="module")
def results():
    cases = [(family, text) for family, text, _ in CASES.values()]
    return [dict(zip(CASES, found, strict=True)) for found in run_ranks(steps_of, 2, cases)]


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_one_device(results, name):
    for rank in results:
        assert max(rank[name][:3]) < TIGHT


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case[2] is not None])
def test_collectives_are_in_chunks(results, name):
    """Those of the logits and of embeddings stay."""
    chunks = CASES[name][2]
    for rank in results:
        counted = rank[name][3]
        assert counted["all_gather", "tp"] == 8 * chunks + 3
        assert counted["all_to_all", "tp"] == 8 * chunks
        assert counted.get(("reduce_scatter", "tp"), 0) in (0, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_gradients_beside_other_plugins(name):
    family, text, _ = MORE[name]
    for (found,) in run_ranks(steps_of, 2, [(family, text)]):
        assert max(found[:3]) < TIGHT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("degree", "mesh", "more"),
    [
        (2, "dp_shard = 2\n[train]\nmicrobatch = 1\n[sharding.fsdp2]\n", ASYNC),
        (4, "", ASYNC + "chunks = 3\n"),
    ],
    ids=["fsdp2", "four ranks"],
)
def test_gradients_in_layouts(degree, mesh, more):
    for (found,) in run_ranks(steps_of, 4, [("llama", tp("llama", more, degree=degree, mesh=mesh))]):
        assert max(found[:3]) < TIGHT


def of_stages(text):
    """Return the largest relative error of this stage's gradients."""
    torch.set_default_dtype(torch.float64)
    _, wanted, _ = reference("llama")
    run = composer3d.compose(built("llama"), write_manifest(text), loss_fn=class_loss)
    inputs, targets = (mine(run, tensor) for tensor in batch_of("llama"))
    with run.step(0):
        run.forward_backward(inputs, target=targets)
        run.clip_grad_norm_(float("inf"))
        found = {name: full(p.grad) for name, p in run.named_parameters()}
    run.close()
    return max(float((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()) for name in found)


@pytest.mark.slow
def test_gradients_of_stages():
    mesh = "pp = 2\n[train]\nmicrobatch = 1\n[scheduling.pipeline]\n"
    assert max(run_ranks(of_stages, 4, tp("llama", ASYNC, mesh=mesh))) < TIGHT


def bytes_of(texts):
    """Return by manifest what travels over tp in the operators of two blocks."""
    found = []
    for text in texts:
        run = composer3d.compose(built("llama"), write_manifest(text), loss_fn=class_loss)
        inputs, targets = (mine(run, tensor) for tensor in batch_of("llama"))
        with run.step(0), count_collectives(run.mesh) as collectives:
            run.forward_backward(inputs, target=targets)
        totals = collectives.summary()
        run.close()
        found.append({op: num_bytes for (op, axis), (_, num_bytes) in totals.items() if axis == "tp"})
    return found


def test_as_many_bytes_travel_as_in_whole():
    whole, chunks = on_one_rank(bytes_of, 2, [tp("llama"), tp("llama", ASYNC)])
    assert chunks["all_gather"] == whole["all_gather"] and chunks["all_reduce"] == whole["all_reduce"]
    assert chunks["all_to_all"] + chunks["reduce_scatter"] == whole["reduce_scatter"]


# ---- state, plan -----------------------------------------------------------------------------------------------------


def rows_of(text):
    run = composer3d.compose(built("llama"), write_manifest(text), loss_fn=class_loss)
    rows = {row.name: row.fqns for row in run.plan if row.name.startswith("async_tensor_parallel")}
    names = sorted(name for name, _ in run.named_parameters())
    run.close()
    return rows, names


def test_rows_name_what_overlaps_and_parameters_keep_their_names():
    rows, names = on_one_rank(rows_of, 2, tp("llama", ASYNC))
    of = [f"layers.{layer}." for layer in (0, 1)]
    gathered = ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3")
    assert set(rows["async_tensor_parallel.gathered"]) == {each + name for each in of for name in gathered}
    summed = ("attention.wo", "feed_forward.w2")
    assert set(rows["async_tensor_parallel.summed"]) == {each + name for each in of for name in summed}
    assert names == sorted(name for name, _ in built("llama").named_parameters())


# ---- the compiler's pass ---------------------------------------------------------------------------------------------


def test_a_step_in_which_nothing_was_fused_is_an_error(monkeypatch):
    monkeypatch.setattr(torch_compat, "lacking_symmetric_memory", lambda device, num_ranks: None)
    text = tp("llama", '[communication.async_tensor_parallel]\n[scheduling.compile]\nbackend = "aot_eager"\n')
    fused = torch_compat.FusedPairs(found=4)
    monkeypatch.setattr(torch_compat, "micro_pipeline", lambda groups: (fused, lambda: None))

    def step():
        run = composer3d.compose(built("llama"), write_manifest(text), loss_fn=class_loss)
        inputs, targets = batch_of("llama")
        with run.step(0):
            run.forward_backward(inputs, target=targets)
            run.clip_grad_norm_(1.0)

    with pytest.raises(PluginError, match="has fused none of 4 exchanges of tp"):
        on_one_rank(step, 2)


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusal(text):
    with pytest.raises(ManifestError) as caught:
        composed(text)
    return str(caught.value).partition("run.toml")[2]


CONVERTED = """composer3d = 1
model.use = "composer3d.models:llama"
model.args = { dim = 64, num_layers = 2, num_heads = 4, ffn_dim = 128 }
data = { use = "synthetic", seq_len = 32, vocab_size = 64 }
train.steps = 2
run.device = "cpu"
[mesh]
tp = 2
[sharding.tensor_parallel]
sequence_parallel = true
[communication.async_tensor_parallel]
"""


@pytest.mark.parametrize("table", ["float8", "int8", "qat", "qlora", "mxfp8"])
def test_check_and_plan_say_that_converted_layers_leave_nothing_to_overlap(table, tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONVERTED + f"[precision.{table}]\n")
    said = [str(problem) for problem in composer3d.check(path).problems if problem.severity == "error"]
    assert said == [
        f"{path}:11:16: [communication.async_tensor_parallel] all 14 linear layers that exchange the sequence, as "
        f'"layers.0.attention.wq", are converted by {table}, whose products are no plain ones: there is nothing to '
        f"overlap; remove this table, or leave some of them out of {table}"
    ]
    with pytest.raises(ManifestError, match="there is nothing to overlap"):
        composer3d.plan(path)


def test_what_is_not_converted_overlaps(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(CONVERTED + '[precision.float8]\nexclude = ["layers.*.feed_forward"]\n')
    rows = {row["name"]: row["fqns"] for row in composer3d.check(path).report["plan"]}
    assert {name: fqns for name, fqns in rows.items() if name.startswith("async_tensor_parallel")} == {
        "async_tensor_parallel.gathered": [f"layers.{n}.feed_forward.{w}" for n in (0, 1) for w in ("w1", "w3")],
        "async_tensor_parallel.summed": [f"layers.{n}.feed_forward.w2" for n in (0, 1)],
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (auto('[communication.async_tensor_parallel]\nmethod = "micro_pipelined"\n'), "symmetric memory is of GPUs"),
        (auto(ASYNC).replace(SP, ""), "there is nothing to overlap"),
        ("[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n" + ASYNC, "no plugin of this manifest shards over tp"),
        ("[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n[sharding.tensor_parallel]\n" + ASYNC, "tp = 1: no rank exchanges"),
    ],
)
def test_refusals(text, said):
    assert said in on_one_rank(refusal, 2, text)
