from __future__ import annotations

import pytest
import torch

from composer3d import TransformError
from composer3d.initialisation.parameter_order import Order


@pytest.mark.parametrize("dim", [0, 1])
def test_orders_are_undone(dim):
    order = Order(dim, [(4, 2), (0, 1), (6, 1), (1, 3)])
    full = torch.arange(49).view(7, 7)
    stored = order.stored(full)
    assert stored.select(dim, 0).equal(full.select(dim, 4)) and stored.select(dim, 2).equal(full.select(dim, 0))
    assert torch.equal(order.model(stored), full)
    assert order.size == 7


@pytest.mark.parametrize("runs", [[(0, 2), (3, 1)], [(0, 2), (1, 2)], [(1, 2)]])
def test_every_row_is_there_once(runs):
    with pytest.raises(TransformError, match="twice or not at all"):
        Order(0, runs)
