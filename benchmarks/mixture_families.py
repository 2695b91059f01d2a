"""Every mixture of experts that transformers has, with its experts over two ranks, beside one device.

A family is a small model of it, made from its configuration, in float64, and one step of two sequences a rank, some
of whose targets are padding. It is `equal` where the loss and all gradients are one device's (relative 1e-12),
`refused` where composer3d says before the first step why it cannot be, `absent` where transformers makes no model of
these sizes, and else `wrong`. Rows are written to benchmarks/results/mixture_families_LAYOUT.json as they are found, in
place of earlier ones of the same family.

Usage: python benchmarks/mixture_families.py [--only 'deepseek*' ...] [--layout ep2|ep2_tp2|ep2_cp2] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.nn.functional as F
from harness import conditions, fail, say
from torch import Tensor, nn

import composer3d
from composer3d import Loss
from composer3d.huggingface.folder import import_transformers
from composer3d.testing import full, run_ranks
from composer3d.verification.arithmetic import in_double_precision

RESULTS = Path(__file__).resolve().parent / "results"
TIGHT = 1e-12
LAYOUTS = {
    "ep2": "[mesh]\nep = 2\ndp_shard = 2\n",
    "ep2_tp2": "[mesh]\nep = 2\ndp_shard = 2\ntp = 2\n[sharding.tensor_parallel]\n",
    "ep2_cp2": "[mesh]\nep = 2\ncp = 2\n[sharding.context_parallel]\n",
}
SEQ_LEN, VOCAB_SIZE = 8, 64

# Of a configuration, those that it has; every name of a size of attention, of experts and of layers.
SIZES: Mapping[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 32),
    **dict.fromkeys(("intermediate_size", "intermediate_size_mlp", "ffn_hidden_size", "d_ff"), 32),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 32),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size", "share_expert_dim"), 16),
    **dict.fromkeys(("expert_hidden_dim", "moe_hidden_size", "moe_latent_size", "router_hidden_size"), 16),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "mamba_expand"), 2),
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("head_dim", "kv_channels", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 8),
    "qk_head_dim": 16,
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "o_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 0),
    **dict.fromkeys(("encoder_sparse_step", "decoder_sparse_step", "num_sparse_encoder_layers"), 1),
    **dict.fromkeys(("num_sparse_decoder_layers", "expert_layer_period", "interleave_moe_layer_step"), 1),
    **dict.fromkeys(("dropout", "attention_dropout", "dropout_rate", "activation_dropout", "moe_token_dropout"), 0.0),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "router_jitter_noise", "input_jitter_noise"), 0.0),
    "mlp_layer_types": ["sparse"] * 2,
    "mlp_only_layers": [],
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCAB_SIZE),
    "max_position_embeddings": 64,
    **dict.fromkeys(("pad_token_id", "decoder_start_token_id"), 0),
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a family needs beside them.
MORE: Mapping[str, Mapping[str, Any]] = {
    "doge": {"is_moe": True, "num_experts": 16},
    "dbrx": {
        **{"n_heads": 4, "n_layers": 2, "max_seq_len": 64},
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "jamba": {"expert_layer_offset": 0},
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]}},
    "glm5_next_text": {"qk_rope_head_dim": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "gemma4_text": {"enable_moe_block": True, "top_k_experts": 2, "global_head_dim": 8},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 4},
    "longcat_flash": {"zero_expert_num": 2},  # of 256 among 4 with weights, tokens would choose these alone
    "zaya": {"num_experts_per_tok": 1},
    "deepseek_v4": {"mlp_layer_types": ["moe"] * 2},
    "dots3_note": {"pad_token_id": 0},
}


@dataclass
class Logits:
    """What a model with a head returns."""

    logits: Tensor


class Headed(nn.Module):
    """A model of transformers that has no head, with one."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config
        self.head = nn.Linear(model.config.hidden_size, VOCAB_SIZE, bias=False, dtype=torch.float64)

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Any:
        """Return logits of every next token."""
        hidden = self.model(input_ids=input_ids, use_cache=use_cache).last_hidden_state
        return Logits(self.head(hidden))


def families() -> dict[str, str]:
    """Return model types of which transformers has a language model whose source speaks of experts, with its class.

    Of a source with several those with a head come first; else it is the model of a text configuration.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto as auto

    found: dict[str, tuple[str, str]] = {}
    headed = {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES}
    bare = {name: cls for name, cls in auto.MODEL_MAPPING_NAMES.items() if name.endswith("_text")}
    # A text model stands before one of several modalities, whose configuration has others inside.
    texts = sorted(headed.items(), key=lambda item: item[1].endswith("ForConditionalGeneration"))
    for name, cls in [*texts, *bare.items()]:
        module = CONFIG_MAPPING[name].__module__.replace("configuration_", "modeling_")
        spec = find_spec(module)
        source = Path(spec.origin).read_text() if spec is not None and spec.origin else ""
        if "xperts" in source:
            found.setdefault(module, (name, cls))
    return dict(sorted(found.values()))


def config_of(family: str) -> Any:
    """Return a small configuration of a family."""
    from transformers import CONFIG_MAPPING

    cls = CONFIG_MAPPING[family]
    known = cls().to_dict()
    if "vocab_size" not in known:  # of several modalities, the text's
        cls = type(cls().get_text_config())
        known = cls().to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in known}
    if "kv_lora_rank" in known:  # keys of all heads are made of one vector
        sizes["num_key_value_heads"] = SIZES["num_attention_heads"]
    return cls(**{**sizes, **MORE.get(family, {})})


def make(family: str) -> nn.Module:
    """Make the model of a family, the same each time; grouped products know no float64."""
    import transformers

    cls = getattr(transformers, families()[family])
    torch.manual_seed(0)
    model: nn.Module = cls._from_config(config_of(family), dtype=torch.float64, experts_implementation="eager")
    model = Headed(model) if cls.__name__.endswith("Model") else model
    for parameter in model.parameters():  # of what begins as zeros, gradients would show nothing
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model.train()


def batch_of(model: nn.Module) -> tuple[dict[str, Tensor], Tensor]:
    """Return what a model is called with, four sequences, and their targets."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(3, VOCAB_SIZE, (4, SEQ_LEN + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, 5:], targets[2, :2] = -100, -100
    inputs = {"input_ids": tokens[:, :-1].contiguous()}
    if getattr(model.config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = tokens[:, 1:].clamp(min=3)
    return inputs, targets


def token_sum(output: Any, targets: Tensor) -> Loss:
    """Sum the cross-entropy of the valid targets."""
    logits = output.logits.to(torch.float64)
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    return Loss(sum=total, count=(targets != -100).sum())


def one_device(family: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of one device, a sequence at a time, as the ranks have them."""
    model = make(family)
    inputs, targets = batch_of(model)
    loss = 0.0
    for number in range(len(targets)):
        given = {name: value[number : number + 1] for name, value in inputs.items()}
        found = token_sum(model(**given, use_cache=False), targets[number : number + 1])
        part = found.sum / (targets != -100).sum()
        part.backward()
        loss += float(part.detach())
    return loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compared(family: str, manifest: Path) -> tuple[str, str]:
    """Run on a rank: what becomes of a family, and how far from one device it is, or why it is refused.

    Code that computes in float32 whatever it is given does so in float64 here.
    """
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    with in_double_precision():
        return _compared(family, manifest)


def _compared(family: str, manifest: Path) -> tuple[str, str]:
    try:
        loss_1, gradients = one_device(family)
    except Exception as error:  # code of transformers' may raise anything
        return "absent", _told(error)
    model = make(family)
    inputs, targets = batch_of(model)
    try:
        run = composer3d.compose(model, manifest, loss_fn=token_sum, example=((), {**inputs, "use_cache": False}))
    except composer3d.ComposerError as error:
        text = str(error).strip().splitlines()[0]
        return "refused", text.partition("] ")[2] or text
    mine = slice(run.context.data_parallel_rank, None, run.context.data_parallel_degree)
    with run.step(0):
        given = {name: value[mine] for name, value in inputs.items()}
        loss = run.forward_backward(**given, use_cache=False, target=targets[mine])
        scale = max(float(gradient.abs().max()) for gradient in gradients.values())
        worst = abs(float(loss) - loss_1)
        for name, parameter in run.named_parameters():
            if parameter.grad is None or name not in gradients:
                if (parameter.grad is None) != (name not in gradients):
                    return "wrong", f"{name} has a gradient on one of both alone"
                continue
            found = run.context.in_model_order(name, full(parameter.grad))
            worst = max(worst, float((found - gradients[name]).abs().max()) / scale)
    run.close()
    return ("equal" if worst <= TIGHT else "wrong"), f"{worst:.1e}"


def _told(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def outcome_of(family: str, layout: str) -> dict[str, str]:
    """Return a row: the family, its outcome, and the error or reason of the rank that is worst off."""
    try:
        with torch.device("meta"):
            make(family)  # whose modules ranks need not import then
    except Exception as error:  # a configuration of transformers' may raise anything
        return {"name": family, "outcome": "absent", "detail": _told(error)}
    tables = "[sharding.fsdp2]\n[sharding.expert_parallel]\n[train]\nmicrobatch = 1\n"
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder, "run.toml")
        manifest.write_text(f"composer3d = 1\n{LAYOUTS[layout]}{tables}")
        try:
            ranks = run_ranks(compared, 4 if "tp" in layout else 2, family, manifest, timeout_s=900)
        except composer3d.RankError as error:
            return {"name": family, "outcome": "wrong", "detail": str(error).partition("\n")[0][:300]}
    worst = max(ranks, key=lambda found: ("equal", "absent", "refused", "wrong").index(found[0]))
    detail = max((found[1] for found in ranks if found[0] == worst[0]), key=lambda text: (len(text), text))
    return {"name": family, "outcome": worst[0], "detail": detail}


def main() -> None:
    """Compare families with one device, and print a line of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", nargs="+", default=["*"], help="families, as in 'deepseek*'")
    parser.add_argument("--layout", choices=LAYOUTS, default="ep2", help="the ranks beside ep = 2")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    arguments = parser.parse_args()
    stated = conditions()
    import_transformers()
    known = families()
    some = [family for family in known if any(fnmatchcase(family, pattern) for pattern in arguments.only)]
    if not some:
        fail(f"no family matches {', '.join(arguments.only)}")
    file = RESULTS / f"mixture_families_{arguments.layout}.json"
    before = json.loads(file.read_text())["rows"] if file.exists() else []
    rows = {row["name"]: row for row in before if row["name"] in known}
    for family in some:
        rows[family] = outcome_of(family, arguments.layout)
        if not arguments.json:
            say("  ".join(rows[family].values()))
        listed = [rows[name] for name in sorted(rows)]
        summary = dict(Counter(row["outcome"] for row in listed))
        found = {"layout": arguments.layout, "summary": summary, "conditions": stated, "rows": listed}
        file.write_text(json.dumps(found, indent=1) + "\n")
    counts = Counter(rows[family]["outcome"] for family in some)
    say(json.dumps(found, indent=1) if arguments.json else ", ".join(f"{n} {outcome}" for outcome, n in counts.items()))


if __name__ == "__main__":
    main()
