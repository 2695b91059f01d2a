from __future__ import annotations

import pytest
import torch
from support.block_habits import MODELS
from support.family_models import FAMILIES, batch_of, class_loss
from support.foreign_blocks import Scaled
from support.models import write_manifest
from support.tensor_parallel import AUTO, built, errors, on_one_rank, one_step, reference, steps_of
from torch import nn

import composer3d
from composer3d import ManifestError
from composer3d.testing import run_ranks

TIGHT = 1e-12
SP, LP = "sequence_parallel = true", "loss_parallel = true"


def auto(degree=2, settings="", more=""):
    return f"[mesh]\ntp = {degree}\n{more}\n{AUTO}{settings}\n"


def rows(name, text):
    run = composer3d.compose(built(name), write_manifest(text), loss_fn=class_loss)
    found = {row.name.removeprefix("tensor_parallel."): row.fqns for row in run.plan}
    run.close()
    return found


def plans(cases):
    """Return which modules are cut how; how the model's code is run beside that is another test's."""
    return [
        {style: fqns for style, fqns in rows(name, text).items() if style not in ("sizes", "propagated")}
        for name, text in cases
    ]


# ---- numerics --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names", [["llama", "gpt2"], list(FAMILIES), list(MODELS)], ids=["two families", "families", "blocks"]
)
def test_gradients_equal_one_device(names):
    cases = [(name, auto()) for name in names]
    for results in run_ranks(steps_of, 2, cases):
        assert {
            name: max(result[:3]) for (name, _), result in zip(cases, results, strict=True) if max(result[:3]) > TIGHT
        } == {}


def test_gradients_with_sequence_parallel():
    names = ["llama", "gpt2", "bert", "vit", "GroupedNormed", "Parallel", "Joined", "Interleaved", "Einsum"]
    cases = [(name, auto(2, f"{SP}\n{LP}")) for name in names]
    for results in run_ranks(steps_of, 2, cases):
        assert max(max(result[:3]) for result in results) < TIGHT


# Tokens that are mixed by weights, no list of blocks, blocks that return something whole, 61 tokens.
WHOLE = [("mixer", {}), ("Vectors", {}), ("Convolutions", {}), ("vit", {"patch": 2})]


def test_a_sequence_that_cannot_be_sharded_stays_whole():
    cases = [(name, auto(2, SP), options) for name, options in WHOLE]
    for results in run_ranks(steps_of, 2, cases):
        assert max(max(result[:3]) for result in results) < TIGHT


@pytest.mark.slow
def test_gradients_with_four_ranks_and_data_parallelism():
    cases = [(name, auto(4)) for name in ("gpt2", "vit", "Interleaved")]
    cases += [(name, auto(2, SP, "[sharding.fsdp2]")) for name in ("gpt2", "GroupedNormed")]
    for results in run_ranks(steps_of, 4, cases):
        assert max(max(result[:3]) for result in results) < TIGHT


# ---- collectives -----------------------------------------------------------------------------------------------------


def test_collectives():
    """The same as of a plan that is written, but that the sequence is cut at the first block, not at the embedding."""
    layers, control = 2, 2
    plain, sequence = run_ranks(steps_of, 2, [("gpt2", auto()), ("gpt2", auto(2, SP))])[0]
    assert plain[3] == {("all_reduce", "tp"): 2 * (2 * layers + 1) + control, ("all_gather", "tp"): 1}
    assert sequence[3] == {
        # Two a layer and direction, the whole sequence after the last block and its gradient before the first; logits.
        ("all_gather", "tp"): 2 * (2 * layers + 1) + 1,
        ("reduce_scatter", "tp"): 2 * 2 * layers,
        # The embedding, and the gradient of what the head takes.
        ("all_reduce", "tp"): 2 + control,
    }


# ---- the plan --------------------------------------------------------------------------------------------------------


def layers(*names, blocks="layers"):
    return tuple(f"{blocks}.{layer}.{name}" for layer in range(2) for name in names)


PLANS = {
    "llama": {
        "vocab": ("tok_embeddings",),
        "head": ("output",),
        "colwise": layers("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1", "feed_forward.w3"),
        "rowwise": layers("attention.wo", "feed_forward.w2"),
    },
    "gpt2": {
        "vocab": ("wte",),
        "head": ("lm_head",),
        "colwise": layers("mlp.c_fc", blocks="h"),
        "packed_colwise": layers("attn.c_attn", blocks="h"),
        "rowwise": layers("attn.c_proj", "mlp.c_proj", blocks="h"),
    },
    "bert": {
        "vocab": ("word",),
        "head": ("decoder",),
        "colwise": layers("attention.query", "attention.key", "attention.value", "intermediate", blocks="layer"),
        "rowwise": layers("attention.dense", "output", blocks="layer"),
    },
    "vit": {
        "head": ("head",),
        "colwise": layers("mlp.0", blocks="blocks"),
        "packed_colwise": layers("attn.qkv", blocks="blocks"),
        "rowwise": layers("attn.proj", "mlp.2", blocks="blocks"),
    },
    "mixer": {
        "head": ("head",),
        "colwise": layers("token_up", "channel_up", blocks="blocks"),
        "rowwise": layers("token_down", "channel_down", blocks="blocks"),
    },
    "GroupedNormed": {
        "vocab": ("emb",),
        "head": ("out",),
        "colwise": layers("q"),
        "packed_colwise": layers("kv", "gate_up"),
        "local": layers("qn", "kn"),
        "rowwise": layers("o", "down"),
    },
    "Joined": {
        "vocab": ("emb",),
        "head": ("out",),
        "colwise": layers("q", "k", "v", "up"),
        "packed_rowwise": layers("down"),
    },
    "WholeNorm": {
        "vocab": ("emb",),
        "head": ("out",),
        "colwise": layers("k", "v"),
        "packed_colwise": layers("up"),
        "replicate": layers("q"),
        "rowwise": layers("o", "down"),
    },
}


def test_plans():
    found = on_one_rank(plans, 2, [(name, auto()) for name in PLANS])
    assert dict(zip(PLANS, found, strict=True)) == PLANS


def test_the_sequence_is_cut_between_the_first_block_and_the_last():
    (found,) = on_one_rank(plans, 2, [("llama", auto(2, SP))])
    assert found["split"] == ("layers.0",) and found["gather"] == ("layers.1",)
    assert found["sequence"] == layers("attention_norm", "attention_dropout", "ffn_norm", "ffn_dropout")


def test_the_plan_says_where_the_sequence_stays_whole():
    found = on_one_rank(plans, 2, [("mixer", auto(2, SP)), ("llama", auto(2, SP)), ("llama", auto())])
    assert [each.get("whole sequence") for each in found] == [("",), None, None]
    assert found[0] == {**PLANS["mixer"], "whole sequence": ("",)}


def codes(cases):
    return [{label: rows(name, text).get(label, ()) for label in ("sizes", "propagated")} for name, text in cases]


CODES = [
    (("llama", auto()), {}),
    (("llama", auto(2, SP)), {}),
    (("mixer", auto()), {}),
    # Attributes hold this rank's number of heads.
    (("bert", auto()), {"sizes": layers("attention", blocks="layer")}),
    (("bert", auto(2, SP)), {"sizes": layers("attention", blocks="layer")}),
    (("GroupedNormed", auto()), {"sizes": ("layers.0", "layers.1")}),
    # Sizes computed from whole activations; the rest of the block is not propagated.
    (("gpt2", auto()), {"propagated": layers("attn", blocks="h")}),
    (("gpt2", auto(2, SP)), {"propagated": layers("attn", blocks="h")}),
    (("Alibi", auto()), {"propagated": ("layers.0", "layers.1")}),
]


def test_what_is_done_to_the_models_code_is_in_the_plan():
    found = on_one_rank(codes, 2, [case for case, _ in CODES])
    assert found == [{"sizes": (), "propagated": (), **expected} for _, expected in CODES]


# ---- declared plans --------------------------------------------------------------------------------------------------


class Config:
    base_model_tp_plan = {"h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise", "h.*.mlp.experts": "rowwise"}


OWN = {"h.*.mlp.c_fc": "colwise", "h.*.mlp.c_proj": "rowwise"}
UNKNOWN = (
    'the model declares the style "diagonal" for "h.*.ln_1", which is not one of: colwise, colwise_gather_output, '
    "colwise_rep, embedding_rowwise, head, local, mla_kv_a_proj, packed_colwise, packed_rowwise, replicate, "
    "replicated, replicated_with_grad_allreduce, rowwise, sequence, sequence_parallel, vocab; write the plan"
)


def declaring(own, base=None):
    """Return the plan's rows, or what is refused, and the largest error of a gradient."""
    torch.set_default_dtype(torch.float64)
    model = built("gpt2")
    if base is None:
        model.tp_plan = own
    else:
        model.config, model._tp_plan = Config(), own
        model.config.base_model_tp_plan = {**Config.base_model_tp_plan, **base}
    try:
        run = composer3d.compose(model, write_manifest(auto()), loss_fn=class_loss)
    except ManifestError as error:
        return str(error).partition("] ")[2]
    found = {row.name.removeprefix("tensor_parallel."): row.fqns for row in run.plan}
    _, gradients, _ = reference("gpt2")
    inputs, targets = batch_of("gpt2")
    with run.step(0):
        run.forward_backward(inputs, target=targets)
        assert errors(run, gradients) < TIGHT
    run.close()
    return found


PAIR = {"colwise": layers("mlp.c_fc", blocks="h"), "rowwise": layers("mlp.c_proj", blocks="h")}
# A style of Hugging Face's that is not known here: the code tells as much.
DERIVED = {
    "colwise": layers("mlp.c_fc", blocks="h"),
    "propagated": layers("attn", blocks="h"),
    "head": ("lm_head",),
    "packed_colwise": layers("attn.c_attn", blocks="h"),
    "rowwise": ("h.0.attn.c_proj", "h.0.mlp.c_proj", "h.1.attn.c_proj", "h.1.mlp.c_proj"),
    "vocab": ("wte",),
}
DECLARED = [
    ((OWN,), PAIR),
    (({"lm_head": "colwise_rep"}, {}), {**PAIR, "head": ("lm_head",), "vocab": ("wte",)}),
    (
        ({}, {"h.*.ln_1": "sequence_parallel", "h.*.ln_2": "replicate"}),
        {**PAIR, "sequence": layers("ln_1", blocks="h"), "replicate": layers("ln_2", blocks="h")},
    ),
    (({**OWN, "h.*.ln_1": "diagonal"},), UNKNOWN),
    (({}, {"h.*.ln_1": "diagonal"}), DERIVED),
    # Nor does one of theirs stop a run that does not fit the code.
    (({}, {"h.*.attn.c_attn": "colwise", "h.*.attn.c_proj": "rowwise"}), DERIVED),
    (
        ({**OWN, "h.*.mlp.gate": "colwise"},),
        'the pattern "h.*.mlp.gate" matches nothing in the model; did you mean "h.*.mlp"?',
    ),
    (
        ({"h.*.attn.c_attn": "colwise", "h.*.attn.c_proj": "rowwise"},),
        'the plan does not fit the model\'s code: "GPT2Block": split on sharded features: 0:16 of 48 is no whole part '
        "(family_models.py:28)",
    ),
]


@pytest.mark.parametrize("case", range(len(DECLARED)))
def test_what_a_model_declares_is_taken(case):
    given, expected = DECLARED[case]
    assert run_ranks(declaring, 2, *given)[0] == expected


# ---- refusals --------------------------------------------------------------------------------------------------------


def refusals(cases):
    found = []
    for name, text, *options in cases:
        with pytest.raises(ManifestError) as caught:
            composer3d.compose(built(name, *options), write_manifest(text), loss_fn=class_loss)
        found.append(str(caught.value).partition("run.toml:")[2].partition("] ")[2])
    return found


REFUSALS = [
    (
        ("Convolutions", auto(5)),
        'no plan can be derived for this model: "fc": its 12 rows do not divide by tp = 5; write it',
    ),
]


def test_refusals():
    found = on_one_rank(refusals, 5, [case for case, _ in REFUSALS])
    assert found == [message for _, message in REFUSALS]


def test_one_rank_needs_no_plan():
    assert run_ranks(one_step, 1, "gpt2", auto(1))[0][2] < TIGHT


class Worded(nn.Module):
    """A vocabulary that does not divide, or rows that are rescaled."""

    def __init__(self, vocab=12, max_norm=None):
        super().__init__()
        self.words, self.out = nn.Embedding(vocab, 16, max_norm=max_norm), nn.Linear(16, vocab)
        self.layers = nn.ModuleList(Scaled(16) for _ in range(2))

    def forward(self, tokens):
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def styles_outside(options):
    run = composer3d.compose(lambda: Worded(**options), write_manifest(auto()), loss_fn=class_loss)
    rules = next(iter(run.context.state.values())).rules
    run.close()
    return [rules[name].style for name in ("words", "out")]


@pytest.mark.parametrize(
    ("options", "styles"),
    [
        ({}, ["vocab", "head"]),
        ({"vocab": 13}, ["replicate", "replicate"]),
        ({"max_norm": 1.0}, ["replicate", "head"]),
    ],
)
def test_the_plan_says_that_a_vocabulary_stays_whole(options, styles):
    assert on_one_rank(styles_outside, 2, options) == styles


def rescaled():
    text = auto() + "[sharding.tensor_parallel.plan]\n" + '"layers.*.up" = "colwise"\n"layers.*.down" = "rowwise"\n'
    with pytest.raises(ManifestError) as caught:
        composer3d.compose(lambda: Worded(max_norm=1.0), write_manifest(text + 'words = "vocab"'), loss_fn=class_loss)
    return str(caught.value).partition("] ")[2]


def test_an_embedding_that_rescales_its_rows_cannot_be_cut():
    assert run_ranks(rescaled, 2)[0] == (
        '"words" has max_norm, which rescales its rows as they are looked up, on each rank others than on the next, so '
        'it cannot be "vocab"; write "replicate"'
    )
