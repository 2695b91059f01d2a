"""Models with experts under tp: attention is cut, experts stay whole, and gradients equal one device."""

from __future__ import annotations

import pytest
import torch
from composer3d_plugins.sharding.tensor_parallel.plan_resolution import Rule
from support.huggingface import config_of, make, token_sum
from support.models import write_manifest
from support.tensor_parallel import AUTO, errors

import composer3d
from composer3d.huggingface import HuggingFaceModel
from composer3d.huggingface.folder import import_transformers
from composer3d.testing import run_ranks

TIGHT = 1e-12


@pytest.fixture(scope="module", autouse=True)
def _imported():
    import_transformers()


def mixtral():
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    # Grouped matrix products know no float64.
    return AutoModelForCausalLM.from_config(config_of("mixtral"), dtype=torch.float64, experts_implementation="eager")


def step():
    torch.set_default_dtype(torch.float64)
    tokens = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(0))
    model = mixtral()
    loss = token_sum(model(tokens), tokens)
    (loss.sum / loss.count).backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    run = composer3d.compose(
        mixtral(), write_manifest(f"[mesh]\ntp = 2\n[train]\nmicrobatch = 2\n{AUTO}"), loss_fn=token_sum
    )
    with run.step(0):
        run.forward_backward(tokens, target=tokens)
        error = errors(run, gradients)
    rules = next(iter(run.context.state.values())).rules
    run.close()
    return error, rules


def test_experts_stay_whole():
    for error, rules in run_ranks(step, 2):
        assert error < TIGHT
        assert rules["model.layers.0.mlp.experts"] == Rule(style="replicate")
        assert [rules[f"model.layers.0.self_attn.{name}_proj"].style for name in "qkvo"] == ["colwise"] * 3 + [
            "rowwise"
        ]


def outputs(folder):
    """Return what the model says in float64, on meta, and in float32 by the grouped product; the same weights."""
    from transformers import AutoModelForCausalLM

    tokens, found = torch.randint(3, 64, (2, 8), generator=torch.Generator().manual_seed(0)), {}
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        model = HuggingFaceModel(folder, weights="init")()
        weights = AutoModelForCausalLM.from_pretrained(folder).state_dict()
        model.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()})
        found[dtype] = model(tokens).logits
        found["meta", dtype] = model.to("meta")(tokens.to("meta")).logits
    return found


def test_experts_compute_in_float64_and_on_meta(tmp_path):
    # As in a proof, and where a pipeline looks how blocks are called; torch's grouped product knows neither.
    found = run_ranks(outputs, 1, make("mixtral", tmp_path / "mixtral"))[0]
    single, double = found[torch.float32], found[torch.float64]
    assert (single.double() - double).abs().max() <= 1e-5 * double.abs().max()
    assert found["meta", torch.float32].shape == found["meta", torch.float64].shape == double.shape
