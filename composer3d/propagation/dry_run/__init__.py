"""Dry runs on meta: a model's calls, the flow between its blocks, and records of what its code does."""
