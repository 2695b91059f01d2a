"""Operators, writes and reads that a loop applies to sharded parameters and gradients, with one device's results."""
