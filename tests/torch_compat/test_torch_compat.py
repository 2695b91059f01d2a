from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from composer3d import torch_compat
from composer3d.testing import run_ranks


def test_dispatch_mode_hands_over_every_operator():
    seen = []

    def handle(operator, types, args, kwargs):
        seen.append((str(operator), types))
        return operator(*args, **kwargs)

    leaf = torch.ones(2, requires_grad=True)
    with torch_compat.dispatch_mode(handle):
        result = (leaf * 2).sum()
        result.backward()
    assert result.item() == 4.0
    assert [name for name, _ in seen[:2]] == ["aten.mul.Tensor", "aten.sum.default"]
    assert "aten.expand.default" in [name for name, _ in seen]


def test_wrapper_subclasses_are_told_from_plain_tensors():
    from torch.distributed.tensor import DTensor

    assert torch_compat.is_wrapper_subclass(DTensor)
    assert not torch_compat.is_wrapper_subclass(torch.Tensor)
    assert not torch_compat.is_wrapper_subclass(torch.nn.Parameter)


def test_a_number_that_autograd_has_saved_is_read_within_a_dispatch_mode():
    number = (torch.ones((), requires_grad=True).exp() * 0.25).grad_fn._saved_other
    with torch_compat.dispatch_mode(lambda func, types, args, kwargs: func(*args, **kwargs)):
        assert float(number) == 0.25


def test_a_dispatch_mode_that_compiles_nothing_imports_no_compiler():
    script = (
        "import sys, torch; from composer3d.torch_compat import dispatch_mode\n"
        "with dispatch_mode(lambda f, t, a, k: f(*a, **k), compiles=False): torch.ones(2)\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_storages_are_told_apart_on_meta():
    one, other = torch.empty(4, device="meta"), torch.empty(4, device="meta")
    assert torch_compat.storage_key(one) == torch_compat.storage_key(one[1:])
    assert torch_compat.storage_key(one) != torch_compat.storage_key(other)


def test_schemas_tell_what_operators_write_and_take():
    one, other = torch.zeros(2), torch.ones(2)
    aten = torch.ops.aten
    assert torch_compat.written_tensors(aten.add.Tensor, (one, other), {}) == []
    assert torch_compat.written_tensors(aten.add_.Tensor, (one, other), {})[0] is one
    assert torch_compat.written_tensors(aten.eye.m_out, (2, 2), {"out": other})[0] is other
    assert len(torch_compat.written_tensors(aten._foreach_mul_.Scalar, ([one, other], 2.0), {})) == 2
    assert torch_compat.has_argument(aten.scalar_tensor.default, "device")
    assert not torch_compat.has_argument(aten.add.Tensor, "device")


def test_trees_are_mapped_and_flattened():
    tree = ({"a": [1, 2]}, 3)
    assert torch_compat.tree_leaves(tree) == [1, 2, 3]
    assert torch_compat.tree_map(lambda leaf: leaf + 1, tree) == ({"a": [2, 3]}, 4)
    leaves, form = torch_compat.tree_flatten(tree)
    assert torch_compat.tree_unflatten(leaves, form) == tree


def test_trees_are_those_of_torch():
    import collections

    from torch.utils import _pytree as pytree

    Pair = collections.namedtuple("Pair", "one other")
    kept = torch.return_types.max((torch.ones(1), torch.ones(1)))
    tree = [(), None, {"b": (1.5, "x"), "a": [torch.float32]}, Pair(1, [2]), torch.Size([3]), {7}, slice(1), kept]
    tree.append(collections.OrderedDict(b=collections.deque([1]), a=torch.device("cpu")))
    assert list(map(id, torch_compat.tree_leaves(tree))) == list(map(id, pytree.tree_leaves(tree)))
    one, other = (tree_map(lambda leaf: [leaf], tree) for tree_map in (torch_compat.tree_map, pytree.tree_map))
    assert repr(one) == repr(other)


def test_neg_view_is_a_view():
    tensor = torch.ones(2)
    view = torch_compat.neg_view(tensor)
    view[0] = 5.0
    assert view.is_neg() and tensor.tolist() == [-5.0, 1.0]


def test_allocate_keeps_values_that_are_there():
    module = torch.nn.Linear(2, 2, device="meta")
    module.register_buffer("ready", torch.arange(2))
    torch_compat.allocate(module, "cpu")
    assert module.weight.device.type == "cpu" and isinstance(module.weight, torch.nn.Parameter)
    assert module.ready.tolist() == [0, 1]


def test_foreach_lerp_moves_tensors_in_place():
    tensors = [torch.zeros(2), torch.ones(3)]
    torch_compat.foreach_lerp_(tensors, [torch.ones(2), torch.ones(3)], 0.25)
    assert tensors[0].tolist() == [0.25, 0.25] and tensors[1].tolist() == [1.0, 1.0, 1.0]


def test_foreach_kernels_take_lists():
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([-5.0])]
    assert [norm.item() for norm in torch_compat.foreach_norm(tensors, 2.0)] == [5.0, 5.0]
    torch_compat.foreach_mul_(tensors, torch.tensor(2.0))
    torch_compat.foreach_mul_(tensors, 0.5)
    assert [tensor.tolist() for tensor in tensors] == [[3.0, 4.0], [-5.0]]


def test_draws_on_a_cpu_come_from_one_generator():
    assert torch_compat.default_generators(torch.device("cpu")) == [torch.default_generator]


def test_total_norms_are_seen_before_they_are_computed(monkeypatch):
    from torch.nn.utils import clip_grad, clip_grad_norm_

    monkeypatch.setattr(clip_grad, "_get_total_norm", clip_grad._get_total_norm)  # which is put back after the test
    seen = []
    torch_compat.watch_total_norm(seen.append)
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    assert clip_grad_norm_([parameter], 1.0).item() == 5.0
    assert [[tensor is parameter.grad for tensor in tensors] for tensors in seen] == [[True]]


def test_stages_infer_shapes_from_zeros_and_keep_tensors_that_they_are_given():
    class Stage:
        def _to_tensor(self, arg):
            return arg if isinstance(arg, torch.Tensor) else torch.full(arg, torch.nan)

    stage, given = torch_compat.inferring_from_zeros(Stage()), torch.ones(2)
    assert torch.equal(stage._to_tensor((3,)), torch.zeros(3)) and torch.equal(stage._to_tensor(given), torch.ones(2))
    untouched = object()  # of torch 2.11
    assert torch_compat.inferring_from_zeros(untouched) is untouched


def test_every_name_has_a_test_here():
    modules = {name for name in torch_compat.__all__ if inspect.ismodule(getattr(torch_compat, name))}
    public = set(torch_compat.__all__).union(*(getattr(torch_compat, name).__all__ for name in modules))
    bases = {"EarlyGroup", "UnseenGathers"}  # of our own, which another file builds on
    here = [ast.parse(file.read_text()) for file in Path(__file__).parent.glob("test_torch_compat*.py")]
    froms = [node for tree in here for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    # What this package alone uses, or packages below it, is tested as its own file has it.
    bases |= {a.name for node in froms if (node.module or "").startswith("composer3d.torch_compat") for a in node.names}
    for file in Path(torch_compat.__file__).parent.rglob("[a-z]*.py"):
        tree = ast.parse(file.read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assert {name for name in names if not name.startswith("_")} <= public | bases, file.name
    used = {node.attr for tree in here for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    # Types of our own, which functions return; tests of steps make backwards that fail.
    assert public - used == {"FusedPairs", "reset_units"}


def test_modes_do_not_see_what_runs_without_torch_functions():
    from torch.overrides import TorchFunctionMode

    class Seeing(TorchFunctionMode):
        seen = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            Seeing.seen += 1
            return func(*args, **(kwargs or {}))

    tensor = torch.ones(2)
    with Seeing():
        with torch_compat.without_torch_functions():
            tensor.add(1)
        assert Seeing.seen == 0
        tensor.add(1)
    assert Seeing.seen == 1


def test_modes_of_others_see_what_is_called_beside_one_kind_of_them():
    from torch.overrides import TorchFunctionMode

    seen = []

    class Other(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append("other")
            return func(*args, **(kwargs or {}))

    class Own(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append("own")
            return func(*args, **(kwargs or {}))

    def call(kind):
        seen.clear()
        with torch_compat.without_torch_functions():
            result = torch_compat.call_beside(kind, torch.add, (tensor, 1), {"alpha": 2})
            assert torch.equal(result, torch.full((2,), 3.0))
        return list(seen)

    tensor = torch.ones(2)
    with Own(), Other(), Own():
        assert (call(Own), call(TorchFunctionMode)) == (["other"], [])
        seen.clear()
        with torch_compat.hidden_from(Own):
            tensor.add(1)
            with Own():
                tensor.add(1)
        assert seen == ["other", "own", "other"]
        seen.clear()
        tensor.add(1)
    assert seen == ["own", "other", "own"]


def test_code_that_asks_often_is_told_of_modes_and_autocast():
    from torch.overrides import TorchFunctionMode

    around = torch_compat.function_transforms
    count_modes, is_cast = around.function_mode_counter(), around.autocast_question()
    assert (count_modes(), is_cast()) == (0, False)
    with TorchFunctionMode(), torch_compat.without_torch_functions(), torch.autocast("cpu", torch.bfloat16):
        assert (count_modes(), is_cast()) == (1, True)


def test_an_unviewed_tensor_shares_memory_and_graph():
    leaf = torch.ones(2, 3, requires_grad=True)
    view = (leaf * 2).view(3, 2)
    result = torch_compat.unviewed(view)
    assert not result._is_view() and result.data_ptr() == view.data_ptr()
    result.sum().backward()
    assert torch.equal(leaf.grad, torch.full((2, 3), 2.0))


def test_a_recomputation_knows_that_it_is_in_a_backward():
    seen = []

    def function(x):
        seen.append(torch_compat.in_backward())
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False).sum().backward()
    assert seen == [False, True] and not torch_compat.in_backward()


def test_leaves_whose_gradient_is_returned_are_known_in_the_backward():
    x, y = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    product, seen = x * y, []
    product.register_hook(lambda _: seen.append([torch_compat.is_captured(leaf) for leaf in (x, y)]))
    torch.autograd.grad(product.sum(), [x], retain_graph=True)
    torch.autograd.grad(product.sum(), [x, y], create_graph=True)
    product.sum().backward()
    assert seen == [[True, False], [True, True], [False, False]]


def test_a_backward_under_a_mode_is_that_of_torch():
    x, y = torch.ones(2, requires_grad=True), torch.full((3,), 2.0, requires_grad=True)
    torch_compat.run_backward((x.pow(2).sum(), y * 3), (None, torch.ones(3)))
    assert x.grad.tolist() == [2.0, 2.0] and y.grad.tolist() == [3.0, 3.0, 3.0]
    loss = (x * x).sum()
    torch_compat.run_backward(loss, retain_graph=True, inputs=[x])
    torch_compat.run_backward(loss, torch.tensor(0.5))
    assert x.grad.tolist() == [5.0, 5.0]


def sharded_groups():
    from torch import nn
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    found = {name: list(torch_compat.fsdp_groups(module)) for name, module in model.named_modules()}
    (group, all_gather, reduce_scatter) = found[""][0]
    names = {"mesh_info", "post_backward", "reduce_grads", "all_reduce_grads"}
    callables = callable(all_gather) and callable(reduce_scatter)
    return {name: len(groups) for name, groups in found.items()}, names <= set(dir(group)), callables


def test_groups_of_sharded_units_are_found():
    assert run_ranks(sharded_groups, 1) == [({"": 1, "0": 1, "1": 0}, True, True)]


def test_torchao_is_imported_without_noise():
    code = (
        "from composer3d import torch_compat\n"
        "print(torch_compat.import_torchao('torchao.float8').convert_to_float8_training.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "convert_to_float8_training\n", "")
    assert torch_compat.import_torchao("torchao.float8").__name__ == "torchao.float8"


def test_warnings_that_the_compiler_hides_are_no_errors():
    from torch._dynamo.variables.builder import safe_has_grad

    x = torch.ones(2, requires_grad=True) * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            safe_has_grad(x)
        torch_compat.hide_compiler_warnings()
        assert safe_has_grad(x)
        with pytest.raises(UserWarning):  # of others they are
            x.grad  # noqa: B018


def test_a_matrix_is_orthogonalised_as_muon_does():
    weight = torch.nn.Parameter(torch.zeros(6, 4))
    weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.Muon([weight], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
    optimizer.step()
    wanted = torch_compat.orthogonalised(weight.grad, 5).float() * (6 / 4) ** 0.5
    assert torch.allclose(-weight.detach(), wanted, rtol=1e-6)
    assert torch.linalg.svdvals(wanted).max() < 1.5


def test_the_allocators_history_has_its_names():
    assert callable(torch.cuda.memory._record_memory_history) and callable(torch.cuda.memory._dump_snapshot)
    assert {"max_entries"} <= set(__import__("inspect").signature(torch.cuda.memory._record_memory_history).parameters)


def write_history(file):
    torch_compat.record_memory_history(100)
    torch.ones(10, device="cuda")
    torch_compat.dump_memory_history(str(file))


@pytest.mark.gpu
def test_the_allocators_history_is_written(tmp_path):
    run_ranks(write_history, 1, tmp_path / "history.pickle", init=False)
    assert (tmp_path / "history.pickle").stat().st_size > 0


def test_a_tensor_on_meta_takes_memory_and_stays_what_it_is():
    class Kind(torch.nn.Parameter):
        pass

    seen = []
    parameter = Kind(torch.empty(3, device="meta"))
    parameter.scale = 2.0
    handle = parameter.register_hook(lambda grad: 2.0 * grad)
    parameter.register_post_accumulate_grad_hook(lambda parameter: seen.append(float(parameter.grad.sum())))
    assert torch_compat.take_memory(parameter, torch.ones(3))
    assert (type(parameter), parameter.scale, parameter.tolist()) == (Kind, 2.0, [1.0] * 3)
    parameter.sum().backward()
    handle.remove()
    parameter.sum().backward()
    assert seen == [6.0, 9.0]
    before, after = torch_compat.gradient_hooks(parameter)
    assert (dict(before), len(after)) == ({}, 1)
    parameter.register_hook(lambda grad: 2.0 * grad)
    torch_compat.set_gradient_hooks(parameter, None, None)
    parameter.sum().backward()
    torch_compat.set_gradient_hooks(parameter, before, None)
    parameter.sum().backward()
    assert seen == [6.0, 9.0, 12.0, 18.0] and torch_compat.gradient_hooks(torch.ones(2)) == (None, None)
    assert torch_compat.with_attributes_of(parameter, torch.ones(1)).scale == 2.0
    assert not torch_compat.take_memory(parameter, torch.ones(3))


def test_nodes_say_the_shape_of_what_they_made():
    x = torch.ones(2, 3, requires_grad=True)
    assert torch_compat.node_shape((x * torch.ones(4, 1, 3)).grad_fn) == (4, 2, 3)
    assert torch_compat.node_shape(x.sum().grad_fn) == ()
    assert torch_compat.node_shape(x.unbind()[0].grad_fn) is None


def test_products_of_float8_matrices_have_scales_and_a_dtype_of_their_own():
    a, b = (torch.ones(16, 16).to(torch.float8_e4m3fn) for _ in range(2))
    found = torch_compat.scaled_product(a, b.t(), torch.tensor(2.0), torch.tensor(0.5), torch.bfloat16)
    assert torch.equal(found, torch.full((16, 16), 16.0, dtype=torch.bfloat16))
