"""What classes of optimizers do not take is found before a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from composer3d.runner.objective.optimizer_arguments import refused_arguments
from composer3d.runner.objective.optimizer_groups import optimizer_class
from composer3d.runner.runner_tables import OptimizerGroupTable, OptimizerTable


def refused(**keys):
    table = OptimizerTable(**keys)
    return list(refused_arguments(table, *optimizer_class(table, Path(__file__).parent)))


def grouped(**args):
    return OptimizerGroupTable(match="norm", args=args)


@pytest.mark.parametrize(
    ("keys", "place", "reason"),
    [
        ({"betas": (0.9, 1.5)}, ("betas",), "AdamW: Invalid beta parameter at index 1: 1.5"),
        (
            {"use": "sgd", "nesterov": True, "momentum": 0.0},
            ("nesterov",),
            "SGD: Nesterov momentum requires a momentum and zero dampening",
        ),
        (
            {"args": {"amsgrad": "no"}},
            ("args", "amsgrad"),
            "AdamW takes as amsgrad a value of type bool, not 'no'",
        ),
        (
            {"args": {"foreach": True, "fused": True}},
            ("args", "foreach"),
            "AdamW: `fused` and `foreach` cannot be `True` together.",
        ),
        ({"use": "muon", "args": {"ns_steps": 0}}, ("args", "ns_steps"), "Muon: Invalid ns_steps value: 0"),
        ({"use": "muon", "momentum": 1.0}, ("momentum",), "Muon: Invalid momentum value: 1.0"),
        (
            {"use": "torch.optim:Rprop", "args": {"etas": [1.5, 0.5]}},
            ("args", "etas"),
            "Rprop: Invalid eta values: 1.5, 0.5",
        ),
        (
            {"groups": (grouped(), grouped(betas=[0.9, 1.5]))},
            ("groups", 1, "args", "betas"),
            "AdamW: Invalid beta parameter at index 1: 1.5",
        ),
        (
            {"groups": (grouped(capturable=1),)},
            ("groups", 0, "args", "capturable"),
            "AdamW takes as capturable a value of type bool, not 1",
        ),
        (
            {"use": "torch.optim:Rprop", "groups": (OptimizerGroupTable(match="norm", weight_decay=0.1),)},
            ("groups", 0, "weight_decay"),
            'Rprop has no hyperparameter "weight_decay"; it has lr, etas, step_sizes, foreach, maximize, '
            "differentiable, capturable",
        ),
        (
            {"groups": (grouped(lr=0.1),)},
            ("groups", 0, "args", "lr"),
            "lr is a key of the group; write it without args",
        ),
    ],
)
def test_what_is_refused(keys, place, reason):
    assert refused(**keys) == [(place, reason)]


class Free(torch.optim.SGD):
    """Says of no argument what it is, and wants more than a parameter."""

    def __init__(self, params, lr=0.1, *, shape: Shape = (), plan: "not a type" = None):  # noqa: F722, F821, UP037
        params = list(params)
        assert len(params) > 1
        super().__init__(params, lr=lr)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"use": "sgd"},
        {"args": {"foreach": True}},
        {"use": "muon", "args": {"adjust_lr": "original"}},
        {"use": "torch.optim:Rprop", "args": {"etas": [0.5, 1.5]}},
        {"use": "torch.optim:Adafactor", "args": {"d": 1}},
        {"use": "test_optimizer_arguments:Free", "args": {"shape": "any", "plan": 1}, "groups": (grouped(own=1),)},
    ],
)
def test_what_is_not(keys):
    assert refused(**keys) == []
