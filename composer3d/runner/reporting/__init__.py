"""Reports of a run: metrics, progress, its black box, and failures."""
