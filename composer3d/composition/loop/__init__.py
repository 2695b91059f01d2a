"""Objects of a loop of one's own: optimizers, schedulers, data loaders and samplers beside a composition."""
