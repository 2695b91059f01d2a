"""Flags of Megatron-LM about which another flag decides."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from composer3d.importing.megatron.mixtures import EXPERTS
from composer3d.importing.translation import Translation

__all__ = ["dependents"]

_DECIDED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "num_experts": (*EXPERTS, "expert_tensor_parallel_size"),
        "moe_router_load_balancing_type": ("moe_aux_loss_coeff",),
        "moe_router_score_function": ("moe_router_pre_softmax",),
        "moe_router_topk": ("moe_router_num_groups", "moe_router_group_topk"),
        "tensor_model_parallel_size": ("sequence_parallel", "expert_tensor_parallel_size"),
        "context_parallel_size": ("cp_comm_type", "hierarchical_context_parallel_sizes"),
        "expert_model_parallel_size": ("expert_tensor_parallel_size",),
        "pipeline_model_parallel_size": (
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "virtual_pipeline_model_parallel_size",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "pipeline_model_parallel_layout",
        ),
        "group_query_attention": ("num_query_groups",),
        "global_batch_size": ("rampup_batch_size", "train_samples"),
        "recompute_granularity": ("recompute_method", "recompute_num_layers", "recompute_modules"),
        "lr_decay_style": (
            "min_lr",
            "lr_decay_iters",
            "lr_decay_samples",
            "lr_wsd_decay_style",
            "lr_wsd_decay_iters",
            "lr_wsd_decay_samples",
        ),
        "lr_warmup_iters": ("lr_warmup_init", "lr_warmup_samples"),
        "lr_warmup_fraction": ("lr_warmup_init", "lr_warmup_iters", "lr_warmup_samples"),
        "lr_warmup_samples": ("lr_warmup_init",),
        "optimizer": ("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum", "muon_momentum"),
        "fp16": ("loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"),
        "save_interval": ("async_save",),
        "eval_interval": ("eval_iters",),
    }
)


def dependents(translation: Translation) -> None:
    """Judge flags by no guess where the one that decides about them is not known without running the script."""
    for decider, decided in _DECIDED.items():
        translation.unsettle(decider, decided)
