"""Evaluation of a run: its table, its figures, and the best of them."""
