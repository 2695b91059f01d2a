"""Models of transformers that know nothing of a sharded sequence: gradients equal one device's."""

from __future__ import annotations

import pytest
import torch
from support.huggingface import config_of
from support.sequence_models import LENGTH, VOCAB
from support.sequence_steps import context, padded_batch, sequence_steps, two_lengths
from torch import nn

from composer3d.huggingface.folder import import_transformers
from composer3d.testing import run_ranks
from composer3d.verification.arithmetic import in_double_precision

SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "num_layers": 2, "eos_token_id": 2}
CAPPED = {"sliding_window": 7, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}


class Logits(nn.Module):
    """A model of transformers, of which the loss takes logits."""

    def __init__(self, config, kind, implementation):
        super().__init__()
        import transformers

        config.use_cache = False
        config._attn_implementation = implementation
        self.model = getattr(transformers, kind)._from_config(config, dtype=torch.float64)
        self.model.train()

    def forward(self, input_ids, **given):
        return self.model(input_ids, **given).logits


def language(family, implementation, **changes):
    def factory():
        config = config_of(family)
        for name, value in {**SIZES, **changes}.items():
            setattr(config, name, value)
        kind = type(config).__name__.replace("TextConfig", "Config").replace("Config", "ForCausalLM")
        return Logits(config, kind.replace("GPT2ForCausalLM", "GPT2LMHeadModel"), implementation)

    return factory


def other(kind, implementation, **sizes):
    def factory():
        import transformers

        config = getattr(transformers, kind.partition("For")[0] + "Config")(**sizes)
        return Logits(config, kind, implementation)

    return factory


BERT = {"vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
BERT |= {"intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": VOCAB, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {"vocab_size": VOCAB, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "dropout": 0.0}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
BART |= {"max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def masked():
    """Padding of head and tail, as tokenizers state it."""
    (tokens,), _, targets = padded_batch()
    return (tokens,), {"attention_mask": (tokens != 0).long()}, targets


def packed():
    """Documents one after another in every sequence, as positions that begin anew state them."""
    (tokens,), _, targets = padded_batch()
    at = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(2, -1)
    return (tokens,), {"position_ids": at.contiguous()}, targets


CASES = {
    "llama": (language("llama", "sdpa"), padded_batch),
    "llama by hand": (language("llama", "eager"), padded_batch),
    "llama, packed": (language("llama", "sdpa"), packed),
    "qwen3, padded": (language("qwen3", "sdpa"), masked),
    "mistral": (language("mistral", "sdpa", sliding_window=7), padded_batch),
    "gemma2": (language("gemma3", "eager", **CAPPED), padded_batch),
    "gemma3, padded": (language("gemma3", "sdpa", **CAPPED), masked),
    "gpt2": (language("gpt2", "sdpa", n_layer=2), padded_batch),
    "gpt2 by hand": (language("gpt2", "eager", n_layer=2), padded_batch),
    "bloom": (language("bloom", "eager", n_layer=2), masked),
    "bert, padded": (other("BertForMaskedLM", "sdpa", **BERT), masked),
    "t5": (other("T5ForConditionalGeneration", "eager", **T5, pad_token_id=0), two_lengths),
    "bart": (other("BartForConditionalGeneration", "sdpa", **BART), two_lengths),
    "bart by hand": (other("BartForConditionalGeneration", "eager", **BART), two_lengths),
}


def in_double(cases):
    """Run steps in float64, also what models write as float32."""
    with in_double_precision():
        return sequence_steps(cases)


@pytest.fixture(scope="module", autouse=True)
def _imported():
    import_transformers()


def errors(degree, method, names):
    work = [(CASES[name][0], context(method, degree=degree), CASES[name][1]) for name in names]
    found = run_ranks(in_double, degree, work, timeout_s=600)
    return {
        (name, each[2]): each[:2]
        for result in found
        for name, each in zip(names, result, strict=True)
        if not max(each[:2]) <= 1e-12
    }


def test_gradients_equal_one_device():
    assert errors(2, "gather", list(CASES)) == {}


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ("ring", ["mistral", "bart"]),
        ("ulysses", ["gemma3, padded"]),
        pytest.param("ring", ["bert, padded"], marks=pytest.mark.slow),
        pytest.param("ulysses", ["llama", "llama, packed"], marks=pytest.mark.slow),
    ],
)
def test_rings_and_exchanged_heads(method, names):
    assert errors(2, method, names) == {}


def test_four_ranks():
    assert errors(4, "ring", ["qwen3, padded", "t5"]) == {}
