"""The state of a run: entries of a checkpoint, the whole model on one rank, and one rank's copy in memory."""
