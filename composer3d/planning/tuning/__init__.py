"""Suggestions measured: a few real steps of each on the machine at hand."""
