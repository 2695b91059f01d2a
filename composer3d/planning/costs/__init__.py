"""Costs of a traced step: an allocator's memory, the time of kernels and collectives, the time of the whole step."""
