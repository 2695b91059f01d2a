"""Tensor code in a neutral state: what the caller has set up plays no part in it, and is there again afterwards."""

from __future__ import annotations

import random

import numpy
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from composer3d.processes import neutral_state
from composer3d.processes.child import Child


class Seen(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was seen")


class Dispatched(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was seen")


def settings():
    """Return what decides what a product computes, and whether it can be trained."""
    weight = torch.nn.Parameter(torch.ones(2, 2))
    product = weight @ weight
    return {
        "dtype": str(product.dtype),
        "device": product.device.type,
        "default": torch.get_default_device().type,
        "requires_grad": product.requires_grad,
        "inference": weight.is_inference(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }


NEW = {
    "dtype": "torch.float32",
    "device": "cpu",
    "default": "cpu",
    "requires_grad": True,
    "inference": False,
    "deterministic": False,
}


@pytest.fixture
def defaults():
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    "around",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        Seen,
        Dispatched,
    ],
    ids=["no_grad", "inference_mode", "autocast", "device", "function mode", "dispatch mode"],
)
def test_contexts(around):
    with around() as mode:
        with neutral_state():
            assert settings() == NEW
            assert Child(settings).result() == NEW
        if around in (Seen, Dispatched):
            with pytest.raises(AssertionError, match="was seen"):
                torch.ones(1)
        else:
            assert settings() != NEW, mode
    assert settings() == NEW


def test_defaults(defaults):
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = settings()
    with torch.device("cpu"):
        with neutral_state():
            assert settings() == NEW
        assert settings() == before | {"device": "cpu", "default": "cpu"}
    assert settings() == before
    assert torch.is_deterministic_algorithms_warn_only_enabled()
    torch.set_default_device(None)
    assert settings()["device"] == "cpu"


def test_an_error_leaves_the_settings_as_they_were(defaults):
    torch.set_default_dtype(torch.bfloat16)
    with pytest.raises(KeyError), torch.no_grad(), neutral_state():
        raise KeyError
    assert torch.get_default_dtype() is torch.bfloat16 and torch.is_grad_enabled()


def test_random_numbers_are_those_from_before():
    def draw():
        return random.random(), float(numpy.random.rand()), float(torch.rand(()))

    def seed():
        random.seed(7), numpy.random.seed(7), torch.manual_seed(7)

    seed()
    expected = draw()
    seed()
    with neutral_state():
        draw()
    assert draw() == expected
