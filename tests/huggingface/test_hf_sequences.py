"""Families of transformers without attention, or with more than it, over a sequence that is sharded."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.sequence_models import VOCAB
from support.sequence_steps import context, padded_batch, sequence_step
from torch import nn

from composer3d.testing import run_ranks
from composer3d.verification.arithmetic import in_double_precision

SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32}
FAMILIES = {
    "Mamba": {"state_size": 4, "time_step_rank": 2},
    "FalconMamba": {"state_size": 4, "time_step_rank": 2},
    "Rwkv": {"attention_hidden_size": 16, "context_length": 64},
    "Lfm2": {**HEADS, "layer_types": ["conv", "full_attention"]},
    "RecurrentGemma": {
        **HEADS, "num_key_value_heads": 1, "lru_width": 16, "attention_window_size": 8,
        "block_types": ["recurrent", "attention"],
    },
    "Gemma2": {**HEADS, "head_dim": 8, "sliding_window": 8, "attn_implementation": "eager"},
    "Mamba2": {"num_heads": 8, "head_dim": 4, "state_size": 8, "n_groups": 2, "chunk_size": 8},
}  # fmt: skip
# Mamba2's scan mixes float32 with what it is given, so that it cannot run in float64 throughout: what ranks sum in
# another order is rounded to float32, and a gradient is a sum of a few such parts.
ROUNDED = 8 * torch.finfo(torch.float32).eps


class Logits(nn.Module):
    """The logits alone of a model without a cache."""

    def __init__(self, family):
        super().__init__()
        import transformers

        config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
        self.model = getattr(transformers, f"{family}ForCausalLM")(config)

    def forward(self, tokens):
        return self.model(input_ids=tokens, use_cache=False).logits


def steps(families):
    """Run a step of each; the families' code computes in float32 whatever it is given, so that is float64 here."""
    found = []
    for family in families:
        with in_double_precision():
            found.append(sequence_step(partial(Logits, family), context(), padded_batch))
    return found


def steps_in_float32(families):
    """Run a step of each, the code's float32 left as it is."""
    return [sequence_step(partial(Logits, family), context(), padded_batch) for family in families]


def assert_equal_to_one_device(families, run=steps, tolerance=1e-12):
    """Compare a step of each family on all ranks; return the collectives over cp by family."""
    ranks = run_ranks(run, 2, families, timeout_s=600)
    for found in ranks:
        wrong = [
            (name, *each[:3]) for name, each in zip(families, found, strict=True) if not max(each[:2]) <= tolerance
        ]
        assert wrong == []
    return [{name: each[3] for name, each in zip(families, found, strict=True)} for found in ranks]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_other_families_equal_one_device():
    assert_equal_to_one_device(["FalconMamba", "RecurrentGemma", "Gemma2"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_scan_in_float32_is_off_by_its_rounding():
    assert_equal_to_one_device(["Mamba2"], steps_in_float32, ROUNDED)


# A convolution, or a shift by one token: neighbours are exchanged in the forward, and in the backward.
EXCHANGES = {"Lfm2": 2, "Mamba": 2 * 2, "Rwkv": 2 * 2 * 2}


@pytest.mark.parametrize(
    "family", ["Mamba", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Rwkv", "Lfm2"))]
)
@pytest.mark.filterwarnings("ignore")
def test_families_equal_one_device(family):
    for counted in assert_equal_to_one_device([family]):
        assert counted[family]["all_to_all"][0] == EXCHANGES[family]
