"""verify of compressed collectives: steps with everything sent as it is, and every codec by itself."""

from __future__ import annotations

import pytest
from composer3d_plugins.communication.compression import replica_means
from support.composition_faults import Even
from support.models import sum_loss, write_manifest
from support.verification_cases import batch

from composer3d.testing import assert_parity

FSDP = "[mesh]\ndp_shard = 2\n[sharding.fsdp2]\n"


def verdict(table):
    text = FSDP + "[communication.compression]\n" + table
    return assert_parity(Even, write_manifest(text), batch(), loss_fn=sum_loss, grad_clip=0.5, microbatch=3).verdict


@pytest.mark.parametrize(
    "table",
    [
        'gradients = "int8"\nweights = "fp8"\nblock = 16\n',
        'gradients = "int4"\nblock = 16\nrounding = "stochastic"\n',
        'gradients = "support.codecs:Half"\n',
    ],
    ids=["int8 and fp8", "stochastic int4", "a codec of others"],
)
def test_a_right_codec_is_proven(table):
    found = verdict(table)
    assert (found.failures, found.diagnosis) == ((), ())
    assert any("on the wire are gradients as" in note for note in found.notes)
    assert all(row.ok for row in found.evidence.rows)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Shrinking", "is off by more than its codec's bound"),
        ("Wide", "and its codec states"),
        ("Restless", "from the same codec on one device"),
    ],
)
def test_a_wrong_codec_is_found(name, said):
    with pytest.raises(AssertionError) as caught:
        verdict(f'gradients = "support.codecs:{name}"\n')
    assert said in str(caught.value)


REPLICAS = "[mesh]\ndp_replicate = 2\n[sharding.ddp]\n[communication.compression]\n"


def replicated(table):
    options = {"loss_fn": sum_loss, "grad_clip": 0.5, "microbatch": 3}
    return assert_parity(Even, write_manifest(REPLICAS + table), batch(), **options).verdict


@pytest.mark.parametrize(
    "table",
    ['gradients = "topk"\nratio = 0.1\nblock = 16\n', 'gradients = "powersgd"\nrank = 2\n', 'gradients = "int8"\n'],
    ids=["topk", "powersgd", "int8"],
)
def test_means_of_replicas_are_proven(table):
    found = replicated(table)
    assert (found.failures, found.diagnosis) == ((), ())
    assert any("on the wire are gradients over replicas as" in note for note in found.notes)
    assert all(row.ok for row in found.evidence.rows)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Parted", "returns other numbers on some replicas than on others"),
        ("Shrinking", "is off by more than its codec's bound"),
    ],
)
def test_a_wrong_mean_of_replicas_is_found(name, said):
    with pytest.raises(AssertionError) as caught:
        replicated(f'gradients = "support.codecs:{name}"\n')
    assert said in str(caught.value)


def test_a_residual_that_is_lost_is_found(monkeypatch):
    """What senders have left over is forgotten after each exchange."""
    exchange = replica_means.mean_of_replicas

    def forgetful(x_N, codec, group, owed=None, *, out=None):  # noqa: N803 - shapes are in names
        mean = exchange(x_N, codec, group, owed, out=out)
        if owed is not None:
            owed.sender_N.zero_()
        return mean

    monkeypatch.setattr(replica_means, "mean_of_replicas", forgetful)
    with pytest.raises(AssertionError) as caught:
        replicated('gradients = "topk"\nratio = 0.1\n')
    assert "loses, or sends twice" in str(caught.value)
