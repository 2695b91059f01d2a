"""From a manifest and a model to a composition: prepare, agree, apply, assemble, and what a loop then talks to."""
