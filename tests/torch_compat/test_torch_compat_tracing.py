"""The private names of torch that runs without values rest on."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn

from composer3d import torch_compat
from composer3d.testing import fake_world
from composer3d.torch_compat.fakes import rules_at_hand
from composer3d.torch_compat.fakes.shardings import like_other_meshes


def test_fake_tensors_have_no_values_and_answer_when_asked():
    with torch_compat.fake_tensors() as mode:
        tensor = torch.zeros(3)
        assert tensor.fake_mode is mode and torch_compat.active_fake_mode() is mode
        assert (float(tensor.sum()), int(torch.zeros(1, dtype=torch.int64)), bool(tensor.isnan().any())) == (
            1.0,
            0,
            False,
        )
        assert torch.equal(tensor, tensor + 1)
        with torch_compat.with_values():
            assert torch.arange(3).tolist() == [0, 1, 2]
    assert torch_compat.active_fake_mode() is None


def test_a_fake_tensors_device_is_a_question_that_modes_see():
    asked = []

    def handle(operator, types, args, kwargs):
        asked.append((operator, args[0]))
        return operator(*args, **kwargs)

    with torch_compat.fake_tensors():
        tensor = torch.zeros(3, requires_grad=True)
        with torch_compat.dispatch_mode(handle, compiles=False):
            (tensor * 2).sum().backward()
        number = len(asked)
        with torch_compat.dispatch_mode(handle, compiles=False, knows_devices=True):
            (tensor * 2).sum().backward()
    questions = [of for operator, of in asked if operator is torch_compat.operators.device_question()]
    assert questions and all(of.fake_device == torch.device("cpu") for of in questions)
    told = [operator for operator, _ in asked[number:]]
    assert torch.ops.aten.mul.Tensor in told and torch_compat.operators.device_question() not in told, (
        "answered at once"
    )


def test_rules_of_operators_are_found_at_hand_and_left_as_they_were():
    from torch._library import simple_registry

    class Kind(torch.Tensor):
        pass

    def rule(mode, func, types, args, kwargs):
        return "by a rule"

    before, name = simple_registry.singleton, torch.ops.aten.mul.Tensor.name()
    holder = before.find(name).torch_dispatch_rules
    with rules_at_hand(), rules_at_hand():
        find = simple_registry.find_torch_dispatch_rule
        assert simple_registry.singleton is not before and find(torch.ops.aten.mul.Tensor, Kind) is None
        registered = holder.register(Kind, rule)
        assert find(torch.ops.aten.mul.Tensor, Kind) is rule, "one that is registered meanwhile"
        registered.destroy()
        assert find(torch.ops.aten.mul.Tensor, Kind) is None
        assert simple_registry.singleton.find(name) is before.find(name)
    assert simple_registry.singleton is before and "find" not in vars(holder)


def test_views_and_operators_in_place_are_told_from_others():
    aten = torch.ops.aten
    assert [torch_compat.is_view(op) for op in (aten.view.default, aten._unsafe_view.default, aten.mul.Tensor)] == [
        True,
        True,
        False,
    ]
    assert [torch_compat.is_in_place(op) for op in (aten.add_.Tensor, aten.add.Tensor)] == [True, False]


def test_storages_that_change_by_hand_are_told():
    seen = []
    with torch_compat.watch_storages(lambda storage: seen.append(storage.nbytes()), lambda paused: None):
        torch.zeros(4).untyped_storage().resize_(0)
    torch.zeros(4).untyped_storage().resize_(0)
    assert seen == [0]


def test_plain_tensors_of_wrappers_and_the_buffers_of_sharded_units():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with fake_world(2):
        module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)))
        (plain,) = torch_compat.plain_tensors(module.weight)
        assert tuple(plain.shape) == (2, 4)
        module(torch.ones(1, 4))
        assert {tensor.untyped_storage().nbytes() for tensor in torch_compat.fsdp_buffers(module)} == {16, 64}


def test_integers_are_sharded_and_need_no_gradient():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    with fake_world(2):
        module = nn.Linear(4, 4)
        module.codes = nn.Parameter(torch.arange(8, dtype=torch.uint8), requires_grad=False)
        torch_compat.shard_integers()
        fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        assert module.codes.to_local().tolist() == [0, 1, 2, 3] and not module.codes.requires_grad
        assert module.weight.requires_grad


def test_gradients_of_a_group_are_brought_to_one_dtype():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    with fake_world(2):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        module = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
        module.set_requires_gradient_sync(False)
        module(torch.ones(1, 4)).sum().backward()
        ((group, _, _),) = torch_compat.fsdp_groups(module)
        weight, bias = group.fsdp_params
        late = torch.ones_like(bias.unsharded_param)
        bias.unsharded_accumulated_grad, bias.unsharded_param.grad = None, late
        weight.unsharded_param.grad = torch.ones_like(weight.unsharded_param)
        before = weight.unsharded_accumulated_grad.clone()
        torch_compat.unify_gradients(module)
        assert [p.unsharded_param.grad for p in (weight, bias)] == [None, None]
        assert torch.equal(weight.unsharded_accumulated_grad, before + 1.0)
        assert torch.equal(bias.unsharded_accumulated_grad, late.float())
        assert bias.unsharded_accumulated_grad.dtype is torch.float32


def test_a_lone_pipeline_replaces_methods_that_torch_has():
    from torch.distributed.pipelining import PipelineStage, schedules

    describing = ("_recv_meta", "_send_meta") if hasattr(PipelineStage, "_recv_meta") else ("_shape_inference",)
    single, multi = schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti
    if hasattr(single, "_initialize_pp_stages"):
        beginning = [(schedules._PipelineSchedule, "_initialize_pp_stages")]
    else:
        beginning = [(single, "_initialize_stage"), (multi, "_initialize_stages")]
    stage = torch_compat.described_stage() if describing[0] == "_recv_meta" else PipelineStage
    places = [*((stage, name) for name in describing), *beginning, (schedules, "_batch_p2p")]
    before = [getattr(owner, name) for owner, name in places]
    with torch_compat.lone_pipeline(lambda on: None, lambda *said: None, lambda *asked: None, lambda *told: None):
        assert not any(getattr(owner, name) is old for (owner, name), old in zip(places, before, strict=True))
    assert [getattr(owner, name) for owner, name in places] == before


def forms(tensors):
    """Return what is to be known of tensors without values, and which of them share memory."""
    places: dict[int, int] = {}
    return [
        (
            type(t).__name__,
            tuple(t.shape),
            t.stride(),
            t.storage_offset(),
            t.dtype,
            t.device,
            t.untyped_storage().nbytes(),
            places.setdefault(torch_compat.storage_key(t), len(places)),
        )
        for t in tensors
    ]


def program():
    """Run operators of every kind: with new results, views of any argument, results in place, several, none."""
    x, weight = torch.ones(4, 6, 8), torch.ones(8, 8, requires_grad=True)
    found = [x, x[1:, ::2], x.transpose(0, 1), x.reshape(24, 8), x.transpose(0, 1).reshape(24, 8), x.expand(2, 4, 6, 8)]
    found += [*x.split(3, 1), *x.unbind(0), *torch.ops.aten.native_layer_norm(x, [8], None, None, 1e-5)]
    found += [x.to(torch.bfloat16), x.to(torch.float32), x.double().sum(), x.argmax(-1), x[..., None] == 1]
    found += [x.add_(1), x.mul_(2).view(-1), torch.arange(3), torch.arange(3.0), x.new_empty(2), x.view(torch.int32)]
    found += [torch.view_as_complex(x.reshape(4, 6, 4, 2)), x[:, 0].clone(), x.sum(1, keepdim=True).squeeze_(1)]
    pair = [x, x + 1]
    torch._foreach_add_(pair, 1)
    found += [*pair, *torch._foreach_mul(pair, 2.0)]
    q = torch.ones(2, 2, 4, 8, requires_grad=True)
    attended = torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    (torch.nn.functional.linear(x.detach(), weight).relu().sum() + attended.sum()).backward()
    held = torch.nn.Parameter(torch.ones(3))
    held.untyped_storage().resize_(0)
    return [*found, attended, weight.grad, q.grad, held]


def test_remembered_results_have_the_form_of_the_first():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        expected = forms(program())
    memory = torch_compat.ResultMemory()
    with torch_compat.fake_tensors(memory) as mode:
        first = program()
    assert forms(first) == expected
    num_known = len(memory)
    with torch_compat.fake_tensors(memory) as other:
        second = program()
        assert forms(second) == forms(first) and len(memory) == num_known > 30
    assert {t.fake_mode for t in first} == {mode} and {t.fake_mode for t in second} == {other}


def gathered():
    """Gather, scatter and reduce over a group of the fake world, by functional collectives."""
    operators, name = torch.ops._c10d_functional, torch.distributed.group.WORLD.group_name
    rows = torch.ones(4, 6).t()
    found = [
        operators.all_gather_into_tensor(rows, 8, name),
        operators.reduce_scatter_tensor(torch.ones(16, 3), "sum", 8, name),
        operators.all_reduce(rows, "sum", name),
        operators.all_to_all_single(torch.ones(4, 6), [3, 1], [2, 2], name),
    ]
    return [*found, *map(operators.wait_tensor, found)]


def test_a_mode_over_the_fake_one_is_told_results_without_it():
    memory, told = torch_compat.ResultMemory(), []

    def asks(operator, types, args, kwargs):
        make = recall(operator, args, kwargs)
        told.append(make is not None)
        return operator(*args, **kwargs) if make is None else make(args, kwargs)

    def passes(operator, types, args, kwargs):
        told.append(False)
        return operator(*args, **kwargs)

    with fake_world(8), torch_compat.fake_tensors(memory):
        first = forms([*program(), *gathered()])
        num_known, recall = len(memory), memory.recaller()
        with torch_compat.dispatch_mode(asks, compiles=False):
            assert forms([*program(), *gathered()]) == first and len(memory) == num_known
            assert sum(told) > 60
            with torch_compat.with_values():
                assert float(torch.full((2,), 3.0).sum()) == 6.0  # of another mode, and of none, nothing is remembered
        # Where there is a mode in between, it is to see all operators.
        with torch_compat.dispatch_mode(passes, compiles=False):
            recall, told = memory.recaller(), []
            with torch_compat.dispatch_mode(asks, compiles=False):
                assert forms([*program(), *gathered()]) == first and not any(told)


def test_memory_for_tensors_of_no_mode_is_remembered_and_views_of_them_are_not():
    memory, plain = torch_compat.ResultMemory(), torch.empty(4, 6, device="meta")
    outside = nn.Parameter(plain.t())
    with torch_compat.fake_tensors(memory):
        given = [torch.empty_like(outside, device="cpu") for _ in range(2)]
        assert forms(given) == forms([torch.empty(4, 6).t() for _ in range(2)]) and len(memory) >= 1
        views = [torch.ops.aten._unsafe_view(plain, [24]) for _ in range(2)]
        assert len({torch_compat.storage_key(each) for each in views}) == 1


def test_results_on_meta_have_the_form_that_torch_gives_them():
    memory = torch_compat.MetaResults()

    def remembered(operator, types, args, kwargs):
        return memory.run(operator, args, kwargs, lambda: operator(*args, **kwargs))

    with torch.device("meta"):
        expected = forms(program())
        with torch_compat.dispatch_mode(remembered):
            assert [forms(program()) for _ in range(2)] == [expected] * 2
    assert len(memory) > 30


def test_what_has_no_plain_form_is_left_to_torch():
    memory = torch_compat.ResultMemory()
    with torch_compat.fake_tensors(memory):
        for _ in range(2):
            number, lazy = torch.ones(3), torch.ones(2, dtype=torch.complex64).conj()
            assert float(number.sum()) == 1.0
            assert lazy.is_conj() and lazy.resolve_conj().is_conj() is False and lazy.imag.is_neg()
            assert (lazy.imag * 1).is_neg() is False
            with pytest.raises(Exception, match="unique"):
                number.unique()


def test_sizes_that_values_decide_are_assumed():
    with torch_compat.fake_tensors(), torch_compat.were_sizes_assumed() as were_assumed:
        x, mask = torch.ones(6, 4, requires_grad=True), torch.ones(6, dtype=torch.bool)
        assert torch.bincount(torch.ones(3, dtype=torch.int64), minlength=5).shape == (5,)
        assert torch_compat.assumed_size_of(torch.ops.aten.add.Tensor, (x, x), {}) is NotImplemented
        assert not were_assumed()
        assert mask.nonzero().shape == (6, 1)
        assert were_assumed()
        with torch_compat.assumed_share(0.25):
            rows, columns = torch.where(mask[:, None] == torch.ones(4, dtype=torch.bool))
            assert rows.shape == columns.shape == (6,)
            assert x[mask].shape == (2, 4) and x.masked_select(x > 0).shape == (6,)
            x[mask].sum().backward()
            assert x.grad.shape == (6, 4)
            written = torch.zeros(6, 4)
            written[mask] = x.detach()[mask]
        assert x[mask].shape == (6, 4)
    with torch_compat.were_sizes_assumed() as were_assumed:
        assert not were_assumed()


def grouped(dtype, is_transposed):
    """Multiply rows in groups, forward and backward, with columns that end at no multiple of 16 bytes."""
    rows, columns = torch.ones(10, 32, dtype=dtype, requires_grad=True), 24
    shape = (4, columns, 32) if is_transposed else (4, 32, columns)
    weight = torch.ones(shape, dtype=dtype, requires_grad=True)
    ends = torch.tensor([2, 2, 7, 10], dtype=torch.int32)
    used = weight.transpose(-2, -1) if is_transposed else weight
    product = torch.nn.functional.grouped_mm(rows, used, offs=ends)
    (product * 1).pow(2).sum().backward()
    return [product, rows.grad, weight.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_products_have_the_form_of_the_kernels(dtype):
    for is_transposed in (True, False):
        real = [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in grouped(dtype, is_transposed)]
        for _ in range(2):
            with torch_compat.fake_tensors():
                fake = grouped(dtype, is_transposed)
            assert [(t.shape, t.stride(), t.dtype, t.untyped_storage().nbytes()) for t in fake] == real


def test_grouped_products_are_refused_where_the_kernels_refuse():
    ends = torch.tensor([4], dtype=torch.int32)
    for dtype, width in ((torch.float64, 8), (torch.float32, 5)):
        said = []
        for mode in (None, torch_compat.fake_tensors()):
            with mode or contextlib.nullcontext(), pytest.raises(RuntimeError) as caught:
                rows, weight = torch.ones(4, width, dtype=dtype), torch.ones(1, width, 8, dtype=dtype)
                torch.nn.functional.grouped_mm(rows, weight, offs=ends)
            said.append(str(caught.value).split(", got")[0])
        assert said[0] == said[1]


def test_buckets_are_reduced_without_the_other_ranks():
    import torch.distributed as dist

    counted = []

    def handle(operator, types, args, kwargs):
        counted.append(operator.name())
        return operator(*args, **kwargs)

    with fake_world(2), torch_compat.fake_tensors(), torch_compat.lone_buckets() as ran:
        model = nn.Linear(4, 4)
        torch_compat.replicate_buckets(model, process_group=dist.group.WORLD)
        for _ in range(3):
            counted.clear()
            with torch_compat.dispatch_mode(handle, compiles=False):
                model(torch.zeros(2, 4)).sum().backward()
        assert len(ran) == 1 and counted.count("c10d::allreduce_") == 1
        assert tuple(model.weight.grad.shape) == (4, 4)
    begin = nn.parallel.DistributedDataParallel._pre_forward
    assert begin.__module__ == "torch.nn.parallel.distributed"


def test_shardings_on_a_mesh_are_those_of_another_of_its_form():
    """Found once for two meshes of other ranks, and again for another shape, place or placement of the operands."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    propagator = DTensor._op_dispatcher.sharding_propagator
    find, found = propagator.propagate_op_sharding_non_cached, []
    memory, known = torch_compat.ResultMemory(), {}

    def counted(op_schema):
        found.append(op_schema.op)
        return find(op_schema)

    def product(rank, *, rows=4, dim=1):
        with fake_world(8, rank=rank):
            mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))["tp"]
            with torch_compat.fake_tensors(memory), like_other_meshes(known):
                x = DTensor.from_local(torch.ones(rows, 6), mesh, [Replicate()], run_check=False)
                local = torch.ones(6, 10) if dim else torch.ones(3, 20)
                result = x @ DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
            assert result.device_mesh is mesh
            return result.placements, tuple(result.shape), result._spec.tensor_meta, len(found)

    propagator.propagate_op_sharding_non_cached = counted
    try:
        first, same = product(0), product(4)
        assert first[3] > 0 and same == first, "the ranks of a mesh do not matter"
        assert first[:2] == ((Shard(1),), (4, 20))
        assert product(1)[3] > same[3], "another place in it does"
        other = product(0, rows=8)
        assert other[:2] == ((Shard(1),), (8, 20)) and other[3] > same[3]
        again = product(4, dim=0)
        assert again[0] != first[0] and again[3] > other[3]
    finally:
        del propagator.propagate_op_sharding_non_cached
    assert propagator.propagate_op_sharding_non_cached.__func__ is type(propagator).propagate_op_sharding_non_cached
