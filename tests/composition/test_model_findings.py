"""What is found of a model once, for several layouts of it, and what is not."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from composer3d import ModelFindings
from composer3d.checking import inspect, open_manifest

MODEL = """
from torch import nn

FORWARDS = {!r}


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BSD):
        return x_BSD + self.down(self.up(x_BSD).relu())


class Model(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 16), nn.Linear(16, vocab_size)
        self.layers = nn.ModuleList(Block(16) for _ in range(4))

    def forward(self, tokens_BS):
        with open(FORWARDS, "a") as file:  # what it left in a list of this file would be taken back
            file.write(".")
        x_BSD = self.embed(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD)
        return self.head(x_BSD)
"""
PIPELINE = ("mesh.pp=2", "mesh.dp_shard=2", 'scheduling.pipeline.schedule="1F1B"')
TENSOR = ("mesh.tp=2", "mesh.dp_shard=2", "sharding.tensor_parallel={}")


@pytest.fixture
def inspected(tmp_path, monkeypatch):
    """Return what inspects a layout of one manifest, and what counts the forwards of its model."""
    monkeypatch.syspath_prepend(tmp_path)
    name = f"model_of_{tmp_path.name}"
    forwards = tmp_path / "forwards"
    forwards.touch()
    (tmp_path / f"{name}.py").write_text(MODEL.replace("{!r}", repr(str(forwards))))
    (tmp_path / "run.toml").write_text(
        f'composer3d = 1\n[mesh]\ndp_shard = 4\n[model]\nuse = "{name}:Model"\n'
        '[data]\nuse = "synthetic"\nseq_len = 8\nvocab_size = 32\n'
        "[train]\nsteps = 1\nglobal_batch = 16\nmicrobatch = 2\n[sharding.fsdp2]\n"
    )

    def of_layout(changes, findings=None):
        found = inspect(
            open_manifest(str(tmp_path / "run.toml"), changes),
            world_size=4,
            rank=0,
            device=torch.device("cpu"),
            findings=findings,
        )
        assert found.ok(strict=False), found.problems
        assert found.preparation is not None
        return found.preparation

    return of_layout, lambda: len(forwards.read_text())


@pytest.mark.parametrize(
    "layouts",
    [
        [PIPELINE, (*PIPELINE, "sharding.fsdp2.zero=1")],
        [TENSOR, (*TENSOR, "sharding.fsdp2.zero=1")],
    ],
    ids=["stages", "shards"],
)
def test_layouts_of_a_search_run_their_model_once_and_are_what_they_are_alone(inspected, layouts):
    of_layout, num_forwards = inspected
    alone, findings = [of_layout(changes) for changes in layouts], ModelFindings()
    before = num_forwards()
    together = [of_layout(layouts[0], findings)]
    once = num_forwards()
    together.append(of_layout(layouts[1], findings))
    assert once > before
    assert num_forwards() == once
    assert [found.plan for found in together] == [found.plan for found in alone]
    assert together[0].model is together[1].model
    assert alone[0].model is not alone[1].model


def test_what_depends_on_a_degree_or_on_the_batch_is_found_again(inspected):
    of_layout, num_forwards = inspected
    findings = ModelFindings()
    wider = ("mesh.tp=4", "mesh.dp_shard=1", "sharding.tensor_parallel={}")
    for changes in (TENSOR, wider, (*wider, "train.microbatch=4")):
        expected = of_layout(changes).plan
        before = num_forwards()
        assert of_layout(changes, findings).plan == expected
        assert num_forwards() > before


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_a_model_with_values_is_made_for_every_layout(device):
    findings, factory = ModelFindings(), object()

    def make():
        model = nn.Linear(2, 2, device="meta")
        model.register_buffer("scale", torch.ones(2, device=device))
        return model, None

    first, second = (findings.model_of(factory, make)[0] for _ in range(2))
    assert (first is second) == (device == "meta")
    other = findings.model_of(object(), make)[0]
    assert other is not second


def test_findings_of_a_model_are_not_those_of_another_or_of_examples_with_values():
    findings, found = ModelFindings(), []

    def find():
        found.append(len(found))
        return found[-1]

    model, _ = findings.model_of("factory", lambda: (nn.Linear(2, 2, device="meta"), None))
    example = (torch.empty(3, 2, device="meta"),), {}
    ask = findings.of_model
    assert ask(model, "key", find, example=example) == ask(model, "key", find, example=example) == 0
    assert ask(model, "other", find, example=example) == 1
    assert ask(nn.Linear(2, 2, device="meta"), "key", find, example=example) == 2
    assert [ask(model, "key", find, example=((torch.ones(3, 2),), {})) for _ in range(2)] == [3, 4]
    findings.model_of("another factory", lambda: (model, None))
    assert ask(model, "key", find, example=example) == 5
