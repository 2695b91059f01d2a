"""Observing a run without changing it: spans, collectives, and the last of them when one hangs."""
