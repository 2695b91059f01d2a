"""Ranks of a run: started, watched, restarted and stopped; the lock on its folder, and signals."""
