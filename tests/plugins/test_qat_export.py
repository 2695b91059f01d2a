"""A run that trains for quantised weights, exported: the file holds them, and computes what was trained."""

from __future__ import annotations

import pytest
import torch
from safetensors import safe_open
from support.huggingface import make
from support.models import composed
from support.training import start, write

from composer3d import CheckpointError, torch_compat
from composer3d.checkpoint import contents, find_checkpoint, read_tensor
from composer3d.cli import main
from composer3d.huggingface.folder import import_transformers
from composer3d.models import llama
from composer3d.runner.weights.quantised_weights import find_form
from composer3d.runner.weights.weight_export import export, find_description

# Before ranks are forked: each of them would import it anew.
torch_compat.import_torchao("torchao.quantization.qat.fake_quantizer")
import_transformers()

SIZES = {"dim": 64, "num_layers": 2, "num_heads": 2}
TEXT = """
composer3d = 1
model.args = {{ dim = 64, num_layers = 2, num_heads = 2, tie_embeddings = {tied} }}
data = {{ use = "synthetic", seq_len = 16, vocab_size = 64 }}
train = {{ steps = 6, global_batch = 4, microbatch = 2 }}
optimizer.lr = 1e-2
run.device = "cpu"
[sharding.fsdp2]
"""
QAT = "[precision.qat]\n"


def read(file):
    """Return a file's tensors as torchao puts them together."""
    support = torch_compat.import_torchao("torchao.prototype.safetensors.safetensors_support")
    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        found, left = support.unflatten_tensor_state_dict(tensors, opened.metadata())
    assert not left
    return found, sum(tensor.nbytes for tensor in tensors.values())


def trained_for(run, text, options):
    """Return logits of the trained weights as the run computed them, rounded in every product."""
    model = llama(**SIZES, vocab_size=64, max_seq_len=16, tie_embeddings=text == "true")
    path = find_checkpoint(run)
    weights = {key.removeprefix("model/"): read_tensor(path, key) for key in contents(path) if key[:6] == "model/"}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected and all("weight" not in name or name == "output.weight" for name in missing)
    composition = composed(QAT + options, model)
    logits = composition.model(torch.arange(16)[None])
    composition.close()
    return logits.detach()


@pytest.mark.parametrize("tied", ["false", pytest.param("true", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options", ["", pytest.param('weights = "int8"\nactivations = "none"\ngroup_size = 64\n', marks=pytest.mark.slow)]
)
def test_what_was_trained_for_is_what_is_exported(tmp_path, options, tied):
    start(write(tmp_path, TEXT.format(tied=tied) + QAT + options), 2)
    assert main(["export", str(tmp_path / "out"), "--to", str(tmp_path / "q"), "--quantise"]) == 0
    assert main(["export", str(tmp_path / "out"), "--to", str(tmp_path / "plain")]) == 0
    weights, num_bytes = read(tmp_path / "q" / "model.safetensors")
    kinds = {name: type(weight).__name__ for name, weight in weights.items()}
    assert kinds["layers.0.attention.wq.weight"] == kinds["output.weight"] == "IntxUnpackedToInt8Tensor"
    assert kinds["layers.0.attention_norm.weight"] == "Tensor"
    # Of a product's weights a byte an element is left, and a scale a group.
    if tied == "false":
        assert num_bytes < 0.45 * (tmp_path / "plain" / "model.safetensors").stat().st_size
    model = llama(**SIZES, vocab_size=64, max_seq_len=16, tie_embeddings=False)
    model.load_state_dict(weights, strict=False, assign=True)
    with torch.no_grad():
        found = model(torch.arange(16)[None])
    wanted = trained_for(tmp_path / "out", tied, options)
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    # The rounding is not small beside that.
    plain = llama(**SIZES, vocab_size=64, max_seq_len=16, tie_embeddings=False)
    plain.load_state_dict(
        {name: getattr(w, "dequantize", lambda w=w: w)() for name, w in weights.items()}, strict=False
    )
    if not options:
        assert (plain(torch.arange(16)[None]) - wanted).abs().max() > 1e-3 * wanted.abs().max()


def test_refuses_a_run_that_did_not_train_for_it(tmp_path):
    start(write(tmp_path, TEXT.format(tied="false")), 1)
    path = find_checkpoint(tmp_path / "out")
    with pytest.raises(CheckpointError) as caught:
        find_form(path)
    assert str(caught.value) == f"{path}: no plugin of its run trained for quantised weights; leave --quantise out"


HF = """
composer3d = 1
model.hf = "llama"
data = { use = "text.txt", seq_len = 16, tokenizer = "bytes" }
train = { steps = 3, global_batch = 4, microbatch = 2 }
optimizer.lr = 1e-2
run.device = "cpu"
[sharding.fsdp2]
"""


@pytest.mark.parametrize(
    ("family", "tied", "left"),
    [
        ("llama", True, ""),
        ("llama", False, 'exclude = ["lm_head", "model.layers.0.mlp"]\n'),
        pytest.param("llama", True, 'exclude = ["lm_head", "model.layers.0.mlp"]\n', marks=pytest.mark.slow),
        pytest.param("qwen2", True, "", marks=pytest.mark.slow),
        pytest.param("mistral", False, "", marks=pytest.mark.slow),
    ],
)
def test_a_hugging_face_folder_of_quantised_weights_is_loaded(tmp_path, family, tied, left):
    from transformers import AutoModelForCausalLM

    make(family, tmp_path / "llama", hidden_size=64, intermediate_size=128, vocab_size=256, tie_word_embeddings=tied)
    (tmp_path / "text.txt").write_text("a text of some length " * 200)
    start(write(tmp_path, HF + QAT + left), 1)
    for folder, more in (("q", ["--quantise"]), ("plain", [])):
        assert main(["export", str(tmp_path / "out"), "--to", str(tmp_path / folder), *more]) == 0
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "q", output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    composition = composed(QAT + left, AutoModelForCausalLM.from_pretrained(tmp_path / "plain"))
    tokens = torch.arange(16)[None]
    with torch.no_grad():
        found, wanted = model(tokens).logits, composition.model(tokens).logits
    composition.close()
    assert (found - wanted).abs().max() < 1e-5 * wanted.abs().max()
    kinds = {name: type(p.data).__name__ for name, p in model.named_parameters()}
    assert kinds["model.layers.1.mlp.up_proj.weight"] == "IntxUnpackedToInt8Tensor"
    head = kinds.get("lm_head.weight", "Tensor")  # of a tied one it is the embedding's
    assert (head == "Tensor") == bool(left) == (kinds["model.layers.0.mlp.up_proj.weight"] == "Tensor")
    assert kinds["model.embed_tokens.weight"] == "Tensor"
    # What is tied is there once as it is looked up, and once as it is multiplied, if that is another.
    with safe_open(tmp_path / "q" / "model.safetensors", "pt") as opened:
        heads = sorted(key for key in opened.keys() if "embed_tokens" in key or "lm_head" in key)  # noqa: SIM118
    quantised = ["lm_head._weight_qdata", "lm_head._weight_scale", "lm_head._weight_zero_point"]
    whole = [] if tied else ["lm_head.weight"]
    assert heads == [*(whole if left else quantised), "model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match="reads of one file what its quantised weights are"):
        newest = find_checkpoint(tmp_path / "out")
        form, config = find_form(newest)
        export(
            newest,
            to=tmp_path / "many",
            max_shard_bytes=20000,
            description=find_description(newest),
            form=form,
            config=config,
        )
