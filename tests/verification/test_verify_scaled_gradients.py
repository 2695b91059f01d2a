"""Gradients that a plugin of precision multiplies by less than its dtypes round: float64 has no such plugin."""

from __future__ import annotations

import re

import pytest
from support.composition_faults import Even
from support.models import sum_loss, write_manifest
from support.verification_cases import DDP, FSDP, batch, planted, refuted

from composer3d.testing import assert_parity

table = planted("scaling_faults")
MIXED = "[precision.mixed]\n"
RANKS = r"all gradients of the ranks are 1\.0[12]\d* times what one device has \(in the run's dtypes\)"
RANKS_A_LITTLE = r"all gradients of the ranks are 1\.0003 times what one device has \(in the run's dtypes\)"
ALONE = r"all gradients of one device with its precision plugins are {} times what it has in float64"
ONE = "1 gradients of one device with its precision plugins are multiples of what it has in float64, as that of "
SAID = "roundings add errors and do not multiply: one of those plugins scales gradients"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (FSDP + MIXED + table("precision", "growing", "ranks", factor=1.02), RANKS),
        (DDP + table("precision", "growing", "ranks", factor=1.0003), RANKS_A_LITTLE),
        (FSDP + MIXED + table("precision", "growing", "reduced", factor=1.02), ALONE.format(r"1\.0[12]\d*")),
        (DDP + table("precision", "growing", "one", factor=1.02), ONE),
        (FSDP + MIXED + table("precision", "growing", "backward", factor=2.0), ALONE.format(r"(2|1\.99\d*)")),
    ],
    ids=["2 % on ranks", "0.03 % on ranks", "2 % in bfloat16", "of one parameter", "in a backward"],
)
def test_a_factor_is_named(text, line):
    told = refuted(text, own_dtype=True, microbatch=3)
    assert re.search(line, told) and SAID in told, told


def test_a_factor_of_one_is_no_alarm():
    text = FSDP + MIXED + table("precision", "growing", "backward", factor=1.0)
    parity = assert_parity(Even, write_manifest(text), batch(), loss_fn=sum_loss, steps=1, microbatch=3)
    assert parity.verdict.ok
