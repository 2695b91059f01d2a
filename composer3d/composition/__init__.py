"""Composition of a model by a manifest: preparing, agreeing, applying, assembling, and the object that a loop uses."""
