"""Weights of a run beside those that train: averaged, merged with adapters, quantised, exported."""
