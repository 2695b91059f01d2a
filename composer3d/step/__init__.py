"""Optimizer step: engine, micro-batches, losses, gradients, guard and optimizer."""
