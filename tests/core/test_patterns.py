from __future__ import annotations

import pytest
from support.models import Net
from torch import nn

from composer3d import PatternError, TransformError, select_fqns
from composer3d.composition.blocks import find_blocks
from composer3d.patterns import matches, sharing_nothing

FQNS = ("", "tok", "layers", "layers.0", "layers.0.up", "layers.1", "layers.1.up", "norm", "out")


@pytest.mark.parametrize(
    ("pattern", "fqn", "expected"),
    [
        ("layers.0", "layers.0", True),
        ("layers.0", "layers.00", False),
        ("layers.*", "layers.0", True),
        ("layers.*", "layers", False),
        ("layers.*", "layers.0.norm", False),
        ("layers.*.norm", "layers.0.norm", True),
        ("layers.1*", "layers.12", True),
        ("layers.1*", "layers.21", False),
        ("layers.[01]", "layers.1", True),
        ("layers.[01]", "layers.2", False),
        ("layers.?", "layers.12", False),
        ("*", "layers", True),
        ("*", "layers.0", False),
        ("**", "layers.0.norm", True),
        ("**", "", True),
        ("**.norm", "norm", True),
        ("**.norm", "layers.0.norm", True),
        ("**.norm", "layers.0.norm.weight", False),
        ("layers.**", "layers", True),
        ("layers.**", "layers.0.up.weight", True),
        ("layers.**.weight", "layers.0.up.weight", True),
        ("layers.**.weight", "layers.weight", True),
        ("**.up.**", "layers.0.up", True),
        ("**.attention.**.weight", "layers.0.attention.wq.weight", True),
        ("**.attention.**.weight", "layers.0.mlp.wq.weight", False),
        ("Layers.0", "layers.0", False),
        ("layers", "", False),
    ],
)
def test_matches(pattern, fqn, expected):
    assert matches(pattern, fqn) is expected


def test_select_keeps_the_order_of_the_model_and_leaves_the_root_out():
    assert select_fqns("layers.*", FQNS) == ["layers.0", "layers.1"]
    assert select_fqns("layers.*", FQNS[::-1]) == ["layers.1", "layers.0"]
    assert select_fqns("**", FQNS) == list(FQNS[1:])


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("layer.0.up", 'did you mean "layers.0.up"?'),
        ("leyers.*", 'did you mean "layers.*"?'),
        ("leyers.*.up", 'did you mean "layers.*.up"?'),
        ("blocks.*.ffn", "the model has tok, layers, layers.0, layers.0.up, layers.1, layers.1.up, norm, out"),
        ("", "the model has tok, layers, layers.0, layers.0.up, layers.1, layers.1.up, norm, out"),
    ],
)
def test_a_pattern_without_a_match_is_an_error(pattern, hint):
    with pytest.raises(PatternError) as caught:
        select_fqns(pattern, FQNS)
    assert str(caught.value) == f'the pattern "{pattern}" matches nothing in the model; {hint}'
    assert caught.value.pattern == pattern


def test_a_large_model_is_not_listed_whole():
    with pytest.raises(PatternError, match=r"the model has l0, l1, l2, l3, l4, l5, l6, l7$"):
        select_fqns("zzzzzz", [f"l{number}" for number in range(100)])


def blocks(number, dim=3):
    return [nn.Sequential(nn.Linear(dim, dim), nn.LayerNorm(dim)) for _ in range(number)]


def inside(**children):
    root = nn.Module()
    for name, child in children.items():
        setattr(root, name, child)
    return root


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        pytest.param(Net(), "layers.*", id="net"),
        pytest.param(inside(model=Net()), "model.layers.*", id="inside another"),
        pytest.param(inside(h=nn.Sequential(*blocks(3))), "h.*", id="Sequential"),
        pytest.param(nn.Sequential(*blocks(2)), "*", id="the root itself"),
        pytest.param(nn.Linear(2, 2), None, id="none"),
        pytest.param(Net(num_layers=1), None, id="one block is no list"),
        pytest.param(inside(encoder=nn.ModuleList(blocks(2)), decoder=nn.ModuleList(blocks(2))), None, id="two lists"),
        pytest.param(
            inside(layers=nn.ModuleList([nn.ModuleList(blocks(2)), nn.ModuleList(blocks(2))])),
            "layers.*",
            id="lists inside blocks do not count",
        ),
        pytest.param(inside(layers=nn.ModuleList([*blocks(1), *blocks(1, dim=4)])), None, id="shapes differ"),
        pytest.param(inside(layers=nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])), None, id="types differ"),
        pytest.param(inside(layers=nn.ModuleList([nn.Tanh(), nn.Tanh()])), None, id="without parameters"),
        pytest.param(inside(a=nn.Linear(2, 2), b=nn.Linear(2, 2)), None, id="not numbered"),
        pytest.param(
            inside(layers=nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})), "layers.*", id="ModuleDict"
        ),
        pytest.param(
            inside(layers=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})), "layers.*", id="named blocks"
        ),
        pytest.param(
            inside(h=nn.ModuleList(blocks(2)), heads=nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})),
            "h.*",
            id="a ModuleDict beside a list",
        ),
    ],
)
def test_find_blocks(model, expected):
    assert find_blocks(model) == expected


def test_blocks_beside_a_list_whose_name_begins_alike():
    model = inside(h=nn.ModuleList(blocks(2)), heads=nn.ModuleList(nn.Linear(3, 3) for _ in range(2)))
    assert find_blocks(model) is None
    model = inside(layers=nn.ModuleList(blocks(2)), layers_extra=nn.ModuleList(blocks(2)))
    assert find_blocks(model) is None


def test_units_that_share_a_parameter_are_left_to_the_root():
    units = ["layers.0", "layers.1", "layers.1.inner", "layers.2"]
    ties = [("embed.weight", "layers.2.head.weight"), ("layers.0.up.weight", "layers.1.inner.up.weight")]
    assert sharing_nothing(units, ties, stated=False) == ["layers.1", "layers.2"]
    assert sharing_nothing(units, ties[:1], stated=True) == units
    with pytest.raises(
        TransformError, match='"layers.0" and "layers.1.inner" share the parameter "layers.0.up.weight"'
    ):
        sharing_nothing(units, ties, stated=True)
