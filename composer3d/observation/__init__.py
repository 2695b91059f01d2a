"""Observation of a run without changing it: spans, collectives, and a report when one hangs."""
