"""Which device is a process's own."""

from __future__ import annotations

import pytest
import torch

from composer3d.world import default_device, own_device


@pytest.mark.parametrize(
    ("stated", "local", "own"),
    [
        ("cpu", "3", "cpu"),
        ("cuda", "3", "cuda:3"),
        ("cuda:1", "3", "cuda:1"),
        (torch.device("cuda"), "0", "cuda:0"),
        ("meta", "2", "meta"),
    ],
)
def test_a_device_without_a_number_is_this_ranks(monkeypatch, stated, local, own):
    monkeypatch.setenv("LOCAL_RANK", local)
    assert own_device(stated) == torch.device(own)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator, and it has a number")
def test_without_a_launcher_and_an_accelerator_a_device_stays_as_stated(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert own_device("cuda") == torch.device("cuda")
    assert default_device() == torch.device("cpu")
