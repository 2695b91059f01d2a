"""Losses: the sum over valid tokens of the global batch over their number, read from what a loss computes."""
