from __future__ import annotations

import pytest

from composer3d.errors import ComposerError
from composer3d.mesh import AXES, resolve
from composer3d.proof.shrinking import reduce_degrees


def layout(**degrees):
    stated = {axis.name: degrees.get(axis.name, 1) for axis in AXES}
    return resolve(stated, axes=AXES, world_size=None, default=None)


@pytest.mark.parametrize(
    ("degrees", "max_ranks", "expected"),
    [
        ({"dp_shard": 2}, 8, {"dp_shard": 2}),
        ({"dp_shard": 64, "tp": 8}, 8, {"dp_shard": 2, "tp": 4}),
        ({"dp_shard": 64, "tp": 8}, 4, {"dp_shard": 2, "tp": 2}),
        ({"pp": 3, "dp_shard": 5}, 8, {"pp": 3, "dp_shard": 2}),
        (
            {"pp": 8, "dp_replicate": 4, "dp_shard": 16, "tp": 8},
            16,
            dict.fromkeys(("pp", "dp_replicate", "dp_shard", "tp"), 2),
        ),
    ],
)
def test_every_axis_stays_above_one(degrees, max_ranks, expected):
    assert reduce_degrees(layout(**degrees), max_ranks) == expected


def test_four_axes_do_not_fit_eight_ranks():
    with pytest.raises(ComposerError) as caught:
        reduce_degrees(layout(pp=8, dp_replicate=4, dp_shard=16, tp=8), 8)
    assert str(caught.value) == (
        "pp, dp_replicate, dp_shard, tp are all above 1, so the smallest world of this shape has 16 ranks, and 8 are "
        "allowed; pass --max-ranks 16, or set one of the axes to 1 with --set and verify in several calls"
    )
