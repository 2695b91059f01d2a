"""Hook specs are for ever: their signatures are frozen, and their docstrings are the plugin author's manual."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from composer3d.hookspecs import HookSpecs

TESTS = Path(__file__).parent.parent
PACKAGE = TESTS.parent / "composer3d"
HOOKS = {name: function for name, function in vars(HookSpecs).items() if not name.startswith("_")}

# It describes a table to those who reason about layouts that nobody composes.
WITHOUT_CONTEXT = "composer3d_layout"
# The hooks of which there is one answer.
QUERIES = {
    "composer3d_actions",
    "composer3d_dtypes",
    "composer3d_grad_scaler",
    "composer3d_group_options",
    "composer3d_load_parameter",
    "composer3d_offload_policy",
    "composer3d_optimizer",
    "composer3d_parameter_mesh",
    "composer3d_replicas",
    "composer3d_schedule",
    "composer3d_split",
}


def section(function, title):
    """Return the lines of a docstring's section, without their indent."""
    lines = inspect.getdoc(function).splitlines()
    if f"{title}:" not in lines:
        return []
    rest = lines[lines.index(f"{title}:") + 1 :]
    length = next((index for index, line in enumerate(rest) if line and not line.startswith(" ")), len(rest))
    return [line[4:] for line in rest[:length] if line]


def test_signatures_are_frozen():
    # A spec only grows: plugins in the field implement what this file says.
    signatures = "".join(f"{name}{inspect.signature(function)}\n" for name, function in HOOKS.items())
    assert signatures == (TESTS / "golden" / "hookspecs.txt").read_text()


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_named_and_typed(name):
    assert name.startswith("composer3d_")
    signature = inspect.signature(HOOKS[name])
    assert list(signature.parameters)[:2] == ["self", "degrees" if name == WITHOUT_CONTEXT else "context"]
    for parameter in list(signature.parameters.values())[1:]:
        assert parameter.annotation is not parameter.empty, parameter
        # pluggy passes what an implementation names; a default would make it keep its own.
        assert parameter.default is parameter.empty, parameter
    assert signature.return_annotation is not signature.empty


@pytest.mark.parametrize("name", HOOKS)
def test_docstrings_have_the_skeleton(name):
    function = HOOKS[name]
    first, following = inspect.getdoc(function).splitlines()[:2]
    assert re.match(r"(Query: [a-z]|[A-Z])", first) and first.endswith(".") and not following
    described = [re.match(r"(\w+): [A-Z`].*", line) for line in section(function, "Args") if not line.startswith(" ")]
    assert [match[1] for match in described] == list(inspect.signature(function).parameters)[1:]
    returns_something = inspect.signature(function).return_annotation != "None"
    assert bool(section(function, "Returns")) == returns_something


@pytest.mark.parametrize("name", HOOKS)
def test_queries_are_called_queries(name):
    assert inspect.getdoc(HOOKS[name]).startswith("Query: ") == (name in QUERIES)


@pytest.mark.parametrize("name", HOOKS)
def test_the_core_asks_queries_and_calls_the_others(name):
    facade = (PACKAGE / "hooks" / "typed_calls.py").read_text()
    assert (re.search(rf'_(query|answers)\("{name}"', facade) is not None) == (name in QUERIES)
    assert f'"{name}"' in facade


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_in_the_order_of_calls(name):
    """The module's docstring lists when hooks are called, the frozen ones by what their own docstrings say."""
    manual = inspect.getdoc(inspect.getmodule(HookSpecs))
    short = name.removeprefix("composer3d")
    assert (
        name in manual or f"`{short}`" in manual or inspect.getdoc(HOOKS[name]).partition("\n")[0].endswith("Frozen.")
    )


@pytest.mark.parametrize("name", HOOKS)
def test_every_hook_is_exercised_by_a_test(name):
    implementing = [
        path.name
        for path in TESTS.rglob("*.py")
        if re.search(rf"^ +@hookimpl\n +def {name}\(self", path.read_text(), re.MULTILINE)
    ]
    assert implementing
