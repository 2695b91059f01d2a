"""Propagation of activations that are sharded along the sequence."""
