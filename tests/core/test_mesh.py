from __future__ import annotations

import importlib
import math
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from composer3d import Axis, GroupOptions, MeshError, Role, torch_compat
from composer3d.mesh import AXES, arrange, build, crossings, resolve
from composer3d.testing import fake_world, run_ranks


def layout(world_size=None, *, default=None, axes=AXES, **stated):
    return resolve(stated, axes=axes, world_size=world_size, default=default)


def refusal(function, *args, **options):
    with pytest.raises(MeshError) as caught:
        function(*args, **options)
    return str(caught.value)


# ---- axes ------------------------------------------------------------------------------------------------------------


def test_the_standard_axes_outermost_first():
    assert arrange([]) == AXES
    assert [axis.name for axis in AXES] == ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]


def test_axes_are_inserted_where_they_belong():
    outer = Axis(name="site", role=Role.INDEPENDENT)
    inner = Axis(name="pair", role=Role.BATCH, inside="dp_shard")
    expected = ["site", "pp", "dp_replicate", "dp_shard", "pair", "cp", "tp", "ep"]
    for extra in ([outer, inner], [inner, outer]):
        assert [axis.name for axis in arrange(extra)] == expected


def test_axes_that_cannot_be_inserted():
    message = refusal(arrange, [Axis(name="tp", role=Role.TENSOR)])
    assert message == 'the axis "tp" is declared twice'
    message = refusal(arrange, [Axis(name="a", role=Role.BATCH), Axis(name="a", role=Role.TENSOR)])
    assert message == 'the axis "a" is declared twice'
    message = refusal(arrange, [Axis(name="a", role=Role.BATCH, inside="dpp")])
    assert message == 'the axis "a" is to stand inside "dpp", which is no axis'


# ---- degrees ---------------------------------------------------------------------------------------------------------


def test_unnamed_degrees_are_one():
    assert dict(layout().degrees) == {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "cp": 1, "tp": 1, "ep": 1}
    assert layout(1).world_size == 1


def test_what_is_left_goes_to_the_axis_of_minus_one():
    assert layout(16, dp_shard=-1, tp=2).degrees["dp_shard"] == 8
    assert layout(16, tp=-1, dp_shard=4).degrees["tp"] == 4
    assert layout(16, tp=-1, dp_shard=16).degrees["tp"] == 1


def test_what_is_left_goes_to_the_default_axis():
    assert layout(16, default="dp_shard", tp=2).degrees["dp_shard"] == 8
    assert layout(16, default="dp_replicate", dp_shard=2).degrees["dp_replicate"] == 8


def test_the_default_axis_stands_back_where_something_is_stated():
    stated = layout(16, default="dp_shard", pp=-1)
    assert (stated.degrees["pp"], stated.degrees["dp_shard"]) == (16, 1)
    message = refusal(layout, 16, default="dp_shard", dp_shard=4, tp=2)
    assert message == "dp_shard=4 x tp=2 = 8, but the world has 16 ranks"


def test_without_a_world_the_product_is_the_world():
    assert layout(pp=2, tp=4).world_size == 8
    assert layout(default="dp_shard", dp_shard=-1, tp=4).world_size == 4


@pytest.mark.parametrize(
    ("world_size", "stated", "message"),
    [
        (8, {"tp": 3, "dp_shard": -1}, "dp_shard=1 x tp=3 = 3, but the world has 8 ranks"),
        (8, {"dp_shard": 2}, "dp_shard=2, but the world has 8 ranks"),
        (
            8,
            {},
            "the world has 8 ranks, and no plugin of this manifest shares work among them; name one (composer3d "
            'plugins lists those of the family "sharding"), or start 1 rank',
        ),
        (4, {"dp_shard": 4, "cp": 1, "tp": 2}, "dp_shard=4 x cp=1 x tp=2 = 8, but the world has 4 ranks"),
        (8, {"pp": -1, "tp": -1}, "only one axis may be -1, not pp and tp"),
        (
            6,
            {"dp_shard": 6, "ep": 4},
            "ep=4 does not divide dp_shard x cp = 6, which it is carved out of; write dp_shard = 4, or a multiple of "
            "it",
        ),
        (8, {"dp_shard": 8, "ep": -1}, "ep cannot be -1: it is carved out of dp_shard x cp x tp, and takes no ranks"),
    ],
)
def test_degrees_that_do_not_fit(world_size, stated, message):
    assert refusal(layout, world_size, **stated) == message


@pytest.mark.parametrize("axes", [(), ("pp",), ("tp", "pp"), ("dp_shard", "cp"), ("pp", "dp_shard", "cp", "tp")])
def test_ranks_of_one_place_along_axes_are_grouped_by_their_positions(axes):
    made = layout(pp=2, dp_shard=3, cp=2, tp=2)
    for ranks in (range(24), [5, 1, 7, 23, 0, 12]):
        places = [tuple(made.coordinates(rank)[axis] for axis in axes) for rank in ranks]
        expected = {place: tuple(p for p, other in enumerate(places) if other == place) for place in places}
        found = made.alike(ranks, axes)
        assert sorted(found) == sorted(group for group in expected.values() if len(group) > 1)
        assert made.alike(list(ranks) if isinstance(ranks, list) else ranks, axes) is found


def test_experts_do_not_multiply_the_world():
    assert layout(8, dp_shard=4, cp=2, ep=8).world_size == 8


def test_further_axes_take_part():
    axes = arrange([Axis(name="site", role=Role.INDEPENDENT)])
    found = layout(8, axes=axes, default="dp_shard", site=2)
    assert (found.degrees["site"], found.degrees["dp_shard"], found.world_size) == (2, 4, 8)
    assert str(found) == "site=2 x pp=1 x dp_replicate=1 x dp_shard=4 x cp=1 x tp=1"


# ---- coordinates -----------------------------------------------------------------------------------------------------

LAYOUTS = [
    {"pp": 2, "dp_shard": 2, "tp": 2},
    {"pp": 3, "dp_replicate": 2, "dp_shard": 4, "cp": 2, "tp": 5},
    {"dp_replicate": 2, "dp_shard": 4, "cp": 2, "ep": 4},
    {},
]


@pytest.mark.parametrize("degrees", LAYOUTS)
def test_ranks_are_numbered_like_an_array(degrees):
    found = layout(**degrees)
    names = [axis.name for axis in found.dense_axes]
    shape = tuple(found.degrees[name] for name in names)
    assert found.world_size == math.prod(shape)
    for rank in range(found.world_size):
        expected = dict(zip(names, map(int, np.unravel_index(rank, shape)), strict=True))
        coordinates = dict(found.coordinates(rank))
        assert {name: coordinates[name] for name in names} == expected
        assert list(coordinates) == [axis.name for axis in found.axes]


def test_experts_are_neighbours_along_dp_shard_and_cp():
    found = layout(dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=4)
    for rank in range(found.world_size):
        coordinates = found.coordinates(rank)
        assert coordinates["ep"] == (coordinates["dp_shard"] * 2 + coordinates["cp"]) % 4


def test_flat_indices():
    found = layout(pp=2, dp_replicate=2, dp_shard=3, tp=2)
    for rank in range(found.world_size):
        pp, replicate, shard, _, tp = np.unravel_index(rank, (2, 2, 3, 1, 2))
        assert found.index(rank, Role.BATCH) == replicate * 3 + shard
        assert found.index(rank, Role.STAGE) == pp
        assert found.index(rank, Role.STAGE, Role.TENSOR) == pp * 2 + tp
        assert found.index(rank) == 0
    assert found.degree(Role.BATCH) == 6
    assert found.names(Role.BATCH, Role.TENSOR) == ("dp_replicate", "dp_shard", "tp")


def test_groups_are_innermost_for_tp_and_outermost_for_pp():
    large = layout(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    groups = {axis.name: large.group(21, axis.name) for axis in large.dense_axes}
    assert groups == {"pp": (5, 21), "dp_replicate": (21, 29), "dp_shard": (17, 21), "cp": (21, 23), "tp": (20, 21)}


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_a_group_has_the_ranks_that_differ_in_that_coordinate_alone(ep):
    large = layout(pp=2, dp_replicate=2, dp_shard=4, cp=2, tp=2, ep=ep)
    coordinates = [dict(large.coordinates(rank)) for rank in range(large.world_size)]
    for rank, here in enumerate(coordinates):
        for axis in (axis.name for axis in large.axes):
            group = large.group(rank, axis)
            assert rank in group and list(group) == sorted(group) and len(group) == large.degrees[axis]
            assert sorted(coordinates[other][axis] for other in group) == list(range(large.degrees[axis]))
            assert all(large.group(other, axis) == group for other in group)
            taken = {axis, "ep"} if axis != "ep" else {"dp_shard", "cp", "ep"}
            for other in group:
                assert {name for name in here if here[name] != coordinates[other][name]} <= taken


def test_ranks_outside_the_world():
    for rank in (-1, 4):
        assert refusal(layout(4, dp_shard=4).coordinates, rank) == f"rank {rank} is not in a world of 4 ranks"


@pytest.mark.parametrize(
    ("degrees", "gpus_per_node", "expected"),
    [
        ({"tp": 8, "dp_shard": 4}, 8, ()),
        ({"tp": 16}, 8, ("tp",)),
        ({"tp": 3}, 8, ()),
        ({"tp": 3, "dp_shard": 4}, 8, ("tp",)),
        ({"tp": 4, "cp": 2}, 8, ()),
        ({"tp": 4, "cp": 4}, 8, ("cp",)),
        ({"tp": 16, "cp": 2}, 8, ("cp", "tp")),
        ({"dp_shard": 64, "pp": 4}, 8, ()),
        ({"tp": 2, "cp": 1}, 1, ("tp",)),
        ({"tp": 4}, 6, ()),
        ({"tp": 4, "dp_shard": 2}, 6, ("tp",)),
    ],
)
def test_crossings(degrees, gpus_per_node, expected):
    assert set(crossings(layout(**degrees), gpus_per_node)) == set(expected)


@pytest.mark.parametrize("gpus_per_node", [1, 2, 3, 4, 6, 8, 12, 16, 24])
def test_axes_that_leave_a_node_are_those_whose_ranks_are_on_different_ones(gpus_per_node):
    for found in (layout(dp_replicate=2, dp_shard=3, tp=2), layout(pp=2, dp_shard=2, cp=2), layout(dp_shard=4)):
        dense = [axis.name for axis in found.dense_axes]
        for index, axis in enumerate(dense):
            inside = dense[index:]
            groups = {}
            for rank in range(found.world_size):
                place = tuple(value for name, value in found.coordinates(rank).items() if name not in (*inside, "ep"))
                groups.setdefault(place, set()).add(rank // gpus_per_node)
            expected = any(len(nodes) > 1 for nodes in groups.values())
            assert found.leaves_node(axis, gpus_per_node) == expected, (axis, found)


# ---- the mesh --------------------------------------------------------------------------------------------------------


def build_on_a_rank(degrees, options):
    found = layout(**degrees)
    torch_compat.set_group_timeout(None, timedelta(seconds=70))
    mesh = build(found, device_type="cpu", options=options)
    rank = dist.get_rank()
    result = {}
    for name in mesh.mesh_dim_names:
        group = mesh[name].get_group()
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        result[name] = (
            mesh[name].get_local_rank(),
            dist.get_process_group_ranks(group),
            int(total),
            dist.get_backend(group),
            timeout.total_seconds(),
        )
    return result, dict(found.coordinates(rank))


def test_the_mesh_of_four_ranks():
    options = {"tp": GroupOptions(timeout_s=7.0), "dp_shard": GroupOptions(backend="gloo")}
    expected = {
        "dp_shard": {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]},
        "tp": {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]},
    }
    for rank, (found, coordinates) in enumerate(run_ranks(build_on_a_rank, 4, {"dp_shard": 2, "tp": 2}, options)):
        assert list(found) == ["pp", "dp_replicate", "dp_shard", "cp", "tp"]
        for name, (index, ranks, total, backend, timeout_s) in found.items():
            assert index == coordinates[name]
            assert ranks == expected.get(name, {}).get(rank, [rank])
            assert total == sum(ranks)
            assert backend == "gloo"
            assert timeout_s == (7.0 if name == "tp" else 70.0)  # the world's, which torch does not hand on


def backends():
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers the backend
    mesh = build(layout(dp_shard=2), device_type="cpu", options={"dp_shard": GroupOptions(backend="fake")})
    return {name: dist.get_backend(mesh[name].get_group()) for name in mesh.mesh_dim_names}


def test_an_axis_has_the_backend_of_its_options():
    expected = {"pp": "gloo", "dp_replicate": "gloo", "dp_shard": "fake", "cp": "gloo", "tp": "gloo"}
    assert run_ranks(backends, 2) == [expected, expected]


def lone_groups():
    mesh = build(layout(cp=2, dp_shard=2), device_type="cpu", options={"tp": GroupOptions(backend="gloo")})
    groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
    summed = {name: torch.full((3,), dist.get_rank() + 1.0) for name in groups}
    for name, group in groups.items():
        dist.all_reduce(summed[name], group=group)
    return (
        {name: torch_compat.group_name(group) for name, group in groups.items()},
        {name: float(value[0]) for name, value in summed.items()},
        len(torch_compat.all_groups()),
    )


def test_axes_of_one_rank_share_its_group_but_for_those_with_options():
    found = run_ranks(lone_groups, 4)
    for rank, (names, sums, num_groups) in enumerate(found):
        assert names["pp"] == names["dp_replicate"] != names["tp"]
        assert len(set(names.values())) == 4 and num_groups == 5  # the world's too
        assert [sums[name] for name in ("pp", "dp_replicate", "tp")] == [rank + 1.0] * 3
    # No two ranks' groups have the same name.
    assert len({names["pp"] for names, _, _ in found}) == 4


def test_a_rank_of_a_large_world():
    with fake_world(512, rank=301):
        mesh = build(layout(pp=4, dp_shard=16, tp=8), device_type="cpu", options={})
        assert tuple(mesh.get_coordinate()) == tuple(layout(pp=4, dp_shard=16, tp=8).coordinates(301).values())[:-1]
        assert dist.get_process_group_ranks(mesh["tp"].get_group()) == list(range(296, 304))
