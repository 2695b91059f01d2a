"""Hugging Face models in every layout: losses and gradients of one device, and no rank reads more than its part."""

from __future__ import annotations

import pytest
from support.huggingface import assert_equal_to_one_device, make, results_of
from support.selected_cases import selected

from composer3d.huggingface.folder import import_transformers

FSDP = "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"
EP = "[mesh]\ndp_shard = 2\nep = 2\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"
DDP = "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"
TP = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"
SEQUENCE = TP + "sequence_parallel = true\n"
LOSS = TP + "loss_parallel = true\n"
PP = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n'
INTERLEAVED = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "Interleaved1F1B"\n'
RECOMPUTED = TP + "[scheduling.activation_checkpoint]\n"
TENSOR_PIPELINE = '[mesh]\npp = 2\ntp = 2\n[sharding.tensor_parallel]\n[scheduling.pipeline]\nschedule = "1F1B"\n'
TENSOR_SHARDS = "[mesh]\ndp_shard = 2\ntp = 2\n[sharding.tensor_parallel]\n[sharding.fsdp2]\n"

# (family, layout, whether the loss is the model's own, share of the weights' bytes that a rank may read)
CASES = {
    "llama-fsdp": ("llama", FSDP, False, 0.5),
    "llama-ddp": ("llama", DDP, False, 1.0),
    "llama-tp": ("llama", TP, False, 0.51),
    "llama-sequence": ("llama", SEQUENCE, False, 0.51),
    "llama-loss": ("llama", LOSS, False, 0.51),
    "llama-pp": ("llama", PP, False, 0.51),
    "llama-recomputed": ("llama", RECOMPUTED, False, 0.51),
    "llama-own-loss-fsdp": ("llama", FSDP, True, 0.5),
    "llama-own-loss-pp": ("llama", PP, True, 0.51),
    "gpt2-tp-fused": ("gpt2", TP, False, 0.54),
    "gpt2-interleaved-tied": ("gpt2", INTERLEAVED, False, 0.55),
    "gpt2-own-loss-tp": ("gpt2", TP, True, 0.54),
    "qwen2-tied-tp": ("qwen2", TP, False, 0.51),
    "qwen3-norms-of-heads-tp": ("qwen3", TP, False, 0.51),
    "mistral-window-pp": ("mistral", PP, False, 0.51),
    "gemma-fsdp": ("gemma", FSDP, False, 0.5),
    "gemma-tp": ("gemma", TP, False, 0.51),
    "gemma3-two-windows-pp": ("gemma3", PP, False, 0.6),
    "phi3-fused-tp": ("phi3", TP, False, 0.51),
    "neox-interleaved-heads-tp": ("neox", TP, False, 0.6),
    "olmo2-tp": ("olmo2", TP, False, 0.66),
    "falcon-fused-grouped-tp": ("falcon", TP, False, 0.53),
    "bloom-fused-interleaved-tp": ("bloom", TP, False, 0.67),
    "opt-tied-pp": ("opt", PP, False, 0.61),
    "biogpt-own-mask-pp": ("biogpt", PP, False, 0.61),
    "biogpt-own-mask-tp": ("biogpt", TP, False, 0.57),
    "qwen2-moe-pp": ("qwen2_moe", PP, False, 0.51),
    "mixtral-pp": ("mixtral", PP, False, 0.51),
    "mixtral-ep": ("mixtral", EP, False, 0.51),
    "qwen2-moe-ep": ("qwen2_moe", EP, False, 0.51),
}
CASES_OF_4 = {
    "llama-pp-tp": ("llama", TENSOR_PIPELINE, False, 0.26),
    "llama-fsdp-tp": ("llama", TENSOR_SHARDS, False, 0.26),
    "gpt2-fsdp-tp": ("gpt2", TENSOR_SHARDS, False, 0.28),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory, request):
    import_transformers()
    root = tmp_path_factory.mktemp("models")
    families = {{**CASES, **CASES_OF_4}[name][0] for name in selected(request, "name")}
    # Several files and an index, as large models have.
    return {family: make(family, root / family, max_shard_size="60KB") for family in sorted(families)}


@pytest.fixture(scope="module")
def results(folders, request):
    wanted = selected(request, "name")
    found = {}
    for world_size, cases in ((2, CASES), (4, CASES_OF_4)):
        chosen = {name: case for name, case in cases.items() if name in wanted}
        found |= results_of(chosen, folders, world_size) if chosen else {}
    return found


@pytest.mark.parametrize("name", [*CASES, *CASES_OF_4])
def test_losses_and_gradients_equal_one_device_and_each_rank_reads_its_part(name, results):
    assert_equal_to_one_device(results[name], {**CASES, **CASES_OF_4}[name][3])
