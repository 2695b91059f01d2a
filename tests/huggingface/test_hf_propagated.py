"""transformers' code under tensor parallelism: what of it is propagated at every step, and what is given whole."""

from __future__ import annotations

from support.huggingface import config_of, token_sum
from support.models import write_manifest

import composer3d
from composer3d.huggingface.folder import import_transformers
from composer3d.testing import run_ranks


def codes(cases):
    from transformers import AutoModelForCausalLM

    found = []
    for family, settings in cases:
        model = AutoModelForCausalLM.from_config(config_of(family))
        text = write_manifest(f"[mesh]\ntp = 2\n[sharding.tensor_parallel]\n{settings}\n")
        run = composer3d.compose(model, text, loss_fn=token_sum)
        rows = {row.name.removeprefix("tensor_parallel."): row.fqns for row in run.plan}
        found.append([rows.get(label, ()) for label in ("sizes", "gathered", "propagated")])
        run.close()
    return found


SP = "sequence_parallel = true"
GPT2 = tuple(f"transformer.h.{layer}.attn" for layer in range(4))
LLAMA = tuple(f"model.layers.{layer}.self_attn" for layer in range(2))
CASES = [
    (("llama", ""), [(), (), ()]),
    (("gpt2", ""), [GPT2, (), ()]),
    (("gpt2", SP), [GPT2, (), ()]),
    # They read the length of the sequence before their projections, and are given all of it.
    *(((family, SP), [(), LLAMA, ()]) for family in ("llama", "qwen2", "qwen3", "mistral", "gemma")),
]


def test_what_is_propagated():
    # Once, and not in every rank.
    import_transformers()
    assert run_ranks(codes, 2, [case for case, _ in CASES])[0] == [expected for _, expected in CASES]
