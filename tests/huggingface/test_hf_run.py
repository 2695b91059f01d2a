"""Runs of Hugging Face models from manifests: data by the model's tokenizer, resume, and export back into a folder."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from support.huggingface import make
from support.training import losses, start

from composer3d import CheckpointError, LossError, checkpoint
from composer3d.checkpoint import find_checkpoint
from composer3d.huggingface import model_inputs, model_loss
from composer3d.huggingface.folder import import_transformers
from composer3d.manifest import load_manifest
from composer3d.runner import TABLES
from composer3d.runner.tokenizer import with_tokenizer
from composer3d.runner.weights.weight_export import export, find_description

MANIFEST = """\
composer3d = 1
model.hf = "{family}"
data = {{ use = "text.txt", seq_len = 16 }}
train = {{ steps = 4, global_batch = 4, microbatch = 1 }}
optimizer.lr = 1e-2
lr_schedule.use = "constant"
run.device = "cpu"
"""

TP = "[mesh]\ntp = 2\n[sharding.tensor_parallel]\n"
PP = '[mesh]\npp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n'
FSDP = "[sharding.fsdp2]\n"
EP = "[mesh]\ndp_shard = 2\nep = 2\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"


def write_tokenizer(folder):
    """Write a tokenizer of words, which ends every text with a token that training text must not have."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = {word: number for number, word in enumerate(["<end>", "?", "a", "text", "of", "some", "length"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", 0)])
    tokenizer.enable_truncation(4)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    import_transformers()
    root = tmp_path_factory.mktemp("models")
    for family in ("llama", "gpt2", "qwen2", "mixtral"):
        write_tokenizer(make(family, root / family, max_shard_size="60KB"))
    return root


@pytest.fixture
def manifest(models, tmp_path):
    """Write a manifest beside a model and a text, and return its path."""

    def write(family, text, **changes):
        shutil.copytree(models / family, tmp_path / family, dirs_exist_ok=True)
        (tmp_path / "text.txt").write_text("a text of some length " * 400)
        path = tmp_path / "run.toml"
        path.write_text(MANIFEST.format(family=family) + text)
        return path

    return write


def exported(run, to, **options):
    path = find_checkpoint(run)
    return export(path, to=to, description=find_description(path), **options)


def assert_exported_equal(run, folder):
    """What `from_pretrained` loads is what the checkpoint holds, bit by bit, and ties are ties."""
    from transformers import AutoModelForCausalLM, logging

    logging.disable_progress_bar()
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    path = find_checkpoint(run)
    names = [name for name in checkpoint.contents(path) if name.startswith("model/")]
    tensors = model.state_dict()
    assert {name.removeprefix("model/") for name in names} == {name for name, _ in model.named_parameters()}
    for name, tensor in checkpoint.read_tensors(path, names):
        assert torch.equal(tensor, tensors[name.removeprefix("model/")])
        assert tensor.dtype == tensors[name.removeprefix("model/")].dtype
    return model


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("llama", FSDP, id="llama-fsdp"),
        pytest.param("gpt2", TP, id="gpt2-tp"),
        pytest.param("qwen2", PP, id="qwen2-pp"),
        pytest.param("mixtral", FSDP, id="mixtral-fsdp"),
        pytest.param("mixtral", EP, id="mixtral-ep"),
    ],
)
def test_a_run_becomes_a_folder_that_from_pretrained_loads(family, layout, manifest, tmp_path):
    path = manifest(family, layout)
    assert start(path, 2)["status"] == "finished"
    files = exported(tmp_path / "out", tmp_path / "exported", max_shard_bytes=60_000)
    assert len(files) > 1
    model = assert_exported_equal(tmp_path / "out", tmp_path / "exported")
    assert model.config.use_cache
    # Trained, and not what it started from.
    assert losses(tmp_path / "out")[-1] < losses(tmp_path / "out")[0]
    names = {file.name for file in (tmp_path / "exported").iterdir()} - {file.name for file in files}
    assert names == {
        *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
        "model.safetensors.index.json",
    }
    index = json.loads((tmp_path / "exported" / "model.safetensors.index.json").read_text())
    before = json.loads((tmp_path / family / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == before["weight_map"].keys()


def test_an_exported_folder_is_trained_on_and_dtypes_go_with_it(manifest, tmp_path):
    from transformers import AutoConfig

    start(manifest("llama", FSDP), 2, "train.steps=1", 'model.dtype="bfloat16"')
    exported(tmp_path / "out", tmp_path / "again")
    assert AutoConfig.from_pretrained(tmp_path / "again").dtype is torch.bfloat16
    assert_exported_equal(tmp_path / "out", tmp_path / "again")
    exported(tmp_path / "out", tmp_path / "wide", dtype=torch.float32)
    assert AutoConfig.from_pretrained(tmp_path / "wide").dtype is torch.float32
    outcome = start(tmp_path / "run.toml", 2, "train.steps=1", 'model.hf="again"', output=tmp_path / "more")
    assert outcome["status"] == "finished"


def test_a_run_goes_on_under_another_layout(manifest, tmp_path):
    path = manifest("gpt2", FSDP)
    start(path, 2, "checkpoint.every=2")
    whole = losses(tmp_path / "out")
    shutil.copytree(tmp_path / "out" / "checkpoints" / "step-2", tmp_path / "other" / "checkpoints" / "step-2")
    path.write_text(MANIFEST.format(family="gpt2") + TP)
    start(path, 2, output=tmp_path / "other")
    assert losses(tmp_path / "other") == pytest.approx(whole[2:], rel=1e-5)


def test_another_configuration_does_not_go_on(manifest, tmp_path):
    path = manifest("llama", FSDP)
    start(path, 1, "train.steps=1")
    with pytest.raises(Exception, match="model.hf.config.rms_norm_eps was 1e-06 and is 0.001"):
        start(path, 1, "model.args.rms_norm_eps=1e-3")


def test_the_models_own_loss_is_the_same_loss(manifest, tmp_path):
    path = manifest("llama", FSDP)
    start(path, 2, "train.steps=2", "evaluation.every=2")
    start(path, 2, "train.steps=2", "evaluation.every=2", 'train.loss="model"', output=tmp_path / "own")
    assert losses(tmp_path / "own") == pytest.approx(losses(tmp_path / "out"), rel=1e-6)


def test_mixed_precision_trains(manifest, tmp_path):
    start(manifest("llama", FSDP + "[precision.mixed]\n"), 2, "train.steps=8")
    found = losses(tmp_path / "out")
    assert found[-1] < 0.9 * found[0]


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_text_is_read_by_the_models_tokenizer(manifest, tmp_path):
    from composer3d.runner.data import open_source

    read = with_tokenizer(load_manifest(manifest("llama", FSDP), tables=TABLES))
    table = read.tables["data"]
    assert table.tokenizer == str(tmp_path / "llama" / "tokenizer.json")
    source = open_source(table, seed=0, folder=tmp_path, cache=tmp_path / "cache")
    tokens, targets = source[0]
    # No special token, and nothing cut off.
    assert tokens[:6].tolist() == [2, 3, 4, 5, 6, 2]
    assert torch.equal(tokens[1:], targets[:-1])
    assert source.vocab_size == 7
    assert source.record()["tokenizer"] == "file"


@pytest.mark.parametrize(("stated", "expected"), [("llama", "llama/tokenizer.json"), ("bytes", "bytes")])
def test_a_stated_tokenizer_wins(stated, expected, manifest, tmp_path):
    path = manifest("llama", FSDP)
    read = with_tokenizer(load_manifest(path, tables=TABLES, overrides=[f'data.tokenizer="{stated}"']))
    assert read.tables["data"].tokenizer.endswith(expected)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_checkpoint_without_its_description_is_refused(manifest, tmp_path):
    start(manifest("llama", FSDP), 1, "train.steps=1")
    shutil.rmtree(tmp_path / "out" / "huggingface")
    with pytest.raises(CheckpointError, match="its run had a Hugging Face model, and .*huggingface with its config"):
        find_description(find_checkpoint(tmp_path / "out"))


def test_a_folder_is_not_exported_to_a_file(manifest, tmp_path):
    start(manifest("llama", FSDP), 1, "train.steps=1")
    with pytest.raises(CheckpointError, match="is exported to a folder, since from_pretrained loads folders"):
        exported(tmp_path / "out", tmp_path / "w.safetensors")


class Output:
    def __init__(self, loss, aux_loss=None):
        self.loss, self.aux_loss = loss, aux_loss


def test_a_loss_of_its_own_that_ignores_what_it_is_given_is_refused():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    targets = torch.tensor([[1, 2, -100], [0, 1, 2]])
    mean = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    with pytest.raises(LossError, match="the model's own loss is a mean: its forward does not hand num_items"):
        model_loss(Output(mean), targets)
    with pytest.raises(LossError, match="is made in a way that cannot be told"):
        model_loss(Output(logits.sum()), targets)
    with pytest.raises(LossError, match='returns no loss of its own .Output.; set .train. loss = "cross_entropy"'):
        model_loss(Output(None), targets)
    assert model_inputs(targets).keys() == {"labels", "shift_labels", "num_items_in_batch"}


def test_a_routers_loss_is_auxiliary():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    targets = torch.tensor([[1, 2, -100], [0, 1, 2]])
    total = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / 1
    balance = logits.square().mean()
    loss = model_loss(Output(total + 0.02 * balance, balance), targets, auxiliary_weight=0.02)
    torch.testing.assert_close(loss.sum, total)
    torch.testing.assert_close(loss.auxiliary, 0.02 * balance)
    assert loss.count == 5
