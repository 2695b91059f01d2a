"""Faults of a sharded sequence: what `context_parallel` could do wrong is found, and named by module or parameter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from composer3d_plugins.sharding.context_parallel import ContextParallel, block_attention, sequence_rules
from composer3d_plugins.sharding.context_parallel.sequence_positions import contiguous
from support.composition_faults import VOCAB
from support.models import sum_loss, write_manifest
from support.verification_cases import FSDP, assert_named, batch
from torch import nn

from composer3d import Batch, ReceivedValues, hookimpl
from composer3d.propagation import function_mode
from composer3d.propagation.sequences import sequence_mode, sequence_operands
from composer3d.propagation.sequences.lost_marks import LostMarks
from composer3d.step.guard import Guard
from composer3d.testing import assert_parity

CP = "[mesh]\ncp = 2\n"
SHARDED = f"{CP}[sharding.fsdp2]\n"
PP = '[mesh]\npp = 2\ncp = 2\n[scheduling.pipeline]\nschedule = "1F1B"\n'


class Attention(nn.Module):
    """A window of two keys, and none of the first token; or causal, without a mask."""

    def __init__(self, dim, has_mask):
        super().__init__()
        self.qkv, self.o, self.has_mask = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), has_mask

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        mask = None
        if self.has_mask:
            at = torch.arange(x.shape[1])
            apart = at[:, None] - at
            mask = (apart == 0) | ((apart > 0) & (apart < 2) & (at > 0))
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not self.has_mask)
        return self.o(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim, has_mask):
        super().__init__()
        self.attention, self.norm = Attention(dim, has_mask), nn.LayerNorm(dim)

    def forward(self, x):
        return x + self.attention(self.norm(x))


class Model(nn.Module):
    """Two blocks of attention."""

    def __init__(self, *, has_mask=False):
        super().__init__()
        self.tok, self.out = nn.Embedding(VOCAB, 8), nn.Linear(8, VOCAB)
        self.layers = nn.ModuleList(Block(8, has_mask) for _ in range(2))

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def masked():
    return Model(has_mask=True)


def context(method="gather", mesh=CP):
    return f'{mesh}[sharding.context_parallel]\nmethod = "{method}"\n'


def shifts_labels_after_sharding(patch):
    place = ContextParallel.composer3d_place_batch

    @hookimpl
    def shifted(self, context, batch):
        placed = place(self, context, batch)
        return Batch(args=placed.args, kwargs=placed.kwargs, target=F.pad(placed.target[:, 1:], (0, 1), value=-100))

    patch.setattr(ContextParallel, "composer3d_place_batch", shifted)


def has_keys_in_order(patch):
    """Let keys and values be taken for contiguous shards, which they are not."""
    plan = sequence_rules.SequencePlan.of
    patch.setattr(
        sequence_rules.SequencePlan,
        "of",
        lambda method, group, rows, columns: plan(method, group, rows, contiguous(columns.length, columns.degree)),
    )


def keeps_gradients_of_keys(patch):
    """Leave gradients of keys with the ranks that computed them."""
    send_on = block_attention._Homecoming.send_on

    def dropped(self, visit, flat):
        send_on(self, visit, torch.zeros_like(flat) if visit.direction else flat)

    patch.setattr(block_attention._Homecoming, "send_on", dropped)


def with_mask(change):
    def fault(patch):
        attend = sequence_rules.EngineRules.attend

        def other(self, call):
            if call.mask is not None and not call.mask.is_meta:
                object.__setattr__(call, "mask", change(call.mask, self.positions(call.k_length)))
            return attend(self, call)

        patch.setattr(sequence_rules.EngineRules, "attend", other)

    return fault


permutes_columns = with_mask(lambda mask, positions: mask.index_select(-1, positions.order()))
ignores_windows = with_mask(lambda mask, positions: torch.ones_like(mask).tril())


def leaves_second_stage(patch):
    """Let the second stage take its shard for the whole sequence."""
    patch.setattr(ReceivedValues, "given", lambda self, stage, fqn, call, index, value: value)
    patch.setattr(LostMarks, "marked_again", lambda self, fqn, args, kwargs, *, is_inside: (args, kwargs))


def drops_partial_gradients(patch):
    """Return whole operands without their gradient, as if every rank had all of it."""
    gather = sequence_operands.gather_along
    patch.setattr(
        sequence_operands,
        "gather_along",
        lambda x, dim, length, rules: gather(x, dim, length, rules).detach(),
    )


def counts_its_own_tokens(patch):
    """Let every rank divide by the valid tokens that it holds itself."""
    agree = Guard.agree

    def local(self, *, counts, **options):
        found = agree(self, counts=counts, **options)
        return replace(found, count=sum(counts) * 2)

    patch.setattr(Guard, "agree", local)


class ByHand(Attention):
    """Softmax by hand."""

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.o((q @ k.transpose(1, 2)).softmax(-1) @ v)


def by_hand():
    model = Model()
    for layer in model.layers:
        layer.attention = ByHand(8, has_mask=False)
    return model


def hooked():
    model = Model()
    model.layers[0].register_forward_hook(lambda module, given, output: output.register_hook(torch.neg) and None)
    return model


FIRST = r"the first module whose output is another one is "
FAULTS = {
    "labels shifted after sharding": (
        shifts_labels_after_sharding, context(), Model, r"the loss is given other targets than the batch has: .* shift",
    ),
    "positions of queries alone are balanced": (has_keys_in_order, context(), Model, FIRST + r"layers.0.attention.o$"),
    "gradients of keys that stay": (keeps_gradients_of_keys, context("ring"), Model, r"layers.1.attention"),
    "columns of a mask permuted": (permutes_columns, context(), masked, FIRST + r"layers.0.attention.o$"),
    "a window ignored": (ignores_windows, context("ring"), masked, FIRST + r"layers.0.attention.o$"),
    "a second stage that is not sharded": (leaves_second_stage, context(mesh=PP), Model, FIRST + r"layers.1"),
    "gradients of gathered keys dropped": (drops_partial_gradients, context(), by_hand, r"layers.1.attention"),
    "each rank's own count": (counts_its_own_tokens, context(), Model, r"the ranks together train on \d+ valid tokens"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name, monkeypatch):
    fault, text, factory, cause = FAULTS[name]
    fault(monkeypatch)
    assert_named(text, {"factory": factory, "microbatch": 6}, cause)


def test_a_hook_on_a_gathered_copy_never_fires(monkeypatch):
    for module in (function_mode, sequence_mode):
        monkeypatch.setattr(module, "OBJECT", frozenset())
    with pytest.raises(AssertionError, match="gradients differ by more"):
        assert_parity(hooked, write_manifest(context("gather", SHARDED)), batch(), loss_fn=sum_loss, steps=1)


@pytest.mark.parametrize("factory", [Model, masked, by_hand, hooked])
def test_without_a_fault_all_of_them_are_proven(factory):
    for text in (context(), context("ring", FSDP.replace("[mesh]\n", CP))):
        assert_parity(factory, write_manifest(text), batch(), loss_fn=sum_loss, steps=1)


class Cast(nn.Module):
    """A norm in float32, as most models have."""

    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.norm(x.float()).type_as(x)


def casting():
    model = Model()
    for layer in model.layers:
        layer.norm = Cast(layer.norm)
    return model


def test_compiled_blocks_that_cast_to_float32_are_proven_in_float64():
    text = context() + '[scheduling.compile]\nbackend = "aot_eager"\n'
    found = assert_parity(casting, write_manifest(text), batch(), loss_fn=sum_loss, steps=1).verdict
    assert not any("runs as it is" in note for note in found.notes)
