"""Optimizers of a composition: their step, also inside the backward, and what they compute on shards."""
