"""Tiny Hugging Face models, made on the spot, and a composed step of one beside transformers' own."""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F

import composer3d
from composer3d import Loss
from composer3d.huggingface import HuggingFaceModel, model_inputs, model_loss
from composer3d.testing import full, run_ranks
from support.models import largest, write_manifest

_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2}

_DEEPER = {"num_hidden_layers": 4}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def config_of(family):
    import transformers as t

    if family == "gpt2":
        sizes = {"vocab_size": 64, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}
        return t.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return {
        "llama": lambda: t.LlamaConfig(**_GROUPED),
        "qwen2": lambda: t.Qwen2Config(**_GROUPED, tie_word_embeddings=True),
        "qwen3": lambda: t.Qwen3Config(**_GROUPED, head_dim=8),
        "mistral": lambda: t.MistralConfig(**_GROUPED, sliding_window=8),
        "gemma": lambda: t.GemmaConfig(**_GROUPED, head_dim=8),
        "gemma3": lambda: t.Gemma3TextConfig(**_GROUPED, head_dim=8, sliding_window=8),
        "phi3": lambda: t.Phi3Config(**_GROUPED, resid_pdrop=0.0, embd_pdrop=0.0),
        "neox": lambda: t.GPTNeoXConfig(**_SIZES),
        "olmo2": lambda: t.Olmo2Config(**_GROUPED),
        "mixtral": lambda: t.MixtralConfig(**_GROUPED, num_local_experts=4),
        "qwen2_moe": lambda: t.Qwen2MoeConfig(
            **_GROUPED,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        ),
        "falcon": lambda: t.FalconConfig(**_SIZES, num_kv_heads=2, new_decoder_architecture=True),
        "bloom": lambda: t.BloomConfig(**_SIZES, n_layer=2, n_head=4),
        "opt": lambda: t.OPTConfig(**_SIZES, ffn_dim=64, word_embed_proj_dim=32, dropout=0.0),
        "deepseek_v3": lambda: t.DeepseekV3Config(
            **{**_SIZES, **_DEEPER, "num_key_value_heads": 4},
            **_EXPERTS,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            head_dim=8,
            n_routed_experts=4,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
        ),
        "qwen3_next": lambda: t.Qwen3NextConfig(
            **{**_GROUPED, **_DEEPER},
            **_EXPERTS,
            head_dim=8,
            num_experts=4,
            shared_expert_intermediate_size=16,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        "lfm2": lambda: t.Lfm2Config(
            **{**_GROUPED, **_DEEPER}, layer_types=["conv", "full_attention"] * 2, conv_L_cache=3, block_multiple_of=8
        ),
        "bamba": lambda: t.BambaConfig(
            **{**_GROUPED, **_DEEPER},
            mamba_n_heads=8,
            mamba_d_head=8,
            mamba_d_state=8,
            mamba_n_groups=1,
            mamba_chunk_size=4,
            attn_layer_indices=[1, 3],
        ),
        "minimax": lambda: t.MiniMaxConfig(
            **{**_GROUPED, **_DEEPER},
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            layer_types=["linear_attention", "full_attention"] * 2,
            block_size=4,
        ),
        # It makes a mask of its own, and looks at it.
        "biogpt": lambda: t.BioGptConfig(**_SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0),
    }[family]()


def make(family, folder, *, max_shard_size="5GB", dtype=torch.float32, **changes):
    """Write a model's folder as `save_pretrained` does, and return it."""
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    config = config_of(family)
    for key, value in changes.items():
        setattr(config, key, value)
    state = torch.get_rng_state()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    torch.set_rng_state(state)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def batch(num_sequences=4, seq_len=12):
    """Tokens and targets; sequences have different numbers of valid targets."""
    tokens = torch.randint(3, 60, (num_sequences, seq_len + 1), generator=torch.Generator().manual_seed(3))
    targets = tokens[:, 1:].clone()
    targets[0, 5:] = -100
    targets[2, 9:] = -100
    return tokens[:, :-1].contiguous(), targets


def token_sum(output, targets):
    total = F.cross_entropy(output.logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return Loss(sum=total, count=(targets != -100).sum())


def options_of(folder):
    """Return how experts are run: grouped matrix products know no float64."""
    config = json.loads((folder / "config.json").read_text())
    return (
        {"experts_implementation": "eager"}
        if config.keys() & {"num_experts", "num_local_experts", "n_routed_experts"}
        else {}
    )


def reference(folder, own_loss):
    """One device: transformers' model, a sequence at a time, as the runs split their batch.

    Norms of Gemma and the models' own losses compute in float32 whatever the weights are, so the split shows at 1e-7.
    """
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options_of(folder)).train()
    inputs, targets = batch()
    count = (targets != -100).sum()
    loss = torch.zeros((), dtype=torch.float64)
    for tokens, wanted in zip(inputs.split(1), targets.split(1), strict=True):
        if own_loss:
            total = model_loss(model(tokens, use_cache=False, **model_inputs(wanted)), wanted).sum
        else:
            total = token_sum(model(tokens, use_cache=False), wanted).sum
        (total / count).backward()
        loss += total.detach() / count.double()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss, gradients, sum(p.numel() * 4 for p in model.parameters())


def one_step(folder, text, own_loss=False):
    """Run on a rank: a composed step in float64 from float32 weights.

    Returns (loss error, largest relative gradient error, names without one device's gradient, share of bytes read).
    """
    torch.set_default_dtype(torch.float64)
    loss_1, gradients, num_bytes = reference(folder, own_loss)
    factory = HuggingFaceModel(folder, dtype="float64", config=options_of(folder))
    loss_fn = factory.own_loss() if own_loss else token_sum
    run = composer3d.compose(factory, write_manifest(f"{text}\n[train]\nmicrobatch = 1\n"), loss_fn=loss_fn)
    read = factory.files.num_bytes_read / num_bytes
    inputs, targets = (
        tensor.chunk(run.context.data_parallel_degree)[run.context.data_parallel_rank] for tensor in batch()
    )
    least = 1e-3 * max(float(g.abs().max()) for g in gradients.values())
    worst, wrong = 0.0, []
    with run.step(0):
        loss = run.forward_backward(inputs, target=targets, **(model_inputs(targets) if own_loss else {}))
        run.clip_grad_norm_(float("inf"))
        for name, parameter in run.named_parameters():
            if (parameter.grad is None) != (name not in gradients):
                wrong.append(name)
            elif parameter.grad is not None:
                found, expected = run.context.in_model_order(name, full(parameter.grad)), gradients[name]
                scale = max(float(expected.abs().max()), least)
                worst = largest([worst, float((found - expected).abs().max()) / scale])
    run.close()
    # The models' own losses are float32, and so is what comes of them.
    return float((loss - loss_1.to(loss.dtype)).abs()), worst, wrong, read


def steps_of(cases):
    """Run several steps on a rank: a world costs more than a step."""
    return [one_step(*case) for case in cases]


def results_of(cases, folders, world_size):
    """Return by case what every rank found; cases are (family, layout, whether the loss is the model's own)."""
    work = [(folders[family], text, own_loss) for family, text, own_loss, *_ in cases.values()]
    by_rank = run_ranks(steps_of, world_size, work, timeout_s=600)
    return {name: [results[index] for results in by_rank] for index, name in enumerate(cases)}


def assert_equal_to_one_device(results, most_read):
    """Assert that all ranks agree with one device, and that each read no more than its share of the weights' bytes."""
    for loss, gradients, wrong, read in results:
        assert loss < 1e-12
        assert gradients < 1e-12
        assert wrong == []
        assert 0 < read <= most_read
