"""Weights on disk: what is read, how names are found, and what is refused."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.huggingface import make

from composer3d import ModelError
from composer3d.huggingface import HuggingFaceModel
from composer3d.huggingface.weight_names import tiles
from composer3d.initialisation import Slab, WeightsOnDisk, materialise, record


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make(family, root / family) for family in ("llama", "gpt2", "qwen2", "mixtral", "phi3")}


@pytest.fixture
def folder(models, tmp_path):
    """A copy of a family's folder, to be spoilt."""

    def copy(family="llama"):
        return shutil.copytree(models[family], tmp_path / family)

    return copy


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def opened(folder, **options):
    factory = HuggingFaceModel(folder, **options)
    model, recipe = record(factory)
    recipe.source = factory.open_weights(model)
    return factory, model, recipe


def loaded(folder, **options):
    _, model, recipe = opened(folder, **options)
    assert materialise(model, recipe, seed=0, device="cpu") == ()
    return model


def reference(folder, **options):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, **options)


def assert_same(model, other):
    """Parameters and all buffers, those that no file holds included."""
    tensors = [dict([*m.named_parameters(), *m.named_buffers()]) for m in (model, other)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert tensor.dtype == tensors[1][name].dtype
        assert torch.equal(tensor, tensors[1][name]), name


# ---- slabs -----------------------------------------------------------------------------------------------------------


class Numbers:
    """A source of one tensor that counts what is read of it."""

    def __init__(self, shape):
        self.full = torch.arange(torch.Size(shape).numel()).reshape(shape)
        self.num_read = 0

    def __contains__(self, fqn):
        return True

    def shape(self, fqn):
        return tuple(self.full.shape)

    def read(self, fqn, ranges):
        part = self.full[tuple(slice(*each) for each in ranges)]
        self.num_read += part.numel()
        return part

    def fingerprint(self):
        return 0


@pytest.mark.parametrize("size", [0, 1, 5, 6, 7])
@pytest.mark.parametrize("chunks", [1, 2, 3, 8])
def test_slabs_are_cut_as_torch_cuts_and_read_nothing_else(size, chunks):
    source = Numbers((4, size))
    pieces, expected = Slab(source, "w").chunk(chunks, 1), source.full.chunk(chunks, 1)
    assert [piece.shape for piece in pieces] == [tuple(piece.shape) for piece in expected]
    for piece, values in zip(pieces, expected, strict=True):
        before = source.num_read
        assert torch.equal(piece.read(), values)
        assert source.num_read - before == values.numel()


def test_a_reordered_slab_reads_the_runs_of_its_share():
    source = Numbers((12, 3))
    runs = [(0, 2), (6, 2), (10, 1), (2, 4), (8, 2), (11, 1)]
    stored = torch.cat([source.full[start : start + length] for start, length in runs])
    slab = Slab(source, "w").reordered(0, runs)
    assert slab.shape == (12, 3)
    for index in range(2):
        share = slab.chunk(2, 0)[index].narrow(1, 1, 2)
        before = source.num_read
        assert torch.equal(share.read(), stored.chunk(2)[index][:, 1:])
        assert source.num_read - before == 12


# ---- what is loaded --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen2", "mixtral", "phi3"])
def test_a_model_loaded_part_by_part_is_the_one_of_from_pretrained(family, models):
    assert_same(loaded(models[family]), reference(models[family], dtype=torch.float32))


def test_an_index_of_several_files(tmp_path):
    folder = make("llama", tmp_path / "m", max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same(loaded(folder), reference(folder, dtype=torch.float32))


def test_names_without_the_prefix_and_buffers_of_old_versions(folder):
    # As the first GPT-2 was published.
    def old(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 8, 8)

    changed = edit(folder("gpt2"), old)
    assert_same(loaded(changed), reference(changed, dtype=torch.float32))


@pytest.mark.parametrize(("stated", "expected"), [("bfloat16", torch.bfloat16), ("auto", torch.float16)])
def test_dtypes_have_the_names_of_the_ecosystem(stated, expected, tmp_path):
    folder = make("llama", tmp_path / "m", dtype=torch.float16)
    model = loaded(folder, dtype=stated)
    assert {p.dtype for p in model.parameters()} == {expected}
    assert_same(model, reference(folder, dtype=expected))


def test_auto_is_the_dtype_of_the_weights_where_the_configuration_has_none(folder):
    changed = folder()
    config = json.loads((changed / "config.json").read_text())
    del config["dtype"]
    (changed / "config.json").write_text(json.dumps(config))
    edit(changed, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    assert HuggingFaceModel(changed, dtype="auto").dtype is torch.bfloat16


def test_experts_are_stacked_out_of_the_parts_that_are_needed(models):
    factory, model, recipe = opened(models["mixtral"])
    fqn = "model.layers.1.mlp.experts.gate_up_proj"
    whole = reference(models["mixtral"]).get_parameter(fqn)
    slab = Slab(recipe.source, fqn)
    assert slab.shape == tuple(whole.shape) == (4, 128, 32)
    before = factory.files.num_bytes_read
    # Of two experts the last of the gate's rows and the first of the other projection's.
    part = slab.narrow(0, 1, 2).narrow(1, 60, 10).read()
    assert torch.equal(part, whole[1:3, 60:70])
    assert factory.files.num_bytes_read - before == part.numel() * 4


def test_what_takes_arithmetic_is_converted_in_full(models, monkeypatch):
    from composer3d.huggingface import weights

    fqn = "model.layers.0.mlp.experts.down_proj"
    whole = reference(models["mixtral"]).get_parameter(fqn)
    monkeypatch.setattr(weights, "tiles", lambda group, shapes: None if group.converter else tiles(group, shapes))
    _, _, recipe = opened(models["mixtral"])
    assert torch.equal(Slab(recipe.source, fqn).narrow(0, 3, 1).narrow(2, 5, 7).read(), whole[3:, :, 5:12])


def test_attention_implementations_and_overrides_reach_the_model(models):
    model, _ = record(HuggingFaceModel(models["llama"], attn_implementation="eager", weights="init"))
    assert model.config._attn_implementation == "eager"
    assert not model.config.use_cache
    small = HuggingFaceModel(models["llama"], weights="init", config={"num_hidden_layers": 1})
    assert sum("q_proj" in name for name, _ in record(small)[0].named_parameters()) == 1


def test_init_draws_weights_of_the_configuration_in_every_layout_alike(models):
    factory = HuggingFaceModel(models["llama"], weights="init")
    assert isinstance(factory, WeightsOnDisk)
    model, recipe = record(factory)
    assert factory.open_weights(model) is None
    materialise(model, recipe, seed=0, device="cpu")
    weight = model.model.layers[0].mlp.up_proj.weight
    assert float(weight.detach().std()) == pytest.approx(model.config.initializer_range, rel=0.1)
    assert not torch.equal(weight, reference(models["llama"]).model.layers[0].mlp.up_proj.weight)
    again, recipe = record(factory)
    materialise(again, recipe, seed=0, device="cpu")
    assert_same(model, again)


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(
            lambda tensors: [tensors.pop(name) for name in list(tensors) if "mlp" in name],
            'FOLDER holds no "model.layers.0.mlp.gate_proj.weight" (and 5 more), which LlamaForCausalLM needs; '
            'weights = "init" starts from the configuration alone',
            id="missing",
        ),
        pytest.param(
            lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weigth": torch.ones(1)}),
            'FOLDER holds "model.layers.0.mlp.up_proj.weigth", for which LlamaForCausalLM has no place; did you mean '
            '"model.layers.0.mlp.up_proj.weight"?',
            id="no-place",
        ),
        pytest.param(
            lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}),
            '"model.norm.weight" in FOLDER makes "model.norm.weight" of shape (31,), and the configuration asks for '
            "(32,); the weights are of another configuration",
            id="shape",
        ),
    ],
)
def test_other_weights_are_refused(change, message, folder):
    changed = edit(folder(), change)
    with pytest.raises(ModelError) as refused:
        opened(changed)
    assert str(refused.value) == message.replace("FOLDER", str(changed))


def test_damaged_and_missing_files_are_refused(folder, tmp_path):
    damaged = folder()
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelError, match="model.safetensors cannot be read: .*"):
        HuggingFaceModel(damaged)
    several = make("llama", tmp_path / "several", max_shard_size="30KB")
    first = sorted(several.glob("*.safetensors"))[0]
    first.unlink()
    with pytest.raises(ModelError, match=f"names {first.name}, which is not there"):
        HuggingFaceModel(several)
    (several / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ModelError, match='is damaged: it has no "weight_map"'):
        HuggingFaceModel(several)


def test_pickled_weights_are_not_read(folder):
    changed = folder()
    (changed / "model.safetensors").rename(changed / "pytorch_model.bin")
    with pytest.raises(ModelError) as refused:
        HuggingFaceModel(changed)
    assert str(refused.value) == (
        f"{changed} holds weights as pytorch_model.bin alone, and reading that may execute code; load it with "
        "transformers once, and save_pretrained it as safetensors"
    )


def test_quantised_weights_are_refused(folder):
    changed = folder()
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(ModelError, match="are quantised, and what is trained has to be in floating point"):
        HuggingFaceModel(changed)


def test_other_files_on_other_ranks_are_seen(models, folder):
    mine, other = opened(models["llama"])[2], opened(edit(folder(), lambda t: t.update(more_free(t))))[2]
    assert mine.fingerprint() == opened(models["llama"])[2].fingerprint() != other.fingerprint()


def more_free(tensors):
    return {name: tensor.double() for name, tensor in tensors.items()}
