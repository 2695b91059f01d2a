from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.models import Even, Net, mean_loss, padded, sum_loss, unpadded, write_manifest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import composer3d
from composer3d import Batch, BatchError, InitialisationError, ManifestError, RankError
from composer3d.testing import assert_gradients_equal, assert_parity, full, gather_full, run_ranks


def named(**values):
    return {fqn: torch.tensor(value, dtype=torch.float64) for fqn, value in values.items()}


def test_the_measure_is_relative_to_the_largest_reference_of_each_parameter():
    reference = named(a=[1000.0, 1.0], b=[1.0])
    assert_gradients_equal(named(a=[1000.0, 1.5], b=[1.0]), reference, tolerance=5e-4)
    with pytest.raises(AssertionError) as caught:
        assert_gradients_equal(named(a=[1000.0, 1.5], b=[1.5]), reference, tolerance=4.9e-4)
    assert str(caught.value) == (
        "2 of 2 gradients differ by more than 0.00049 of their largest value:\n  b: 0.5\n  a: 0.0005"
    )


def test_the_five_worst_are_shown_and_nan_is_the_worst():
    reference = {f"layers.{index}": torch.ones(1) for index in range(8)}
    actual = {fqn: tensor + index / 10 for index, (fqn, tensor) in enumerate(reference.items())}
    actual["layers.0"] = torch.tensor([float("nan")])
    with pytest.raises(AssertionError) as caught:
        assert_gradients_equal(actual, reference, tolerance=0.15)
    assert re.findall(r"\n  (layers\.\d): (\S+)", str(caught.value)) == [
        ("layers.0", "nan"),
        ("layers.7", "0.7"),
        ("layers.6", "0.6"),
        ("layers.5", "0.5"),
        ("layers.4", "0.4"),
    ]


@pytest.mark.parametrize("value", [1e-300, float("inf"), float("nan")])
def test_a_reference_of_zeros_asks_for_zeros(value):
    assert_gradients_equal(named(a=[0.0]), named(a=[0.0]), tolerance=0.0)
    with pytest.raises(AssertionError, match="1 of 1 gradients differ"):
        assert_gradients_equal(named(a=[value]), named(a=[0.0]), tolerance=1e9)


def test_low_precision_is_compared_in_float64():
    reference = {"a": torch.tensor([1.0, 3e-8], dtype=torch.float64)}
    with pytest.raises(AssertionError, match="a: 3e-08"):
        assert_gradients_equal({"a": torch.tensor([1.0, 0.0], dtype=torch.bfloat16)}, reference, tolerance=1e-12)


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        ({}, r"FQNs differ: missing \['a'\], unexpected \[\]"),
        (named(a=[1.0], b=[1.0]), r"FQNs differ: missing \[\], unexpected \['b'\]"),
        (named(a=[1.0, 1.0]), r"a: shape \(2,\) is not the reference's \(1,\)"),
        ({"a": None}, "a: the actual gradient is None and the other is not"),
    ],
)
def test_what_cannot_be_compared_is_named(actual, message):
    with pytest.raises(AssertionError, match=f"^{message}$"):
        assert_gradients_equal(actual, named(a=[1.0]), tolerance=1.0)


def test_absent_and_empty_gradients_are_equal():
    both = {"frozen": None, "empty": torch.empty(0, 3)}
    assert_gradients_equal(both, dict(both), tolerance=0.0)


def sharded_and_partial():
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    value = torch.arange(15.0).reshape(5, 3)
    shards = distribute_tensor(value, mesh, [Shard(0), Shard(1)])
    partial = DTensor.from_local(torch.ones(2), mesh["tp"], [Partial()])
    plain = torch.ones(1, requires_grad=True)
    gathered = gather_full({"shards": shards, "partial": partial, "plain": plain})
    assert_gradients_equal({"w": shards}, {"w": value}, tolerance=0.0)
    return gathered, full(shards.requires_grad_()).requires_grad


def test_full_tensors_of_sharded_and_partial_ones():
    for gathered, requires_grad in run_ranks(sharded_and_partial, 4):
        assert list(gathered) == ["partial", "plain", "shards"]
        assert torch.equal(gathered["shards"], torch.arange(15.0).reshape(5, 3))
        assert torch.equal(gathered["partial"], torch.full((2,), 2.0))
        assert not gathered["plain"].requires_grad
        assert not requires_grad


def stages():
    """Hold what two stages of a pipeline hold: their own layer, and a tied weight that only the ends have."""
    rank = dist.get_rank()
    own = [(f"layers.{rank}", torch.full((3, 2), float(rank)).t())]
    if rank != 1:
        own.append(("tied", torch.tensor([rank, 7], dtype=torch.int32)))
    return gather_full(own)


def test_every_rank_gets_what_only_some_have():
    for rank, gathered in enumerate(run_ranks(stages, 3)):
        assert list(gathered) == ["layers.0", "layers.1", "layers.2", "tied"]
        for index in range(3):
            assert torch.equal(gathered[f"layers.{index}"], torch.full((2, 3), float(index)))
        # Rank 1 has it from the lowest owner; owners keep their own, so that a difference shows.
        assert gathered["tied"].tolist() == [2 if rank == 2 else 0, 7]


def test_without_a_world_the_tensors_are_copied():
    weight = torch.nn.Parameter(torch.zeros(2))
    gathered = gather_full({"weight": weight})
    gathered["weight"].add_(1)
    assert weight.tolist() == [0.0, 0.0]
    assert not gathered["weight"].requires_grad


FSDP = "[sharding.fsdp2]\n"
HYBRID = "[mesh]\ndp_replicate = 2\n[train]\nseed = 3\n" + FSDP
STALE = '[sharding.stale]\nuse = "support.plugins:Stale"\n'
SCALED = '[precision.scaled]\nuse = "support.plugins:Scaled"\n'


def global_batch(make=padded):
    tokens, targets = make()
    return Batch(args=(tokens,), target=targets)


@pytest.mark.parametrize(
    ("text", "world_size", "microbatch", "loss_fn", "make"),
    [
        pytest.param(FSDP, 2, None, sum_loss, padded, id="fsdp2"),
        pytest.param(HYBRID, 4, 1, sum_loss, padded, id="hsdp", marks=pytest.mark.slow),
        pytest.param("[sharding.ddp]\n", 2, 2, mean_loss, unpadded, id="ddp"),
    ],
)
def test_a_right_layout_is_in_parity(text, world_size, microbatch, loss_fn, make):
    path = write_manifest(text)
    parity = assert_parity(Net, path, global_batch(make), world_size=world_size, loss_fn=loss_fn, microbatch=microbatch)
    assert parity.loss <= 1e-12 and parity.grad_norm <= 1e-12
    assert list(parity.gradients) == sorted(name for name, _ in Net().named_parameters())
    assert max(parity.gradients.values()) <= 1e-12
    assert "all_reduce" in {op for op, _ in parity.collectives}


def test_precision_plugins_are_compared_in_their_own_dtypes():
    path = write_manifest(SCALED)
    parity = assert_parity(Net, path, global_batch(), loss_fn=sum_loss, microbatch=4, own_dtype=True)
    own = parity.verdict.evidence
    assert set(own.reference.tolerances) == {"float64", "own"}
    assert 0.0 <= own.largest("gradients", "own") <= own.reference.tolerances["own"]["gradients"] < 1e-4


def test_the_collectives_of_the_step_are_counted():
    parity = assert_parity(Net, write_manifest(FSDP), global_batch(), world_size=2, loss_fn=sum_loss, microbatch=2)
    # Four units and three micro-batches; counts, loss and norm.
    assert {key: count for key, (count, _) in parity.collectives.items()} == {
        ("all_gather", "dp_shard"): 2 * 4 * 3 - 3,
        ("reduce_scatter", "dp_shard"): 4 * 3,
        ("all_reduce", "dp_shard"): 3,
    }


def test_a_fault_of_a_plugin_is_found():
    path = write_manifest(FSDP + STALE)
    options = {"world_size": 2, "loss_fn": sum_loss, "steps": 1, "own_dtype": False}
    with pytest.raises(AssertionError) as caught:
        assert_parity(Net, path, global_batch(), **options)
    first, second, *more = str(caught.value).splitlines()
    assert re.fullmatch(r"the gradient norm differs by \S+ of its value, more than 1e-12 \(in float64\)", first)
    assert second == "4 of 17 gradients differ by more than 1e-12 (in float64)"
    worst = [line for line in more if line.startswith("  ")]
    whose = "layers.1.down.bias, layers.1.down.weight, layers.1.up.bias, layers.1.up.weight"
    assert more[-2:] == [
        f"likely: the gradients of {whose} are 1.001 times the right ones",
        f"likely: the loss is right, and of all gradients those of {whose} alone are wrong",
    ]
    names = {f"layers.1.{name}" for name in ("down.bias", "down.weight", "up.bias", "up.weight")}
    assert {line.split(":")[0].strip() for line in worst} == names
    assert {line.split(": ")[1] for line in worst} == {"0.001"}


@pytest.mark.slow
def test_a_tolerance_that_is_too_wide_does_not_see_a_fault():
    path = write_manifest(FSDP + STALE)
    assert_parity(Net, path, global_batch(), tolerance=2e-2, world_size=2, loss_fn=sum_loss, steps=1, own_dtype=False)


def test_a_fault_of_one_rank_is_found():
    def lost_on_one_rank():
        model = Net()
        if dist.get_world_size() > 1 and dist.get_rank() == 1:
            model.register_forward_hook(lambda module, args, output: 2 * output)
        return model

    with pytest.raises(
        AssertionError, match=r"^the loss differs by \S+ of its value, more than 1e-12 \(in float64\)\nthe gradient"
    ):
        assert_parity(
            lost_on_one_rank,
            write_manifest("[sharding.ddp]\n"),
            global_batch(),
            world_size=2,
            loss_fn=sum_loss,
            steps=1,
            own_dtype=False,
        )


def test_gradients_that_only_one_side_has_are_named():
    def frozen_in_company():
        model = Net()
        model.norm.bias.requires_grad_(dist.get_world_size() == 1)
        return model

    with pytest.raises(AssertionError, match=r"\nlikely: no gradient reaches norm.bias"):
        assert_parity(
            frozen_in_company,
            write_manifest(FSDP),
            global_batch(),
            world_size=2,
            loss_fn=sum_loss,
            steps=1,
            own_dtype=False,
        )


def test_a_target_of_several_tensors_is_counted_by_the_caller():
    class TwoHeads(nn.Linear):
        def forward(self, *, features):
            found = super().forward(features)
            return {"one": found[:, :2] + 0.0, "other": found[:, 2] + 0.0}

    def loss_fn(outputs, targets):
        one = torch.nn.functional.cross_entropy(outputs["one"], targets["one"], reduction="sum")
        return one + (outputs["other"] - targets["other"]).square().sum(), torch.tensor(len(targets["one"]))

    targets = {"one": torch.tensor([0, 1, 1, 0]), "other": torch.arange(4.0)}
    parity = assert_parity(
        lambda: TwoHeads(3, 3),
        write_manifest("[sharding.ddp]\n"),
        Batch(args=(), kwargs={"features": torch.rand(4, 3)}, target=targets),
        world_size=2,
        loss_fn=loss_fn,
        count_fn=lambda targets: len(targets["one"]),
        microbatch=1,
        own_dtype=False,
    )
    assert max(parity.gradients.values()) <= 1e-12


def test_floating_point_inputs_take_the_dtype():
    features, labels = torch.rand(4, 3), torch.tensor([0, 1, 2, 1])
    parity = assert_parity(
        lambda: nn.Linear(3, 3),
        write_manifest(FSDP),
        Batch(args=(), kwargs={"input": features}, target=labels),
        world_size=2,
        loss_fn=torch.nn.CrossEntropyLoss(reduction="sum"),
    )
    assert set(parity.gradients) == {"weight", "bias"}


def first(number):
    """Return the first samples of the batch."""
    whole = global_batch()
    return Batch(args=(whole.args[0][:number],), target=whole.target[:number])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            lambda: (Net(), global_batch()),
            InitialisationError,
            "assert_parity is given a Net, and takes a factory: the model is made once for each composition, in "
            "float64 too; pass its class, or lambda: Model(...)",
        ),
        (
            lambda: (Net, Batch(args=(torch.tensor(3),), target=None)),
            BatchError,
            "assert_parity is given a batch without samples: none of its tensors has a dim 0 to cut",
        ),
        (
            lambda: (Net, (global_batch().args[0], global_batch().target)),
            BatchError,
            "assert_parity is given a tuple as its batch; pass composer3d.Batch(args=(inputs,), target=targets), the "
            "whole batch of a step on the CPU",
        ),
        (
            lambda: (Net, first(3)),
            BatchError,
            "a global batch of 3 samples does not divide over 2 data-parallel ranks; use 2 or 4",
        ),
        (
            lambda: (Net, first(4), {"microbatch": 3}),
            BatchError,
            "a batch of 2 samples cannot be split into micro-batches of 3 ([train] microbatch); hand over a multiple "
            "of 3 samples a call",
        ),
    ],
)
def test_mistakes_are_refused_before_ranks_are_started(arguments, error, message):
    factory, batch, *options = arguments()
    with pytest.raises(error) as caught:
        assert_parity(factory, write_manifest(FSDP), batch, world_size=2, loss_fn=sum_loss, **dict(*options))
    assert str(caught.value) == message


class Raising(Net):
    """Fails in its forward."""

    def forward(self, *args):
        raise ValueError("a mistake of the model")


def test_a_rank_that_fails_is_told_by_its_own_traceback_alone():
    with pytest.raises(RankError, match="ValueError: a mistake of the model") as caught:
        assert_parity(Raising, write_manifest(FSDP), global_batch(), world_size=2, loss_fn=sum_loss)
    product = Path(composer3d.__file__).parent
    inside = {entry.path.name for entry in caught.traceback if entry.path.is_relative_to(product)}
    assert inside <= {"verifying.py"}
    assert "in forward" in str(caught.value) and caught.value.__cause__ is None


def test_the_manifest_of_a_run_passes_with_its_tables():
    from composer3d.runner import TABLES

    path = write_manifest('model = "nobody:reads_this"\ntrain.steps = 3\n' + FSDP)
    options = {"world_size": 2, "loss_fn": sum_loss, "steps": 1, "own_dtype": False}
    assert_parity(Net, path, global_batch(), tables=TABLES, **options)
    with pytest.raises(ManifestError, match='unknown key "steps"'):
        assert_parity(Net, path, global_batch(), **options)


class Weighed(Even):
    """Is called with more than tokens."""

    def forward(self, tokens, *, weight):
        return super().forward(tokens) * weight


def test_plugins_that_follow_a_forward_see_the_batch():
    tokens, targets = padded()
    batch = Batch(args=(tokens,), kwargs={"weight": torch.rand(*tokens.shape, 1)}, target=targets)
    path = write_manifest('[mesh]\ntp = 2\n[sharding.tensor_parallel]\nplan = "auto"\n')
    proven = assert_parity(Weighed, path, batch, loss_fn=sum_loss, steps=1, own_dtype=False)
    assert proven.collectives[("all_reduce", "tp")][0] > 0
