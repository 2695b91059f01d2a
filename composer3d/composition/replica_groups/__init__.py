"""Groups of ranks that leave and come back: their steps, their averages, and the state that they are given."""
