"""From what a rank does to what it takes: an allocator's memory, kernels and collectives in time, a whole step."""
