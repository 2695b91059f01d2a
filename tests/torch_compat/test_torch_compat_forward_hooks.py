from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from composer3d.torch_compat.forward_hooks import (
    ForwardTables,
    HeldHooks,
    after,
    are_there,
    before,
    calling,
    home_of,
    hooks_form,
    leave_hooks,
    newest,
    num_registered,
    of_plugins,
    replace_hooks,
    skip,
    tables_of,
    tables_of_forwards,
    take_hooks,
    with_hooks,
)


class Doubling(nn.Module):
    def forward(self, x):
        return 2 * x


class Ending(nn.Module):
    """Its forward ends before its end."""

    composer3d_calls_forward_hooks = True

    def forward(self, x):
        skip(self)
        return 2 * x


def hooked(module):
    module.forward = with_hooks(module, module.forward)
    return module


def call(module, *args, **kwargs):
    with calling(module):
        return module(*args, **kwargs)


def test_a_forward_calls_its_hooks_in_torchs_order_with_what_they_return():
    module, plain, order = hooked(Doubling()), Doubling(), {True: [], False: []}
    for each, is_own in ((module, True), (plain, False)):
        seen = order[is_own]
        each.register_forward_pre_hook(lambda m, a, seen=seen: seen.append(("first", a[0].item())) or a[0] + 1)
        each.register_forward_pre_hook(lambda m, a, k, seen=seen: ((a[0] + 2,), k), with_kwargs=True)
        each.register_forward_hook(lambda m, a, o, seen=seen: seen.append((a[0].item(), o.item())))
        each.register_forward_hook(lambda m, a, k, o, seen=seen: o + k.get("x", 5), with_kwargs=True, prepend=True)
    x = torch.tensor(1.0)
    assert call(module, x) == plain(x) == 13
    assert order[True] == order[False] == [("first", 1.0), (4.0, 13.0)]


def test_hooks_are_where_they_were_behind_a_call_and_outside_of_it_torch_calls_them():
    module = hooked(Doubling())
    handle = module.register_forward_hook(lambda m, a, o: o + 1)
    hooks = dict(module._forward_hooks)
    assert call(module, torch.tensor(1.0)) == 3
    assert dict(module._forward_hooks) == hooks
    assert module(torch.tensor(1.0)) == 3
    assert module.forward(torch.tensor(1.0)) == 2
    handle.remove()
    assert call(module, torch.tensor(1.0)) == 2


def test_hooks_of_libraries_and_of_other_modules_are_left_to_torch():
    module, inner, seen = hooked(Doubling()), Doubling(), []
    module.inner = inner

    def of_torch(m, a, o):
        seen.append("torch")

    of_torch.__module__ = "torch.distributed.fsdp"
    module.register_forward_hook(functools.partial(of_torch))
    everywhere = modules.register_module_forward_hook(lambda m, a, o: seen.append(m) or o + 1)
    try:
        assert call(module, torch.tensor(1.0)) == 3
        assert inner(torch.tensor(1.0)) == 3
    finally:
        everywhere.remove()
    assert seen == [module, "torch", inner]


def test_a_hook_that_is_always_called_sees_a_forward_that_raises():
    module, seen = hooked(Doubling()), []
    module.register_forward_hook(lambda m, a, o: seen.append(o), always_call=True)
    with pytest.raises(TypeError):
        call(module, None)
    assert seen == [None]


def test_a_hook_before_a_forward_returns_both_kinds_of_arguments():
    module = hooked(Doubling())
    module.register_forward_pre_hook(lambda m, a, k: a, with_kwargs=True)
    with pytest.raises(RuntimeError, match="must return None or a tuple of"):
        call(module, torch.tensor(1.0))


def test_hooks_on_the_output_of_a_forward_that_ends_early_are_left_out():
    module, seen = Ending(), []
    take_hooks(module)
    assert with_hooks(module, module.forward) == module.forward
    module.register_forward_hook(lambda m, a, o: seen.append(o))
    module.register_full_backward_hook(lambda m, i, o: seen.append(o))
    module.register_full_backward_pre_hook(lambda m, o: seen.append(o))
    call(module, torch.tensor(1.0, requires_grad=True)).backward()
    assert not seen
    leave_hooks(module)
    call(module, torch.tensor(1.0, requires_grad=True)).backward()
    assert len(seen) == 3


def test_arguments_and_outputs_are_as_they_are_outside_of_such_a_call():
    module = Doubling()
    module.register_forward_hook(lambda m, a, o: o + 1)
    assert before(module, (1,), {}) == ((1,), {})
    assert after(module, (1,), {}, 2) == 2


def test_modules_that_call_their_hooks_are_copied_and_pickled():
    module = Doubling()
    take_hooks(module)
    for each in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert each(torch.tensor(1.0)) == 2


@pytest.mark.parametrize(
    "register",
    [
        pytest.param(lambda m, hook: m.register_forward_hook(hook), id="forward"),
        pytest.param(lambda m, hook: m.register_full_backward_pre_hook(hook), id="backward"),
        pytest.param(lambda m, hook: modules.register_module_forward_pre_hook(hook), id="of all modules"),
    ],
)
def test_tables_of_hooks_have_those_of_users_until_they_are_removed(register):
    module = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    nn.utils.spectral_norm(module, name="bias")  # a hook of torch's own
    tables = tables_of([module])
    before = sum(map(len, tables))
    assert before and not are_there(tables)
    handle = register(module, lambda *_: None)
    assert are_there(tables) and sum(map(len, tables)) == before + 1
    handle.remove()
    assert not are_there(tables)


def test_hooks_that_a_plugin_registers_stay_where_torch_calls_them():
    module = Ending()
    take_hooks(module)
    with of_plugins(module):
        module.register_forward_hook(lambda m, a, o: o + 1)
    module.register_forward_hook(lambda m, a, o: o * 100)
    assert call(module, torch.tensor(1.0)) == 3
    with of_plugins(module):
        module.register_forward_pre_hook(lambda m, a: (a[0] + 1,))
    assert call(module, torch.tensor(1.0)) == 5
    assert module(torch.tensor(1.0)) == 500


def test_hooks_that_torch_calls_may_be_replaced():
    model, seen = nn.Sequential(Doubling(), Doubling()), []
    take_hooks(model)
    assert len(tables_of_forwards(model.modules())) == 4  # of the two inside
    handle = model[0].register_forward_hook(lambda m, a, o: seen.append("hook"))
    replace_hooks(
        tables_of_forwards(model.modules()), lambda hook: lambda *given: seen.append("around") or hook(*given)
    )
    model(torch.tensor(1.0))
    assert seen == ["around", "hook"]
    handle.remove()
    model(torch.tensor(1.0))
    assert seen == ["around", "hook"]


def test_a_forward_calls_what_takes_the_place_of_its_hooks():
    module, seen = Doubling(), []
    module.forward = with_hooks(module, module.forward, around=lambda hook: lambda *given: seen.append(hook))
    hooks = [lambda m, a: None, lambda m, a, o: None]
    module.register_forward_pre_hook(hooks[0])
    module.register_forward_hook(hooks[1])
    call(module, torch.tensor(1.0))
    assert seen == hooks


def test_hooks_that_are_held_are_those_of_a_forward_whatever_is_there_later():
    model = nn.Sequential(Doubling(), Doubling())
    tables = ForwardTables(model)
    assert tables.keys() == ()
    first = model[0].register_forward_hook(lambda m, a, k, o: o + 1, with_kwargs=True)
    everywhere = modules.register_module_forward_pre_hook(lambda m, a: (a[0] * 3,) if m is model[1] else None)
    held, wanted = HeldHooks(tables), model(torch.tensor(1.0))
    with held.again() as gone:
        assert gone == [] and model(torch.tensor(1.0)) == wanted
    first.remove()
    everywhere.remove()
    later = model[1].register_forward_hook(lambda m, a, o: o * 0)
    with held.again() as gone:
        assert len(gone) == 2 and model(torch.tensor(1.0)) == wanted
    assert tables.keys() == (later.id,) and model(torch.tensor(1.0)) == 0


def test_hooks_of_libraries_are_as_they_are_when_held_hooks_are_back():
    model = nn.Sequential(Doubling())
    tables, seen = ForwardTables(model), []

    def observe(module, given, output):
        seen.append(output)

    observe.__module__ = "torch.utils.observers"
    observer = model[0].register_forward_hook(observe)
    held = HeldHooks(tables)
    observer.remove()
    with held.again() as gone:
        model(torch.tensor(1.0))
    assert gone == seen == []
    model[0].register_forward_hook(observe)
    with HeldHooks(ForwardTables([])).again(), held.again():
        model(torch.tensor(1.0))
    assert seen == [2]


def test_a_hook_is_of_the_module_that_defines_its_function():
    partial = functools.partial(functools.partial(nn.functional.normalize, dim=-1), eps=1e-6)
    assert [home_of(hook) for hook in (partial, nn.Linear(2, 2).forward, lambda *_: None)] == [
        "torch.nn.functional",
        "torch.nn.modules.linear",
        __name__,
    ]


def test_the_newest_hook_of_tables_is_known():
    module = nn.Linear(2, 2)
    tables = tables_of_forwards([module])
    assert newest(tables) == -1
    first = module.register_forward_hook(lambda *_: None)
    second = module.register_forward_pre_hook(lambda *_: None)
    assert newest(tables) == second.id > first.id
    second.remove()
    assert newest(tables) == first.id


def test_hooks_that_are_registered_are_counted_on_modules_and_of_all_of_them():
    before = num_registered()
    handles = [nn.Linear(2, 2).register_forward_hook(lambda *_: None)]
    handles.append(modules.register_module_forward_hook(lambda *_: None))
    assert num_registered() == before + 2
    for handle in handles:
        handle.remove()
    assert num_registered() == before + 2


class Block(nn.Module):
    def __init__(self, number, scale=None):
        super().__init__()
        self.inner, self.number, self.keep = nn.Linear(2, 2), number, None
        self.inner.register_forward_hook(self.note)
        if scale is not None:
            self.inner.register_forward_hook(lambda module, args, output: output * scale)

    def note(self, module, args, output):
        return output * self.number


def times(module, args, output, factor):
    return factor * output


def test_forms_of_hooks_are_equal_for_equal_code_and_what_it_holds():
    plain, scaled = Block(1), Block(2, 0.5)
    assert hooks_form(plain) == hooks_form(Block(2)) != hooks_form(nn.Linear(2, 2))
    assert hooks_form(scaled) == hooks_form(Block(3, 0.5)) != hooks_form(Block(3, 0.25))
    assert hooks_form(scaled) != hooks_form(plain)
    assert hash(hooks_form(scaled)) == hash(hooks_form(Block(3, 0.5)))


def test_forms_of_hooks_tell_modules_tables_partial_functions_and_held_ones_apart():
    twice = functools.partial(times, factor=2)
    blocks = [Block(1) for _ in range(6)]
    blocks[0].register_forward_hook(torch.mul)  # a library's function is no hook of a model's
    blocks[1].register_forward_hook(twice)
    blocks[2].inner.register_forward_hook(twice)
    blocks[3].register_full_backward_hook(twice)
    blocks[4].register_forward_hook(functools.partial(times, factor=3))
    blocks[5].keep = twice
    assert len({hooks_form(block) for block in (*blocks, Block(1))}) == 6
    blocks[0].register_forward_hook(functools.partial(times, factor=2))
    assert hooks_form(blocks[0]) == hooks_form(blocks[1])
