"""Layouts in numbers: read from manifests, written as changes to them, their collectives in closed form, and advice."""
