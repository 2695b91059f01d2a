"""Fake tensors and fake process groups: sizes without values."""
