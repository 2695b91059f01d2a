"""sequence_parallel where activations do not just go from one block to the next, and in evaluation."""

from __future__ import annotations

import pytest
import torch
from support.branching_models import FLOWS
from support.family_models import batch_of, class_loss
from support.models import Even, composed, mine, seeded, write_manifest
from support.selected_cases import selected
from support.shared_parts import SHARED_PARTS
from support.tensor_parallel import AUTO, built, on_one_rank, steps_of

import composer3d
from composer3d.propagation.dry_run.block_flow import Flow
from composer3d.testing import full, run_ranks

TIGHT = 1e-12
SP = "sequence_parallel = true\n"


def auto(settings="", more=""):
    return f"[mesh]\ntp = 2\n{more}\n{AUTO}{settings}\n"


MODELS = {**FLOWS, **SHARED_PARTS}
CASES = [(name, auto(settings)) for name in MODELS for settings in ("", SP)]


@pytest.fixture(scope="module")
def results(request):
    counted = {(name, SP) for name in selected(request, "name") & COUNTS.keys()}
    wanted = {(name, auto(settings)) for name, settings in selected(request, "name", "settings") | counted}
    cases = [case for case in CASES if case in wanted]
    return [dict(zip(cases, found, strict=True)) for found in run_ranks(steps_of, 2, cases)]


@pytest.mark.parametrize("settings", ["", SP])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_equal_one_device(results, name, settings):
    for rank in results:
        assert max(rank[name, auto(settings)][:3]) < TIGHT


# Regions that take the cut sequence, blocks before which it is cut and after which it is whole again, and tensors
# that are whole on every rank and of which each does other work with its features.
COUNTS = {
    # Attention and feed-forward; in the decoder also to the memory, whose gradient is added up once a layer.
    "Seq2Seq": (2 + 2 * 3, 2, 2, 2),
    "Torch": (2 * 2 + 2 * 3, 2, 2, 1),
    # One block between the first and the last, which take and give whole sequences.
    "Skipping": (3 * 2, 3, 0, 1),
    "Averaged": (3 * 2, 3, 0, 1),
    "Shared": (3 * 2, 3, 0, 1),
}


@pytest.mark.parametrize("name", COUNTS)
def test_collectives(results, name):
    regions, boundaries, memories, embeddings = COUNTS[name]
    for rank in results:
        counted = rank[name, auto(SP)][3]
        assert counted == {
            # Of regions one forward and one backward, as of boundaries; and the logits.
            ("all_gather", "tp"): 2 * regions + 2 * boundaries + 1,
            ("reduce_scatter", "tp"): 2 * regions,
            # Embeddings, memories, the gradient of what the head takes, and the core's own.
            ("all_reduce", "tp"): embeddings + memories + 1 + 2,
        }


FLOWED = [
    # (calls, edges, used elsewhere, blocks that can be cut; where it is cut, and put together)
    ("abc", {(0, 1), (1, 2)}, set(), "abc", "a", "c"),
    ("abc", {(0, 1), (1, 2)}, {1}, "abc", "ac", "bc"),
    ("abc", {(0, 1), (1, 2)}, set(), "ac", "ac", "ac"),
    # A block that is called twice has one way in, and one way out.
    ("aab", {(0, 1), (1, 2)}, set(), "ab", "ab", "ab"),
    ("abab", {(0, 1), (1, 2), (2, 3)}, set(), "ab", "a", "b"),
    # Two blocks take what one gives, or one of them cannot.
    ("abc", {(0, 1), (0, 2)}, set(), "abc", "a", "bc"),
    ("abc", {(0, 1), (0, 2)}, set(), "ab", "ab", "ab"),
]


@pytest.mark.parametrize("case", range(len(FLOWED)))
def test_boundaries(case):
    calls, edges, used, cut, split, gather = FLOWED[case]
    flow = Flow()
    flow.calls, flow.edges, flow.used = list(calls), edges, used
    assert flow.boundaries(set(cut)) == (set(split), set(gather))


def rows_of(names):
    found = {}
    for name in names:
        run = composer3d.compose(built(name), write_manifest(auto(SP)), loss_fn=class_loss)
        rows = {row.name.removeprefix("tensor_parallel."): row.fqns for row in run.plan}
        labels = ("split", "gather", "split_gather", "gathered", "propagated", "attention")
        found[name] = {label: rows[label] for label in labels if label in rows}
        run.close()
    return found


def layers(*numbers, of="layers", name=""):
    return tuple(f"{of}.{number}{name}" for number in numbers)


ROWS = {
    "Seq2Seq": {
        "split": ("decoder.0",),
        "gather": ("decoder.1",),
        "split_gather": ("encoder.0",),
        # Their code reads the length of the sequence, and is not propagated.
        "gathered": (
            "encoder.0.attention",
            "decoder.0.attention",
            "decoder.0.cross",
            "decoder.1.attention",
            "decoder.1.cross",
        ),
    },
    "Skipping": {"split_gather": layers(0, 1, 2), "gathered": layers(0, 1, 2, name=".attention")},
    "Torch": {
        "split": ("encoder.layers.0", "decoder.layers.0"),
        "gather": ("encoder.layers.1", "decoder.layers.1"),
        "attention": (
            *layers(0, 1, of="encoder.layers", name=".self_attn"),
            *(f"decoder.layers.{n}.{name}" for n in (0, 1) for name in ("self_attn", "multihead_attn")),
        ),
    },
    # A shared module under its first name, wherever it is called.
    "SharedFeed": {
        "split_gather": ("layers.0.attention", "layers.0.feed", "layers.1.attention"),
        "gathered": ("layers.0.attention", "layers.1.attention"),
    },
    # Heads are written out in evaluation alone, in which the code has to be propagated as well.
    "Evaluated": {"split": layers(0), "gather": layers(1), "propagated": layers(0, 1)},
}


def test_where_the_sequence_is_cut():
    assert on_one_rank(rows_of, 2, list(ROWS)) == ROWS


def evaluated(cases):
    """Return, by case, how far an evaluation during a run is from one device's."""
    torch.set_default_dtype(torch.float64)
    found = []
    for name, text in cases:
        model = built(name).eval()
        inputs, targets = batch_of(name)
        run = composer3d.compose(built(name), write_manifest(text), loss_fn=class_loss)
        own, wanted = (mine(run, tensor) for tensor in (inputs, targets))
        with run.step(0):
            run.forward_backward(own, target=wanted)
        loss = run.evaluate(own, target=wanted).loss
        with run.step(1):
            run.forward_backward(own, target=wanted)
        with torch.no_grad():
            total, count = class_loss(model(inputs), targets)
        found.append(float((loss - total / count).abs()))
        run.close()
    return found


EVALUATED = [(name, auto(settings)) for name in ("Evaluated", "Torch", "Seq2Seq") for settings in ("", SP)]


def test_evaluation_during_a_run_equals_one_device():
    for errors in run_ranks(evaluated, 2, EVALUATED):
        assert max(errors) < TIGHT


def drawn(cases):
    """Return gradients of a step with dropout, and whether blocks are propagated."""
    torch.set_default_dtype(torch.float64)
    found = []
    for settings, again in cases:
        options = {"dropout": 0.3, "again": again}
        run = composer3d.compose(built("Recomputed", options), write_manifest(auto(settings)), loss_fn=class_loss)
        inputs, targets = (mine(run, tensor) for tensor in batch_of("Recomputed"))
        propagated = {row.name: row.fqns for row in run.plan}.get("tensor_parallel.propagated", ())
        with run.step(0):
            run.forward_backward(inputs, target=targets)
            found.append(({name: full(p.grad) for name, p in run.named_parameters()}, propagated))
        run.close()
    return found


def test_what_the_models_code_recomputes_is_propagated_again_and_draws_the_same():
    cases = [(settings, again) for settings in ("", SP) for again in (False, True)]
    for found in run_ranks(drawn, 2, cases):
        assert all(propagated == ("layers.0", "layers.1") for _, propagated in found)
        for (plain, _), (recomputed, _) in zip(found[::2], found[1::2], strict=True):
            assert plain.keys() == recomputed.keys()
            assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


class Chosen(Even):
    """Blocks of which each forward leaves some out."""

    kept = (True,) * 4

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer, is_kept in zip(self.layers, self.kept, strict=True):
            if is_kept:
                x = layer(x)
        return self.out(self.norm(x)) + 0.0


def skipped(rows):
    """Run a step for each choice of blocks; return what ended it, if anything did."""
    torch.set_default_dtype(torch.float64)
    tokens, found = torch.arange(4)[None], []
    run = composed(f"[mesh]\ntp = 2\n{AUTO}{SP}", seeded(Chosen))
    for number, row in enumerate(rows):
        Chosen.kept = row
        try:
            with run.step(number):
                run.forward_backward(tokens, target=tokens)
            found.append("")
        except composer3d.StepError as error:
            found.append(str(error))
    run.close()
    return found


def test_a_forward_that_leaves_out_where_the_sequence_is_sharded_or_gathered_is_refused():
    rows = [[1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 1, 1], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    for right, inner, first, last, none, again in run_ranks(skipped, 2, rows):
        assert right == inner == none == again == ""
        assert first.startswith('"layers.1" was called, and "layers.0", which shards the sequence, was not called in')
        assert last.startswith('the forward of the model ended, and "layers.3", which gathers the sequence, was not')
