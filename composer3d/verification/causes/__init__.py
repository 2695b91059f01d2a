"""Causes of a difference from one device: evidence that is general, and rules that read it."""
