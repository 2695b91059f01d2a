"""Layers of experts, and lists whose entries a forward chooses: their contract, and products with stacked weights."""
