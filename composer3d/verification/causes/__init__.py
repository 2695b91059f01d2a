"""Likely causes of a difference: rules over the evidence, each a function that yields its sentence or nothing."""
