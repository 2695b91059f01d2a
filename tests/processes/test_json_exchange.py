import ast
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from composer3d import all_gather_json, broadcast_json
from composer3d.processes.json_exchange import gather_json
from composer3d.testing import count_collectives, fake_world, run_ranks

ROOT = Path(__file__).resolve().parents[2]
# Whatever reaches `pickle.loads` with what another rank sent.
PICKLING = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
# Stand-ins, in plans and replays, for what torch's own pipeline stages call.
STAND_INS = {
    "composer3d/torch_compat/pipelines.py",
    "composer3d/torch_compat/fakes/fake_tensors.py",
}

VALUES = [
    {"a": [1, 2.5, None, True], "b": {"c": "text \u00e9 \u4e2d \U0001f600"}},
    "x" * 100_000,
    2**127 + 1,
    [],
    float("inf"),
]


def rank_value(rank):
    return VALUES[rank % len(VALUES)]


def exchange():
    rank = dist.get_rank()
    with count_collectives() as gathering:
        everyone = all_gather_json(rank_value(rank))
    with count_collectives() as broadcasting:
        first = broadcast_json({"from": rank} if rank == 0 else object())
    pair = dist.new_group([1, 2])
    of_pair = all_gather_json(rank, group=pair) if rank in (1, 2) else None
    first_of_pair = broadcast_json(rank, group=pair) if rank in (1, 2) else None
    gathered_of_pair = gather_json((rank, ()), group=pair) if rank in (1, 2) else None
    counts = gathering.count("all_gather"), broadcasting.count("broadcast")
    return everyone, first, of_pair, first_of_pair, gathered_of_pair, gather_json(rank), counts


def test_ranks_exchange_values_of_any_length():
    results = run_ranks(exchange, 5)
    for rank, (everyone, first, of_pair, first_of_pair, gathered_of_pair, gathered, counts) in enumerate(results):
        inside = rank in (1, 2)
        assert everyone == VALUES
        assert first == {"from": 0}
        assert of_pair == ([1, 2] if inside else None)
        assert first_of_pair == (1 if inside else None)
        assert gathered_of_pair == ([[1, []], [2, []]] if rank == 1 else None)
        assert gathered == ([0, 1, 2, 3, 4] if rank == 0 else None)
        assert counts == (2, 2)


def test_without_a_process_group_it_is_ones_own():
    assert all_gather_json((1, "a")) == [[1, "a"]]
    assert gather_json((1, "a")) == [[1, "a"]]
    assert broadcast_json((1, "a")) == [1, "a"]


@pytest.mark.parametrize("rank", [0, 2])
def test_in_a_fake_world_every_rank_has_this_ranks_value(rank):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with fake_world(4, rank=rank), FakeTensorMode(), torch.device("meta"):
        assert all_gather_json((rank, "a")) == [[rank, "a"]] * 4
        assert gather_json(rank) == [rank] * 4
        assert broadcast_json({"rank": rank}) == {"rank": rank}
        assert all_gather_json(1, group=dist.new_group([rank, 3])) == [1, 1]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": [{1: 2}]}, "value.a.0 has the key 1, a int; JSON keys are strings"),
        ([b"bytes"], "value.0 is a bytes, which JSON cannot carry between ranks"),
        ({"a": torch.zeros(1)}, "value.a is a Tensor, which JSON cannot carry between ranks"),
    ],
)
def test_what_json_would_lose_is_refused(value, message):
    for function in (all_gather_json, gather_json, broadcast_json):
        with pytest.raises(TypeError) as caught:
            function(value)
        assert str(caught.value) == message


def pickling_names(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PICKLING:
            yield node.lineno
        elif isinstance(node, ast.ImportFrom):
            yield from (node.lineno for alias in node.names if alias.name in PICKLING)
        elif isinstance(node, ast.Constant) and node.value in PICKLING:
            yield node.lineno


def test_nothing_pickles_over_a_collective():
    files = sorted([*(ROOT / "composer3d").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")])
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        if str(path.relative_to(ROOT)) not in STAND_INS
        and any(name in path.read_text(encoding="utf-8") for name in PICKLING)  # few files are parsed
        for line in pickling_names(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(files) > 100
    assert found == []


def test_pickling_collectives_are_recognised():
    source = "import torch.distributed as dist\nfrom torch.distributed import gather_object as g\n"
    source += "dist.all_gather_object(a, b)\ngetattr(dist, 'broadcast_object_list')(a)\ndist.all_gather(a, b)\n"
    assert sorted(pickling_names(ast.parse(source))) == [2, 3, 4]
