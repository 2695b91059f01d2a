"""What tests of proofs share: the batch, a proof that has to fail, and a subject of one's own."""

from __future__ import annotations

import math
import re

import pytest
import torch

from composer3d import Batch
from composer3d.manifest import load_manifest
from composer3d.testing import assert_parity, run_ranks
from support.composition_faults import VOCAB, Even
from support.models import sum_loss, write_manifest

DDP = "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n"
FSDP = "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"
TP = '[mesh]\ntp = 2\n[sharding.hand_made]\nuse = "support.composition_faults:HandMade"\n'


def planted(module):
    """Return what writes the table of a plugin of a module of tests: family, name, its fault and other options."""

    def table(family, name, fault="", **options):
        title = "".join(word.capitalize() for word in name.split("_"))
        lines = [f'use = "support.{module}:{title}"', *([f'fault = "{fault}"'] if fault else [])]
        lines += [f"{key} = {value}" for key, value in options.items()]
        return f"[{family}.{name}]\n" + "\n".join(lines) + "\n"

    return table


def batch():
    """Return 12 sequences, each with another number of valid targets."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCAB, (12, 5), generator=generator)
    targets = torch.randint(0, VOCAB, (12, 4), generator=generator)
    for row, length in enumerate(torch.randint(0, 3, (12,), generator=generator)):
        targets[row, :length] = -100
    return Batch(args=(tokens[:, :4].contiguous(),), target=targets)


def refuted(text, *, factory=Even, loss_fn=sum_loss, steps=1, own_dtype=False, **options):
    """Return the proof's report on a composition that does not hold."""
    with pytest.raises(AssertionError) as caught:
        options |= {"loss_fn": loss_fn, "steps": steps, "own_dtype": own_dtype}
        assert_parity(factory, write_manifest(text), batch(), **options)
    return str(caught.value)


def assert_named(text, options, cause):
    """Assert that the proof fails with this cause in one line; return its report."""
    told = refuted(text, **options)
    assert re.search(f"likely: .*{cause}", told), told
    return told


def layout_of(text):
    """Return the layout of a manifest's text."""
    from composer3d.composition import preparing
    from composer3d.hooks import Hooks

    manifest = load_manifest(write_manifest(text))
    return preparing.layout_of(manifest, Hooks(manifest.plugins), world_size=None)


def launch(function, args, num_ranks):
    """Start ranks."""
    return run_ranks(function, num_ranks, *args)


def subject(text, *, batch, loss_fn, factory):
    """Make a subject with given batches."""
    from composer3d.verification import Subject

    return Subject(
        manifest=load_manifest(write_manifest(text)),
        build=lambda: factory,
        loss_fn=loss_fn,
        make_optimizer=lambda run: run.optimizer(torch.optim.AdamW, lr=1e-3),
        batch=batch,
        grad_clip=math.inf,
        average_buffers=None,
        device=torch.device("cpu"),
    )
