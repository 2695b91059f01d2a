from __future__ import annotations

import shutil
import sys
from dataclasses import FrozenInstanceError
from importlib.metadata import distributions
from types import FunctionType, SimpleNamespace
from typing import Literal

import pytest
import torch
from pydantic import ValidationError

from composer3d import (
    Axis,
    Dtypes,
    Part,
    Phase,
    PluginError,
    QueryError,
    Role,
    Split,
    StepAction,
    StepPoint,
    Transform,
    hookimpl,
    plugin,
)
from composer3d.hooks import Hooks
from composer3d.registry import Catalogue, Registered, info_of, options_of

AXIS = Axis(name="site", role=Role.INDEPENDENT)


@plugin(family="sharding", owns=["site"], axes=[AXIS], devices=["cuda"], extra="fancy")
class Example:
    """An example."""

    every: int
    mode: Literal["a", "b"] = "a"


# ---- the decorator ---------------------------------------------------------------------------------------------------


def test_the_class_knows_what_it_declares():
    info = info_of(Example)
    assert info is not None
    assert (info.family, info.owns, info.axes, info.devices, info.extra) == (
        "sharding",
        ("site",),
        (AXIS,),
        ("cuda",),
        "fancy",
    )
    assert info_of(int) is None


def test_instances_are_frozen_and_keyword_only():
    one = Example(every=2)
    assert (one.every, one.mode) == (2, "a")
    with pytest.raises(FrozenInstanceError):
        one.every = 3
    with pytest.raises(ValidationError, match="positional"):
        Example(2)


@pytest.mark.parametrize("wrong", [{"every": "2"}, {"every": 2.5}, {"every": 2, "mode": "c"}, {"every": 2, "x": 1}, {}])
def test_fields_are_strict(wrong):
    with pytest.raises(ValidationError):
        Example(**wrong)


def test_plugins_are_told_apart_by_identity():
    # context.state is keyed by the instance, so two of equal fields must not be one.
    one, other = Example(every=2), Example(every=2)
    assert one != other
    assert len({one, other}) == 2


def test_options_are_a_schema():
    schema = options_of(Example)
    assert schema["required"] == ["every"]
    assert schema["properties"]["mode"]["enum"] == ["a", "b"]
    assert schema["additionalProperties"] is False


def test_an_unknown_family():
    with pytest.raises(PluginError) as caught:
        plugin(family="shardin")
    assert str(caught.value) == '"shardin" is not a family; did you mean "sharding"?'


# ---- the catalogue ---------------------------------------------------------------------------------------------------


def catalogue(folder, *lines, name="third"):
    """Make a distribution with entry points, as an installer leaves it, and read them."""
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nProvides-Extra: fancy\n")
    (info / "entry_points.txt").write_text("[composer3d]\n" + "\n".join(lines) + "\n")
    points = [point for found in distributions(path=[str(folder)]) for point in found.entry_points]
    return Catalogue(points)


def module(folder, monkeypatch, name, text):
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, name, raising=False)


def refusal(found, name):
    with pytest.raises(PluginError) as caught:
        found.load(name)
    return str(caught.value)


def test_the_built_ins_are_found_as_any_plugin_is():
    found = Catalogue.installed()
    assert found.load("fsdp2").__name__ == "FSDP2"
    assert found.origin("fsdp2").startswith("composer3d_plugins.sharding.fsdp2:FSDP2 (composer3d ")


def test_distributions_that_come_and_go_are_seen(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    assert "late" not in Catalogue.installed().names()
    catalogue(tmp_path, "late = registry_late:Late")
    assert "late" in Catalogue.installed().names()
    shutil.rmtree(tmp_path / "third-1.0.dist-info")
    assert "late" not in Catalogue.installed().names()


def test_a_plugin_is_imported_when_it_is_named(tmp_path, monkeypatch):
    text = "import composer3d\n@composer3d.plugin(family='profiling')\nclass Good:\n    'Good.'\n"
    module(tmp_path / "code", monkeypatch, "registry_good", text)
    found = catalogue(tmp_path / "site", "good = registry_good:Good", "bad = registry_bad:Bad")
    assert found.names() == ("bad", "good")
    assert found.origin("good") == "registry_good:Good (third 1.0)"
    assert "registry_good" not in sys.modules
    assert info_of(found.load("good")).family == "profiling"


def test_no_such_plugin():
    assert refusal(Catalogue([]), "fsdp") == 'no plugin "fsdp" is installed'
    message = refusal(Catalogue.installed(), "fsdpp2")
    assert message == 'no plugin "fsdpp2" is installed; did you mean "fsdp2"?'


def test_two_distributions_with_one_name(tmp_path):
    catalogue(tmp_path, "same = one:Same", name="one")
    found = catalogue(tmp_path, "same = two:Same", name="two")
    message = refusal(found, "same")
    assert message.startswith('two distributions have a plugin "same": ')
    assert "one:Same (one 1.0)" in message and "two:Same (two 1.0)" in message
    assert message.endswith('; write use = "module:Class" in its table')


def test_one_distribution_found_twice_is_one(tmp_path, monkeypatch):
    text = "import composer3d\n@composer3d.plugin(family='profiling')\nclass Once:\n    'Once.'\n"
    module(tmp_path / "code", monkeypatch, "registry_once", text)
    catalogue(tmp_path, "once = registry_once:Once", name="one")
    found = catalogue(tmp_path, "once = registry_once:Once", name="copy")
    assert found.load("once").__name__ == "Once"


def test_a_missing_extra(tmp_path, monkeypatch):
    module(tmp_path / "code", monkeypatch, "registry_extra", "import there_is_no_such_module\n")
    found = catalogue(tmp_path / "site", "extra = registry_extra:Extra [fancy]")
    assert refusal(found, "extra") == (
        'the plugin "extra" cannot be imported: No module named \'there_is_no_such_module\'; pip install "third[fancy]"'
    )


def test_a_module_or_a_class_that_is_not_there(tmp_path, monkeypatch):
    module(tmp_path / "code", monkeypatch, "registry_empty", "")
    found = catalogue(tmp_path / "site", "a = registry_nowhere:A", "b = registry_empty:B")
    assert refusal(found, "a") == "the plugin \"a\" cannot be imported: No module named 'registry_nowhere'"
    assert refusal(found, "b") == ("the plugin \"b\" cannot be imported: module 'registry_empty' has no attribute 'B'")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise RuntimeError('no licence')\n", "RuntimeError: no licence"),
        ("def broken(:\n", "SyntaxError: invalid syntax (registry_broken.py, line 1)"),
    ],
)
def test_an_import_that_fails(tmp_path, monkeypatch, text, said):
    module(tmp_path / "code", monkeypatch, "registry_broken", text)
    found = catalogue(tmp_path / "site", "broken = registry_broken:Broken")
    assert refusal(found, "broken") == f'the plugin "broken" cannot be imported: {said}'


def test_something_that_is_not_a_plugin(tmp_path, monkeypatch):
    module(tmp_path / "code", monkeypatch, "registry_plain", "class Plain: pass\n")
    found = catalogue(tmp_path / "site", "plain = registry_plain:Plain")
    message = '"registry_plain:Plain" is not a plugin; decorate the class with @composer3d.plugin'
    assert refusal(found, "plain") == message


# ---- hooks -----------------------------------------------------------------------------------------------------------


def hooks(**classes):
    """Register plugins under names, in the order given."""
    return Hooks([Registered(name, cls(), f"run.toml:{line}") for line, (name, cls) in enumerate(classes.items(), 3)])


def plugin_with(family="profiling", **methods):
    body = {"__doc__": "Made for a test.", "__annotations__": {}, "__module__": __name__, **methods}
    return plugin(family=family)(type("Made", (), body))


BF16 = Dtypes(param=torch.bfloat16)


def answering(hook, answer):
    """Make a plugin that gives one answer to one hook."""

    def method(self):
        return answer

    method.__name__ = hook
    return plugin_with(**{hook: hookimpl(method)})


def refused(**classes):
    with pytest.raises(PluginError) as caught:
        hooks(**classes)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "argument", "said"),
    [
        ("composer3d_recoder", "context", 'there is no hook composer3d_recoder; did you mean "composer3d_recorder"?'),
        (
            *("composer3d_recorder", "contxt"),
            "composer3d_recorder takes contxt, which its hook does not pass; allowed: context",
        ),
    ],
)
def test_a_hook_that_no_spec_has(name, argument, said):
    method = FunctionType((lambda self, a: None).__code__.replace(co_varnames=("self", argument)), {}, name)
    assert refused(watch=plugin_with(**{name: hookimpl(method)})) == f"[profiling.watch] (run.toml:3): {said}"


def test_a_hook_without_its_marker():
    def composer3d_recorder(self, context):
        return None

    message = refused(watch=plugin_with(composer3d_recorder=composer3d_recorder))
    assert message == (
        "[profiling.watch] (run.toml:3): composer3d_recorder is not marked, so nobody would call it; "
        "decorate it with @composer3d.hookimpl"
    )


@pytest.mark.parametrize("option", ["tryfirst", "trylast", "wrapper", "hookwrapper"])
def test_call_order_carries_no_meaning(option):
    def composer3d_recorder(self, context):
        return (yield)

    def plain(self, context):
        return None

    method = composer3d_recorder if "wrapper" in option else plain
    method.__name__ = "composer3d_recorder"
    cls = plugin_with(composer3d_recorder=hookimpl(**{option: True})(method))
    assert refused(watch=cls) == (
        "[profiling.watch] (run.toml:3): composer3d_recorder is marked tryfirst, trylast or wrapper; "
        "order is declared by phases and after/before; call order carries no meaning"
    )


def test_two_tables_of_one_name():
    with pytest.raises(PluginError) as caught:
        Hooks(
            [Registered("same", plugin_with()(), "run.toml:3"), Registered("same", plugin_with("precision")(), "x:4")]
        )
    assert str(caught.value) == (
        "[profiling.same] (run.toml:3) and [precision.same] (x:4) have the same name; rename one and write its use"
    )


def test_implementations_are_frozen_by_name():
    recorders = {name: SimpleNamespace(begin=print, end=name.lower) for name in ("b", "c", "a")}
    made = {name: answering("composer3d_recorder", recorder) for name, recorder in recorders.items()}
    found = hooks(**made)
    assert [registered.name for registered in found.implementing("composer3d_recorder")] == ["a", "b", "c"]
    assert found.recorders(None) == (recorders["a"], recorders["b"], recorders["c"])
    assert [registered.name for registered in found.plugins] == ["a", "b", "c"]


def test_an_implementation_gets_the_arguments_that_it_names():
    seen = []

    @hookimpl
    def composer3d_metrics(self, metrics, context):
        seen.append((metrics, context))

    @hookimpl
    def composer3d_close(self):
        seen.append("closed")

    found = hooks(few=plugin_with(composer3d_metrics=composer3d_metrics, composer3d_close=composer3d_close))
    ((_, metrics),) = found.metrics()
    metrics(context="context", step=3, metrics={"a": 1.0})
    ((_, close),) = found.close()
    close(context="context", error=None)
    assert seen == [({"a": 1.0}, "context"), "closed"]


def test_answers_that_are_none_do_not_count():
    found = hooks(a=answering("composer3d_state", None), b=answering("composer3d_state", {}))
    assert found.states(None) == {"b": {}}
    assert hooks(a=answering("composer3d_split", None)).split(None, None) is None
    assert hooks().split(None, None) is None


def test_one_answer_to_a_query():
    found = hooks(a=answering("composer3d_dtypes", None), b=answering("composer3d_dtypes", BF16))
    assert found.dtypes(None, "layers.0") == BF16


def test_two_answers_to_a_query_name_both_plugins():
    found = hooks(b=answering("composer3d_dtypes", BF16), a=answering("composer3d_dtypes", Dtypes()))
    with pytest.raises(QueryError) as caught:
        found.dtypes(None, "layers.0")
    assert str(caught.value) == (
        "[profiling.a] (run.toml:4) and [profiling.b] (run.toml:3) both answer composer3d_dtypes "
        'for "layers.0"; remove one of them'
    )
    one, other = (Split(parts=(Part(module=torch.nn.Linear(1, 1)),)) for _ in range(2))
    found = hooks(a=answering("composer3d_split", one), b=answering("composer3d_split", other))
    with pytest.raises(QueryError, match=r"both answer composer3d_split; remove one of them$"):
        found.split(None, None)


def test_agreeing_answers_are_one():
    same = Dtypes(param=torch.bfloat16)
    found = hooks(a=answering("composer3d_dtypes", BF16), b=answering("composer3d_dtypes", same))
    assert found.dtypes(None, "") == BF16


@pytest.mark.parametrize("other", [torch.ones(2), torch.zeros(2)])
def test_two_tensors_are_two_answers(other):
    # Comparing tensors gives tensors, which are neither true nor false.
    found = hooks(
        a=answering("composer3d_load_parameter", torch.zeros(2)), b=answering("composer3d_load_parameter", other)
    )
    with pytest.raises(QueryError, match='both answer composer3d_load_parameter for "w"'):
        found.load_parameter(None, "w", torch.zeros(2))


def action(name):
    return StepAction(name=name, point=StepPoint.BEGIN, run=lambda state: name)


def test_one_thing_or_several_are_collected():
    found = hooks(
        b=answering("composer3d_step_actions", [action("x"), action("y")]),
        a=answering("composer3d_step_actions", (action("w"),)),
        c=answering("composer3d_step_actions", action("z")),
        d=answering("composer3d_step_actions", ()),
    )
    items = [(registered.name, item.name, item.run(None)) for registered, item in found.step_actions(None)]
    assert items == [("a", "w", "w"), ("b", "x", "x"), ("b", "y", "y"), ("c", "z", "z")]


def test_transforms_are_asked_for_hook_by_hook():
    kept = {name: Transform(name=name, phase=Phase.CONVERT, select=list, apply=list) for name in "ab"}
    found = hooks(b=answering("composer3d_convert", kept["b"]), a=answering("composer3d_shard", kept["a"]))
    asked = [(registered.name, function(context=None)) for registered, function in found.transforms()]
    assert asked == [("b", kept["b"]), ("a", kept["a"])]


def test_axes_have_one_owner():
    def owning(*axes):
        return plugin(family="sharding", owns=axes)(type("Owner", (), {"__doc__": "Owns.", "__module__": __name__}))

    found = hooks(a=owning("dp_shard", "dp_replicate"), b=owning("tp"))
    assert {axis: registered.name for axis, registered in found.owners().items()} == {
        "dp_shard": "a",
        "dp_replicate": "a",
        "tp": "b",
    }
    with pytest.raises(PluginError) as caught:
        hooks(a=owning("dp_shard"), b=owning("tp", "dp_shard")).owners()
    assert str(caught.value) == (
        '[sharding.a] (run.toml:3) and [sharding.b] (run.toml:4) both own the axis "dp_shard"; remove one of them'
    )
