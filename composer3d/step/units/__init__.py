"""Units of data parallelism: modules whose parameters are gathered and reduced together, and their order."""
