"""Faults of an exchange of tokens: the proof fails, and says where."""

from __future__ import annotations

import re

import pytest
from support.mixtures import shipped, token_sum, tokens_and_targets
from support.models import write_manifest
from support.verification_cases import planted

from composer3d import Batch
from composer3d.testing import assert_parity

EP = "[mesh]\ndp_shard = 2\nep = 2\n[sharding.fsdp2]\n[sharding.expert_parallel]\n"
fault = planted("expert_faults")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("router", r"router\.weight"),
        ("twice", r"the gradients of .*experts\.w._N.* are 0\.5 times the right ones"),
        ("position", r"layers\.0\.feed_forward"),
        ("weights", r"layers\.0\.feed_forward"),
    ],
    ids=["router", "twice", "position", "weights"],
)
def test_an_exchange_that_is_wrong_is_found_and_named(name, said):
    tokens, targets = tokens_and_targets()
    with pytest.raises(AssertionError) as caught:
        assert_parity(
            shipped,
            write_manifest(EP + fault("profiling", "misrouted", name)),
            Batch(args=(tokens,), target=targets),
            loss_fn=token_sum,
            steps=1,
            own_dtype=False,
        )
    assert re.search(f"likely: .*{said}", str(caught.value)), str(caught.value)
