"""Units of FSDP2: their gathers, hooks, entries and parameters."""
