"""Tracing: one rank's optimizer step, composed in a fake process group, run on fake tensors, and recorded."""
