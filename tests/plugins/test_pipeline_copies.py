"""Copies of a model of which a stage computes with a part."""

from __future__ import annotations

from composer3d_plugins.scheduling.pipeline.model_copy import copy_model
from support.models import Net
from torch import nn


def test_functions_of_what_is_copied_out_of_another_stages_block_call_the_copy():
    """The block stands in the memo; a module of it is copied where the model holds it by another name."""
    model = Net(num_layers=2)
    left, kept = model.layers
    left.up.call = lambda x: kept(x)
    left.down.call = lambda x: left(x)
    model.held = [left.up]
    stand_in = nn.Identity()
    made = copy_model(model, {id(left): stand_in})
    assert made.layers[0] is stand_in and made.layers[1] is not kept
    (up,) = made.held
    assert up is not left.up and up.call.__closure__[0].cell_contents is made.layers[1]
    assert left.up.call.__closure__[0].cell_contents is kept, "the model is left as it was"
