"""Random numbers of a step, which depend on the seed, the step, the module and the sample, never on the layout."""
